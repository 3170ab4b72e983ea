"""Remembers which workers served the earlier turns of a conversation, and how much of it is in their caches.

A later turn repeats the earlier ones: its bytes begin with those of the prompt before, up to the end of that prompt's
last message. So each prompt is cut after every message (text and token ids: after every 256 bytes), and what is known
of a prompt is noted under the hash of everything up to its last cut. Two prompts with the same system message are not
one session.

What a worker had to compute or generate is in its cache until newer tokens replace it. The router counts tokens that it
sent there since, and believes in what is older than half of the cache no longer.
"""

import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.router.fleet.worker import Worker
from kvferry.settings import Role

__all__ = ["EarlierTurn", "Sessions", "cuts_of"]

_NEXT_MESSAGE = re.compile(rb"\}\s*,\s*\{")
_TEXT_BYTES = 256


@dataclass(frozen=True, slots=True)
class EarlierTurn:
    """A prompt that a worker has served, with the answer that it gave."""

    worker: Worker
    num_prompt_tokens: int
    num_answer_tokens: int
    size: int
    """The prompt's number of bytes."""
    incarnation: str
    seen_tokens: int
    """`Worker.seen_tokens` at that time."""
    at_s: float
    """The time (monotonic)."""

    def num_cached(self, num_more_tokens: int) -> int:
        """Returns about how many tokens of a prompt that is longer by this many are in the worker's cache: those of the
        earlier prompt, and of its answer, which the longer one is assumed to repeat."""
        info = self.worker.info
        if info is None or info.incarnation != self.incarnation:
            return 0
        capacity = info.limits.blocks * info.limits.block_tokens
        if capacity and self.worker.seen_tokens - self.seen_tokens > capacity // 2:
            return 0
        return self.num_prompt_tokens + min(self.num_answer_tokens, num_more_tokens)


class Sessions:
    """The latest turns that a router has seen. It is used on the event loop, and `max_turns` bounds its memory."""

    def __init__(self, *, max_turns: int = 20_000) -> None:
        """`max_turns` holds for each role."""
        self._max_turns = max_turns
        self._turns: Mapping[Role, OrderedDict[bytes, EarlierTurn]] = {
            Role.PREFILL: OrderedDict(),
            Role.DECODE: OrderedDict(),
        }

    def find(self, cuts: tuple[bytes, ...]) -> dict[Role, EarlierTurn]:
        """Returns, per role, the longest known prompt that this one continues or repeats."""
        found = {}
        for role, turns in self._turns.items():
            key = next((cut for cut in reversed(cuts) if cut in turns), None)
            if key is not None:
                turns.move_to_end(key)
                found[role] = turns[key]
        return found

    def note(
        self, cuts: tuple[bytes, ...], size: int, worker: Worker, num_prompt_tokens: int, num_answer_tokens: int
    ) -> None:
        """Notes that a worker has served a prompt of `size` bytes."""
        worker.seen_tokens += num_prompt_tokens + num_answer_tokens
        if not cuts or worker.info is None:
            return
        turns = self._turns[worker.assigned_role]
        turns[cuts[-1]] = EarlierTurn(
            worker,
            num_prompt_tokens,
            num_answer_tokens,
            size,
            worker.info.incarnation,
            worker.seen_tokens,
            time.monotonic(),
        )
        turns.move_to_end(cuts[-1])
        if len(turns) > self._max_turns:
            turns.popitem(last=False)


def cuts_of(begin: bytes, *, whole: bool) -> tuple[bytes, ...]:
    """Returns the hash of everything up to each cut of a prompt, which begins with these bytes as they came. `whole`:
    they are all of it."""
    end = begin.rstrip(b" \t\r\n]")
    if end.endswith(b"}") or not whole:
        at = [match.start() + 1 for match in _NEXT_MESSAGE.finditer(begin)] + ([len(end)] if whole else [])
    else:
        at = []
    at = at or list(range(_TEXT_BYTES, len(begin), _TEXT_BYTES))
    done, start, cuts = hashlib.blake2b(digest_size=16), 0, []
    for cut in at:
        done.update(begin[start:cut])
        cuts.append(done.digest())
        start = cut
    return tuple(cuts)
