"""The measurements of `python -m benchmarks.vllm`, on pairs of servers that run side by side and take turns, A B A B.

A `Fleet` is one model and one transfer mode, with a prefill and a decode worker for each connector. Everything here
returns plain numbers; the caller makes rows and ratios.
"""

import random
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from kvferry.errors import FerryError
from tests.harness.vllm_client import Served, ask, decode_first_params, prefill_params, serve_pair
from tests.harness.vllm_servers import VllmServer, VllmSpec
from tests.harness.vllm_zygote import PATCH_VARIABLE, Zygote

__all__ = [
    "Fleet",
    "Sample",
    "grant_cores",
    "hand_over",
    "idle_cores",
    "scatter",
    "step_times",
    "throughput",
    "transfer_s",
    "waiting_cores",
]

PATCHES = {"builtin": "neutralise", "kvferry": "neutralise_yield"}
"""sched_yield is vLLM's own and affects both; the other two are the built-in connector's."""
_XFER = {"builtin": "vllm:nixl_xfer_time_seconds", "kvferry": "kvferry_handoff_transfer_seconds"}
_REQUEST_S = 120.0
_FIRST, _LAST = 3, 500
"""Token ids between these two are ordinary tokens of every model that is measured."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The times of one hand-off, in seconds."""

    first_token_s: float
    decode_part_s: float
    transfer_s: float | None


@dataclass(slots=True)
class Fleet:
    """Servers that `start` starts. A context: leaving it ends every server."""

    zygote: Zygote
    python: str
    model: Path
    mode: str
    connectors: Sequence[str]
    max_tokens: int
    dtype: str = "float32"
    stock: bool = False
    num_blocks: int = 256
    tell: Callable[[str], None] = lambda _text: None
    pairs: dict[str, tuple[VllmServer, VllmServer]] = field(default_factory=dict)
    first: dict[str, Sample] = field(default_factory=dict)
    """The first hand-off of each pair, with the handshake in it."""
    _servers: list[VllmServer] = field(default_factory=list)

    def start(self) -> "Fleet":
        """Starts all servers side by side, then makes short hand-offs, so that everything is warm."""
        for connector in self.connectors:
            servers = [
                VllmServer(self._spec(connector, role), self.tell, self.zygote) for role in ("prefill", "decode")
            ]
            for one in servers:
                self._servers.append(one)
                one.start()
            self.pairs[connector] = (servers[0], servers[1])
        for pair in self.pairs.values():
            for one in pair:
                one.wait_ready(300.0)
        dice = random.Random(3)
        for connector, pair in self.pairs.items():
            for one in pair:  # model, server and client are warm after this: only the handshake is left
                for _ in range(2):
                    ask(one, prompt_of(dice, 200), max_tokens=2, timeout_s=_REQUEST_S)
            self.first[connector] = hand_over(self, connector, prompt_of(dice, 200), self.ways[0])
            for _ in range(2):
                hand_over(self, connector, prompt_of(dice, 200), self.ways[-1])
        return self

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways in which a router can dispatch in this mode."""
        return ("pull",) if self.mode == "pull" else ("push-after", "push-first")

    def _spec(self, connector: str, role: str) -> VllmSpec:
        patch = {} if self.stock else {PATCH_VARIABLE: PATCHES[connector]}
        flags = ("--no-enable-prefix-caching", "--num-gpu-blocks-override", str(self.num_blocks))
        return VllmSpec(
            name=f"{connector}-{role}", python=self.python, model=self.model, connector=connector, role=role,
            mode=self.mode, dtype=self.dtype, max_tokens=self.max_tokens, flags=flags, env=patch,
        )  # fmt: skip

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in self._servers:
            one.stop(0.0, keep_log=error is not None)


def prompt_of(dice: random.Random, num_tokens: int) -> list[int]:
    """Returns random tokens, so that no cache has them."""
    return dice.choices(range(_FIRST, _LAST), k=num_tokens)


def transfer_s(fleet: Fleet, connector: str) -> tuple[float, float]:
    """Returns the seconds in transfers and their number so far, by the connector's own metrics of both sides."""
    total, count = 0.0, 0.0
    for server in fleet.pairs[connector]:
        total += server.metric(f"{_XFER[connector]}_sum")
        count += server.metric(f"{_XFER[connector]}_count")
    return total, count


def hand_over(
    fleet: Fleet, connector: str, prompt: Sequence[int], way: str, *, max_tokens: int = 2, timed: bool = False
) -> Sample:
    """Sends one request through a pair. `timed`: with the time of the transfer. Raises FerryError if it fails."""
    prefill, decode = fleet.pairs[connector]
    before = transfer_s(fleet, connector) if timed else (0.0, 0.0)
    served = serve_pair(prefill, decode, prompt, way=way, max_tokens=max_tokens, timeout_s=_REQUEST_S)
    _check(served, connector, way)
    moved: float | None = None
    if timed:
        deadline_s = time.monotonic() + 3.0
        while True:
            total, count = transfer_s(fleet, connector)
            if count > before[1]:
                moved = (total - before[0]) / (count - before[1])
            if moved is not None or time.monotonic() > deadline_s:
                break
            # The metrics of the servers follow within an engine step; both connectors are given that time.
            threading.Event().wait(0.05)
    return Sample(served.first_token_s, served.decode_part_s, moved)


