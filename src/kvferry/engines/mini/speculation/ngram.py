"""Drafts from the text itself: the tokens that followed the last earlier occurrence of its end (prompt lookup)."""

from collections.abc import Sequence
from typing import Protocol

from kvferry.ids import RequestId

__all__ = ["NgramDrafter", "TextDrafter"]


class TextDrafter(Protocol):
    """A drafter that knows only tokens. Called on the engine's thread; never blocks."""

    def propose(self, request: RequestId, tokens: Sequence[int], count: int) -> list[int]:
        """Returns at most `count` drafts for what follows `tokens`, the prompt and the answer so far.

        From call to call a request's tokens only grow at the end, or begin again with the same prompt.
        """
        ...

    def forget(self, request: RequestId, answer: Sequence[int]) -> None:
        """Forgets a request that has ended with this answer. Unknown ids are ignored."""
        ...


class NgramDrafter:
    """Looks up the last tokens, from `longest` down to `shortest` of them, at their last earlier occurrence."""

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._indices: dict[RequestId, _Index] = {}

    def propose(self, request: RequestId, tokens: Sequence[int], count: int) -> list[int]:
        """Implements TextDrafter."""
        index = self._indices.setdefault(request, _Index(self._sizes))
        index.extend(tokens)
        for size in self._sizes:
            if len(tokens) > size:
                at = index.find(tuple(tokens[-size:]))
                if at is not None:
                    text = list(tokens[at:])
                    for i in range(count - len(text)):
                        text.append(text[i])  # a text that repeats itself is assumed to continue repeating
                    return text[:count]
        return []

    def forget(self, request: RequestId, answer: Sequence[int]) -> None:
        """Implements TextDrafter."""
        self._indices.pop(request, None)


class _Index:
    """Maps each run of tokens to where it last ended, except the run at the very end, which would find itself."""

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
