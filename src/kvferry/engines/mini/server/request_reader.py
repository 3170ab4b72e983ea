"""Reads requests without holding the event loop: sizes are judged first, and what takes long runs on other threads.

    bytes arrive -> fields (web/body_fields) -> sizes judged -> decoded -> chat template -> tokens, judged again

A prompt with more characters than all tokens of the context can cover is refused before anything is made of it. The
last three steps run on the threads of an OffLoop, one after another, so a client that hangs up ends its work between
them; long lists of token ids are decoded in pieces, because the decoder lets no other thread run (web/json_ids). A body
of up to INLINE_BYTES is done at once, which is faster than a change of threads.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from kvferry.engines.mini.server.prompts import (
    MAX_PROMPTS,
    Prompt,
    TokenizerLike,
    chat_text,
    completion_items,
    prompt_of_ids,
    prompt_of_text,
)
from kvferry.engines.mini.server.refused_handoffs import remember_handoff
from kvferry.engines.mini.server.request_body import ChatBody, CompletionBody, read_body
from kvferry.errors import RequestTooLong
from kvferry.web.api_errors import ApiError
from kvferry.web.body_fields import BODIES_HELD, BodyRoom, Counts, Fields, join_fields, read_fields
from kvferry.web.json_ids import PIECE_BYTES, id_lists
from kvferry.web.off_loop import OffLoop

__all__ = ["INLINE_BYTES", "MAX_FIELD_BYTES", "PAUSE_S", "RequestReader"]

Result = TypeVar("Result")

INLINE_BYTES = 2048
"""A body up to this size is read on the event loop: tokenising takes 1 to 2 microseconds per byte."""
MAX_FIELD_BYTES = 1 << 20
"""The most bytes of a field that is no part of the prompt; and what messages may have besides their characters."""
PAUSE_S = 0.001
"""A body of 30 MB then takes about a second, and steps of the engine take their time."""
_BYTES_PER_CHAR = 12
"""The most bytes of JSON for one character: two escapes of 6 bytes, for one beyond U+FFFF."""


class RequestReader:
    """Reads the requests of one server. Used on its event loop."""

    def __init__(
        self,
        tokenizer: TokenizerLike,
        *,
        max_model_len: int,
        vocab_size: int,
        max_body_bytes: int = 32 << 20,
        max_waiting: int = 1024,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        per_token = tokenizer.max_chars_per_token
        self._max_chars = None if per_token is None else per_token * max_model_len
        self._room = BodyRoom(BODIES_HELD * max_body_bytes)
        self.threads = OffLoop("kvferry-read", max_waiting=max_waiting)
        """Where long work of this server runs."""
        self.num_reading = 0
        """The number of requests that are being read."""

    async def stop(self) -> None:
        """Ends the threads. Requests that are being read get 503."""
        await self.threads.stop()

    async def completion(self, request: web.Request) -> tuple[CompletionBody, tuple[Prompt, ...]]:
        """Returns the body and the prompts of a completion. Raises ApiError or another FerryError."""
        self.num_reading += 1
        try:
            fields = await read_fields(request, self._room, pause_s=PAUSE_S)
            try:
                remember_handoff(request, fields)
                self._check_sizes(fields)
                body, items = await self._do(len(fields.raw), partial(_completion_of, fields))
            finally:
                fields.release()
            prompts = [await self._do(len(item), partial(self._prompt, item, bool(body.echo))) for item in items]
        finally:
            self.num_reading -= 1
        return body, tuple(prompts)

    async def chat(self, request: web.Request) -> tuple[ChatBody, Prompt]:
        """Returns the body of a chat completion, and the conversation as one prompt. Raises the same errors."""
        self.num_reading += 1
        try:
            fields = await read_fields(request, self._room, pause_s=PAUSE_S)
            size = len(fields.raw)
            try:
                remember_handoff(request, fields)
                self._check_sizes(fields)
                body = await self._do(size, partial(read_body, fields.raw, ChatBody))
            finally:
                fields.release()
            if len(body.messages) > self._max_model_len:
                raise self._too_long(f"{len(body.messages)} messages", "messages")
            text = await self._do(size, partial(chat_text, body, self._tokenizer))
            self._check_chars(text, "messages")
            return body, await self._do(len(text), partial(self._tokens, text, "messages", add_special_tokens=False))
        finally:
            self.num_reading -= 1

    async def _do(self, size: int, function: Callable[[], Result]) -> Result:
        return function() if size <= INLINE_BYTES else await self.threads.run(function)

    def _prompt(self, item: str | list[int], echo: bool) -> Prompt:
        if isinstance(item, str):
            self._check_chars(item, "prompt")
            return self._tokens(item, "prompt", add_special_tokens=True)
        if len(item) > self._max_model_len:
            raise self._too_long(f"{len(item)} tokens", "prompt")
        return prompt_of_ids(item, self._vocab_size, self._tokenizer.decode if echo else None)

    def _tokens(self, text: str, name: str, *, add_special_tokens: bool) -> Prompt:
        try:
            return prompt_of_text(
                text, self._tokenizer, add_special_tokens=add_special_tokens, max_tokens=self._max_model_len
            )
        except RequestTooLong as error:
            raise ApiError(400, str(error), param=name, code="context_length_exceeded") from error

    # ---- sizes ----

    def _check_sizes(self, fields: Fields) -> None:
        """Refuses fields that cannot fit, by their bytes."""
        if len(fields.raw) <= INLINE_BYTES:
            return
        for name, value in fields.values.items():
            if name == "prompt":
                self._check_prompt(value, fields.counts.get(name))
            elif name in ("messages", "tools"):
                self._check_bytes(value, name, MAX_FIELD_BYTES)
            elif len(value) > MAX_FIELD_BYTES:
                raise ApiError(
                    400, f"{name[:40]} has {len(value)} bytes, and at most {MAX_FIELD_BYTES} are accepted: shorten it",
                    param=name[:40],
                )  # fmt: skip

    def _check_prompt(self, value: memoryview, counts: Counts | None) -> None:
        begin = bytes(value[:64]).translate(None, b" \t\r\n")
        if begin[:1] == b'"':
            self._check_bytes(value, "prompt", 0)
        elif begin[:1] == b"[" and begin[1:2] not in (b'"', b""):
            most = self._max_model_len * (MAX_PROMPTS if begin[1:2] == b"[" else 1)
            num_ids = 1 + (bytes(value).count(b",") if counts is None else counts.commas)
            if num_ids > most:
                raise self._too_long(f"{num_ids} tokens", "prompt")

    def _check_bytes(self, value: memoryview, name: str, more: int) -> None:
        if self._max_chars is not None and len(value) - 2 - more > self._max_chars * _BYTES_PER_CHAR:
            raise self._too_long(f"{len(value)} bytes", name)

    def _check_chars(self, text: str, name: str) -> None:
        if self._max_chars is not None and len(text) > self._max_chars:
            raise self._too_long(f"{len(text)} characters", name)

    def _too_long(self, size: str, name: str) -> ApiError:
        chars = "" if self._max_chars is None else f", which is at most {self._max_chars} characters"
        return ApiError(
            400,
            f"the prompt has {size}, and the model's context is {self._max_model_len} tokens{chars}: shorten the "
            "prompt, or serve with a larger --max-model-len",
            param=name,
            code="context_length_exceeded",
        )


def _completion_of(fields: Fields) -> tuple[CompletionBody, list[str | list[int]]]:
    prompt = fields.values.get("prompt")
    lists = None if prompt is None or len(prompt) <= PIECE_BYTES else id_lists(prompt, "prompt")
    if lists is None:
        body = read_body(fields.raw, CompletionBody)
        return body, completion_items(body)
    body = read_body(b"".join(join_fields({**fields.values, "prompt": b'""'})), CompletionBody)
    return body, completion_items(msgspec.structs.replace(body, prompt=lists))
