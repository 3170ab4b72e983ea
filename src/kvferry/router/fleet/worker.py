"""One worker, as the router sees it: what it says of itself, whether it is well, how busy it is, what it was promised.

Life: UNKNOWN (never answered) -> UP <-> DOWN (with the reason). A worker is UP again with its first good answer,
whatever its incarnation: a restart needs no more than that, and closes its circuit breaker. `state` beside it is the
worker's own word, for example `draining`: it is well, and gets nothing new.
"""

import itertools
import math
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec

from kvferry.router.fleet.breakers import Breaker
from kvferry.router.settings import RouterSettings
from kvferry.settings import Role, TransferMode
from kvferry.web.records import WorkerInfo

__all__ = ["BlockReservation", "Cached", "Learned", "Report", "Source", "Wait", "Worker"]


class Source(StrEnum):
    """From where the router knows a worker."""

    FLAG = "flag"
    FILE = "file"
    REGISTERED = "registered"
    ETCD = "etcd"


class Wait(Protocol):
    """Something of the router that waits for a worker's headers or bytes."""

    waiting_since_s: float | None
    """Loop time since when it waits for the next bytes; None: it doesn't at the moment."""

    def give_up(self, reason: str) -> None:
        """End the wait, as a failure of the worker with this reason. Never blocks; nothing if it has just ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a prefill worker said of itself in the parameters that it returned (R15, R16)."""

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
        """Decode can register with it before it has answered: push may go to both at once."""
        return bool(self.engine and self.host and self.port)


@dataclass(slots=True)
class BlockReservation:
    """Blocks on decode that a dispatch will take, until the worker's own report counts them."""

    num_blocks: int
    began_s: float | None = None
    """When decode began to answer: a report that was asked for later has them in it."""


@dataclass(slots=True)
class Report:
    """The worker's last answer, and when it was asked for."""

    asked_s: float = 0.0
    num_open_then: int = 0
    """Requests of this router that were open at that time."""


@dataclass(slots=True)
class Cached:
    """The blocks in a worker's prefix cache, as it told them: 8-byte prefixes of their hashes."""

    version: int = -1
    blocks: frozenset[bytes] = field(default_factory=frozenset)


