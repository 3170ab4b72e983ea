"""The reply to the client of one request. Nothing in it is ever sent twice.

UNSTARTED   Nothing was sent: another worker may still be asked.
STARTED     A stream has begun, with prefill's first token or with decode's first bytes.
ENDED       The stream is complete, or has ended with an error event and no [DONE].
"""

import asyncio
from collections.abc import Callable, Mapping

from aiohttp import web

from kvferry.web.api_errors import ApiError

__all__ = ["Reply"]


class Reply:
    """One per request, on the event loop. In push mode two tasks use it, so its state is set before anything is
    awaited."""

    def __init__(self, request: web.Request, on_first_byte: Callable[[str], None]) -> None:
        """`on_first_byte` is called with the source of the first byte: `prefill` or `decode`."""
        self.request = request
        self.early: bytes | None = None
        """The event with prefill's first token, if the stream began with it."""
        self._on_first_byte = on_first_byte
        self._stream: web.StreamResponse | None = None
        self._starting = asyncio.Lock()

    @property
    def started(self) -> bool:
        """True once anything was sent."""
        return self._stream is not None

    @property
    def response(self) -> web.StreamResponse:
        """The response, whose stream must have started."""
        assert self._stream is not None, "the stream must have started"
        return self._stream

    async def start(self, status: int, headers: Mapping[str, str]) -> web.StreamResponse:
        """Begins the stream; one that has begun stays as it is."""
        async with self._starting:
            if self._stream is None:
                self._stream = web.StreamResponse(status=status, headers=headers)
                self._on_first_byte("decode")
                await self._stream.prepare(self.request)
            return self._stream

    async def start_early(self, headers: Mapping[str, str], event: bytes) -> None:
        """Begins the stream with prefill's first token."""
        assert self._stream is None, "a stream begins once"
        async with self._starting:
            self._stream = web.StreamResponse(headers=headers)
            self.early = event
            self._on_first_byte("prefill")
            await self._stream.prepare(self.request)
            await self._stream.write(event)

    def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> web.Response:
        """Returns an answer that is not streamed."""
        assert self._stream is None, "a stream was begun"
        self._on_first_byte("decode")
        return web.Response(status=status, body=body, headers=headers)

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """Ends a stream that has started, with an event that says why it is incomplete."""
        return await self.end(b"data: " + error.body() + b"\n\n")

    async def end(self, last: bytes = b"") -> web.StreamResponse:
        """Ends a stream that has started."""
        stream = self.response
        if last:
            await stream.write(last)
        await stream.write_eof()
        return stream
