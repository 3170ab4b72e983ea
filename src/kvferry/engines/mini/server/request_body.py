"""The request bodies of /v1/completions and /v1/chat/completions, and what is known of each field (request_fields.py).

No field is ignored in silence. Each is done, or gets 400 `unsupported` with the remedy unless its value asks for
nothing, or is listed here as one that changes no answer. A name that is not here gets 400 `unsupported`, too.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from kvferry.engines.mini.api import SAMPLING_BOUNDS, SamplingParams
from kvferry.engines.mini.server.request_fields import INT64, accepted, check_fields, done, fields_of, refused
from kvferry.settings import FailurePolicy
from kvferry.web.api_errors import ApiError
from kvferry.web.json_body import decode_body, shown
from kvferry.web.records import DECODE_CHECKS, DecodeChecks
from kvferry.wire.salt import MAX_SALT_CHARS

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "MAX_CHOICES",
    "ChatBody",
    "CommonBody",
    "CompletionBody",
    "RefusedFields",
    "StreamOptions",
    "check_for_decode",
    "check_length",
    "limit_of",
    "read_body",
    "sampling_of",
]

DEFAULT_MAX_TOKENS = 16
"""The limit on the answer's tokens in /v1/completions, if the client sends none."""
MAX_CHOICES = 128
_MAX_TOP_LOGPROBS = 20
_MAX_STOPS = 64
_MAX_STOP_CHARS = 1000
_MAX_IDS = 1024
_MAX_NAME_CHARS = 4096
_LATER = "leave it out"


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream has besides the text."""

    include_usage: Annotated[bool | None, done("the last event before `[DONE]` has the usage", default="false")] = None
    continuous_usage_stats: Annotated[
        bool | None, done("with `include_usage`: every event has the usage so far", default="false")
    ] = None
    include_obfuscation: Annotated[
        bool | None, accepted("OpenAI pads events against eavesdroppers of encrypted streams; kvferry never does")
    ] = None


class RefusedFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of the OpenAI API and of vLLM that would change an answer, and that are not done here."""

    best_of: Annotated[object, refused("leave it out, or send n and choose yourself", 1)] = None
    suffix: Annotated[object, refused("no model here fills in the middle; leave it out", "")] = None
    prompt_logprobs: Annotated[object, refused("log probabilities of prompts are not computed; leave it out")] = None
    logprob_token_ids: Annotated[object, refused("send logprobs for the likeliest tokens", [])] = None
    use_beam_search: Annotated[object, refused("leave it out, or send n with a temperature", False)] = None
    length_penalty: Annotated[object, refused("it belongs to beam search; leave it out", 1, 1.0)] = None
    early_stopping: Annotated[object, refused("it belongs to beam search; leave it out", False)] = None
    structured_outputs: Annotated[object, refused("answers cannot be constrained here; leave it out")] = None
    guided_json: Annotated[object, refused("answers cannot be constrained here; leave it out")] = None
    guided_regex: Annotated[object, refused("answers cannot be constrained here; leave it out")] = None
    guided_choice: Annotated[object, refused("answers cannot be constrained here; leave it out")] = None
    guided_grammar: Annotated[object, refused("answers cannot be constrained here; leave it out")] = None
    guided_whitespace_pattern: Annotated[object, refused("answers cannot be constrained here; leave it out")] = None
    guided_decoding_backend: Annotated[object, refused("answers cannot be constrained here; leave it out")] = None
    logits_processors: Annotated[object, refused("send logit_bias, or leave it out", [])] = None
    bad_words: Annotated[object, refused("send logit_bias with -100 for their tokens", [])] = None
    allowed_token_ids: Annotated[object, refused("send logit_bias, or leave it out")] = None
    repetition_detection: Annotated[object, refused("send repetition_penalty or stop, or leave it out")] = None
    thinking_token_budget: Annotated[object, refused("send max_tokens, or leave it out")] = None
    watermarking: Annotated[object, refused(_LATER, False)] = None
    skip_special_tokens: Annotated[
        object, refused("answers are without special tokens; send return_token_ids to see them", True)
    ] = None
    spaces_between_special_tokens: Annotated[
        object, refused("answers are without special tokens; leave it out", True)
    ] = None
    include_stop_str_in_output: Annotated[
        object, refused("answers end before the stop string, which stop_reason names; leave it out", False)
    ] = None
    detokenize: Annotated[object, refused("answers always have text; leave it out", True)] = None
    truncate_prompt_tokens: Annotated[object, refused("shorten the prompt yourself")] = None
    truncation_side: Annotated[object, refused("shorten the prompt yourself")] = None
    prompt_embeds: Annotated[object, refused("send text or token ids")] = None
    add_generation_prompt: Annotated[object, refused("the answer's header is always written; leave it out", True)] = (
        None
    )
    continue_final_message: Annotated[
        object, refused("render the conversation yourself and send it to /v1/completions", False)
    ] = None
    chat_template: Annotated[object, refused("the model's own template is used; leave it out")] = None
    chat_template_kwargs: Annotated[object, refused("the template gets messages and tools only; leave it out", {})] = (
        None
    )
    documents: Annotated[object, refused("put them into a message", [])] = None
    functions: Annotated[object, refused("send tools", [])] = None
    function_call: Annotated[object, refused("send tools and tool_choice", "none")] = None
    reasoning_effort: Annotated[object, refused("the template gets messages and tools only; leave it out")] = None
    include_reasoning: Annotated[object, refused("answers are not parsed for reasoning; leave it out", True)] = None
    verbosity: Annotated[object, refused(_LATER)] = None
    modalities: Annotated[object, refused("models here write text", ["text"])] = None
    audio: Annotated[object, refused("models here write text; leave it out")] = None
    prediction: Annotated[object, refused("start the worker with --speculative-config; leave it out")] = None
    web_search_options: Annotated[object, refused(_LATER)] = None
    moderation: Annotated[object, refused(_LATER)] = None
    store: Annotated[object, refused("answers are not stored; leave it out", False)] = None
    media_io_kwargs: Annotated[object, refused("models here read text; leave it out", {})] = None
    mm_processor_kwargs: Annotated[object, refused("models here read text; leave it out", {})] = None
    mm_payload: Annotated[object, refused("models here read text; leave it out")] = None
    return_mm_kwargs: Annotated[object, refused("models here read text; leave it out", False)] = None
    priority: Annotated[object, refused("requests are served in order of arrival; leave it out", 0)] = None
    request_id: Annotated[object, refused("send the header X-Request-Id")] = None
    stream_interval: Annotated[object, refused("every step is sent at once; leave it out", 1)] = None
    return_tokens_as_token_ids: Annotated[object, refused("send return_token_ids", False)] = None
    return_token_offsets: Annotated[object, refused("send logprobs to /v1/completions (text_offset)", False)] = None
    return_prompt_text: Annotated[object, refused("send echo to /v1/completions", False)] = None
    routed_experts_prompt_start: Annotated[object, refused(_LATER, 0)] = None
    ec_transfer_params: Annotated[object, refused("models here read text; leave it out")] = None
    vllm_xargs: Annotated[object, refused("they are for vLLM's plug-ins; leave it out", {})] = None


