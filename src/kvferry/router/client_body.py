"""The client's request body, and the bodies made from it for prefill and decode.

Unknown fields are passed on as they came, and every value keeps the bytes that the client sent, except for the few that
this module sets.
"""

import msgspec

from kvferry.web.api_errors import ApiError
from kvferry.web.json_body import decode_body

__all__ = ["ClientBody", "PrefillAnswer", "check_choices"]

_encode = msgspec.json.encode
_NOTHING = msgspec.Raw(b"")
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
    def params(self) -> msgspec.Raw | None:
        """The hand-off's parameters as the bytes that prefill sent, or None if there are none."""
        raw = self.kv_transfer_params
        return None if bytes(raw) == b"null" else raw


class ClientBody:
    """A request of a client."""

    def __init__(self, raw: bytes) -> None:
        """Raises ApiError 400 if `raw` is not a JSON object, or if a field that the router reads has a wrong type."""
        self._read = decode_body(raw, _Read)
        fields = decode_body(raw, dict[str, msgspec.Raw])
        fields.pop("kv_transfer_params", None)  # only the router sets it
        self._fields = fields

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
        limit = self._read.max_completion_tokens
        return self._read.max_tokens if limit is None else limit

    @property
    def num_prompts(self) -> int:
        """The number of prompts; more than one is possible only in /v1/completions."""
        prompt = self._read.prompt
        return 1 if not isinstance(prompt, list) or all(isinstance(item, int) for item in prompt) else len(prompt)

    @property
    def num_prompt_ids(self) -> int | None:
        """The number of the prompt's tokens if the client sent token ids; None for text."""
        prompt = self._read.prompt
        if not isinstance(prompt, list) or not prompt:
            return None
        if isinstance(prompt[0], int):
            return len(prompt)
        if isinstance(prompt[0], str):
            return None
        return sum(len(item) for item in prompt if isinstance(item, list))

    @property
    def prompt_bytes(self) -> bytes:
        """The bytes of everything that becomes the prompt, as they came."""
        fields = self._fields
        if "prompt" in fields:
            return bytes(fields["prompt"])
        return bytes(fields.get("tools", _NOTHING)) + bytes(fields.get("messages", _NOTHING))

    @property
    def greedy(self) -> bool:
        """True if the answer to a prompt is the same wherever it is computed (`temperature` 0)."""
        try:
            return float(bytes(self._fields.get("temperature", _NOTHING))) == 0.0
        except ValueError:
            return False

    def asks(self, name: str) -> bool:
        """True if the field is present, and neither null, false nor 0."""
        return bytes(self._fields.get(name, _NOTHING)) not in _OFF

    @property
    def indivisible_reason(self) -> str | None:
        """The reason why one worker must compute both the prompt and the answer; None if there is none."""
        if self.num_prompts > 1:
            return f"{self.num_prompts} prompts in one request: a hand-off carries one"
        # `logprobs: 0` still asks for log probabilities, with 0 alternatives; only null and false do not.
        has_logprobs = bytes(self._fields.get("logprobs", _NOTHING)) not in (b"", b"null", b"false")
        asks_prompt = bytes(self._fields.get("prompt_logprobs", _NOTHING)) not in (b"", b"null", b"false")
        if asks_prompt or (self.asks("echo") and has_logprobs):
            return "prompt log probabilities are computed with the prompt"
        if self.asks("use_beam_search"):
            return "a beam search computes many answers at once"
        if self.max_tokens == 0:
            return "no answer tokens are asked for"
        return None

    def plain(self) -> bytes:
        """Returns the body as the client sent it, without a hand-off."""
        return _encode(self._fields)

    def for_prefill(self, transfer_id: str) -> bytes:
        """Returns the body for prefill: one token, one choice, not streamed, and the request for a hand-off."""
        fields: dict[str, object] = dict(self._fields)
        fields.pop("stream_options", None)
        fields |= {"stream": False, "max_tokens": 1}
        if "n" in fields:
            fields["n"] = 1
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = 1
        if self._read.min_tokens:
            fields["min_tokens"] = 1
        fields["kv_transfer_params"] = {**_ASK_FOR_HANDOFF, "transfer_id": transfer_id}
        return _encode(fields)

    def for_decode(self, params: msgspec.Raw | dict[str, object]) -> bytes:
        """Returns the body for decode, with the hand-off's parameters: in pull mode, prefill's own bytes."""
        fields: dict[str, object] = dict(self._fields)
        fields["kv_transfer_params"] = params
        return _encode(fields)


def check_choices(body: ClientBody) -> None:
    """Raises ApiError if `n` is not positive: it would otherwise fail only after prefill has done its work."""
    if body.num_choices < 1:
        raise ApiError(400, f"n={body.num_choices!r}: send 1 or more", param="n")
