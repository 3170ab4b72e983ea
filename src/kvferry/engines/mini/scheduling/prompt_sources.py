"""Where the KV of each prompt token of one request came from, and how many of them were computed, counting each time.

The account is final when the first token of the answer is chosen: that is what headers report. Whatever is computed of
the prompt after that, because the request was preempted, is only counted as computed again.
"""

from enum import Enum

from kvferry.stats import PromptAccount

__all__ = ["PromptSources"]


class _Source(Enum):
    CACHED = "cached"
    HANDED_OVER = "handed over"
    FETCHED = "fetched"
    COMPUTED = "computed"


class PromptSources:
    """The record of one request."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: the length of the prompt."""
        self._num_tokens = num_tokens
        self._runs: list[tuple[int, _Source]] = []
        """Runs of tokens with one source, as (first token after the run, source)."""
        self._num_computed = 0
        """How many prompt tokens were part of a step; those of two steps count twice."""
        self._final = False
        self._source = ""

    def admitted(self, num_cached: int) -> None:
        """The request has blocks, in which the first `num_cached` tokens are in the prefix cache.

        If it had blocks before, then those of these tokens that it had keep their source.
        """
        if not self._final:
            self._truncate(num_cached)
            self._extend(num_cached, _Source.CACHED)

    def handed_over(self, stop: int) -> None:
        """The tokens before `stop` that were not there yet have come from another engine."""
        self._extend(stop, _Source.HANDED_OVER)

    def fetched(self, stop: int, source: str) -> None:
        """The tokens before `stop` that were not there yet were fetched from the engine `source`."""
        self._source = source
        self._extend(stop, _Source.FETCHED)

    def computed(self, start: int, stop: int) -> None:
        """A step has computed the tokens [start, stop)."""
        self._num_computed += max(0, min(stop, self._num_tokens) - start)
        self._extend(stop, _Source.COMPUTED)

    def close(self) -> None:
        """Makes the account final: the first token of the answer is chosen."""
        self._final = True

    def account(self, reason: str) -> PromptAccount:
        """Returns the counts so far."""
        counts = dict.fromkeys(_Source, 0)
        start = 0
        for stop, source in self._runs:
            counts[source] += stop - start
            start = stop
        return PromptAccount(
            handed_over=counts[_Source.HANDED_OVER],
            fetched=counts[_Source.FETCHED],
            source=self._source if counts[_Source.FETCHED] else "",
            cached=counts[_Source.CACHED],
            recomputed=counts[_Source.COMPUTED],
            computed_again=self._num_computed - counts[_Source.COMPUTED],
            reason=reason,
        )

    def _extend(self, stop: int, source: _Source) -> None:
        stop = min(stop, self._num_tokens)
        if not self._final and stop > (self._runs[-1][0] if self._runs else 0):
            self._runs.append((stop, source))

    def _truncate(self, stop: int) -> None:
        runs, self._runs = self._runs, []
        for end, source in runs:
            self._extend(min(end, stop), source)
