"""Sends prefill's first token to the client as soon as prefill has it. Decode's first event repeats it and is dropped.

This needs workers with the ability `first-token`: their answer to a hand-off begins with an event of that one token.
The two events are compared. If decode had to compute the prompt itself and sampled another first token, the stream ends
with an error. So an early first token is sent only if that is unlikely: decode gets the token with the parameters
(pull), or the request is greedy.
"""

from typing import Any

import msgspec

from kvferry.router.client_body import ClientBody
from kvferry.web.api_errors import ApiError

__all__ = ["FirstEvent", "as_events", "early_event"]

_INCOMPLETE = "\ufffd"
_MAX_EVENT_BYTES = 1 << 20
_PER_TOKEN = frozenset({"token_ids", "content", "tokens", "token_logprobs", "top_logprobs", "text_offset"})
"""Lists of a choice, or of its logprobs, with one element per token."""


def early_event(body: ClientBody, raw: bytes) -> bytes | None:
    """Returns the first event of the stream, made from prefill's answer, or None if its token cannot be sent alone.

    Decode holds back text that ends within a character, and text that may begin a stop string.
    """
    if not body.stream or body.num_choices != 1 or body.asks("stop"):
        return None
    answer: dict[str, Any] = msgspec.json.decode(raw)
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return None
    text = _text_of(choices[0])
    if not text or _INCOMPLETE in text:
        return None
    event = as_events(answer, include_usage=False)[0]
    event.pop("kvferry", None)
    event["choices"][0] |= {"finish_reason": None}
    if body.include_usage:
        event["usage"] = None
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def as_events(answer: dict[str, Any], *, include_usage: bool) -> list[dict[str, Any]]:
    """Returns a complete body as the chunks of a stream."""
    chat = answer.get("object") == "chat.completion"
    head: dict[str, Any] = {name: answer[name] for name in ("id", "created", "model") if name in answer}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    tail = {"kvferry": answer["kvferry"]} if "kvferry" in answer else {}
    choices = []
    for choice in answer.get("choices", []):
        choice = dict(choice)
        if chat:
            choice["delta"] = choice.pop("message", {})
        choices.append(choice)
    if not include_usage:
        return [{**head, "choices": choices, **tail}]
    last = {**head, "choices": [], "usage": answer.get("usage"), **tail}
    return [{**head, "choices": choices, "usage": None}, last]


class FirstEvent:
    """Drops the first event of decode's stream, because it was sent already."""

    def __init__(self, early: bytes) -> None:
        self._early = early
        self._buffer = b""
        self.passed = False
        """True once the first event has come; what follows is passed on as it comes."""

    def feed(self, chunk: bytes) -> bytes:
        """Returns what of the stream is to be sent. Raises ApiError if decode's first token is another one."""
        self._buffer += chunk
        event, end, rest = self._buffer.partition(b"\n\n")
        if not end:
            if len(self._buffer) > _MAX_EVENT_BYTES:
                raise _differs("an event without an end")
            return b""
        self.passed, self._buffer = True, b""
        ours, theirs = _choice_of(self._early), _choice_of(event)
        if theirs is None:
            return event + end + rest  # decode's error, or its end
        sent, repeated = _text_of(ours or {}), _text_of(theirs)
        if not repeated.startswith(sent):
            raise _differs(f"{repeated[:40]!r} after {sent[:40]!r}")
        if repeated == sent and not theirs.get("finish_reason"):
            return rest
        return _without_first(event, ours or {}, repeated[len(sent) :]) + end + rest


def _differs(what: str) -> ApiError:
    return ApiError(
        502, f"decode computed the prompt itself and began with another token ({what}): send the request again",
        code="first_token_differs",
    )  # fmt: skip


def _choice_of(event: bytes) -> dict[str, Any] | None:
    try:
        choices = msgspec.json.decode(event.removeprefix(b"data: ").strip()).get("choices")
    except (msgspec.MsgspecError, AttributeError):
        return None
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None


def _text_of(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message") or {}
    text = choice.get("text") or (part.get("content") if isinstance(part, dict) else "")
    return text if isinstance(text, str) else ""


def _without_first(event: bytes, ours: dict[str, Any], text: str) -> bytes:
    """Returns the event with `text` in place of its own, and without the tokens that our first event had."""
    body: dict[str, Any] = msgspec.json.decode(event.removeprefix(b"data: ").strip())
    choice = body["choices"][0]
    if "delta" in choice:
        choice["delta"] = {"content": text}
    else:
        choice["text"] = text
    choice.pop("prompt_token_ids", None)
    for holder, sent in ((choice, ours), (choice.get("logprobs"), ours.get("logprobs"))):
        if isinstance(holder, dict) and isinstance(sent, dict):
            for name in _PER_TOKEN & holder.keys() & sent.keys():
                if isinstance(holder[name], list) and isinstance(sent[name], list):
                    holder[name] = holder[name][len(sent[name]) :]
    return b"data: " + msgspec.json.encode(body)
