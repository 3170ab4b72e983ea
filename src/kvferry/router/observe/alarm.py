"""Does the fleet silently serve decode-only? Answers are right then, and slow: nobody notices but this.

Counted are requests that were meant to be handed over: those that decode serves by choice (short, several prompts,
prompt log probabilities) are not. The alarm looks back over a window.
"""

from collections import deque

__all__ = ["DecodeOnlyAlarm"]

_MAX_NOTES = 100_000


class DecodeOnlyAlarm:
    """One a router. Time is an argument."""

    def __init__(self, window_s: float, share: float) -> None:
        self._window_s = window_s
        self._share = share
        self._notes: deque[tuple[float, bool]] = deque(maxlen=_MAX_NOTES)
        self._num_alone = 0
        self.last_why = ""
        """Of the last request that was not handed over."""

    def note(self, now_s: float, why_not_handed_over: str | None) -> None:
        """A request is served. None: its prompt was handed over."""
        if len(self._notes) == _MAX_NOTES:
            self._num_alone -= self._notes.popleft()[1]
        alone = why_not_handed_over is not None
        self._notes.append((now_s, alone))
        self._num_alone += alone
        self.last_why = why_not_handed_over or self.last_why
        self._forget(now_s)

    def share(self, now_s: float) -> float:
        """Of the window's requests, those that were not handed over; 0 without requests."""
        self._forget(now_s)
        return self._num_alone / len(self._notes) if self._notes else 0.0

    def rings(self, now_s: float) -> bool:
        """A person should look."""
        return bool(self._num_alone) and self.share(now_s) >= self._share

    def _forget(self, now_s: float) -> None:
        while self._notes and self._notes[0][0] < now_s - self._window_s:
            self._num_alone -= self._notes.popleft()[1]