class CommonBody(RefusedFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that both endpoints take. None means the default of SamplingParams."""

    model: Annotated[
        str | None,
        done("the served model's name; another gets 404", default="the served model", max_chars=_MAX_NAME_CHARS),
    ] = None
    n: Annotated[
        int | None,
        done("choices per prompt; over all prompts together the same bound holds", (1, MAX_CHOICES), default="1"),
    ] = None
    stream: Annotated[bool | None, done("answer with server-sent events", default="false")] = None
    stream_options: Annotated[StreamOptions | None, done("see below")] = None
    max_tokens: Annotated[
        int | None,
        done(
            "the most tokens of the answer",
            SAMPLING_BOUNDS["max_tokens"],
            default="completions: 16; chat: the rest of the context",
        ),
    ] = None
    max_completion_tokens: Annotated[
        int | None,
        done(
            "the same as `max_tokens`; if both are sent, chat takes this one, and for completions they must be equal",
            SAMPLING_BOUNDS["max_tokens"],
        ),
    ] = None
    min_tokens: Annotated[
        int | None,
        done("the answer does not stop before; at most `max_tokens`", SAMPLING_BOUNDS["min_tokens"], default="0"),
    ] = None
    temperature: Annotated[float | None, done("0 is greedy", SAMPLING_BOUNDS["temperature"], default="1")] = None
    top_p: Annotated[
        float | None,
        done(
            "consider the fewest likeliest tokens with this sum of probabilities", SAMPLING_BOUNDS["top_p"], default="1"
        ),
    ] = None
    top_k: Annotated[
        int | None,
        done(
            "consider this many of the likeliest tokens; 0 and -1: all", (-1, SAMPLING_BOUNDS["top_k"][1]), default="0"
        ),
    ] = None
    min_p: Annotated[
        float | None,
        done(
            "consider tokens with at least this part of the likeliest one's probability",
            SAMPLING_BOUNDS["min_p"],
            default="0",
        ),
    ] = None
    seed: Annotated[
        int | None, done("the same seed, the same answer; choice `i` has `seed + i`", INT64, default="random")
    ] = None
    stop: Annotated[
        str | list[str] | None,
        done("strings that end the answer, which ends before them", max_items=_MAX_STOPS, max_chars=_MAX_STOP_CHARS),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        done("tokens of the vocabulary that end the answer", (0, 2**31 - 1), max_items=_MAX_IDS),
    ] = None
    ignore_eos: Annotated[bool | None, done("go on after the model's end token", default="false")] = None
    presence_penalty: Annotated[
        float | None,
        done("taken from the logits of tokens that the answer has", SAMPLING_BOUNDS["presence_penalty"], default="0"),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        done("the same, times how often the answer has them", SAMPLING_BOUNDS["frequency_penalty"], default="0"),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        done("divides the logits of tokens of prompt and answer", SAMPLING_BOUNDS["repetition_penalty"], default="1"),
    ] = None
    logit_bias: Annotated[
        dict[str, float] | None,
        done("maps token ids, as strings of digits, to what is added to their logits", (-100, 100), max_items=_MAX_IDS),
    ] = None
    return_token_ids: Annotated[
        bool | None, done("each choice, or chunk of a stream, has `token_ids` (vLLM's name)", default="false")
    ] = None
    response_format: Annotated[
        dict[str, Any] | None, done('`{"type": "text"}`; others get 400 `unsupported`', default="text")
    ] = None
    kv_transfer_params: Annotated[
        dict[str, Any] | None, done("the hand-off; the router sets it, and drops a client's own")
    ] = None
    cache_salt: Annotated[
        str | None,
        done(
            "requests with different salts share no cached KV, here and between workers; not empty",
            max_chars=MAX_SALT_CHARS,
        ),
    ] = None
    kv_on_failure: Annotated[
        FailurePolicy | None,
        done("`recompute` or `fail`: what decode does if the prompt's KV does not arrive", default="`--on-failure`"),
    ] = None
    user: Annotated[object, accepted("a name for the client's own records")] = None
    metadata: Annotated[object, accepted("a note for the client's own records")] = None
    session_id: Annotated[object, accepted("a name for sessions; a hint for routers")] = None
    safety_identifier: Annotated[object, accepted("a name for the client's own records")] = None
    prompt_cache_key: Annotated[object, accepted("a hint; the prefix cache looks at tokens")] = None
    prompt_cache_retention: Annotated[object, accepted("a hint; the prefix cache keeps what it has room for")] = None
    prompt_cache_options: Annotated[object, accepted("a hint; the prefix cache looks at tokens")] = None
    service_tier: Annotated[object, accepted("there is one tier")] = None
    parallel_tool_calls: Annotated[object, accepted("calls are left in the text, however many there are")] = None


class CompletionBody(CommonBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        done("a string, token ids of the vocabulary, or a list of up to 256 strings or lists of ids"),
    ]
    echo: Annotated[
        bool | None, done("the text begins with the prompt; not together with `logprobs`", default="false")
    ] = None
    logprobs: Annotated[
        int | None, done("log probabilities of the tokens, and of this many likeliest ones", (0, _MAX_TOP_LOGPROBS))
    ] = None
    top_logprobs: Annotated[object, refused("send logprobs with a number")] = None
    tools: Annotated[object, refused("send them to /v1/chat/completions", [])] = None
    tool_choice: Annotated[object, refused("send it to /v1/chat/completions", "none", "auto")] = None
    add_special_tokens: Annotated[object, refused("send token ids for a prompt without them", True)] = None


class ChatBody(CommonBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[
        list[dict[str, Any]],
        done("the conversation: text only; content may be a list of text parts"),
    ]
    logprobs: Annotated[bool | None, done("log probabilities of the tokens", default="false")] = None
    top_logprobs: Annotated[
        int | None, done("with `logprobs: true`: of this many likeliest ones, too", (0, _MAX_TOP_LOGPROBS), default="0")
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        done("passed to the chat template; 400 if the template has no tools", max_items=_MAX_IDS),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        done('`"auto"` or `"none"`; others get 400 `unsupported`, as no call can be enforced', default="auto"),
    ] = None
    echo: Annotated[object, refused("send it to /v1/completions", False)] = None
    add_special_tokens: Annotated[object, refused("the template writes them; leave it out", False)] = None


Body = TypeVar("Body", CompletionBody, ChatBody)
_ENDPOINTS: dict[type[CommonBody], str] = {CompletionBody: "/v1/completions", ChatBody: "/v1/chat/completions"}


def read_body(raw: bytes | memoryview, kind: type[Body]) -> Body:
    """Decodes and checks a body. Raises ApiError (400) with the field, its value and the remedy."""
    try:
        body = decode_body(raw, kind)
    except ApiError as error:
        if error.code != "unsupported" or error.param is None:
            raise
        raise ApiError(400, _unknown(error.param, kind), param=error.param, code="unsupported") from error
    check_fields(body)
    if not all(re.fullmatch("[0-9]{1,10}", key) for key in body.logit_bias or ()):
        raise ApiError(
            400,
            f"logit_bias={shown(body.logit_bias)}: every key must be a token id, as a string of digits",
            param="logit_bias",
        )
    if body.cache_salt == "":
        raise ApiError(400, "cache_salt is empty: send a string, or leave it out", param="cache_salt")
    if body.stream_options is not None:
        check_fields(body.stream_options)
    if body.response_format not in (None, {"type": "text"}):
        raise ApiError(
            400,
            f"response_format={shown(body.response_format)}: answers cannot be constrained here; send "
            """{"type": "text"}, or leave it out""",
            param="response_format",
            code="unsupported",
        )
    return body


def _unknown(name: str, kind: type[CommonBody]) -> str:
    other = next((where for one, where in _ENDPOINTS.items() if one is not kind and name in fields_of(one)), None)
    if other is not None:
        return f"{name} is a field of {other}, and not of {_ENDPOINTS[kind]}: send it there, or leave it out"
    return f"{name} is not a field that kvferry knows: leave it out, or correct its name"


def limit_of(body: CommonBody) -> int | None:
    """Returns the most tokens of the answer that the client asks for.

    In chat `max_completion_tokens` goes before `max_tokens`, as OpenAI defines it. Raises ApiError if a completion has
    two limits.
    """
    one, other = body.max_tokens, body.max_completion_tokens
    if isinstance(body, CompletionBody) and one is not None and other is not None and one != other:
        raise ApiError(
            400, f"max_tokens={one} and max_completion_tokens={other} differ: send one of them", param="max_tokens"
        )
    return one if other is None else other


def sampling_of(body: CommonBody, *, max_tokens: int, logprobs: int | None, seed_offset: int = 0) -> SamplingParams:
    """Returns the sampling parameters for a choice of a checked body; choice i of a seeded request has seed + i. Raises
    RequestError."""
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
    return {int(token): value for token, value in bias.items()}


def check_for_decode(headers: Mapping[str, str], body: CommonBody, length: int) -> None:
    """Raises ApiError or RequestError as decode will for this request, if the router says what decode will get.

    Prefill gets it with `max_tokens` 1. If only decode refused it, prefill would have computed its prompt of `length`
    tokens in vain, and a stream would have begun with prefill's token.
    """
    raw = headers.get(DECODE_CHECKS)
    if raw is None:
        return
    checks = decode_body(raw.encode(), DecodeChecks)
    if checks.n is not None and not 1 <= checks.n <= MAX_CHOICES:
        raise ApiError(400, f"n={checks.n!r}: send 1 to {MAX_CHOICES} choices", param="n", code="out_of_range")
    room = checks.longest_request - length if checks.longest_request else DEFAULT_MAX_TOKENS
    default = room if isinstance(body, ChatBody) else min(DEFAULT_MAX_TOKENS, room)
    max_tokens = max(1, default) if checks.max_tokens is None else checks.max_tokens
    sampling_of(msgspec.structs.replace(body, min_tokens=checks.min_tokens), max_tokens=max_tokens, logprobs=None)
    if checks.longest_request:
        check_length(length, max_tokens, checks.longest_request, chat=isinstance(body, ChatBody))


def check_length(num_prompt: int, max_tokens: int, longest: int, *, chat: bool) -> None:
    """Raises ApiError 400 if a prompt and its answer are longer than `longest` tokens together."""
    if num_prompt + max(max_tokens, 1) > longest:
        raise ApiError(
            400,
            f"the prompt has {num_prompt} tokens, max_tokens is {max_tokens}, and at most {longest} fit together: "
            "shorten the prompt, lower max_tokens, or serve with a larger --max-model-len or --cache-gb",
            param="messages" if chat else "prompt",
            code="context_length_exceeded",
        )
