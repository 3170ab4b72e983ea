"""The part of `kvferry bench handoff` without HTTP: bytes per second of a hand-off, and what it costs the engine.

Prefill's half runs in a process of its own; decode's half runs in this one, next to an embedded engine that decodes.
Both are the worker halves that `kvferry serve` uses, on a cache of the given size.
"""

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from kvferry.connector.worker import HandoffWorker, start_worker
from kvferry.engines.mini.api import GenerateRequest, SamplingParams
from kvferry.engines.mini.engine import Engine, EngineSettings
from kvferry.errors import TransferError
from kvferry.handoff.orders import Fetch, Offer, PeerAccepted, StepOrders, StepReport
from kvferry.ids import EngineId, Incarnation, PeerName, RequestId, TransferId
from kvferry.layout.blocks import BlockTable, Runs, TokenRange
from kvferry.layout.builders import block_major, head_range
from kvferry.layout.description import CacheLayout
from kvferry.settings import FerrySettings, Role, TransferMode, TransferSettings
from kvferry.testing.ends import LocalEnd, ProcessEnd
from kvferry.transport.base import Operation
from kvferry.wire.hello import Hello, encode_hello

__all__ = ["Rates", "load_engine", "measure_one_long", "measure_rates"]

_INCARNATION = Incarnation("bench")
_LAYERS, _HEADS, _HEAD_DIM, _ELEMENT_BYTES, _BLOCK_TOKENS = 30, 3, 64, 4, 16
_BLOCK_BYTES = _LAYERS * 2 * _HEADS * _HEAD_DIM * _ELEMENT_BYTES * _BLOCK_TOKENS
_WAIT_S = 120.0
_NUM_SEQUENCES = 4
_MIN_STEPS = 30


@dataclass(frozen=True, slots=True)
class Rates:
    """The speed of a large transfer, and its effect on the engine in the same process."""

    gbps: float
    """Bytes divided by the time from the first post (pull) or the registration (push) to the last byte."""
    step_ms_idle: float
    step_ms_during: float


