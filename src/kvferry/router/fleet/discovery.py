"""Workers that come and go: a fleet file that is watched, and registrations with a lease.

The file names the current workers: one that is no longer in it leaves the fleet. A file that cannot be read or makes no
sense changes nothing, and the log says so.

A worker that registers has to register again before its lease ends, or it is forgotten. A lease runs on the router's
own clock from when the registration arrived.
"""

import asyncio
import logging
import time
from pathlib import Path

import msgspec

from kvferry.errors import ConfigError
from kvferry.router.fleet.worker import Source, Worker
from kvferry.router.fleet.workers import Fleet, check_url
from kvferry.router.settings import RouterSettings
from kvferry.settings import Role
from kvferry.web.api_errors import ApiError

__all__ = ["FleetFile", "Registration", "Registrations"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
_MAX_FILE_BYTES = 4 << 20


class _FileBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a fleet file: {"prefill": ["http://..."], "decode": ["http://..."]}."""

    prefill: list[str] = []
    decode: list[str] = []


class FleetFile:
    """Keeps a fleet in line with a file."""

    def __init__(self, path: str, fleet: Fleet) -> None:
        self._path = Path(path)
        self._fleet = fleet
        self._seen: tuple[int, int] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Reads the file, then watches it. Raises ConfigError if it cannot be read at the start."""
        self._apply(self._read())
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stops watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Reads the file again if it has changed. Never raises."""
        try:
            stat = self._path.stat()
            if (stat.st_mtime_ns, stat.st_size) == self._seen:
                return
            body = self._read()
            self._apply(body)
        except (OSError, ConfigError) as error:
            logger.warning("fleet file ignored path=%s cause=%s", self._path, error)
            self._seen = self._mark()

    def _mark(self) -> tuple[int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size

    def _read(self) -> _FileBody:
        try:
            self._seen = self._mark()
            with self._path.open("rb") as file:
                raw = file.read(_MAX_FILE_BYTES + 1)
            if len(raw) > _MAX_FILE_BYTES:
                raise ConfigError(f"fleet file {str(self._path)!r} is longer than {_MAX_FILE_BYTES} bytes")
            return msgspec.json.decode(raw, type=_FileBody)
        except OSError as error:
            raise ConfigError(f"fleet file {str(self._path)!r} cannot be read: {error.strerror or error}") from error
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"fleet file {str(self._path)!r} cannot be used: {error}. "
                'Write {"prefill": ["http://HOST:PORT"], "decode": ["http://HOST:PORT"]}'
            ) from error

    def _apply(self, body: _FileBody) -> None:
        wanted = {(url.rstrip("/"), Role.PREFILL) for url in body.prefill}
        wanted |= {(url.rstrip("/"), Role.DECODE) for url in body.decode}
        for url, _ in sorted(wanted):
            check_url(url)  # all of them first: a file that makes no sense changes nothing
        for url, role in sorted(wanted):
            self._fleet.add(url, role, Source.FILE)
        for worker in self._fleet.workers:
            if worker.source is Source.FILE and (worker.url, worker.assigned_role) not in wanted:
                self._fleet.remove(worker, "it is no longer in the fleet file")


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/kvferry/register, which a worker sends."""

    url: str
    """The address at which the router and decode workers reach it."""
    role: Role
    leaving: bool = False
    """True if the worker ends and is to be forgotten now."""


class Registrations:
    """The workers that registered themselves, and their leases."""

    def __init__(self, fleet: Fleet, settings: RouterSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._until_s: dict[Worker, float] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the task that ends leases."""
        self._task = asyncio.create_task(self._end_leases())

    async def stop(self) -> None:
        """Stops that task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def take(self, registration: Registration, now_s: float) -> float:
        """Adds the worker, or renews its lease. Returns the lease in seconds. Raises ApiError 400 or 503."""
        url = registration.url.rstrip("/")
        roles = [Role.PREFILL, Role.DECODE] if registration.role is Role.BOTH else [registration.role]
        if registration.leaving:
            for worker in [w for w in self._until_s if w.url == url and w.assigned_role in roles]:
                self._forget(worker, "it said that it ends")
            return 0.0
        for role in roles:
            known = self._fleet.find(url, role)
            if known is not None and known.source is not Source.REGISTERED:
                continue  # the operator added it: it stays without a lease
            if known is None and len(self._until_s) >= self._settings.max_registered:
                raise ApiError(
                    503, f"{len(self._until_s)} workers are registered, and no more are taken: raise --max-registered",
                    code="too_many_workers",
                )  # fmt: skip
            try:
                worker = self._fleet.add(url, role, Source.REGISTERED)
            except ConfigError as error:
                raise ApiError(400, str(error), param="url") from error
            self._until_s[worker] = now_s + self._settings.registration_lease_s
        return self._settings.registration_lease_s

    def end_leases(self, now_s: float) -> None:
        """Forgets the workers that have not registered again in time."""
        for worker in [worker for worker, until_s in self._until_s.items() if until_s <= now_s]:
            self._forget(worker, "it has not registered again in time")

    def _forget(self, worker: Worker, reason: str) -> None:
        del self._until_s[worker]
        self._fleet.remove(worker, reason)

    async def _end_leases(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, self._settings.registration_lease_s / 4))
            self.end_leases(time.monotonic())
