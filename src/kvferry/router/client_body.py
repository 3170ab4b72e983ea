"""The client's request body, and the bodies made from it for prefill and decode.

Unknown fields are passed on as they came, and every value keeps the bytes that the client sent, except for the few that
this module sets.
"""

import hashlib
from collections.abc import Sequence

import msgspec

from kvferry.web.api_errors import ApiError
from kvferry.web.body_fields import SMALL_BYTES, Fields, Parts, join_fields
from kvferry.web.json_body import decode_body
from kvferry.web.records import DecodeChecks

__all__ = ["ClientBody", "PrefillAnswer"]

_encode = msgspec.json.encode
_NOTHING = memoryview(b"")
_SHORT_BYTES = 64
_PREFIX_BYTES = 256 << 10
"""The most bytes of a prompt by which a worker is chosen: those of all pieces in fleet.prefixes."""
_OFF = frozenset({b"", b"null", b"false", b"0"})
_ASK_FOR_HANDOFF = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The parameters that ask prefill for a hand-off; the names and nulls are those that vLLM's connectors read."""


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Read(msgspec.Struct, frozen=True):
    """The fields of a request that the router reads."""

    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    prompt: str | list[str | int | list[int]] | None = None
    model: str | None = None
    cache_salt: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0


class _Account(msgspec.Struct, frozen=True):
    recomputed: int = 0


class PrefillAnswer(msgspec.Struct, frozen=True):
    """Prefill's answer, as far as the router reads it."""

    class Choice(msgspec.Struct, frozen=True):
        """One of `choices`."""

        finish_reason: str | None = None

    choices: list[Choice]
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: _Usage | None = None
    kvferry: _Account | None = None
    prompt_blocks: str = ""
    """The hashes of the prompt's whole blocks, in base64; see `fleet.prefixes`."""

    @property
    def stopped(self) -> bool:
        """True if the first token ended the first choice."""
        return bool(self.choices) and self.choices[0].finish_reason not in (None, "length")

    @property
    def params(self) -> msgspec.Raw | None:
        """The hand-off's parameters as the bytes that prefill sent, or None if there are none."""
        raw = self.kv_transfer_params
        return None if bytes(raw) == b"null" else raw