class _Half:
    """A worker half on a cache of its own, in the shape of SmolLM2, with this many bytes."""

    def __init__(self, role: Role, mode: TransferMode, num_bytes: int) -> None:
        self.num_blocks = max(2, num_bytes // _BLOCK_BYTES)
        self.memory = np.ones(self.num_blocks * _BLOCK_BYTES, np.uint8)
        self.layout = self._layout()
        self.role = role
        self.mode = mode
        self.engine = EngineId(str(role))
        settings = FerrySettings(transfer=TransferSettings(mode=mode, deadline_s=_WAIT_S))
        self.worker: HandoffWorker = start_worker(
            self.layout, (self.memory,), engine=self.engine, incarnation=_INCARNATION, settings=settings
        )

    def _layout(self) -> CacheLayout:
        return block_major(
            [f"layers.{i}.attn" for i in range(_LAYERS)],
            num_blocks=self.num_blocks,
            block_tokens=_BLOCK_TOKENS,
            heads=head_range(_HEADS, 0, 1),
            head_dim=_HEAD_DIM,
            element_bytes=_ELEMENT_BYTES,
            encoding="fp32",
            address=self.memory.ctypes.data,
        )

    @property
    def hello(self) -> bytes:
        """The payload of a handshake, for the other side."""
        ranks = (self.worker.record.hello(),)
        return encode_hello(Hello(engine=self.engine, incarnation=_INCARNATION, role=self.role, ranks=ranks))

    def accept(self, engine: EngineId, hello: bytes) -> None:
        """Learn of the other side, as if a handshake had accepted it."""
        self.worker.start_step(StepOrders(accepted=(PeerAccepted(engine, _INCARNATION, hello),)))

    def table(self, seed: int) -> tuple[BlockTable, ...]:
        """Returns a table of all blocks in random order, so that each is a run of its own."""
        ids = list(range(self.num_blocks))
        random.Random(seed).shuffle(ids)
        return (BlockTable(0, 0, ids),)

    @property
    def tokens(self) -> TokenRange:
        """The tokens of one hand-off: the whole cache."""
        return TokenRange(0, self.num_blocks * _BLOCK_TOKENS)

    def wait(self, done: Callable[[StepReport], bool], meanwhile: Callable[[], None]) -> None:
        """Steps until `done` accepts a report; `meanwhile` runs between the steps."""
        until_s = time.monotonic() + _WAIT_S
        while time.monotonic() < until_s:
            report = self.worker.end_step()
            if report.failed:
                raise TransferError(f"the hand-off of the benchmark failed: {report.failed[0].reason}")
            if done(report):
                return
            meanwhile()
        raise TransferError(f"the hand-off of the benchmark has not ended in {_WAIT_S:g} s")

    def wait_released(self, transfer: TransferId) -> None:
        """On prefill: waits until its blocks are released."""
        self.wait(lambda report: transfer in report.released, _pause)


def _pause() -> None:
    time.sleep(0.001)


def _serve_prefill(pipe: Connection, mode: TransferMode, num_bytes: int) -> None:
    """The child process: offers the whole cache under each transfer id that it receives."""
    half = _Half(Role.PREFILL, mode, num_bytes)
    try:
        pipe.send(half.hello)
        half.accept(EngineId(str(Role.DECODE)), pipe.recv())
        while (name := pipe.recv()) is not None:
            transfer = TransferId(name)
            offer = Offer(transfer, RequestId(name), half.table(1), half.tokens, final=True)
            half.worker.start_step(StepOrders(offer=(offer,)))
            pipe.send(None)
            half.wait_released(transfer)
            pipe.send(None)
    finally:
        half.worker.close()


def measure_rates(mode: TransferMode, num_bytes: int, engine: Engine, repeats: int) -> Rates:
    """Measures `repeats` transfers of `num_bytes` alone, and more of them next to a decoding engine."""
    spawn = multiprocessing.get_context("spawn")
    pipe, far = spawn.Pipe()
    child = spawn.Process(target=_serve_prefill, args=(far, mode, num_bytes), daemon=True)
    child.start()
    far.close()
    half = _Half(Role.DECODE, mode, num_bytes)
    try:
        half.accept(EngineId(str(Role.PREFILL)), _received(pipe))
        pipe.send(half.hello)
        _hand_over(half, pipe, "warm-up", _pause)
        seconds = [_hand_over(half, pipe, f"alone-{i}", _pause) for i in range(repeats)]
        stepper = _Stepper(engine)
        idle = [stepper.step_s() for _ in range(_MIN_STEPS)]
        during: list[float] = []
        while len(during) < _MIN_STEPS:
            _hand_over(half, pipe, f"beside-{len(during)}", lambda: during.append(stepper.step_s()))
        stepper.close()
        pipe.send(None)
        child.join(20.0)
    finally:
        half.worker.close()
        pipe.close()
        if child.is_alive():
            child.kill()
        child.join()
    moved = half.num_blocks * _BLOCK_BYTES
    return Rates(
        gbps=moved / statistics.median(seconds) / 1e9,
        step_ms_idle=statistics.median(idle) * 1e3,
        step_ms_during=statistics.median(during) * 1e3,
    )


def _hand_over(half: _Half, pipe: Connection, name: str, meanwhile: Callable[[], None]) -> float:
    """Runs one hand-off and returns its seconds."""
    pipe.send(name)
    _received(pipe)
    landed: list[float] = []

    def done(report: StepReport) -> bool:
        landed.extend(one.transfer_s for one in report.landed if one.transfer == name)
        return bool(landed)

    want = Fetch(
        transfer=TransferId(name), request=RequestId(name), engine=EngineId(str(Role.PREFILL)),
        incarnation=_INCARNATION, mode=half.mode, tables=half.table(2), wanted=half.tokens, deadline_s=_WAIT_S,
    )  # fmt: skip
    half.worker.start_step(StepOrders(fetch=(want,)))
    half.wait(done, meanwhile)
    _received(pipe)
    return landed[0]


def _received(pipe: Connection) -> bytes:
    if not pipe.poll(_WAIT_S):
        raise TransferError(f"the prefill process of the benchmark has not answered in {_WAIT_S:g} s")
    received: bytes = pipe.recv()
    return received


class _Stepper:
    """An engine that decodes a few sequences, one step per call."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names = [RequestId(f"step-{i}") for i in range(_NUM_SEQUENCES)]
        self._begin()

    def _begin(self) -> None:
        sampling = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)
        for i, name in enumerate(self._names):
            prompt = tuple(range(100 + i, 164 + i))
            self._engine.add(GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
        for _ in range(4):
            self._engine.step()

    def step_s(self) -> float:
        """Returns the seconds of one step, which computes a token for each sequence."""
        if not self._engine.has_work():
            self._begin()
        begun_s = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - begun_s

    def close(self) -> None:
        """Ends the sequences."""
        for name in self._names:
            self._engine.abort(name)
        while self._engine.has_work():
            self._engine.step()


def measure_one_long(mode: TransferMode, num_bytes: int, repeats: int) -> float:
    """Returns GB/s of one run of that length over the bare transport: a read as in pull, or a write as in push."""
    reader, writer = PeerName("bench-decode/1/0"), PeerName("bench-prefill/1/0")
    ends = [ProcessEnd("nixl", name, (num_bytes,), timeout_s=_WAIT_S, wait=False) for name in (reader, writer)]
    try:
        for end in ends:
            end.wait_ready()
            end.run(_touch)
        decode, prefill = ends
        decode.transport.connect(writer, prefill.transport.metadata(), prefill.regions)
        prefill.transport.connect(reader, decode.transport.metadata(), decode.regions)
        if mode is TransferMode.PULL:
            seconds = decode.run(_one_long, writer, Operation.READ, num_bytes, repeats)
        else:
            seconds = prefill.run(_one_long, reader, Operation.WRITE, num_bytes, repeats)
    finally:
        for end in ends:
            end.close()
    return num_bytes / seconds / 1e9


def _touch(end: LocalEnd) -> None:
    """Brings every byte into memory before anything is timed."""
    end.buffers[0].fill(1)


def _one_long(end: LocalEnd, peer: PeerName, operation: Operation, num_bytes: int, repeats: int) -> float:
    """Returns the median seconds of some transfers, after one that warms up."""
    runs = Runs(0, 0, *(np.array([value], np.int64) for value in (0, 0, num_bytes)))
    seconds = []
    for _ in range(repeats + 1):
        begun_s = time.perf_counter()
        ticket = end.transport.post(peer, operation, [runs])
        waiting = True
        while waiting:
            for done in end.transport.poll().completions:
                if done.error is not None:
                    raise TransferError(done.error)
                waiting = waiting and done.ticket != ticket
            time.sleep(20e-6)
        seconds.append(time.perf_counter() - begun_s)
    return statistics.median(seconds[1:])


def load_engine(model: str, threads: int) -> Engine:
    """Returns the embedded engine alone, with room for a few sequences."""
    return Engine.load(EngineSettings(model=model, threads=threads, cache_bytes=256 << 20))
