"""Turns prompts, in every form that the API allows, into token ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from kvferry.engines.mini.server.request_body import ChatBody, CompletionBody
from kvferry.web.api_errors import ApiError
from kvferry.web.json_body import shown
from kvferry.wire.prompt_digest import pack_tokens

__all__ = [
    "MAX_PROMPTS", "Prompt", "TokenizerLike", "chat_text", "completion_items", "prompt_of_ids", "prompt_of_text",
]  # fmt: skip

MAX_PROMPTS = 256
"""The most prompts of one request, each a text or a list of token ids."""
_MESSAGE_FIELDS = ("role", "content", "tool_call_id")
"""The fields of a message that any template may have; `tool_call_id` says in words what the order says, too."""
_NOTHING: tuple[object, ...] = (None, "", [], {})
_PART_FIELDS = ("type", "text", "prompt_cache_breakpoint", "cache_control")
"""The fields of a text part; the last two are hints for a cache, and the prefix cache looks at tokens."""


class TokenizerLike(Protocol):
    """What the server needs of a tokenizer: see engines.mini.models.tokenizer."""

    @property
    def max_chars_per_token(self) -> int | None:
        """The most characters of a text that one token can cover; None if there is no such limit."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Returns the tokens of a text. Raises RequestTooLong if there are more than `max_tokens`."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, without special tokens."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that one token adds to a text; none for special tokens, which a text leaves out."""
        ...

    def token_text(self, token_id: int) -> str:
        """Returns one token by itself, for logprobs: its text, or `bytes:` and its bytes if those are no text."""
        ...

    def template_reads(self, name: str) -> bool:
        """Returns whether the chat template reads `tools`, or a field of a message, of this name."""
        ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Returns a conversation in the model's chat format. Raises RequestError if the template refuses it."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `text` is None if the client sent token ids, unless it wants them echoed."""

    token_ids: tuple[int, ...]
    text: str | None = None
    packed: bytes = b""
    """The token ids, packed once for all choices and for all that the engine hashes."""


def completion_items(body: CompletionBody) -> list[str | list[int]]:
    """Returns each prompt as a text or token ids: `body.prompt` is one of these, or a list. Raises ApiError (400)."""
    raw = body.prompt
    if isinstance(raw, str):
        return [raw]
    if not raw:
        raise ApiError(400, "prompt=[]: send at least one prompt", param="prompt")
    if len(raw) > MAX_PROMPTS and not isinstance(raw[0], int):
        raise ApiError(400, f"prompt: {len(raw)} prompts in one request; send at most {MAX_PROMPTS}", param="prompt")
    if _are_ids(raw):
        return [raw]
    items: list[str | list[int]] = []
    for index, item in enumerate(raw):
        if isinstance(item, int):
            raise ApiError(
                400,
                f"prompt[{index}]={shown(item)}: token ids and texts are mixed; send texts, or one "
                "list of ids per prompt",
                param="prompt",
            )
        items.append(item)
    return items


def _are_ids(items: list[Any]) -> TypeGuard[list[int]]:
    return set(map(type, items)) == {int}  # a third of the time of a loop


def chat_text(body: ChatBody, tokenizer: TokenizerLike) -> str:
    """Returns the conversation as one text, by the model's chat template. Raises ApiError (400) or RequestError."""
    if not body.messages:
        raise ApiError(400, "messages=[]: send at least one message", param="messages")
    messages = [_message(index, message, tokenizer) for index, message in enumerate(body.messages)]
    if body.tool_choice not in (None, "auto", "none"):
        raise ApiError(
            400,
            f"tool_choice={shown(body.tool_choice)}: a call cannot be enforced here; send 'auto', or leave it out",
            param="tool_choice",
            code="unsupported",
        )
    tools = body.tools if body.tools and body.tool_choice != "none" else None
    if tools and not tokenizer.template_reads("tools"):
        raise ApiError(
            400,
            f"tools: {len(tools)} were sent and the chat template of this model knows no tools; leave them out, "
            "or serve a model whose template does",
            param="tools",
        )
    return tokenizer.render_chat(messages, tools)


def _message(index: int, message: dict[str, Any], tokenizer: TokenizerLike) -> dict[str, Any]:
    where = f"messages[{index}]"
    for name, value in message.items():
        if name not in _MESSAGE_FIELDS and value not in _NOTHING and not tokenizer.template_reads(name):
            raise ApiError(
                400,
                f"{where}.{shown(name)[1:-1]}={shown(value)}: the chat template of this model does not read it; leave "
                "it out, or serve a model whose template does",
                param=where,
                code="unsupported",
            )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ApiError(400, f"{where}.role={shown(role)}: send 'system', 'user', 'assistant' or 'tool'", param=where)
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    if not isinstance(content, list):
        raise ApiError(400, f"{where}.content={shown(content)}: send a string, or a list of text parts", param=where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ApiError(
                400, f"{where}.content has a part of type {shown(kind)}: this model reads only text parts", param=where
            )
        unknown = next((name for name in part if name not in _PART_FIELDS), None)
        if unknown is not None:
            raise ApiError(
                400, f"{where}.content has a part with {shown(unknown)}, which is not done: leave it out", param=where,
                code="unsupported",
            )  # fmt: skip
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


def prompt_of_text(
    text: str, tokenizer: TokenizerLike, *, add_special_tokens: bool, max_tokens: int | None = None
) -> Prompt:
    """Returns a text as a prompt. Raises ApiError (400), or RequestTooLong for more than `max_tokens` tokens."""
    token_ids = tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens))
    if not token_ids:
        raise ApiError(400, f"prompt={shown(text)} has no tokens: send some text", param="prompt")
    return Prompt(token_ids, text, pack_tokens(token_ids))


def prompt_of_ids(token_ids: Sequence[int], vocab_size: int, decode: Callable[[list[int]], str] | None) -> Prompt:
    """Returns token ids as a prompt, with its text if `decode` is given. Raises ApiError (400)."""
    if not token_ids:
        raise ApiError(400, "prompt has a list of 0 token ids: send at least one", param="prompt")
    for wrong in (min(token_ids), max(token_ids)):
        if not 0 <= wrong < vocab_size:
            raise ApiError(
                400, f"prompt has token id {wrong}: this model has ids 0 to {vocab_size - 1}", param="prompt"
            )
    return Prompt(tuple(token_ids), None if decode is None else decode(list(token_ids)), pack_tokens(token_ids))
