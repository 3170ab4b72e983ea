"""An engine of tests.harness.handoff_engines in its own process, over real NIXL. Its caller acts as both schedulers."""

import contextlib
import os
import signal
from collections.abc import Sequence
from hashlib import blake2b
from multiprocessing.connection import Connection
from typing import Any

from kvferry.handoff.orders import PeerAccepted, StepOrders
from kvferry.ids import EngineId, Incarnation, PeerName
from kvferry.settings import Role, TransferMode
from kvferry.transport.base import Transport
from tests.harness.forked import fork_context
from tests.harness.handoff_engines import Engine, Seen, settings_for

TTL_S, QUARANTINE_S, DEADLINE_S = 1.5, 0.2, 4.0
ANSWER_S = 180.0


def _nixl(name: PeerName) -> Transport:
    from kvferry.transport.nixl.nixl import NixlTransport

    return NixlTransport(name, settle_s=0.05)


def _serve(conn: Connection, name: str, role: Role, mode: TransferMode, start: str, ucx_tls: str) -> None:
    if ucx_tls:
        os.environ["UCX_TLS"] = ucx_tls
    settings = settings_for(mode, ttl_s=TTL_S, deadline_s=DEADLINE_S)
    engine = Engine(name, role, settings, _nixl, num_blocks=64, block_tokens=256, start=start)
    conn.send((engine.engine, engine.incarnation, engine.hello()))
    while True:
        try:
            command, args = conn.recv()
        except EOFError:
            break
        if command == "submit":
            engine.submit(*args)
        elif command == "fill":
            engine.fill(*args)
            conn.send(_hash(engine, args[0]))
        elif command == "hash":
            conn.send(_hash(engine, *args))
        elif command == "collect":
            engine.collect()
            conn.send((engine.seen[0], engine.drivers[0].stats()))
            engine.seen[0] = Seen()
        elif command == "close":
            break
    engine.close()


def _hash(engine: Engine, blocks: Sequence[int]) -> str:
    return blake2b(engine.tokens(blocks, 0, len(blocks) * 256).tobytes()).hexdigest()


class Remote:
    """The parent's end of that process. Every call has a deadline."""

    def __init__(self, name: str, role: Role, mode: TransferMode, start: int, ucx_tls: str = "") -> None:
        context = fork_context()
        self._conn, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, name, role, mode, str(start), ucx_tls), daemon=True
        )
        self._process.start()
        theirs.close()
        self.engine: EngineId
        self.incarnation: Incarnation
        self.engine, self.incarnation, self._hello = self._answer()
        self.free = list(range(64))

    def _answer(self) -> Any:
        assert self._conn.poll(ANSWER_S), "the worker does not answer"
        return self._conn.recv()

    def submit(self, orders: StepOrders) -> None:
        self._conn.send(("submit", (orders,)))

    def meet(self, other: "Remote") -> None:
        self.submit(StepOrders(accepted=(PeerAccepted(other.engine, other.incarnation, other._hello),)))

    def fill(self, blocks: Sequence[int], seed: int) -> str:
        self._conn.send(("fill", (blocks, seed)))
        return str(self._answer())

    def hash(self, blocks: Sequence[int]) -> str:
        self._conn.send(("hash", (blocks,)))
        return str(self._answer())

    def collect(self) -> Any:
        """Returns what is new, and the stats."""
        self._conn.send(("collect", ()))
        return self._answer()

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._conn.close()

    def close(self) -> None:
        """Ends the process, whatever its state. May be called twice."""
        if self._process.is_alive():
            self.signal(signal.SIGCONT)
            with contextlib.suppress(OSError):
                self._conn.send(("close", ()))
            self._process.join(20)
        if self._process.is_alive():
            self.kill()
        self._conn.close()
