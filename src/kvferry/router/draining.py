"""Draining a router: it ends what is open and takes nothing new, and then its process may end.

SERVING -> DRAINING   `begin`, by SIGTERM. /health and new requests get 503; the listener stays open, so that a client
                      gets an answer. Open requests go on: streams, requests in prefill, requests that wait.
        -> ENDED      No request is open, or the time is over. `wait_ended` returns.

Whenever the server stops, by whatever way, requests that are still open are cut with an error (`cut`): a stream gets an
error event, any other request 503.
"""

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler

from kvferry.router.dispatch import Dispatch
from kvferry.web.api_errors import ApiError
from kvferry.web.drain import Drain

__all__ = ["RouterDraining"]


class RouterDraining(Drain):
    """The drain of one router."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._open: set[Dispatch] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()

    @property
    def num_open(self) -> int:
        """Implements Drain.num_open."""
        return len(self._open)

    def check(self) -> None:
        """Raises ApiError 503 if no new requests are taken."""
        if self.begun:
            raise ApiError(
                503, "this router is draining: send the request again, to another router or in a moment",
                code="draining", retry_after_s=1,
            )  # fmt: skip

    def opened(self, dispatch: Dispatch) -> None:
        """Notes that a request is open. `closed` has to follow."""
        self._open.add(dispatch)
        self._none_open.clear()

    def closed(self, dispatch: Dispatch) -> None:
        """Notes that it has ended."""
        self._open.discard(dispatch)
        if not self._open:
            self._none_open.set()

    async def _finish(self) -> None:
        await self._none_open.wait()

    async def _cut_off(self) -> None:
        self.cut(f"this router had to end, after {self._timeout_s:g} s (--drain-timeout)")

    def cut(self, reason: str) -> None:
        """Ends every open request with an error. Never blocks; their handlers end soon."""
        for dispatch in list(self._open):
            dispatch.cut(ApiError(503, f"{reason}: send the request again", code="stopping", retry_after_s=1))

    async def on_shutdown(self, _: web.Application) -> None:
        """Cuts what is open when the server stops, drained or not."""
        self.begin("the server stops")
        self.cut("this router is stopping")

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Closes the connection after every answer that is given while draining: the client's next request then finds
        another router, or none, instead of a connection that is about to be closed."""
        response = await handler(request)
        if self.begun:
            response.force_close()
        return response