class Worker:
    """One worker, as the router sees it. Everything runs on the event loop."""

    def __init__(
        self, url: str, wanted: Role, settings: RouterSettings | None = None, source: Source = Source.FLAG
    ) -> None:
        settings = settings or RouterSettings()
        self.url = url.rstrip("/")
        self.wanted = wanted
        """What the operator says it is for: PREFILL or DECODE."""
        self.source = source
        self.info: WorkerInfo | None = None
        self.down: str | None = "it has not answered yet"
        """Why it cannot be reached; None: it can."""
        self.silent_since_s: float | None = None
        """Loop time of the first health check without an answer; None: the last one had one."""
        self.up_s = -math.inf
        """When it came up last, for the first time, again, or as a new process (monotonic)."""
        self.lost_s = -math.inf
        """When it last ceased to be usable; minus infinity: it never was."""
        self.learned: Learned | None = None
        self.cached = Cached()
        self.report = Report()
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_open_s, settings.breaker_longest_s)
        self.num_open = 0
        self.num_failures = 0
        self.last_pick = 0
        self.gone = False
        """It was taken out of the fleet; what is open goes on."""
        self._waits: set[Wait] = set()
        self._promises: dict[int, BlockReservation] = {}
        self._serial = itertools.count()

    @property
    def name(self) -> str:
        """The engine's id, and the address until that is known."""
        return self.info.engine if self.info is not None else self.url

    @property
    def mode(self) -> TransferMode | None:
        """Its own word, else what its parameters said; None: not known yet."""
        if self.info is not None and self.info.mode is not None:
            return self.info.mode
        return self.learned.mode if self.learned is not None else None

    def learn(self, learned: Learned) -> None:
        """Its parameters said this of it."""
        self.learned = learned
        if learned.engine and self.info is not None and self.info.engine != learned.engine:
            self.info = msgspec.structs.replace(self.info, engine=learned.engine)

    @property
    def why_unusable(self) -> str | None:
        """Why it gets no new request; None: it may. Its breaker is asked apart."""
        if self.down is not None or self.info is None:
            return f"{self.name} ({self.url}) is down: {self.down}"
        if self.info.role not in (self.wanted, Role.BOTH):
            return (
                f"{self.name} ({self.url}) is a {self.info.role} worker and was given as --{self.wanted}: "
                f"give it as --{self.info.role}, or start it with --role {self.wanted}"
            )
        if self.info.state != "ready":
            return f"{self.name} ({self.url}) takes nothing new: {self.info.state}"
        return None

    def slow_for_s(self, now_s: float) -> float:
        """For how long it has been silent, if that is all that is wrong with it; else for ever."""
        info = self.info
        if self.silent_since_s is None or info is None or info.role not in (self.wanted, Role.BOTH):
            return math.inf
        return now_s - self.silent_since_s if info.state == "ready" else math.inf

    def why_not_now(self) -> str | None:
        """As `why_unusable`, with the breaker."""
        why = self.why_unusable
        if why is None and not self.breaker.permits(now_s := time.monotonic()):
            return f"{self.name} ({self.url}) is left alone: {self.breaker.why(now_s)}"
        return why

    def can(self, ability: str) -> bool:
        """It said so."""
        return self.info is not None and ability in self.info.abilities

    @property
    def load(self) -> int:
        """Requests open there: ours, and those of others when it was last asked."""
        others = 0 if self.info is None else self.info.load.open_requests - self.report.num_open_then
        return self.num_open + max(0, others)

    def busy(self) -> "_Busy":
        """A context: count a request as open for as long."""
        return _Busy(self)

    # ---- room ----

    @property
    def free_blocks(self) -> int | None:
        """Blocks that are neither taken nor promised; None: it does not say."""
        if self.info is None or self.info.room is None:
            return None
        return self.info.room.free_blocks - sum(promise.num_blocks for promise in self._promises.values())

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a prompt takes; never more than it has at all, so that it can say itself what does not fit."""
        if self.info is None or not self.info.limits.block_tokens:
            return 0
        limits = self.info.limits
        return min(num_tokens // limits.block_tokens + 1, limits.blocks or num_tokens)

    def has_room(self, num_tokens: int) -> bool:
        """For a prompt of about so many tokens."""
        free = self.free_blocks
        return free is None or free >= self.blocks_for(num_tokens)

    def promised(self, num_tokens: int) -> "_Promised":
        """A context: keep room for a prompt for as long; its report takes over once decode has begun to answer."""
        return _Promised(self._promises, next(self._serial), BlockReservation(self.blocks_for(num_tokens)))

    def reported(self, asked_s: float) -> None:
        """It has told its room; asked for at `asked_s` (monotonic)."""
        self.report = Report(asked_s, self.num_open)
        for key in [k for k, one in self._promises.items() if one.began_s is not None and one.began_s < asked_s]:
            del self._promises[key]

    # ---- waits ----

    def ending(self, wait: Wait) -> "_Ending":
        """A context: have this wait given up within it if the worker hangs."""
        return _Ending(self._waits, wait)

    def end_waits(self, since_s: float, reason: str) -> int:
        """Give up the waits that began at `since_s` (loop time) or before. Returns how many."""
        ended = [w for w in self._waits if w.waiting_since_s is not None and w.waiting_since_s <= since_s]
        for wait in ended:
            wait.give_up(reason)
        return len(ended)


# Contexts of every request: classes, for a generator costs four times as much.


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


class _Promised:
    __slots__ = ("_key", "_promise", "_promises")

    def __init__(self, promises: dict[int, BlockReservation], key: int, promise: BlockReservation) -> None:
        self._promises = promises
        self._key = key
        self._promise = promise

    def __enter__(self) -> BlockReservation:
        self._promises[self._key] = self._promise
        return self._promise

    def __exit__(self, *_: object) -> None:
        self._promises.pop(self._key, None)
