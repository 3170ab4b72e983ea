"""Describes one simulated world, and what goes wrong in it: plain values, all from one seed."""

import random
from dataclasses import dataclass, replace

from kvferry.settings import FerrySettings, LeaseSettings, TransferMode, TransferSettings
from kvferry.wire.versions import BINDING, PROTOCOL_MAX

__all__ = ["Crash", "Job", "Partition", "Pause", "Scenario", "make_scenario", "settings_of"]


@dataclass(frozen=True, slots=True)
class Job:
    """One request that is handed over. Times are in seconds of world time."""

    number: int
    at_s: float
    prefill: int
    decode: int
    num_tokens: int
    """The number of tokens that prefill computes and offers."""
    asked_tokens: int
    """The number of tokens that decode asks for; sometimes more or fewer than prefill has."""
    cached_tokens: int
    """The length of decode's own prefix hit."""
    chunks: int
    chunk_s: float
    """Prefill computes in `chunks` chunks, each this long."""
    early: bool
    """Decode is dispatched together with prefill, not after it."""
    queue_s: float
    """How long it waits in decode's queue."""
    withdraw_s: float | None = None
    """Prefill aborts it this long after it came."""
    cancel_s: float | None = None
    """Decode aborts it this long after it was dispatched there."""
    preempted: bool = False
    """Prefill is preempted before the first chunk: it begins again later, in other blocks."""
    lost_by_router: bool = False
    """The router never dispatches it to decode."""
    never_prefilled: bool = False
    """The router never dispatches it to prefill (push)."""
    retries: int = 0
    """When decode fails, it is dispatched again, under the same request id and a new transfer id."""
    differs_at: int | None = None
    """The first token that is another one in decode's prompt. None: one prompt begins with all of the other."""

    @property
    def common_tokens(self) -> int:
        """The number of leading tokens that the two prompts have in common."""
        shorter = min(self.num_tokens, self.asked_tokens)
        return shorter if self.differs_at is None else min(shorter, self.differs_at)

    @property
    def same_prompt(self) -> bool:
        """True if both engines were given the same prompt."""
        return self.num_tokens == self.asked_tokens == self.common_tokens

    @property
    def prompts(self) -> tuple[list[int], list[int]]:
        """The prompts of prefill and decode."""
        first, common = self.number * 1000, self.common_tokens
        ours = [first + token for token in range(self.num_tokens)]
        return ours, [*ours[:common], *(first + 500 + token for token in range(common, self.asked_tokens))]


@dataclass(frozen=True, slots=True)
class Crash:
    """An engine dies, and starts again at the same address."""

    at_s: float
    prefill: bool
    engine: int
    down_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """All ranks of an engine are suspended for a while (SIGSTOP); transfers that they posted continue."""

    at_s: float
    prefill: bool
    engine: int
    for_s: float


@dataclass(frozen=True, slots=True)
class Partition:
    """Messages in one direction between two engines are lost for a while."""

    at_s: float
    prefill: int
    decode: int
    to_prefill: bool
    for_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """One world."""

    seed: int
    mode: TransferMode = TransferMode.PULL
    prefill_ranks: tuple[int, ...] = (1,)
    decode_ranks: tuple[int, ...] = (1,)
    num_blocks: int = 40
    jobs: tuple[Job, ...] = ()
    crashes: tuple[Crash, ...] = ()
    pauses: tuple[Pause, ...] = ()
    partitions: tuple[Partition, ...] = ()
    drop: float = 0.0
    """The share of messages that are lost."""
    duplicate: float = 0.0
    in_order: bool = True
    long_delay: float = 0.0
    """The share of messages that take up to 3 s."""
    fail: float = 0.0
    """The share of transfers that fail half way."""
    slow: float = 0.0
    """The share of transfers that take far longer than estimated."""
    hang: float = 0.0
    """The share of transfers that never end by themselves."""
    late: float = 0.0
    """The share of transfers whose end is noticed late."""
    drift: float = 0.0
    """How much the rates of two clocks differ at most."""
    protocol: int = PROTOCOL_MAX
    """The version that all engines agree on. Before BINDING only the numbers of tokens can be compared."""
    verify: bool = False
    owes_all: bool = True
    """False if some rank pairs exchange nothing."""
    ttl_s: float = 4.0
    quarantine_s: float = 1.0

    @property
    def calm(self) -> bool:
        """True if nothing goes wrong except what the engines themselves do."""
        quiet = not (self.crashes or self.pauses or self.partitions)
        return quiet and not (self.drop or self.duplicate or self.long_delay) and self.in_order and self.smooth

    @property
    def smooth(self) -> bool:
        """True if transfers end as they should."""
        return not (self.fail or self.slow or self.hang or self.late)


def settings_of(scenario: Scenario) -> FerrySettings:
    """Returns the settings of every rank in this world."""
    return FerrySettings(
        transfer=TransferSettings(mode=scenario.mode, transport="memory", deadline_s=12.0),
        lease=LeaseSettings(
            ttl_s=scenario.ttl_s,
            renew_every_s=scenario.ttl_s / 4,
            drift=max(scenario.drift, 0.01),
            quarantine_s=scenario.quarantine_s,
            standstill_s=scenario.quarantine_s,  # disconnecting a peer ends what is in flight with it in this network
        ),
    )


