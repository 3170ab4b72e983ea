"""Detects silent fallback: too many requests served decode-only. Answers stay correct but slow, so nothing else would
show it.

Only requests that should have been handed over are counted, not those that decode serves by choice (short prompts,
several prompts, prompt log probabilities). The alarm looks back over a window of time.
"""

from collections import deque

__all__ = ["DecodeOnlyAlarm"]

_MAX_NOTES = 100_000


class DecodeOnlyAlarm:
    """There is one per router. Time is an argument."""

    def __init__(self, window_s: float, share: float) -> None:
        self._window_s = window_s
        self._share = share
        self._notes: deque[tuple[float, bool]] = deque(maxlen=_MAX_NOTES)
        self._num_decode_only = 0
        self.last_reason = ""
        """The reason why the last decode-only request was not handed over."""

    def note(self, now_s: float, reason: str | None) -> None:
        """Counts a request. `reason` is why its prompt was not handed over; None if it was."""
        if len(self._notes) == _MAX_NOTES:
            self._num_decode_only -= self._notes.popleft()[1]
        decode_only = reason is not None
        self._notes.append((now_s, decode_only))
        self._num_decode_only += decode_only
        self.last_reason = reason or self.last_reason
        self._forget(now_s)

    def note_many(self, now_s: float, num_requests: int, reason: str | None) -> None:
        """Counts requests that ended alike."""
        for _ in range(min(num_requests, _MAX_NOTES)):
            self.note(now_s, reason)

    def share(self, now_s: float) -> float:
        """Returns the share of the window's requests that were not handed over; 0 if there were no requests."""
        self._forget(now_s)
        return self._num_decode_only / len(self._notes) if self._notes else 0.0

    def rings(self, now_s: float) -> bool:
        """True if a person should look at the fleet."""
        return bool(self._num_decode_only) and self.share(now_s) >= self._share

    def _forget(self, now_s: float) -> None:
        while self._notes and self._notes[0][0] < now_s - self._window_s:
            self._num_decode_only -= self._notes.popleft()[1]
