"""The router's HTTP face."""

import logging
import uuid
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from kvferry.errors import ConfigError, FerryError
from kvferry.http.errors import as_api_error, error_middleware
from kvferry.router.bodies import ClientBody
from kvferry.router.dispatch import Dispatch, Dispatcher
from kvferry.router.metrics import RouterMetrics
from kvferry.router.releases import Releases
from kvferry.router.settings import RouterSettings
from kvferry.router.upstream import Upstream
from kvferry.router.workers import Fleet, Worker

__all__ = ["Router"]

logger = logging.getLogger(__name__)


class Router:
    """OpenAI in, tokens out. `app` is ready to listen; it asks every worker once before it takes requests."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], settings: RouterSettings | None = None) -> None:
        """Raises ConfigError for an address that is none."""
        for url in (*prefill, *decode):
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"worker address {url!r} must begin with http:// or https://")
            if not urlsplit(url).hostname:
                raise ConfigError(f"worker address {url!r} names no host: give http://HOST:PORT")
        if not decode:
            raise ConfigError("no decode worker is given: add --decode URL")
        settings = settings or RouterSettings()
        self.fleet = Fleet(prefill, decode, settings)
        self._upstream = Upstream(settings)
        self._metrics = RouterMetrics()
        self._releases = Releases(self._upstream, settings.release_timeout_s)
        self._shared = Dispatcher(self.fleet, self._upstream, settings, self._metrics, self._releases)
        self.app = web.Application(
            client_max_size=settings.max_body_bytes, middlewares=[error_middleware(lambda: uuid.uuid4().hex)]
        )
        self.app.on_startup.append(self._on_startup)
        self.app.on_cleanup.append(self._on_cleanup)
        self.app.add_routes(
            [
                web.post("/v1/completions", self._generate),
                web.post("/v1/chat/completions", self._generate),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._get_metrics),
                web.get("/v1/kvferry", self._describe),
            ]
        )

    async def _on_startup(self, _: web.Application) -> None:
        await self._upstream.start()
        await self.fleet.start(self._upstream.session)

    async def _on_cleanup(self, _: web.Application) -> None:
        await self.fleet.stop()
        await self._releases.stop()
        await self._upstream.stop()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        status = 499
        try:
            body = ClientBody(await request.read())
            response = await Dispatch(self._shared, request, body).run()
            status = response.status
        except FerryError as error:
            status = as_api_error(error).status
            raise
        except web.HTTPException as error:
            status = error.status
            raise
        finally:
            self._metrics.on_end(request.path, status)
        return response

    async def _models(self, _: web.Request) -> web.Response:
        names = sorted({w.info.model for w in self.fleet.workers if w.info is not None and w.why_unusable is None})
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "kvferry"} for name in names]
        return _json({"object": "list", "data": data})

    async def _health(self, _: web.Request) -> web.Response:
        """200 while requests are served, also without prefill (`degraded`); 503 with the reasons otherwise."""
        decode = [worker for worker in self.fleet.decode if worker.why_unusable is None]
        if not decode:
            reasons = [worker.why_unusable for worker in self.fleet.decode]
            return _json({"status": "unavailable", "reason": "no decode worker: " + "; ".join(map(str, reasons))}, 503)
        if not any(self.fleet.has_prefill(one) for one in decode):
            return _json({"status": "degraded", "reason": "decode only: " + self.fleet.why_no_prefill(decode[0])})
        return _json({"status": "ok", "reason": "ready"})

    async def _get_metrics(self, _: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._metrics.text(self.fleet), headers=headers)

    async def _describe(self, _: web.Request) -> web.Response:
        """The fleet: every worker, and for every pair whether it fits."""
        pairs = [
            {"prefill": prefill.name, "decode": decode.name, "why_not": self.fleet.why_not(prefill, decode)}
            for prefill in self.fleet.prefill
            for decode in self.fleet.decode
        ]
        return _json({"workers": [_view(worker) for worker in self.fleet.workers], "pairs": pairs})


def _view(worker: Worker) -> dict[str, object]:
    info = worker.info
    return {
        "url": worker.url,
        "wanted": worker.wanted,
        "engine": info.engine if info else None,
        "incarnation": info.incarnation if info else None,
        "role": info.role if info else None,
        "mode": info.mode if info else None,
        "model": info.model if info else None,
        "usable": worker.why_unusable is None,
        "why": worker.why_unusable or "",
        "open_requests": worker.num_open,
        "failures": worker.num_failures,
    }


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json", status=status)
