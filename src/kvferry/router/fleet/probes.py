"""What a worker is, asked over HTTP: one of ours, or a stock vLLM server.

Ours say everything at GET /v1/kvferry. A vLLM server has no such path (404): GET /version says what it is, /v1/models
which model it serves, /metrics how full it is. Nothing there tells whether its connector pulls or pushes, nor where its
side channel is: that is learned from the parameters that it returns as prefill, and until then the mode is unknown.
"""

import re
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvferry.errors import PeerError
from kvferry.router.fleet.worker import Worker
from kvferry.web.records import Limits, Load, Room, WorkerInfo

__all__ = ["NotAWorker", "ask_what_it_is", "metrics_of_vllm"]

_NUMBER = re.compile(rb"^(vllm:[a-z_]+|process_start_time_seconds)(\{[^}]*\})? ([0-9.eE+-]+|NaN)\s*$", re.MULTILINE)
_LABEL = re.compile(rb'(num_gpu_blocks|block_size)="(\d{1,12})"')
_MAX_METRICS_BYTES = 4 << 20


class NotAWorker(PeerError):
    """It answers, and not as a worker does. The text says how."""


class _Version(msgspec.Struct, frozen=True):
    version: str


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


async def ask_what_it_is(session: aiohttp.ClientSession, worker: Worker, timeout: aiohttp.ClientTimeout) -> WorkerInfo:
    """The record. Raises NotAWorker, TimeoutError, or an error of aiohttp or the system."""
    if worker.info is not None and worker.info.kind == "vllm" and worker.down is None:
        return await _ask_vllm(session, worker, timeout)
    status, body = await _get(session, f"{worker.url}/v1/kvferry", timeout)
    if status == 404:
        return await _ask_vllm(session, worker, timeout)
    if status in (401, 403):
        raise NotAWorker(f"GET /v1/kvferry answered {status}: it wants a key, give it with --worker-key-file")
    if status != 200:
        raise NotAWorker(f"GET /v1/kvferry answered {status}: is it a kvferry worker?")
    try:
        return msgspec.json.decode(body, type=WorkerInfo)
    except msgspec.MsgspecError as error:
        raise NotAWorker(f"GET /v1/kvferry is not what a worker of this version says: {error}") from error


async def _ask_vllm(session: aiohttp.ClientSession, worker: Worker, timeout: aiohttp.ClientTimeout) -> WorkerInfo:
    known = worker.info if worker.down is None else None
    if known is None or known.kind != "vllm":
        known = await _meet_vllm(session, worker, timeout)
    status, body = await _get(session, f"{worker.url}/metrics", timeout)
    if status != 200:
        status, _ = await _get(session, f"{worker.url}/health", timeout)
        if status != 200:
            raise NotAWorker(f"GET /health answered {status}")
        return known
    told = metrics_of_vllm(body)
    incarnation = told.pop("started", known.incarnation)
    limits = msgspec.structs.replace(
        known.limits, block_tokens=int(told.get("block_size", 0)), blocks=int(told.get("num_gpu_blocks", 0))
    )
    used, running, waiting = (told.get(name, 0.0) for name in ("usage", "running", "waiting"))
    free = int(limits.blocks * max(0.0, 1.0 - float(used)))
    return msgspec.structs.replace(
        known,
        incarnation=str(incarnation),
        load=Load(open_requests=int(running) + int(waiting)),
        limits=limits,
        room=Room(free_blocks=free, waiting=int(waiting)) if limits.blocks and limits.block_tokens else None,
    )


async def _meet_vllm(session: aiohttp.ClientSession, worker: Worker, timeout: aiohttp.ClientTimeout) -> WorkerInfo:
    status, body = await _get(session, f"{worker.url}/version", timeout)
    if status != 200:
        raise NotAWorker(
            f"GET /v1/kvferry answered 404 and GET /version {status}: is it a kvferry worker, or a vLLM server?"
        )
    _, models = await _get(session, f"{worker.url}/v1/models", timeout)
    try:
        version = msgspec.json.decode(body, type=_Version).version
        served = msgspec.json.decode(models, type=_Models).data
    except msgspec.MsgspecError as error:
        raise NotAWorker(f"GET /version or /v1/models is not what a vLLM server says: {error}") from error
    first = served[0] if served else _Model("")
    return WorkerInfo(
        engine=f"vllm@{urlsplit(worker.url).netloc}",
        incarnation="",
        role=worker.wanted,
        kind="vllm",
        version=version,
        model=first.id,
        limits=Limits(max_model_len=first.max_model_len or 0),
    )


async def _get(session: aiohttp.ClientSession, url: str, timeout: aiohttp.ClientTimeout) -> tuple[int, bytes]:
    async with session.get(url, timeout=timeout) as response:
        if response.content_length is not None and response.content_length > _MAX_METRICS_BYTES:
            raise NotAWorker(f"GET {url} answered {response.content_length} bytes")
        return response.status, await response.read()


def metrics_of_vllm(text: bytes) -> dict[str, float | str]:
    """`usage` (0 to 1), `running`, `waiting`, `num_gpu_blocks`, `block_size`, `started`; those that are there."""
    names = {
        b"vllm:kv_cache_usage_perc": "usage",
        b"vllm:num_requests_running": "running",
        b"vllm:num_requests_waiting": "waiting",
    }
    told: dict[str, float | str] = {}
    for name, labels, value in _NUMBER.findall(text):
        if name in names and value != b"NaN":
            told[names[name]] = float(value) + (float(told.get(names[name], 0.0)) if name != b"usage" else 0.0)
        elif name == b"process_start_time_seconds":
            told["started"] = value.decode()
        elif name == b"vllm:cache_config_info":
            told |= {label.decode(): float(number) for label, number in _LABEL.findall(labels)}
    return told