def _check(served: Served, connector: str, way: str) -> None:
    for who, answer in (("prefill", served.prefill), ("decode", served.decode)):
        if not answer.ok:
            raise FerryError(f"{connector}, {way}: {who} answered {answer.status} {answer.error!r}: see its log")


def idle_cores(fleet: Fleet, seconds: float) -> dict[str, float]:
    """Returns the cores that each idle pair uses: the peers know each other, and no request is open."""
    before = {name: sum(one.cpu_s() for one in pair) for name, pair in fleet.pairs.items()}
    begun_s = time.monotonic()
    threading.Event().wait(seconds)
    passed_s = time.monotonic() - begun_s
    return {name: (sum(one.cpu_s() for one in pair) - before[name]) / passed_s for name, pair in fleet.pairs.items()}


def grant_cores(fleet: Fleet, seconds: float) -> dict[str, float]:
    """Returns the cores that prefill uses while the blocks of an answered request wait for a decode worker."""
    dice, cores = random.Random(29), {}
    for name, (prefill, _) in fleet.pairs.items():
        answer = ask(prefill, prompt_of(dice, 200), max_tokens=1, params=prefill_params(uuid.uuid4().hex))
        if not answer.ok:
            raise FerryError(f"{name}: prefill answered {answer.status} {answer.error!r}: see its log")
        cores[name] = _cores(prefill, seconds)
    return cores


def waiting_cores(fleet: Fleet, seconds: float) -> dict[str, float]:
    """Returns, for push, the cores that decode uses while it waits for a prompt that prefill has not begun."""
    dice, cores = random.Random(31), {}
    for name, (prefill, decode) in fleet.pairs.items():
        prompt, request_id, transfer_id = prompt_of(dice, 200), uuid.uuid4().hex, uuid.uuid4().hex
        params = decode_first_params(prefill, request_id, transfer_id)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(ask, decode, prompt, max_tokens=2, params=params, request_id=request_id)
            threading.Event().wait(0.3)
            cores[name] = _cores(decode, seconds)
            ask(prefill, prompt, max_tokens=1, params=prefill_params(transfer_id), request_id=request_id)
            if not (answer := waits.result()).ok:
                raise FerryError(f"{name}: decode answered {answer.status} {answer.error!r}: see its log")
    return cores


def _cores(server: VllmServer, seconds: float) -> float:
    before_s, begun_s = server.cpu_s(), time.monotonic()
    threading.Event().wait(seconds)
    return (server.cpu_s() - before_s) / (time.monotonic() - begun_s)


def scatter(server: VllmServer, num_blocks: int, dice: random.Random) -> None:
    """Brings the free blocks of a worker out of order, by many short requests at once that end at different times."""
    with ThreadPoolExecutor(24) as pool:
        work = [
            pool.submit(ask, server, prompt_of(dice, 100), max_tokens=dice.randrange(1, 6), timeout_s=_REQUEST_S)
            for _ in range(num_blocks + num_blocks // 4)
        ]
        for one in work:
            answer = one.result()
            if not answer.ok:
                raise FerryError(f"{server.spec.name} answered {answer.status} {answer.error!r}: see {server.log_path}")


def throughput(fleet: Fleet, connector: str, way: str, *, requests: int, clients: int, num_tokens: int) -> float:
    """Returns requests per second with `clients` at once and 8 tokens per answer."""
    dice = random.Random(11)
    prompts = [prompt_of(dice, num_tokens) for _ in range(requests)]
    begun_s = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        for one in [pool.submit(hand_over, fleet, connector, prompt, way, max_tokens=8) for prompt in prompts]:
            one.result()
    return requests / (time.perf_counter() - begun_s)


def step_times(fleet: Fleet, connector: str, way: str, num_tokens: int, hand_offs: int) -> Mapping[str, float]:
    """Returns milliseconds per token of a stream on decode: alone, and while hand-offs land there (`during`)."""
    _, decode = fleet.pairs[connector]
    dice = random.Random(13)
    idle = _token_gaps(decode, prompt_of(dice, 64), 60, threading.Event())
    stop = threading.Event()
    gaps: list[float] = []
    reader = threading.Thread(target=lambda: gaps.extend(_token_gaps(decode, prompt_of(dice, 64), 4000, stop)))
    reader.start()
    try:
        for _ in range(hand_offs):
            hand_over(fleet, connector, prompt_of(dice, num_tokens), way)
    finally:
        stop.set()
        reader.join()
    if not idle or not gaps:
        raise FerryError(f"{connector}: a stream on decode gave no tokens: see {decode.log_path}")
    return {
        "step_ms_idle": 1e3 * statistics.median(idle),
        "step_ms_during": 1e3 * statistics.fmean(gaps),
        "step_ms_during_p95": 1e3 * sorted(gaps)[int(0.95 * (len(gaps) - 1))],
    }


def _token_gaps(server: VllmServer, prompt: Sequence[int], max_tokens: int, stop: threading.Event) -> list[float]:
    """Returns the seconds between the tokens of one stream, until it ends or `stop` is set."""
    import http.client
    import json

    from tests.harness.vllm_servers import SERVED_AS

    body = {"model": SERVED_AS, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True}  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_REQUEST_S)
    gaps: list[float] = []
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        last_s = 0.0
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                now_s = time.perf_counter()
                if last_s:
                    gaps.append(now_s - last_s)
                last_s = now_s
            if stop.is_set():
                break
    finally:
        connection.close()
    return gaps
