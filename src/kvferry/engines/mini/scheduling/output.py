"""The growing answer of one request: text, stop strings, stop tokens, length limits."""

from dataclasses import dataclass

from kvferry.engines.mini.api import FinishReason, SamplingParams, TokenLogprobs
from kvferry.engines.mini.models.tokenizer import Detokenizer

__all__ = ["Answer", "Finish"]


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an answer is complete; `stop` is the stop token or string that ended it."""

    reason: FinishReason
    stop: int | str | None = None


class Answer:
    """Takes tokens one by one and returns what the client may see of them."""

    def __init__(
        self, sampling: SamplingParams, detokenizer: Detokenizer | None, eos_token_ids: frozenset[int], max_tokens: int
    ) -> None:
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._eos = frozenset() if sampling.ignore_eos else eos_token_ids
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._pending = ""  # text that may be the start of a stop string
        self._hold = max((len(stop) for stop in sampling.stop), default=1) - 1
        self.new_tokens: list[int] = []
        self.new_logprobs: list[TokenLogprobs] = []
        self.new_text = ""

    @property
    def max_tokens_left(self) -> int:
        """The most tokens that are still to come."""
        return self._max_tokens - self._num_tokens

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> Finish | None:
        """Adds a token. Returns why the answer is complete, or None if it goes on."""
        self._num_tokens += 1
        self.new_tokens.append(token_id)
        if logprobs is not None:
            self.new_logprobs.append(logprobs)
        enough = self._num_tokens >= self._sampling.min_tokens
        if enough and token_id in self._eos:
            return self._end(Finish(FinishReason.STOP))
        if enough and token_id in self._sampling.stop_token_ids:
            return self._end(Finish(FinishReason.STOP, token_id))
        if self._detokenizer is not None:
            stop = self._add_text(self._detokenizer.push(token_id), enough)
            if stop is not None:
                return Finish(FinishReason.STOP, stop)
        if self._num_tokens >= self._max_tokens:
            return self._end(Finish(FinishReason.LENGTH))
        return None

    def take(self) -> tuple[tuple[int, ...], str, tuple[TokenLogprobs, ...]]:
        """Returns what is new since the last call: tokens, text, logprobs."""
        result = (tuple(self.new_tokens), self.new_text, tuple(self.new_logprobs))
        self.new_tokens, self.new_text, self.new_logprobs = [], "", []
        return result

    def _add_text(self, text: str, enough: bool) -> str | None:
        """Returns the stop string that the text now contains, if any; the text then ends before it."""
        if not text:
            return None
        self._pending += text
        if enough:
            found = [(at, stop) for stop in self._sampling.stop if (at := self._pending.find(stop)) >= 0]
            if found:
                at, stop = min(found)
                self.new_text += self._pending[:at]
                self._pending = ""
                return stop
        keep = self._suspect()
        cut = len(self._pending) - keep
        self.new_text += self._pending[:cut]
        self._pending = self._pending[cut:]
        return None

    def _suspect(self) -> int:
        """Returns how many characters at the end may be the start of a stop string."""
        for length in range(min(self._hold, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-length:]) for stop in self._sampling.stop):
                return length
        return 0

    def _end(self, finish: Finish) -> Finish:
        stop = self._add_text(self._detokenizer.finish(), True) if self._detokenizer else None
        self.new_text += self._pending
        self._pending = ""
        return Finish(FinishReason.STOP, stop) if stop is not None else finish
