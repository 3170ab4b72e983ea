"""Cuts what a hand-off moves between two ranks into parts: one post each, and each short compared with the lease.

Both sides cut alike: decode cuts what it reads (pull), prefill cuts what it writes (push).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.handoff.actions import LayoutQueries, Peer
from kvferry.layout.blocks import TokenRange

__all__ = ["Cutter", "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens that one post moves. The last part also brings windows and states."""

    index: int
    tokens: TokenRange
    last: bool


@dataclass(slots=True)
class Cutter:
    """How far the tokens of one source or consumer have been cut."""

    next_token: int = 0
    """The first token that is in no part yet."""
    num_parts: int = 0
    finished: bool = False
    """The last part has been cut."""

    def cut(
        self, peer: Peer, queries: LayoutQueries, *, ready_stop: int, wanted_stop: int, final: bool, ttl_s: float
    ) -> Iterator[Part]:
        """Yields the parts that have become ready.

        Parts before the last end at a multiple of `queries.unit_tokens`. None takes longer than a quarter of the lease
        by the slow estimate, unless one unit does.
        """
        if self.finished:
            return
        unit = max(1, queries.unit_tokens(peer))
        stop = max(self.next_token, min(ready_stop, wanted_stop))
        if not final:
            stop = max(self.next_token, stop // unit * unit)
        longest = max(1, stop - self.next_token)
        while longest > unit and queries.write_s(peer, longest) > ttl_s / 4:
            longest = max(unit, longest // 2 // unit * unit)
        while not self.finished and (self.next_token < stop or final):
            upto = min(stop, self.next_token + longest)
            part = Part(self.num_parts, TokenRange(self.next_token, upto), last=final and upto == stop)
            self.num_parts += 1
            self.next_token = upto
            self.finished = part.last
            yield part
