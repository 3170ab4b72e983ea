"""The router's HTTP interface, and the assembly of its parts."""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from aiohttp import ClientSession, web

from kvferry import __version__
from kvferry.errors import ConfigError, FerryError
from kvferry.router.client_body import ClientBody
from kvferry.router.context import RouterContext
from kvferry.router.dispatch import Dispatch
from kvferry.router.draining import RouterDraining
from kvferry.router.fleet.admission import Admission
from kvferry.router.fleet.discovery import FleetFile, Registration, Registrations
from kvferry.router.fleet.etcd_watch import EtcdFleet
from kvferry.router.fleet.handoff_cost import HandoffCost
from kvferry.router.fleet.model_names import served_models
from kvferry.router.fleet.prefixes import Prefixes
from kvferry.router.fleet.worker import Worker
from kvferry.router.fleet.workers import Fleet, check_url
from kvferry.router.keys import bearer_of, fits, key_middleware, read_keys
from kvferry.router.observe.alarm import DecodeOnlyAlarm
from kvferry.router.observe.fleet_view import FleetView
from kvferry.router.observe.metrics import RouterMetrics
from kvferry.router.observe.observer import Observers
from kvferry.router.observe.timeline import Timelines
from kvferry.router.observe.timeline_collect import Collector
from kvferry.router.observe.ui.handlers import PAGE_PATHS, Dashboard
from kvferry.router.settings import RouterSettings
from kvferry.router.upstream.preconnect import Preconnect
from kvferry.router.upstream.releases import Releases
from kvferry.router.upstream.worker_client import Upstream
from kvferry.web.api_errors import ApiError, as_api_error, error_middleware, request_id_of
from kvferry.web.body_fields import BODIES_HELD, BodyRoom, read_fields
from kvferry.web.etcd import check_etcd
from kvferry.web.json_body import decode_body
from kvferry.web.models import model_routes
from kvferry.web.origin import refuse_page

if TYPE_CHECKING:
    from kvferry.router.observe.tracing import Tracing  # needs kvferry[otel]

__all__ = ["Router", "RouterFiles"]

logger = logging.getLogger(__name__)

_REGISTER_PATH = "/v1/kvferry/register"
_OPEN_PATHS = frozenset({"/health", _REGISTER_PATH}) | PAGE_PATHS
"""Paths that need no client's key. Registration has a key of its own; the page at /ui sends a key with its requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFiles:
    """Files that the router reads. They hold keys, or change while it runs. None: there is no such file."""

    fleet: str | None = None
    """The workers as JSON, {"prefill": ["http://HOST:PORT"], "decode": [...]}. The file is watched for changes."""

    api_keys: str | None = None
    """The keys of clients, one per line: requests without one of them get 401. Without this file no key is needed."""

    worker_key: str | None = None
    """The key that is sent to workers, instead of the client's."""

    register_key: str | None = None
    """The keys with which workers register. Without this file they can register only while the router listens on
    loopback and has no keys for clients."""


