"""Asks a worker over HTTP what it is: one of kvferry's own, or a stock vLLM server.

kvferry's workers say everything at GET /v1/kvferry. A vLLM server has no such path (404): GET /version says what it is,
/v1/models which model it serves, and /metrics how full it is. No endpoint says whether its connector pulls or pushes,
or where its side channel is. The router learns that from the parameters that the server returns as prefill; until then
the mode is unknown.
"""

import re
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvferry.errors import PeerError
from kvferry.router.fleet.worker import Worker
from kvferry.web.records import Handoffs, Limits, Load, ModelCard, Room, WorkerInfo

__all__ = ["NotAWorker", "ask_what_it_is", "ask_which_models", "metrics_of_vllm"]

_NUMBER = re.compile(
    rb"^(vllm:[a-z_]+|kvferry_handoffs_[a-z]+_total|process_start_time_seconds)(\{[^}]*\})? ([0-9.eE+-]+|NaN)\s*$",
    re.MULTILINE,
)
_LABEL = re.compile(rb'(num_gpu_blocks|block_size)="(\d{1,12})"')
_MAX_METRICS_BYTES = 4 << 20


class NotAWorker(PeerError):
    """What answers is not a worker. The text says what it answered."""


class _Version(msgspec.Struct, frozen=True):
    version: str


class _Models(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...]


async def ask_what_it_is(session: aiohttp.ClientSession, worker: Worker, timeout: aiohttp.ClientTimeout) -> WorkerInfo:
    """Returns the worker's record. Raises NotAWorker, TimeoutError, or an error of aiohttp or the system."""
    if worker.info is not None and worker.info.kind == "vllm" and worker.down is None:
        return await _ask_vllm(session, worker, timeout)
    status, body = await _get(session, f"{worker.url}/v1/kvferry", timeout)
    if status == 404:
        return await _ask_vllm(session, worker, timeout)
    if status in (401, 403):
        raise NotAWorker(f"GET /v1/kvferry answered {status}: it wants a key; give it with --worker-key-file")
    if status != 200:
        raise NotAWorker(f"GET /v1/kvferry answered {status}, so it is no kvferry worker")
    try:
        return msgspec.json.decode(body, type=WorkerInfo)
    except msgspec.MsgspecError as error:
        raise NotAWorker(f"GET /v1/kvferry did not return what a worker of this version does: {error}") from error


async def _ask_vllm(session: aiohttp.ClientSession, worker: Worker, timeout: aiohttp.ClientTimeout) -> WorkerInfo:
    known = worker.info if worker.down is None else None
    if known is None or known.kind != "vllm":
        known = await _identify_vllm(session, worker, timeout)
    status, body = await _get(session, f"{worker.url}/metrics", timeout)
    if status != 200:
        status, _ = await _get(session, f"{worker.url}/health", timeout)
        if status != 200:
            raise NotAWorker(f"GET /health answered {status}")
        return known
    numbers = metrics_of_vllm(body)
    incarnation = numbers.pop("started", known.incarnation)
    limits = msgspec.structs.replace(
        known.limits, block_tokens=int(numbers.get("block_size", 0)), blocks=int(numbers.get("num_gpu_blocks", 0))
    )
    used, running, waiting = (numbers.get(name, 0.0) for name in ("usage", "running", "waiting"))
    free = int(limits.blocks * max(0.0, 1.0 - float(used)))
    return msgspec.structs.replace(
        known,
        incarnation=str(incarnation),
        load=Load(open_requests=int(running) + int(waiting)),
        limits=limits,
        handoffs=Handoffs(int(numbers["landed"]), int(numbers["failed"])) if "failed" in numbers else None,
        room=Room(free_blocks=free, waiting=int(waiting)) if limits.blocks and limits.block_tokens else None,
    )


async def _identify_vllm(session: aiohttp.ClientSession, worker: Worker, timeout: aiohttp.ClientTimeout) -> WorkerInfo:
    status, body = await _get(session, f"{worker.url}/version", timeout)
    if status != 200:
        raise NotAWorker(
            f"GET /v1/kvferry answered 404 and GET /version {status}, so it is neither a kvferry worker "
            "nor a vLLM server"
        )
    try:
        version = msgspec.json.decode(body, type=_Version).version
    except msgspec.MsgspecError as error:
        raise NotAWorker(f"GET /version did not return what a vLLM server does: {error}") from error
    models = await ask_which_models(session, worker, timeout)
    first = models[0] if models else ModelCard(id="")
    return WorkerInfo(
        engine=f"vllm@{urlsplit(worker.url).netloc}",
        incarnation="",
        role=worker.assigned_role,
        kind="vllm",
        version=version,
        model=first.id,
        models=models,
        limits=Limits(max_model_len=first.max_model_len or 0),
    )


async def ask_which_models(
    session: aiohttp.ClientSession, worker: Worker, timeout: aiohttp.ClientTimeout
) -> tuple[ModelCard, ...]:
    """Returns the models and adapters that a vLLM server serves now. Raises as `ask_what_it_is`."""
    _, body = await _get(session, f"{worker.url}/v1/models", timeout)
    try:
        return msgspec.json.decode(body, type=_Models).data
    except msgspec.MsgspecError as error:
        raise NotAWorker(f"GET /v1/models did not return what a vLLM server does: {error}") from error


async def _get(session: aiohttp.ClientSession, url: str, timeout: aiohttp.ClientTimeout) -> tuple[int, bytes]:
    async with session.get(url, timeout=timeout) as response:
        if response.content_length is not None and response.content_length > _MAX_METRICS_BYTES:
            raise NotAWorker(f"GET {url} answered {response.content_length} bytes")
        return response.status, await response.read()


def metrics_of_vllm(text: bytes) -> dict[str, float | str]:
    """Returns those that are present of `usage` (0 to 1), `running`, `waiting`, `num_gpu_blocks`, `block_size`,
    `landed`, `failed` and `started`."""
    names = {
        b"vllm:kv_cache_usage_perc": "usage",
        b"vllm:num_requests_running": "running",
        b"vllm:num_requests_waiting": "waiting",
        b"kvferry_handoffs_landed_total": "landed",
        b"kvferry_handoffs_failed_total": "failed",
    }
    numbers: dict[str, float | str] = {}
    for name, labels, value in _NUMBER.findall(text):
        if name in names and value != b"NaN":
            numbers[names[name]] = float(value) + (float(numbers.get(names[name], 0.0)) if name != b"usage" else 0.0)
        elif name == b"process_start_time_seconds":
            numbers["started"] = value.decode()
        elif name == b"vllm:cache_config_info":
            numbers |= {label.decode(): float(number) for label, number in _LABEL.findall(labels)}
    return numbers
