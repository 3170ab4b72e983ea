"""Drafts from the text itself: what followed the last time that its last few tokens occurred (prompt lookup)."""

from collections.abc import Sequence
from typing import Protocol

from kvferry.ids import RequestId

__all__ = ["NgramDrafter", "TextDrafter"]


class TextDrafter(Protocol):
    """A drafter that knows only tokens. On the engine's thread; never blocks."""

    def propose(self, request: RequestId, tokens: Sequence[int], count: int) -> list[int]:
        """At most `count` drafts of what follows `tokens`: prompt and answer so far, which only ever grow at the end,
        or begin again with the same prompt."""
        ...

    def forget(self, request: RequestId, answer: Sequence[int]) -> None:
        """The request has ended with this answer. Unknown ids are no error."""
        ...


class NgramDrafter:
    """Looks for the longest run of last tokens, from `longest` down to `shortest`, where it occurred last before."""

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._indices: dict[RequestId, _Index] = {}

    def propose(self, request: RequestId, tokens: Sequence[int], count: int) -> list[int]:
        """See TextDrafter."""
        index = self._indices.setdefault(request, _Index(self._sizes))
        index.extend(tokens)
        for size in self._sizes:
            if len(tokens) > size:
                at = index.find(tuple(tokens[-size:]))
                if at is not None:
                    text = list(tokens[at:])
                    for i in range(count - len(text)):
                        text.append(text[i])  # a text that repeats itself goes on repeating
                    return text[:count]
        return []

    def forget(self, request: RequestId, answer: Sequence[int]) -> None:
        """See TextDrafter."""
        self._indices.pop(request, None)


class _Index:
    """Where each run of tokens ended last, less the run at the very end, which would only find itself."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._ends: dict[tuple[int, ...], int] = {}
        self._length = 0

    def extend(self, tokens: Sequence[int]) -> None:
        for end in range(self._length, len(tokens)):  # runs that end before token `end`
            for size in self._sizes:
                if end >= size:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._length = max(self._length, len(tokens))

    def find(self, run: tuple[int, ...]) -> int | None:
        return self._ends.get(run)
