"""One worker, as the router sees it: what it says about itself, whether it is well, how busy it is, and which of its
blocks are reserved.

Life: UNKNOWN (never answered) -> UP <-> DOWN (with the reason). A worker is UP again with its first good answer,
whatever its incarnation: a restart needs no more than that, and closes its circuit breaker. Independently of this,
`info.state` is what the worker itself says, for example `draining`: it is well, and gets no new requests.
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec

from kvferry.router.fleet.breakers import Breaker
from kvferry.router.settings import RouterSettings
from kvferry.settings import Role, TransferMode
from kvferry.web.records import WorkerInfo

__all__ = ["BlockReservation", "Cached", "Learned", "Report", "Source", "Wait", "Worker", "find_conflicts"]


class Source(StrEnum):
    """Where the router knows a worker from."""

    FLAG = "flag"
    FILE = "file"
    REGISTERED = "registered"
    ETCD = "etcd"


class Wait(Protocol):
    """A wait of the router for a worker's headers or bytes."""

    waiting_since_s: float | None
    """The loop time since when it has waited for the next bytes; None while it does not wait."""

    def give_up(self, reason: str) -> None:
        """Ends the wait as a failure of the worker with this reason. Never blocks; does nothing if the wait has just
        ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a prefill worker said about itself in the parameters that it returned."""

    mode: TransferMode | None = None
    engine: str = ""
    incarnation: str | None = None
    host: str = ""
    port: int = 0
    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1

    @property
    def has_address(self) -> bool:
        """True if decode can register with it before it has answered, so that both can get a push request at once."""
        return bool(self.engine and self.host and self.port)


@dataclass(slots=True)
class BlockReservation:
    """Blocks on decode that are set aside for a dispatch until the worker's own report counts them."""

    num_blocks: int
    began_s: float | None = None
    """When decode began to answer (monotonic): a report that was asked for later includes the blocks."""
    ended: bool = False
    """True once the dispatch has ended."""

    @property
    def open(self) -> bool:
        """True while decode has not begun to answer."""
        return self.began_s is None and not self.ended


@dataclass(slots=True)
class Report:
    """When the worker's last answer was asked for, and what was open then."""

    asked_s: float = 0.0
    num_open_then: int = 0
    """The number of this router's requests that were open at that time."""


@dataclass(slots=True)
class Cached:
    """The blocks in a worker's prefix cache, as it reported them: 8-byte prefixes of their hashes."""

    version: int = -1
    blocks: frozenset[bytes] = field(default_factory=frozenset)


