"""The log probabilities of one choice, in the form of either endpoint.

An entry goes out with the text that its token begins: text that is held back, because a character is incomplete or a
stop string may have begun, holds its entries back, and what a stop string cuts off has none. So the bytes of all
entries, joined, begin with the bytes of the text, and are equal to them unless a token reaches into a stop string.
Entries are written as JSON when they come, so that a long answer is only joined at its end.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from kvferry.engines.mini.api import FinishReason, Output, TokenLogprobs
from kvferry.engines.mini.server.prompts import TokenizerLike

__all__ = ["ChoiceLogprobs", "CompletionEntry", "Entry", "TokenNames", "as_chat", "as_completion"]

_MAX_NAMES = 8192
_Raw = msgspec.Raw


@dataclass(frozen=True, slots=True)
class _Name:
    """A token as an answer shows it."""

    text: str
    escaped: str
    """`bytes:` and its bytes, for texts that two tokens share."""
    bytes: bytes
    """The bytes that it adds to the text."""


class TokenNames:
    """The names of one tokenizer's tokens."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self.of = lru_cache(_MAX_NAMES)(self._of)
        """Returns the name of a token id."""

    def _of(self, token_id: int) -> _Name:
        raw = self._tokenizer.token_bytes(token_id)
        return _Name(self._tokenizer.token_text(token_id), _escaped(raw), raw)

    def top(self, token_id: int, one: TokenLogprobs) -> list[tuple[int, float]]:
        """Returns the most likely tokens, with the chosen one among them."""
        top = list(one.top)
        if not any(other == token_id for other, _ in top):
            top.append((token_id, one.logprob))
        return top

    def keys(self, token_id: int, top: Sequence[tuple[int, float]]) -> list[str]:
        """Returns a different key for each of these tokens: the text of the chosen one is always its key."""
        taken = {self.of(token_id).text}
        keys = []
        for other, _ in top:
            name = self.of(other)
            key = name.text
            if other != token_id and key in taken:
                key = name.escaped if name.escaped not in taken else f"token_id:{other}"
            taken.add(key)
            keys.append(key)
        return keys


def _escaped(raw: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass(frozen=True, slots=True)
class Entry:
    """One token of an answer."""

    token_id: int
    logprobs: TokenLogprobs
    bytes: bytes
    offset: int
    """The number of the character that its first byte begins or continues."""


class ChoiceLogprobs:
    """The entries of one choice, in order. Each is returned by `take` once."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._held: deque[Entry] = deque()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0
        self._num_shown = 0

    def take(self, output: Output) -> list[Entry]:
        """Takes the output of a step. Returns the entries that go out with its text."""
        for token_id, one in zip(output.token_ids, output.logprobs, strict=False):
            raw = self._names.of(token_id).bytes
            self._held.append(Entry(token_id, one, raw, self._num_chars))
            self._num_chars += len(self._decoder.decode(raw))
        self._num_shown += len(output.text)
        cut = isinstance(output.stop_reason, str)
        ends = output.finish_reason is not None
        if ends and not cut and output.finish_reason is FinishReason.STOP and self._held:
            self._held.append(replace(self._held.pop(), bytes=b""))  # the text does not show the token that ends it
        taken = []
        while self._held and (self._held[0].offset < self._num_shown or (ends and not cut)):
            taken.append(self._held.popleft())
        return taken


def as_chat(entries: Sequence[Entry], names: TokenNames, *, with_top: bool) -> list[_Raw]:
    """Returns the entries of `logprobs.content`, as JSON."""
    written = []
    for entry in entries:
        shown = _chat_token(names.of(entry.token_id).text, entry.logprobs.logprob, entry.bytes)
        top = names.top(entry.token_id, entry.logprobs) if with_top else []
        others = [_chat_token(names.of(one).text, logprob, names.of(one).bytes) for one, logprob in top]
        written.append(_Raw(b'{%s,"top_logprobs":[%s]}' % (shown, b",".join(b"{%s}" % one for one in others))))
    return written


def _chat_token(text: str, logprob: float, raw: bytes) -> bytes:
    encode = msgspec.json.encode
    return b'"token":%s,"logprob":%s,"bytes":%s' % (encode(text), encode(logprob), encode(list(raw)))


@dataclass(frozen=True, slots=True)
class CompletionEntry:
    """What one token adds to each list of a completion's `logprobs`."""

    token: str
    logprob: float
    top: _Raw
    """Its `top_logprobs` as JSON; null if they were not asked for."""
    offset: int


def as_completion(entries: Sequence[Entry], names: TokenNames, *, with_top: bool, offset: int) -> list[CompletionEntry]:
    """Returns the entries of a completion. `offset`: the number of characters before the answer's own."""
    written = []
    for entry in entries:
        raw = b"null"
        if with_top:
            top = names.top(entry.token_id, entry.logprobs)
            keys = names.keys(entry.token_id, top)
            raw = msgspec.json.encode(dict(zip(keys, (logprob for _, logprob in top), strict=True)))
        text = names.of(entry.token_id).text
        written.append(CompletionEntry(text, entry.logprobs.logprob, _Raw(raw), offset + entry.offset))
    return written
