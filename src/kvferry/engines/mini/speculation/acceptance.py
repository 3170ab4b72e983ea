"""Counts accepted drafts per position, for metrics and for `benchmarks.spec`."""

from dataclasses import dataclass

__all__ = ["Acceptance", "AcceptanceCounter"]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts since the engine started. All rates are 0.0 if nothing was drafted."""

    num_verifications: int = 0
    """How many times at least one draft of a request was verified in a step."""
    drafted: tuple[int, ...] = ()
    """Verified drafts per position; the first draft of a step is position 0."""
    accepted: tuple[int, ...] = ()
    """Accepted drafts per position: a draft is accepted only together with all before it."""

    @property
    def rate(self) -> float:
        """The fraction of drafts that were accepted."""
        total = sum(self.drafted)
        return sum(self.accepted) / total if total else 0.0

    @property
    def length(self) -> float:
        """Average tokens per verification: the accepted drafts, and one more. At 1.0 speculation is useless."""
        return 1.0 + sum(self.accepted) / self.num_verifications if self.num_verifications else 0.0

    @property
    def by_position(self) -> tuple[float, ...]:
        """Per position, the fraction of its drafts that were accepted."""
        return tuple(a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True))

    def since(self, before: "Acceptance") -> "Acceptance":
        """Returns the counts that came after an earlier snapshot."""

        def less(now: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(value - (then[i] if i < len(then) else 0) for i, value in enumerate(now))

        return Acceptance(
            self.num_verifications - before.num_verifications,
            less(self.drafted, before.drafted),
            less(self.accepted, before.accepted),
        )


class AcceptanceCounter:
    """Collects the counts of an engine."""

    def __init__(self) -> None:
        self._num = 0
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Counts one verification of one request. Does nothing without drafts."""
        if not num_drafts:
            return
        self._num += 1
        for counts in (self._drafted, self._accepted):
            counts += [0] * (num_drafts - len(counts))
        for i in range(num_drafts):
            self._drafted[i] += 1
            self._accepted[i] += i < num_accepted

    def read(self) -> Acceptance:
        """Returns a snapshot of the counts."""
        return Acceptance(self._num, tuple(self._drafted), tuple(self._accepted))
