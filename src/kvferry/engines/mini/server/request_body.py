"""The request bodies of /v1/completions and /v1/chat/completions. Unknown fields are ignored."""

from typing import Any

import msgspec

from kvferry.engines.mini.api import SamplingParams
from kvferry.errors import RequestError
from kvferry.settings import FailurePolicy
from kvferry.web.json_body import shown

__all__ = ["ChatBody", "CommonBody", "CompletionBody", "ResponseFormat", "StreamOptions", "sampling_of"]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream has besides the text."""

    include_usage: bool | None = None


class CommonBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both endpoints take. None means the default of SamplingParams."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    """Return `token_ids` in each choice (vLLM's name)."""
    kv_transfer_params: dict[str, Any] | None = None
    """The hand-off, from the router or from prefill's answer."""
    kv_on_failure: FailurePolicy | None = None
    """What to do if the prompt's KV does not arrive: `recompute` it, or `fail`; None: as the worker was started."""


class CompletionBody(CommonBody, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    logprobs: int | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """The response format; only `text` is supported."""

    type: str


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None


def sampling_of(body: CommonBody, *, max_tokens: int, logprobs: int | None, seed_offset: int = 0) -> SamplingParams:
    """Returns the sampling parameters for a choice; choice i of a seeded request has seed + i. Raises RequestError."""
    given: dict[str, Any] = {
        "min_tokens": body.min_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k == -1 else body.top_k,  # -1 is vLLM's value for "all"
        "min_p": body.min_p,
        "seed": None if body.seed is None else body.seed + seed_offset,
        "stop": _stop_strings(body.stop),
        "stop_token_ids": None if body.stop_token_ids is None else tuple(body.stop_token_ids),
        "ignore_eos": body.ignore_eos,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": _logit_bias(body.logit_bias),
        "logprobs": logprobs,
    }
    return SamplingParams(max_tokens=max_tokens, **{name: v for name, v in given.items() if v is not None})


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError as error:
        raise RequestError(f"logit_bias={shown(bias)}: every key must be a token id, as a string of digits") from error
