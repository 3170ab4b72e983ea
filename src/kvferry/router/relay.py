"""From a worker's answer to the client's: bytes are handed on as they come, untouched."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from kvferry.http.errors import ApiError, request_id_of
from kvferry.http.records import HEADER_PREFIX
from kvferry.router.answers import Answer, WorkerFailed
from kvferry.router.bodies import ClientBody
from kvferry.router.workers import Worker

__all__ = ["from_prefill", "relay"]

logger = logging.getLogger(__name__)

_PASSED_ON = frozenset({"content-type", "content-encoding", "cache-control", "retry-after"})


async def relay(
    request: web.Request,
    worker: Worker,
    answer: Answer,
    headers: Mapping[str, str],
    on_begin: Callable[[Mapping[str, str]], None],
) -> web.StreamResponse:
    """Hand the answer on. Raises WorkerFailed only while nothing has gone to the client.

    A stream that breaks off later ends with an error event and no [DONE]: nothing is ever sent twice.
    """
    merged = {**_passed_on(answer.headers), **headers, "X-Request-Id": request_id_of(request)}
    if answer.content_type != "text/event-stream":
        body = await answer.read()
        on_begin(merged)
        return web.Response(status=answer.status, body=body, headers=merged)
    chunk = await answer.read_some()
    if not chunk:
        raise WorkerFailed(worker, "ended its stream before it began", reached=True)
    response = web.StreamResponse(status=answer.status, headers=merged)
    await response.prepare(request)
    on_begin(merged)
    try:
        while chunk:
            await response.write(chunk)
            chunk = await answer.read_some()
    except WorkerFailed as failure:
        logger.warning("stream broke off request=%s peer=%s cause=%s", merged["X-Request-Id"], worker.name, failure)
        error = ApiError(
            502, f"decode {failure}; the answer is not whole: send the request again", code="worker_failed"
        )
        await response.write(b"data: " + error.body() + b"\n\n")
    await response.write_eof()
    return response


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in headers.items()
        if name.lower() in _PASSED_ON or name.lower().startswith(HEADER_PREFIX)
    }


async def from_prefill(
    request: web.Request, body: ClientBody, raw: bytes, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Prefill's first token ended the answer: its body is the answer, as a stream if the client wants one."""
    answer: dict[str, Any] = msgspec.json.decode(raw)
    answer.pop("kv_transfer_params", None)  # addresses of the fleet are not the client's business
    merged = {**headers, "X-Request-Id": request_id_of(request)}
    if not body.stream:
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json", headers=merged)
    response = web.StreamResponse(headers={**merged, "Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in _as_events(answer, include_usage=body.include_usage):
        await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _as_events(answer: dict[str, Any], *, include_usage: bool) -> list[dict[str, Any]]:
    """A whole body as the chunks of a stream."""
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
