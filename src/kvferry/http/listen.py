"""Listening: one application, on one address, until told to end."""

import asyncio
import errno
import logging
import os
import signal
from pathlib import Path

import msgspec
from aiohttp import web

from kvferry.errors import ConfigError

__all__ = ["Listener", "announce", "serve_until_signal", "url_of"]

logger = logging.getLogger(__name__)


def url_of(host: str, port: int) -> str:
    """How a client on this machine reaches what listens on (host, port)."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Listener:
    """An application with its socket. Handlers are cancelled when their client hangs up."""

    def __init__(self, app: web.Application, host: str, port: int, *, shutdown_s: float = 5.0) -> None:
        self.host = host
        self.port = port
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_s)

    @property
    def url(self) -> str:
        """Where to reach it, once started."""
        return url_of(self.host, self.port)

    async def start(self) -> None:
        """Bind. Port 0 becomes the port that was taken. Raises ConfigError naming address and remedy."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise _cannot_listen(self.host, self.port, error) from error
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Take no new connections, give open ones `shutdown_s`, then cut them. Idempotent."""
        await self._runner.cleanup()


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is in use by another process: give another --port, or 0 for a free one"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} on {host} needs privileges: give a --port of 1024 or more")
    return ConfigError(f"cannot listen on --host {host!r} --port {port!r}: {error.strerror or error}")


def announce(ready_file: str | None, **facts: object) -> None:
    """Write the ready-file: whole or not at all, so that its existence means ready."""
    if ready_file is None:
        return
    path = Path(ready_file)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(msgspec.json.encode({"pid": os.getpid(), **facts}))
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"--ready-file {ready_file!r} cannot be written: {error.strerror or error}") from error


async def serve_until_signal(listener: Listener) -> None:
    """Wait for SIGINT or SIGTERM, then stop the listener. The listener must be started."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    logger.info("stopping url=%s", listener.url)
    await listener.stop()
