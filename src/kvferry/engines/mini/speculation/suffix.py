"""Drafts from counted suffixes of this request's text and of earlier answers (SuffixDecoding, arXiv 2411.04975).

Every run of up to `depth` tokens is a path in a tree whose nodes count how often the run occurred. The longest suffix
of the text that is a path leads to a node. Drafts follow the most frequent child from there, as long as it was frequent
enough, and only as far as the length of the match allows: a longer match is trusted further.

Counting is Python on the engine's thread, about 50 us per token. Each proposal therefore counts a limited number of new
tokens: a long prompt or answer is counted over several steps, and no step waits for all of it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.ids import RequestId

__all__ = ["SuffixDrafter"]

MAX_COUNTED = 128
"""The most tokens that one proposal counts in its request's text, and also in earlier answers."""
MAX_PROMPT_TOKENS = 8192
"""Only this many last tokens of a prompt are counted: a node takes about 300 bytes, a token up to `depth` nodes."""


@dataclass(slots=True)
class _Node:
    count: int = 0
    children: "dict[int, _Node]" = field(default_factory=dict)


class _Tree:
    """Counts all runs of up to `depth` tokens."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._root = _Node()
        self._length = 0
        self._open: list[_Node] = []
        """The nodes of the runs that end with the last token, shortest run first."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Counts some of the tokens that are not counted yet. `tokens` is the whole text."""
        if not self._length:
            self._length = max(0, len(tokens) - MAX_PROMPT_TOKENS)
        for token in tokens[self._length : self._length + MAX_COUNTED]:
            self._open = [self._down(node, token) for node in (self._root, *self._open[: self._depth - 1])]
            self._length += 1

    @staticmethod
    def _down(node: _Node, token: int) -> _Node:
        child = node.children.get(token)
        if child is None:
            child = node.children[token] = _Node()
        child.count += 1
        return child

    def add(self, tokens: Sequence[int], sign: int) -> Iterator[None]:
        """Adds a separate text (sign 1), or removes it again (-1). Handles one token per element that it yields."""
        for start in range(len(tokens)):
            node = self._root
            for token in tokens[start : start + self._depth]:
                child = node.children.setdefault(token, _Node())
                child.count += sign
                if child.count <= 0:
                    del node.children[token]  # nodes below it were seen no more often
                    break
                node = child
            yield

    def find(self, suffix: Sequence[int]) -> "_Node | None":
        """Returns the node of a run, or None if no token ever followed it."""
        node = self._root
        for token in suffix:
            child = node.children.get(token)
            if child is None:
                return None
            node = child
        return node if node.children else None


class SuffixDrafter:
    """Drafts from one tree per request and one of earlier answers, whichever matches longer. Implements TextDrafter."""

    def __init__(self, *, depth: int, max_cached_tokens: int, max_factor: float, min_share: float) -> None:
        self._depth = depth
        self._max_cached_tokens = max_cached_tokens
        self._max_factor = max_factor
        self._min_share = min_share
        self._own: dict[RequestId, _Tree] = {}
        self._answers = _Tree(depth)
        self._kept: deque[tuple[int, ...]] = deque()
        self._num_kept_tokens = 0
        self._to_count: deque[Iterator[None]] = deque()
        """Answers that are being added to or removed from the tree, in this order."""

    def propose(self, request: RequestId, tokens: Sequence[int], count: int) -> list[int]:
        """Implements TextDrafter."""
        own = self._own.setdefault(request, _Tree(self._depth))
        own.extend(tokens)
        self._count_answers()
        for length in range(min(self._depth - 1, len(tokens)), 0, -1):
            suffix = tokens[-length:]
            node = own.find(suffix) or self._answers.find(suffix)
            if node is not None:
                return self._follow(node, min(count, int(length * self._max_factor)))
        return []

    def _count_answers(self) -> None:
        for _ in range(MAX_COUNTED):
            while self._to_count and next(self._to_count[0], self) is self:
                self._to_count.popleft()
            if not self._to_count:
                return

    def _follow(self, node: _Node, count: int) -> list[int]:
        drafts: list[int] = []
        share = 1.0
        while len(drafts) < count and node.children:
            token, child = max(node.children.items(), key=lambda entry: entry[1].count)
            share *= child.count / max(node.count, sum(each.count for each in node.children.values()))
            if share < self._min_share:
                break
            drafts.append(token)
            node = child
        return drafts

    def forget(self, request: RequestId, answer: Sequence[int]) -> None:
        """Implements TextDrafter. The answer may give drafts for other requests from now on."""
        if self._own.pop(request, None) is None or not answer or not self._max_cached_tokens:
            return
        kept = tuple(answer[-self._max_cached_tokens :])
        self._to_count.append(self._answers.add(kept, 1))
        self._kept.append(kept)
        self._num_kept_tokens += len(kept)
        while self._num_kept_tokens > self._max_cached_tokens:
            oldest = self._kept.popleft()
            self._to_count.append(self._answers.add(oldest, -1))
            self._num_kept_tokens -= len(oldest)
