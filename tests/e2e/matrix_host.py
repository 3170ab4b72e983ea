"""One process of the P/D matrix: it runs several engines, the whole of each or the part that plans for its rank
processes, and does what matrix.py says over a pipe."""

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvferry.engines.mini.api import GenerateRequest, SamplingParams
from kvferry.engines.mini.ranks.launcher import Launcher
from kvferry.engines.mini.worker import Worker, WorkerSettings, build_worker
from kvferry.ids import RequestId
from kvferry.wire.params import HandoffParams
from tests.harness.until import let_threads_run

__all__ = ["Answered", "Ask", "Close", "Forget", "Open", "Opened", "host"]


@dataclass(frozen=True)
class Open:
    """An order to start an engine."""

    key: str
    settings: WorkerSettings


@dataclass(frozen=True)
class Opened:
    """The engine runs: its address, for the parameters of a push."""

    key: str
    address: dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """An order to answer a prompt, greedily."""

    key: str
    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    handoff: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answered:
    """The complete answer, and where the KV of its prompt came from."""

    name: str
    tokens: tuple[int, ...]
    cached: int
    handed_over: int
    recomputed: int
    why: str
    handoff: dict[str, Any] | None
    verified_cells: int | None
    """The number of cells that decode compared with prefill's digest; None if it took part in no hand-off."""
    error: str | None


@dataclass(frozen=True)
class Forget:
    """An order to wait until nothing of the engine is open, and to empty its prefix cache. The answer is the key."""

    key: str


@dataclass(frozen=True)
class Close:
    """An order to end an engine and all its processes. The answer is the key."""

    key: str


class _Asked:
    """One request in progress."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.tokens: list[int] = []


def host(pipe: Connection) -> None:
    """Runs in the process, until it receives None."""
    torch.set_num_threads(1)
    workers: dict[str, Worker] = {}
    asked: dict[str, _Asked] = {}
    launcher = Launcher()  # shared by all ranks of all engines, so torch is loaded once
    try:
        while True:
            busy = [worker for worker in workers.values() if worker.engine.has_work()]
            if pipe.poll(0.0 if busy else 0.005):
                try:
                    order = pipe.recv()
                except EOFError:  # the process that gives us orders is gone
                    return
                if order is None:
                    return
                if isinstance(order, Open):
                    worker = workers[order.key] = build_worker(order.settings, launcher)
                    pipe.send(Opened(order.key, _address(worker)))
                    continue
                reply = _do(order, workers, asked, lambda: _step(workers, asked, pipe.send))
                if reply is not None:
                    pipe.send(reply)
            elif busy:
                _step(workers, asked, pipe.send)
                let_threads_run()
    finally:
        for worker in workers.values():
            worker.close()
        launcher.close()
        pipe.close()


def _address(worker: Worker) -> dict[str, Any]:
    identity = worker.identity
    return {
        "remote_engine_id": identity.engine, "remote_incarnation": identity.incarnation,
        "remote_host": identity.host, "remote_port": identity.port,
    }  # fmt: skip


def _do(order: Any, workers: dict[str, Worker], asked: dict[str, _Asked], step: Callable[[], None]) -> Any:
    if isinstance(order, Ask):
        handoff = None if order.handoff is None else HandoffParams.from_dict(order.handoff)
        sampling = SamplingParams(max_tokens=order.max_tokens, temperature=0.0, ignore_eos=True)
        asked[order.name] = _Asked(order)
        workers[order.key].engine.add(
            GenerateRequest(
                request_id=RequestId(order.name), prompt_token_ids=order.prompt, sampling=sampling, handoff=handoff
            )
        )
        return None
    worker = workers[order.key]
    if isinstance(order, Close):
        del workers[order.key]
        worker.close()
        return order.key
    while worker.engine.has_work() or worker.engine.stats().held_blocks:
        step()
        let_threads_run()
    worker.engine.check()
    blocks = worker.engine.blocks
    assert blocks.num_free == blocks.num_usable, f"{order.key}: {blocks.num_usable - blocks.num_free} blocks are lost"
    blocks.forget_all()
    return order.key


def _step(workers: dict[str, Worker], asked: dict[str, _Asked], tell: Callable[[Answered], None]) -> None:
    for worker in workers.values():
        if not worker.engine.has_work():
            continue
        for output in worker.engine.step():
            one = asked[output.request_id]
            one.tokens += output.token_ids
            if output.finish_reason is None:
                continue
            del asked[output.request_id]
            account = output.account
            assert account is not None, output
            tell(Answered(
                one.ask.name, tuple(one.tokens), account.cached, account.handed_over, account.recomputed,
                account.reason, None if output.handoff is None else output.handoff.to_dict(),
                None if output.timing is None else output.timing.verified_cells, output.error,
            ))  # fmt: skip