class ClientBody:
    """A request of a client. A long body is never decoded here: the worker checks what is inside its fields."""

    def __init__(self, fields: Fields, *, chat: bool = False) -> None:
        """`chat`: it came to /v1/chat/completions. Raises ApiError 400 if a field that the router reads has a wrong
        type."""
        self._chat = chat
        self._fields = fields
        fields.values.pop("kv_transfer_params", None)  # only the router sets it
        values = fields.values
        read = {name: values[name] for name in _Read.__struct_fields__ if name in values}
        prompt = read.get("prompt", _NOTHING)
        if len(prompt) > SMALL_BYTES:
            del read["prompt"]
        for name, value in read.items():
            if len(value) > SMALL_BYTES:
                raise ApiError(400, f"{name} has {len(value)} bytes: send at most {SMALL_BYTES}", param=name)
        self._read = decode_body(b"".join(join_fields(read)), _Read)
        self._count_prompt(prompt)
        parts = [prompt] if "prompt" in values else [values.get("tools", _NOTHING), values.get("messages", _NOTHING)]
        self.prompt_size = sum(map(len, parts))
        """The number of bytes of everything that becomes the prompt, as they came."""
        begin = b"".join(bytes(part[:_PREFIX_BYTES]) for part in parts)[:_PREFIX_BYTES]
        self.prompt_begin = _salt_digest(self._read.cache_salt) + begin
        """The first of these bytes, after a digest of the salt if there is one: equal prompts under different salts
        have no KV in common (R38)."""

    def _count_prompt(self, raw: memoryview) -> None:
        prompt = self._read.prompt
        self.num_prompts = 1
        """The number of prompts; more than one is possible only in /v1/completions."""
        self.num_prompt_ids: int | None = None
        """The number of the prompt's tokens if the client sent token ids; None for text."""
        if isinstance(prompt, list) and prompt:
            if not all(isinstance(item, int) for item in prompt):
                self.num_prompts = len(prompt)
            if not isinstance(prompt[0], str):
                self.num_prompt_ids = sum(len(item) if isinstance(item, list) else 1 for item in prompt)
        elif len(raw) > SMALL_BYTES and raw[0] == ord("["):
            counts = self._fields.counts["prompt"]
            self.num_prompts = max(1, counts.elements)
            if bytes(raw[:64]).translate(None, b" \t\r\n")[1:2] != b'"':
                self.num_prompt_ids = counts.commas + 1
        elif len(raw) > SMALL_BYTES and raw[0] != ord('"'):
            raise ApiError(400, "prompt is an object: send a text, or a list of token ids", param="prompt")

    def release(self) -> None:
        """Forgets the fields: no worker will be asked any more. Idempotent."""
        self._fields.release()

    def check(self) -> None:
        """Raises ApiError 400 for values that every worker refuses: it would otherwise happen only after prefill has
        done its work."""
        if self.num_choices < 1:
            raise ApiError(400, f"n={self.num_choices!r}: send 1 or more", param="n")
        name = "max_tokens" if self.max_tokens == self._read.max_tokens else "max_completion_tokens"
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ApiError(400, f"{name}={self.max_tokens!r}: send 1 or more", param=name)
        least = self._read.min_tokens or 0
        if self.max_tokens and least > self.max_tokens:
            raise ApiError(
                400, f"min_tokens={least!r} is above {name}={self.max_tokens!r}: lower it", param="min_tokens"
            )

    def num_needed(self, num_prompt_tokens: int) -> int:
        """Returns the number of tokens for which a worker must have room, prompt and answer together."""
        return num_prompt_tokens + max(1, self.max_tokens or 1)

    def decode_checks(self, longest_request: int) -> str:
        """Returns the header by which prefill checks what decode will check."""
        read = self._read
        checks = DecodeChecks(read.n, self.max_tokens, read.min_tokens, longest_request)
        return _encode(checks).decode()

    @property
    def stream(self) -> bool:
        """True if the client asks for a stream."""
        return bool(self._read.stream)

    @property
    def model(self) -> str | None:
        """The name of the model that the client asks for."""
        return self._read.model

    @property
    def include_usage(self) -> bool:
        """True if the stream is to end with the usage."""
        return bool(self._read.stream_options and self._read.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        """The number of choices, `n`."""
        return 1 if self._read.n is None else self._read.n

    @property
    def max_tokens(self) -> int | None:
        """The limit on the answer's tokens; None if the worker's own limit applies."""
        limit = self._read.max_completion_tokens if self._chat else None
        return self._read.max_tokens if limit is None else limit

    @property
    def greedy(self) -> bool:
        """True if the answer to a prompt is the same wherever it is computed (`temperature` 0)."""
        try:
            return float(self._short("temperature")) == 0.0
        except ValueError:
            return False

    def asks(self, name: str) -> bool:
        """True if the field is present, and neither null, false nor 0."""
        return self._short(name) not in _OFF

    def _short(self, name: str) -> bytes:
        """Returns the first bytes of a field; none if it is not present."""
        return bytes(self._fields.values.get(name, _NOTHING)[:_SHORT_BYTES])

    @property
    def indivisible_reason(self) -> str | None:
        """The reason why one worker must compute both the prompt and the answer; None if there is none."""
        if self.num_prompts > 1:
            return f"{self.num_prompts} prompts in one request: a hand-off carries one"
        # `logprobs: 0` still asks for log probabilities, with 0 alternatives; only null and false do not.
        has_logprobs = self._short("logprobs") not in (b"", b"null", b"false")
        asks_prompt = self._short("prompt_logprobs") not in (b"", b"null", b"false")
        if asks_prompt or (self.asks("echo") and has_logprobs):
            return "prompt log probabilities are computed with the prompt"
        if self.asks("use_beam_search"):
            return "a beam search computes many answers at once"
        if self.max_tokens == 0:
            return "no answer tokens are asked for"
        return None

    def plain(self, sources: Sequence[dict[str, object]] = ()) -> Parts:
        """Returns the body as the client sent it, without a hand-off. `sources`: workers to fetch from."""
        if not sources:
            return join_fields(self._fields.values)
        return join_fields(self._fields.values | {"kv_transfer_params": _encode({"sources": sources})})

    def for_prefill(
        self, transfer_id: str, *, checks_options: bool = False, sources: Sequence[dict[str, object]] = ()
    ) -> Parts:
        """Returns the body for prefill: one token, one choice, not streamed, and the request for a hand-off. `sources`:
        workers to fetch from.

        `checks_options`: it judges the options of a stream although it does not stream. vLLM refuses them then.
        """
        fields: dict[str, bytes | memoryview] = dict(self._fields.values)
        if not checks_options:
            fields.pop("stream_options", None)
        fields |= {"stream": b"false", "max_tokens": b"1"}
        if "n" in fields:
            fields["n"] = b"1"
        if self._chat and "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = b"1"
        if self._read.min_tokens:
            fields["min_tokens"] = b"1"
        asked = {**_ASK_FOR_HANDOFF, "transfer_id": transfer_id} | ({"sources": sources} if sources else {})
        fields["kv_transfer_params"] = _encode(asked)
        return join_fields(fields)

    def for_decode(self, params: msgspec.Raw | dict[str, object]) -> Parts:
        """Returns the body for decode, with the hand-off's parameters: in pull mode, prefill's own bytes."""
        return join_fields(self._fields.values | {"kv_transfer_params": _encode(params)})


def _salt_digest(salt: str | None) -> bytes:
    return hashlib.blake2b(salt.encode(), digest_size=16).digest() if salt else b""