_RANKS = (1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 4)


def _ranks(rng: random.Random) -> int:
    return rng.randint(5, 8) if rng.random() < 0.01 else rng.choice(_RANKS)


def _some(rng: random.Random, often: float, most: float) -> float:
    return rng.random() ** 2 * most if rng.random() < often else 0.0


def _job(rng: random.Random, number: int, num_prefill: int, num_decode: int, push: bool) -> Job:
    num_tokens = rng.choice((1, 2, 3, 4, 5, 6, 8))
    asked, differs_at = _other_prompt(rng, num_tokens) if rng.random() < 0.2 else (num_tokens, None)
    cached = 0 if rng.random() < 0.6 else rng.randint(0, asked)
    return Job(
        number=number,
        at_s=rng.random() * 12.0,
        prefill=rng.randrange(num_prefill),
        decode=rng.randrange(num_decode),
        num_tokens=num_tokens,
        asked_tokens=asked,
        cached_tokens=cached,
        chunks=rng.choice((1, 1, 1, 2, 3)),
        chunk_s=rng.choice((0.01, 0.1, 0.1, 0.5, 2.0)) * rng.random(),
        early=push or rng.random() < 0.4,
        queue_s=rng.choice((0.0, 0.01, 0.1, 0.5, 9.0)) * rng.random(),
        withdraw_s=rng.random() * 1.5 if rng.random() < 0.08 else None,
        cancel_s=rng.random() * 1.5 if rng.random() < 0.12 else None,
        preempted=rng.random() < 0.06,
        lost_by_router=rng.random() < 0.02,
        never_prefilled=push and rng.random() < 0.03,
        retries=rng.choice((0, 0, 1, 2)),
        differs_at=differs_at,
    )


def _other_prompt(rng: random.Random, num_tokens: int) -> tuple[int, int | None]:
    """Returns the length of another prompt than prefill's, and where it differs."""
    asked = max(1, num_tokens + rng.choice((-2, -1, -1, 0, 0, 1, 1, 2)))
    return asked, rng.randrange(asked) if asked == num_tokens or rng.random() < 0.5 else None


def make_scenario(seed: int) -> Scenario:
    """Returns the world of this seed."""
    rng = random.Random(seed)
    push = rng.random() < 0.5
    num_prefill, num_decode = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3))
    rough = rng.random() < 0.75
    protocol = PROTOCOL_MAX if rng.random() < 0.85 else BINDING - 1
    jobs = tuple(_job(rng, n, num_prefill, num_decode, push) for n in range(rng.randint(8, 24)))
    if protocol < BINDING:
        jobs = tuple(replace(job, differs_at=None) for job in jobs)  # nothing but the length shows a difference
    crashes: list[Crash] = []
    pauses: list[Pause] = []
    partitions: list[Partition] = []
    if rough:
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
            prefill = rng.random() < 0.5
            engine = rng.randrange(num_prefill if prefill else num_decode)
            crashes.append(
                Crash(rng.random() * 14.0, prefill, engine, rng.choice((0.01, 0.3, 2.0, 8.0)) * rng.random())
            )
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            prefill = rng.random() < 0.5
            engine = rng.randrange(num_prefill if prefill else num_decode)
            pauses.append(Pause(rng.random() * 14.0, prefill, engine, rng.choice((0.5, 4.0, 8.0)) * rng.random()))
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            pair = rng.randrange(num_prefill), rng.randrange(num_decode)
            partitions.append(
                Partition(rng.random() * 12.0, *pair, rng.random() < 0.5, rng.choice((1.0, 6.0)) * rng.random())
            )
    return Scenario(
        seed=seed,
        mode=TransferMode.PUSH if push else TransferMode.PULL,
        prefill_ranks=tuple(_ranks(rng) for _ in range(num_prefill)),
        decode_ranks=tuple(_ranks(rng) for _ in range(num_decode)),
        num_blocks=rng.choice((12, 24, 60)),
        jobs=jobs,
        crashes=tuple(crashes),
        pauses=tuple(pauses),
        partitions=tuple(partitions),
        drop=_some(rng, 0.3, 0.3) if rough else 0.0,
        duplicate=_some(rng, 0.3, 0.3) if rough else 0.0,
        in_order=not rough or rng.random() < 0.6,
        long_delay=_some(rng, 0.3, 0.2) if rough else 0.0,
        fail=_some(rng, 0.4, 0.4) if rough else 0.0,
        slow=_some(rng, 0.3, 0.3) if rough else 0.0,
        hang=_some(rng, 0.2, 0.2) if rough else 0.0,
        late=_some(rng, 0.3, 0.3) if rough else 0.0,
        drift=rng.choice((0.0, 0.01, 0.1)),
        protocol=protocol,
        verify=rng.random() < 0.2,
        owes_all=rng.random() < 0.8,
        ttl_s=rng.choice((2.0, 4.0)),
        quarantine_s=rng.choice((0.3, 1.0)),
    )