class Worker:
    """One worker, as the router sees it. Everything runs on the event loop."""

    def __init__(
        self, url: str, assigned_role: Role, settings: RouterSettings | None = None, source: Source = Source.FLAG
    ) -> None:
        settings = settings or RouterSettings()
        self.url = url.rstrip("/")
        self.assigned_role = assigned_role
        """What the operator says the worker is for: PREFILL or DECODE."""
        self.source = source
        self.info: WorkerInfo | None = None
        self.down: str | None = "it has not answered yet"
        """The reason why it cannot be reached; None if it can."""
        self.silent_since_s: float | None = None
        """The loop time of the first health check without an answer; None if the last check was answered."""
        self.up_s = -math.inf
        """When it last came up: for the first time, again, or as a new process (monotonic)."""
        self.lost_s = -math.inf
        """When it last ceased to be usable (monotonic); minus infinity if it never was usable."""
        self.conflict: str | None = None
        """Names the living worker that has the same engine id, if this one came later; else None."""
        self.learned: Learned | None = None
        self.cached = Cached()
        self.report = Report()
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_open_s, settings.breaker_longest_s)
        self.num_open = 0
        self.num_failures = 0
        self.last_pick = 0
        self.seen_tokens = 0
        """The number of tokens, of prompts and answers, that this router has seen it serve."""
        self.gone = False
        """True once it was taken out of the fleet. Its open requests go on."""
        self._waits: set[Wait] = set()
        self._reservations: dict[int, BlockReservation] = {}
        self._in_turn: BlockReservation | None = None
        self._serial = itertools.count()

    @property
    def name(self) -> str:
        """The engine's id; the worker's address until the id is known."""
        return self.info.engine if self.info is not None else self.url

    @property
    def label(self) -> str:
        """The engine's id with the address, for people; only the address until the id is known."""
        return self.url if self.info is None else f"{self.info.engine} ({self.url})"

    @property
    def mode(self) -> TransferMode | None:
        """The transfer mode that it reports, else the one in the parameters that it returned; None if not known yet."""
        if self.info is not None and self.info.mode is not None:
            return self.info.mode
        return self.learned.mode if self.learned is not None else None

    @property
    def is_vllm(self) -> bool:
        """True if it is a vLLM server."""
        return self.info is not None and self.info.kind == "vllm"

    @property
    def shares_handoffs(self) -> bool:
        """True if one hand-off serves all choices of a request there. Not with vLLM's own connectors."""
        return self.info is not None and (self.info.kind != "vllm" or self.info.handoffs is not None)

    def serves(self, model: str | None) -> bool:
        """True if requests may give this name as `model`, as far as is known; None: they give no name."""
        if model is None or self.info is None:
            return model is None
        return not self.info.names or model in self.info.names

    def learn(self, learned: Learned) -> None:
        """Takes over what the worker's returned parameters say about it."""
        self.learned = learned
        if learned.engine and self.info is not None and self.info.engine != learned.engine:
            self.info = msgspec.structs.replace(self.info, engine=learned.engine)

    @property
    def unusable_reason(self) -> str | None:
        """The reason why it gets no new request, or None. Its breaker is not considered: see `unavailable_reason`."""
        if self.down is not None or self.info is None:
            return f"{self.label} is down: {self.down}"
        if self.info.role not in (self.assigned_role, Role.BOTH):
            return (
                f"{self.label} is a {self.info.role} worker and was given as --{self.assigned_role}: "
                f"give it as --{self.info.role}, or start it with --role {self.assigned_role}"
            )
        if self.info.state != "ready":
            return f"{self.label} takes no new requests: {self.info.state}"
        return self.conflict

    def slow_for_s(self, now_s: float) -> float:
        """Returns for how long it has been silent, if nothing else is wrong with it; else infinity."""
        info = self.info
        if self.silent_since_s is None or info is None or info.role not in (self.assigned_role, Role.BOTH):
            return math.inf
        return now_s - self.silent_since_s if info.state == "ready" else math.inf

    def unavailable_reason(self) -> str | None:
        """Returns why it gets no request at this moment: `unusable_reason`, or its open breaker. None if it may."""
        reason = self.unusable_reason
        if reason is None and not self.breaker.permits(now_s := time.monotonic()):
            return f"{self.label} is left alone: {self.breaker.explain(now_s)}"
        return reason

    def can(self, ability: str) -> bool:
        """True if the worker reported this ability."""
        return self.info is not None and ability in self.info.abilities

    @property
    def load(self) -> int:
        """The number of requests open there: this router's, and those of others when it was last asked."""
        others = 0 if self.info is None else self.info.load.open_requests - self.report.num_open_then
        return self.num_open + max(0, others)

    def busy(self) -> "_Busy":
        """Returns a context within which a request counts as open."""
        return _Busy(self)

    # ---- room ----

    @property
    def longest_request(self) -> float:
        """The most tokens of a prompt and its answer together that it takes; infinity if that is not known."""
        return (self.info.limits.longest_request if self.info is not None else 0) or math.inf

    @property
    def free_blocks(self) -> int | None:
        """The number of blocks that are neither in use nor reserved; None if the worker does not report its room."""
        if self.info is None or self.info.room is None:
            return None
        return self.info.room.free_blocks - sum(reservation.num_blocks for reservation in self._reservations.values())

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that a prompt takes. It is never more than the worker has at all, so that the
        worker itself can refuse a prompt that is too long."""
        if self.info is None or not self.info.limits.block_tokens:
            return 0
        limits = self.info.limits
        return min(num_tokens // limits.block_tokens + 1, limits.blocks or num_tokens)

    def has_room(self, num_tokens: int) -> bool:
        """True if there is room for a prompt of about this many tokens."""
        free = self.free_blocks
        return free is None or free >= self.blocks_for(num_tokens)

    def reserving(self, num_tokens: int) -> "_Reserving":
        """Returns a context that reserves room for a prompt. Once decode has begun to answer, the worker's own report
        replaces the reservation."""
        return _Reserving(self._reservations, next(self._serial), BlockReservation(self.blocks_for(num_tokens)))

    def waiting_there(self) -> "_Reserving":
        """Returns a context for a request that waits in the worker for room: it reserves none, because smaller ones may
        pass it."""
        self._in_turn = BlockReservation(0)
        return _Reserving(self._reservations, next(self._serial), self._in_turn)

    @property
    def has_turn(self) -> bool:
        """True while a request that found no room waits in the worker: it has not begun to answer, or failed."""
        return self._in_turn is not None and self._in_turn.open

    def reported(self, asked_s: float) -> None:
        """Notes that the worker has reported its room, as asked for at `asked_s` (monotonic)."""
        self.report = Report(asked_s, self.num_open)
        for key in [k for k, one in self._reservations.items() if one.began_s is not None and one.began_s < asked_s]:
            del self._reservations[key]

    # ---- waits ----

    def ending(self, wait: Wait) -> "_Ending":
        """Returns a context within which this wait is given up if the worker hangs."""
        return _Ending(self._waits, wait)

    def end_waits(self, since_s: float, reason: str) -> int:
        """Gives up the waits that began at `since_s` (loop time) or before. Returns how many there were."""
        ended = [w for w in self._waits if w.waiting_since_s is not None and w.waiting_since_s <= since_s]
        for wait in ended:
            wait.give_up(reason)
        return len(ended)


def find_conflicts(workers: Sequence[Worker]) -> list[Worker]:
    """Refuses workers of one role that run under another one's engine id: peers would take their answers for those of
    one engine that restarts. The one that came first goes on. Returns such first ones if the conflict is new: they may
    have gone, as after a restart at another address, and should be asked.
    """
    living: dict[str, list[Worker]] = {}
    for worker in workers:
        if worker.info is not None and worker.down is None:
            living.setdefault(worker.info.engine, []).append(worker)
    conflicts: dict[Worker, str] = {}
    rivals = []
    for engine, same in living.items():
        first = min(same, key=lambda worker: worker.up_s)
        for worker in same:
            if (theirs := _incarnation(worker)) != (ours := _incarnation(first)):
                conflicts[worker] = (
                    f"two engines have the id {engine!r}: incarnation {ours!r} at {first.url}, which is used, and "
                    f"incarnation {theirs!r} at {worker.url}, which is not. Give each its own --engine-id"
                )
                if worker.conflict is None:
                    rivals.append(first)
    for worker in workers:
        worker.conflict = conflicts.get(worker)
    return rivals


def _incarnation(worker: Worker) -> str:
    return worker.info.incarnation if worker.info is not None else ""


# These contexts are entered for every request. They are classes because a generator costs four times as much.


class _Busy:
    __slots__ = ("_worker",)

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        self._worker.num_open += 1

    def __exit__(self, *_: object) -> None:
        self._worker.num_open -= 1


class _Ending:
    __slots__ = ("_wait", "_waits")

    def __init__(self, waits: set[Wait], wait: Wait) -> None:
        self._waits = waits
        self._wait = wait

    def __enter__(self) -> None:
        self._waits.add(self._wait)

    def __exit__(self, *_: object) -> None:
        self._waits.discard(self._wait)


class _Reserving:
    __slots__ = ("_key", "_reservation", "_reservations")

    def __init__(self, reservations: dict[int, BlockReservation], key: int, reservation: BlockReservation) -> None:
        self._reservations = reservations
        self._key = key
        self._reservation = reservation

    def __enter__(self) -> BlockReservation:
        self._reservations[self._key] = self._reservation
        return self._reservation

    def __exit__(self, *_: object) -> None:
        self._reservations.pop(self._key, None)
        self._reservation.ended = True
