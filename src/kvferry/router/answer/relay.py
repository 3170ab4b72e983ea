"""Passes a worker's answer on to the client: its bytes are forwarded as they come, unchanged.

The router looks into them only if it must: to drop a first token that was sent already (`first_event`), and for a
client that asked for `kvferry` in its usage (`usage`).
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from kvferry.router.answer.first_event import FirstEvent, as_events
from kvferry.router.answer.reply import Reply
from kvferry.router.answer.usage import TokenCounter, UsageWriter, asked_for
from kvferry.router.client_body import ClientBody
from kvferry.router.fleet.failures import WorkerFailed
from kvferry.router.fleet.outcomes import OUTCOMES, Outcome
from kvferry.router.fleet.worker import Worker
from kvferry.router.upstream.worker_answer import Answer
from kvferry.web.api_errors import ApiError, request_id_of
from kvferry.web.records import HEADER_PREFIX

__all__ = ["from_prefill", "relay"]

logger = logging.getLogger(__name__)

_PASSED_ON = frozenset({"content-type", "content-encoding", "cache-control", "retry-after"})


async def relay(
    reply: Reply,
    worker: Worker,
    answer: Answer,
    headers: Mapping[str, str],
    on_begin: Callable[[Mapping[str, str]], None],
    counter: TokenCounter | None = None,
) -> web.StreamResponse:
    """Passes the answer on; `counter` sees its bytes. Raises WorkerFailed only while nothing of it has gone to the
    client.

    A stream that breaks off later ends with an error event and no [DONE]: nothing is ever sent twice.
    """
    request = reply.request
    merged = {**_passed_on(answer.headers), **headers, "X-Request-Id": request_id_of(request)}
    usage = UsageWriter(merged) if asked_for(request.headers) else None
    if answer.content_type != "text/event-stream":
        body = await answer.read()
        if counter is not None:
            counter.feed(body)
        on_begin(merged)
        if reply.started:  # with prefill's first token: the status was sent, so the stream carries decode's body
            return await reply.end(b"data: " + body + b"\n\n")
        return reply.whole(answer.status, body if usage is None else usage.whole(body), merged)
    chunk = await answer.read_some()
    if not chunk:
        raise WorkerFailed(worker, "ended its stream before it began", Outcome.UNREADABLE)
    stream = await reply.start(answer.status, merged)
    on_begin(merged)
    try:
        if reply.early is not None:
            chunk = await _after_first_event(answer, chunk, reply.early)
        while chunk:
            if counter is not None:
                counter.feed(chunk)
            await stream.write(chunk if usage is None else usage.feed(chunk))
            chunk = await answer.read_some()
        if usage is not None:
            await stream.write(usage.end())
    except WorkerFailed as failure:
        logger.warning("stream broke off request=%s peer=%s cause=%s", merged["X-Request-Id"], worker.name, failure)
        cut_off = OUTCOMES[Outcome.CUT_OFF]
        text = f"decode {failure}; the answer is incomplete: send the request again"
        return await reply.fail(ApiError(cut_off.status, text, code=cut_off.code))
    except ApiError as error:
        logger.warning("stream broke off request=%s peer=%s cause=%s", merged["X-Request-Id"], worker.name, error)
        return await reply.fail(error)
    return await reply.end()


async def _after_first_event(answer: Answer, chunk: bytes, early: bytes) -> bytes:
    first = FirstEvent(early)
    while True:
        left = first.feed(chunk)
        if left:
            return left
        chunk = await answer.read_some()
        if first.passed or not chunk:
            return chunk


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in headers.items()
        if (lower := name.lower()) in _PASSED_ON or lower.startswith(HEADER_PREFIX)
    }


async def from_prefill(reply: Reply, body: ClientBody, raw: bytes, headers: Mapping[str, str]) -> web.StreamResponse:
    """Answers with prefill's body, as a stream if the client wants one: prefill's first token ended the answer."""
    request = reply.request
    answer: dict[str, Any] = msgspec.json.decode(raw)
    for name in ("kv_transfer_params", "prompt_blocks"):  # they concern the fleet, not the client
        answer.pop(name, None)
    merged = {**headers, "X-Request-Id": request_id_of(request), "Content-Type": "application/json"}
    usage = UsageWriter(merged) if asked_for(request.headers) else None
    if not body.stream:
        encoded = msgspec.json.encode(answer)
        return reply.whole(200, encoded if usage is None else usage.whole(encoded), merged)
    stream = await reply.start(200, {**merged, "Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    for event in as_events(answer, include_usage=body.include_usage):
        line = b"data: " + msgspec.json.encode(event) + b"\n\n"
        await stream.write(line if usage is None else usage.feed(line))
    return await reply.end(b"data: [DONE]\n\n")