class Router:
    """The router. `app` is its web application, which asks every worker once before it takes requests.

    `observers` see every dispatch; see `observe.observer`.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        settings: RouterSettings | None = None,
        *,
        files: RouterFiles | None = None,
        open_registration: bool = False,
        etcd: str | None = None,
    ) -> None:
        """`open_registration` lets workers register without a key, unless clients need one. `etcd` is the address of an
        etcd in which workers have put theirs. Raises ConfigError for an address that is not valid."""
        files = files or RouterFiles()
        for url in (*prefill, *decode):
            check_url(url)
        self._register_keys = read_keys(files.register_key) if files.register_key else ()
        # If clients need keys, a proxy may be in front of the loopback address: a worker that registers would get
        # prompts and keys.
        self._may_register = bool(self._register_keys) or (open_registration and not files.api_keys)
        if not decode and files.fleet is None and not self._may_register and etcd is None:
            raise ConfigError("no decode worker is given: add --decode URL")
        settings = settings or RouterSettings()
        self.fleet = Fleet(prefill, decode, settings)
        self.observers = Observers()
        self._upstream = Upstream(settings)
        self._metrics = RouterMetrics()
        self._releases = Releases(self._upstream, settings.release_timeout_s)
        self._preconnect = Preconnect(self.fleet, self._upstream)
        self.fleet.on_up.append(self._preconnect.on_up)
        self.fleet.on_gone.append(lambda worker: self._metrics.forget(worker.name, worker.url))
        self._file = FleetFile(files.fleet, self.fleet) if files.fleet is not None else None
        self._etcd = EtcdFleet(check_etcd(etcd), self.fleet, settings) if etcd is not None else None
        self._registrations = Registrations(self.fleet, settings)
        admission = Admission(self.fleet, settings)
        cost = HandoffCost(settings.local_below_tokens)
        alarm = DecodeOnlyAlarm(settings.alarm_window_s, settings.alarm_share)
        self.context = RouterContext(
            fleet=self.fleet, admission=admission, upstream=self._upstream, settings=settings, metrics=self._metrics,
            releases=self._releases, observers=self.observers, prefixes=Prefixes(), cost=cost, alarm=alarm,
            worker_key=read_keys(files.worker_key)[0] if files.worker_key else None,
        )  # fmt: skip
        self.fleet.on_handoffs.append(self._on_handoffs)
        self._view = FleetView(fleet=self.fleet, admission=admission, settings=settings, cost=cost, alarm=alarm)
        self.draining = RouterDraining(settings.drain_timeout_s)
        middlewares = [self.draining.middleware, error_middleware(lambda: secrets.token_hex(16), ", /ui")]
        if files.api_keys:
            middlewares.append(key_middleware(read_keys(files.api_keys), _OPEN_PATHS))
        self.app = web.Application(client_max_size=settings.max_body_bytes, middlewares=middlewares)
        self._room = BodyRoom(BODIES_HELD * settings.max_body_bytes)
        self.timelines = Timelines()
        self.collector = Collector()
        self.observers.add(self.timelines)
        self._tracing: Tracing | None = None
        self.app.on_startup.append(self._on_startup)
        self.app.on_shutdown.append(self.draining.on_shutdown)
        self.app.on_cleanup.append(self._on_cleanup)
        self.app.add_routes(
            [
                web.post("/v1/completions", self._generate),
                web.post("/v1/chat/completions", self._generate),
                *model_routes(lambda: served_models(self.fleet)),
                web.get("/health", self._health),
                web.get("/metrics", self._get_metrics),
                web.get("/v1/kvferry", self._describe),
                web.post(_REGISTER_PATH, self._register),
            ]
        )
        Dashboard(self._view, self.timelines, self.collector, lambda: self._upstream.session).attach(self.app)

    def trace_to(self, otlp_url: str) -> None:
        """Sends spans of every request to this OTLP receiver. Called before the router listens. Raises ConfigError."""
        if not otlp_url.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp {otlp_url!r} must begin with http:// or https://, as in http://127.0.0.1:4318")
        try:
            from kvferry.router.observe.tracing import Tracing, otlp_exporter
        except ImportError as error:
            raise ConfigError(
                f"--otlp needs the OpenTelemetry packages ({error}): pip install 'kvferry[otel]'"
            ) from error
        self.trace_by(Tracing(otlp_exporter(otlp_url), *self.seen_by_tracing))

    @property
    def seen_by_tracing(
        self,
    ) -> tuple[Timelines, Collector, Callable[[], list[Worker]], Callable[[], ClientSession], str]:
        """The arguments of Tracing after its exporter."""
        return self.timelines, self.collector, lambda: self.fleet.workers, lambda: self._upstream.session, __version__

    def trace_by(self, tracing: "Tracing") -> None:
        """Adds this observer, which is stopped with the router. Called before the router listens."""
        self.observers.add(tracing)
        self._tracing = tracing

    def _on_handoffs(self, worker: Worker, landed: int, failed: int) -> None:
        """Gives the alarm what a vLLM decode server's own counters say: its answers do not."""
        now_s = time.monotonic()
        self.context.alarm.note_many(now_s, landed, None)
        self.context.alarm.note_many(now_s, failed, f"hand-offs fail on {worker.label}: its log says why")

    async def _on_startup(self, _: web.Application) -> None:
        if self._file is not None:
            await self._file.start()  # first, because it raises if the file cannot be read
        await self._upstream.start()
        if self.context.worker_key is not None:  # for health checks and the like
            self._upstream.session.headers["Authorization"] = f"Bearer {self.context.worker_key}"
        if self._etcd is not None:
            await self._etcd.start()
        await self.fleet.start(self._upstream.session)
        await self._registrations.start()

    async def _on_cleanup(self, _: web.Application) -> None:
        if self._tracing is not None:
            await self._tracing.stop()
        await self._registrations.stop()
        if self._file is not None:
            await self._file.stop()
        if self._etcd is not None:
            await self._etcd.stop()
        await self.fleet.stop()
        await self._preconnect.stop()
        await self._releases.stop()
        await self._upstream.stop()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        status, dispatch, fields = 499, None, None
        number = self.observers.new_dispatch() if self.observers else 0
        try:
            fields = await read_fields(request, self._room)
            body = ClientBody(fields, chat="chat" in request.path)
            if self.observers:
                self.observers.emit(
                    number, "arrived", request_id=request_id_of(request), path=request.path, stream=int(body.stream),
                    traceparent=request.headers.get("traceparent", ""),
                )  # fmt: skip
            self.draining.check()  # after the body was read, so that the client reads the answer
            dispatch = Dispatch(self.context, request, body, number)
            self.draining.opened(dispatch)
            response = await dispatch.run()
            status = response.status
        except FerryError as error:
            status = as_api_error(error).status
            raise
        except web.HTTPException as error:
            status = error.status
            raise
        finally:
            if dispatch is not None:
                self.draining.closed(dispatch)
            self._metrics.on_end(request.path, status)
            if self.observers:
                served = {} if dispatch is None else dispatch.served
                self.observers.emit(number, "ended", status=status, **served)
        return response

    async def _health(self, _: web.Request) -> web.Response:
        """Answers 200 while requests are taken, even without hand-offs (`degraded`), else 503 with the reasons."""
        status, reason = self._view.health(time.monotonic())
        if self.draining.begun:
            status, reason = "unavailable", "draining"
        return _json({"status": status, "reason": reason}, 503 if status == "unavailable" else 200)

    async def _get_metrics(self, _: web.Request) -> web.Response:
        now_s = time.monotonic()
        text = await self._metrics.text(
            self.fleet,
            now_s=now_s,
            num_waiting=self.context.admission.num_waiting,
            alarm=self.context.alarm.rings(now_s),
            local_below=self.context.cost.local_below_tokens,
        )
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _describe(self, _: web.Request) -> web.Response:
        """Answers with the fleet: every worker, and for every pair whether it fits and what it has done."""
        return _json(self._view.state(time.monotonic()))

    async def _register(self, request: web.Request) -> web.Response:
        if not self._may_register:
            raise ApiError(
                403, "workers cannot register here: start the router with --register-key-file, or on loopback "
                    "without --api-key-file",
                code="registration_off",
            )  # fmt: skip
        if self._register_keys and not fits(bearer_of(request), self._register_keys):
            raise ApiError(
                401, "the registration has no key that fits: start the worker with the router's --register-key-file",
                code="invalid_api_key",
            )  # fmt: skip
        if not self._register_keys:
            refuse_page(request)
        lease_s = self._registrations.take(decode_body(await request.read(), Registration), time.monotonic())
        return _json({"lease_s": lease_s})


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json", status=status)
