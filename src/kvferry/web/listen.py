"""Listening: one application, on one address, until told to end."""

import asyncio
import errno
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiohttp import web

from kvferry.errors import ConfigError

__all__ = ["Drain", "Listener", "announce", "check_ready_file", "serve_until_signal", "url_of"]

logger = logging.getLogger(__name__)


def url_of(host: str, port: int) -> str:
    """How a client on this machine reaches what listens on (host, port)."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Listener:
    """An application with its socket. Handlers are cancelled when their client hangs up."""

    def __init__(self, app: web.Application | None, host: str, port: int, *, shutdown_s: float = 5.0) -> None:
        """`app` may come later: see `start`."""
        self.host = host
        self.port = port
        self._app = app
        self._shutdown_s = shutdown_s
        self._socket: socket.socket | None = None
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where to reach it, once bound."""
        return url_of(self.host, self.port)

    def bind(self) -> None:
        """Take the port, and answer nobody yet: so a port in use is told before a model is loaded.

        Port 0 becomes the port that was taken. Raises ConfigError with the address and the remedy.
        """
        if not 0 <= self.port <= 65535:  # getaddrinfo would take the remainder
            raise ConfigError(f"port {self.port!r} is not between 0 and 65535: give another --port")
        try:
            family, kind, number, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind, number)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except OSError as error:
            self.unbind()
            raise _cannot_listen(self.host, self.port, error) from error
        self.port = self._socket.getsockname()[1]

    def unbind(self) -> None:
        """Give the port back, if it is not served yet. Idempotent."""
        if self._socket is not None and self._runner is None:
            self._socket.close()
            self._socket = None

    async def start(self, app: web.Application | None = None) -> None:
        """Start the application, then answer. Raises ConfigError as `bind`, which it calls if nobody did."""
        app = app or self._app
        assert app is not None, "an application is given to the constructor or to start"
        if self._socket is None:
            self.bind()
        assert self._socket is not None, "bind() has made the socket"
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=self._shutdown_s, keepalive_timeout=75
        )
        try:
            await self._runner.setup()
            try:
                await web.SockSite(self._runner, self._socket, backlog=1024).start()
            except OSError as error:
                raise _cannot_listen(self.host, self.port, error) from error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Take no new connections, give open ones `shutdown_s`, then cut them. Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._socket is not None:
            self._socket.close()


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if isinstance(error, socket.gaierror):
        return ConfigError(
            f"cannot listen on --host {host!r} --port {port!r}: {error}. Give an address of this machine"
        )
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is in use by another process: give another --port, or 0 for a free one"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} on {host} needs privileges: give a --port of 1024 or more")
    return ConfigError(f"cannot listen on --host {host!r} --port {port!r}: {error.strerror or error}")


def check_ready_file(ready_file: str | None) -> None:
    """Told before a model is loaded: its directory is not there. Raises ConfigError."""
    if ready_file is not None and not Path(ready_file).absolute().parent.is_dir():
        raise ConfigError(f"--ready-file {ready_file!r} cannot be written: its directory is not there. Make it first")


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


class Drain(Protocol):
    """What ends a server gently."""

    def begin(self, reason: str) -> None:
        """Take nothing new. Idempotent; never blocks."""
        ...

    async def wait_ended(self) -> None:
        """Wait until a drain has begun, by whomever, and has ended."""
        ...


async def serve_until_signal(listener: Listener, drain: Drain | None = None) -> None:
    """Wait for SIGINT or SIGTERM, then stop the listener. The listener must be started.

    With `drain`, the first SIGTERM only begins it, and its end stops the listener. SIGINT, or a second SIGTERM, doesn't
    wait for that.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    gentle = [] if drain is None else [drain]

    def terminate() -> None:
        if gentle:
            gentle.pop().begin("SIGTERM")
        else:
            stop.set()

    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGTERM, terminate)
    waits: set[asyncio.Task[Any]] = {asyncio.create_task(stop.wait(), name="signal")}
    if drain is not None:
        waits.add(asyncio.create_task(drain.wait_ended(), name="drain"))
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in waits:
            task.cancel()
        logger.info("stopping url=%s", listener.url)
        await listener.stop()
