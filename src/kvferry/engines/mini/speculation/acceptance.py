"""How many drafts were accepted, by position. Counted by the engine; shown in metrics and by `benchmarks.spec`."""

from dataclasses import dataclass

__all__ = ["Acceptance", "AcceptanceCounter"]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts since the start. All rates are 0.0 where nothing was drafted."""

    num_verifications: int = 0
    """Steps of requests in which at least one draft was verified."""
    drafted: tuple[int, ...] = ()
    """Drafts that were verified, by position: the first of a step is position 0."""
    accepted: tuple[int, ...] = ()
    """Of these, those that stood together with all before them."""

    @property
    def rate(self) -> float:
        """Accepted drafts of all drafts."""
        total = sum(self.drafted)
        return sum(self.accepted) / total if total else 0.0

    @property
    def length(self) -> float:
        """Tokens a verification: accepted drafts, and the one that is always chosen. 1.0: speculation is useless."""
        return 1.0 + sum(self.accepted) / self.num_verifications if self.num_verifications else 0.0

    @property
    def by_position(self) -> tuple[float, ...]:
        """Of the verifications that had a draft at a position, the share that accepted it."""
        return tuple(a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True))

    def since(self, before: "Acceptance") -> "Acceptance":
        """What came after an earlier count."""

        def less(now: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(value - (then[i] if i < len(then) else 0) for i, value in enumerate(now))

        return Acceptance(
            self.num_verifications - before.num_verifications,
            less(self.drafted, before.drafted),
            less(self.accepted, before.accepted),
        )


class AcceptanceCounter:
    """Adds up."""

    def __init__(self) -> None:
        self._num = 0
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """One verification of one request. Without drafts it counts nothing."""
        if not num_drafts:
            return
        self._num += 1
        for counts in (self._drafted, self._accepted):
            counts += [0] * (num_drafts - len(counts))
        for i in range(num_drafts):
            self._drafted[i] += 1
            self._accepted[i] += i < num_accepted

    def read(self) -> Acceptance:
        """As it stands."""
        return Acceptance(self._num, tuple(self._drafted), tuple(self._accepted))
