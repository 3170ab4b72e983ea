"""The dashboard's HTTP: a page with its files, and the data that they fetch.

The page and its files are the same for everyone, so they need no key. The data (/ui/state, /ui/events, /ui/request)
needs one of the router's keys like everything else; the page asks its user for it. Nothing is loaded from elsewhere,
and a Content-Security-Policy keeps the browser from doing so.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from importlib import resources

import msgspec
from aiohttp import ClientSession, web

from kvferry.router.observe.fleet_view import FleetView
from kvferry.router.observe.timeline import MAX_KEPT, Timelines
from kvferry.router.observe.timeline_collect import Collector
from kvferry.router.observe.ui.state import fleet_state, request_state
from kvferry.web.api_errors import ApiError

__all__ = ["PAGE_PATHS", "Dashboard"]

_FILES = {
    "/ui": ("index.html", "text/html"),
    "/ui/app.js": ("app.js", "text/javascript"),
    "/ui/charts.js": ("charts.js", "text/javascript"),
    "/ui/style.css": ("style.css", "text/css"),
}
PAGE_PATHS = frozenset({"/", *_FILES})
"""The page with its files, and `/`, which redirects to it. They are the same for everyone and need no key."""
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_EVERY_S = 1.0
_TOTALS_EVERY_S = 2.0
_MAX_WATCHERS = 32


class Dashboard:
    """Serves the dashboard. There is one per router; it costs nothing while no page is open."""

    def __init__(
        self, view: FleetView, timelines: Timelines, collector: Collector, session: Callable[[], ClientSession]
    ) -> None:
        """`session` returns the session with which workers are asked; it exists once the application has started."""
        self._view = view
        self._timelines = timelines
        self._collector = collector
        self._session = session
        self._num_watchers = 0
        self._state: tuple[float, bytes] = (float("-inf"), b"")
        self._asked_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    def attach(self, app: web.Application) -> None:
        """Adds the routes, before the application starts."""
        app.router.add_get("/", self._to_page)
        for path in _FILES:
            app.router.add_get(path, self._file)
        app.router.add_get("/ui/state", self._get_state)
        app.router.add_get("/ui/events", self._events)
        app.router.add_get("/ui/request", self._request)
        app.router.add_get("/ui/pair", self._pair)
        app.on_shutdown.append(self._on_shutdown)

    async def _on_shutdown(self, _: web.Application) -> None:
        self._ending.set()  # an open page must not delay the router's end
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _to_page(self, _: web.Request) -> web.Response:
        raise web.HTTPFound("/ui")

    async def _file(self, request: web.Request) -> web.Response:
        name, kind = _FILES[request.path]
        body = resources.files("kvferry.router.observe.ui").joinpath("assets", name).read_bytes()
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)

    async def _get_state(self, _: web.Request) -> web.Response:
        return web.Response(body=self._now(), content_type="application/json", headers=_HEADERS)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Sends the whole state once a second, as server-sent events, until the client hangs up or the router ends."""
        if self._num_watchers >= _MAX_WATCHERS:
            raise ApiError(
                503, f"{self._num_watchers} dashboards are open and at most {_MAX_WATCHERS} are served: close one",
                code="too_many_dashboards", retry_after_s=10,
            )  # fmt: skip
        headers = {**_HEADERS, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        response = web.StreamResponse(headers=headers)
        self._num_watchers += 1
        try:
            await response.prepare(request)
            while not self._ending.is_set():
                await response.write(b"data: " + self._now() + b"\n\n")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), _EVERY_S)
            await response.write_eof()
        finally:
            self._num_watchers -= 1
        return response

    async def _request(self, request: web.Request) -> web.Response:
        """Answers with one request's time line: `?number=` (unique), or `?id=` (the latest with this X-Request-Id)."""
        number, request_id = request.query.get("number", ""), request.query.get("id", "")
        if number.isascii() and number.isdigit() and len(number) < 16:
            line = self._timelines.open.get(int(number)) or self._timelines.ended.get(int(number))
        else:
            line = self._timelines.find(request_id)
        if line is None:
            raise ApiError(
                404, f"no request {number or request_id!r} is remembered: the router keeps the open requests and the "
                f"latest {MAX_KEPT} that have ended",
                code="request_not_found",
            )  # fmt: skip
        parts = await self._collector.parts_of(self._session(), self._view.fleet.workers, line)
        body = msgspec.json.encode(request_state(line, parts, time.monotonic()))
        return web.Response(body=body, content_type="application/json", headers=_HEADERS)

    async def _pair(self, request: web.Request) -> web.Response:
        """Answers with the facts in which a pair differs: `?prefill=URL&decode=URL`."""
        prefill, decode = request.query.get("prefill", ""), request.query.get("decode", "")
        rows = self._view.differences(prefill, decode)
        if rows is None:
            raise ApiError(404, f"no pair {prefill!r}, {decode!r} is in the fleet", code="pair_not_found")
        return web.Response(
            body=msgspec.json.encode({"differences": rows}), content_type="application/json", headers=_HEADERS
        )

    def _now(self) -> bytes:
        """Returns the state. It is made at most twice a second, however many pages are open."""
        now_s = time.monotonic()
        if now_s - self._asked_s >= _TOTALS_EVERY_S and (self._asking is None or self._asking.done()):
            self._asked_s = now_s
            self._asking = asyncio.create_task(self._ask_totals())
        if now_s - self._state[0] >= _EVERY_S / 2:
            state = fleet_state(self._view.state(now_s), self._timelines, self._collector.totals, now_s)
            self._state = (now_s, msgspec.json.encode(state))
        return self._state[1]

    async def _ask_totals(self) -> None:
        session = self._session()
        decode = [worker for worker in self._view.fleet.decode if worker.down is None]
        await asyncio.gather(*(self._collector.ask(session, worker, ()) for worker in decode))
