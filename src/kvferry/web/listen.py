"""Serves one application on one address until a signal or a drain ends it."""

import asyncio
import atexit
import contextlib
import errno
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from kvferry.errors import ConfigError
from kvferry.web.drain import Drain

__all__ = ["Listener", "announce", "check_ready_file", "serve_until_signal", "url_of"]

logger = logging.getLogger(__name__)


def url_of(host: str, port: int) -> str:
    """Returns the URL at which a client on this machine reaches a server that listens on (host, port)."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Listener:
    """An application and its listening socket. A handler is cancelled when its client disconnects."""

    def __init__(self, app: web.Application | None, host: str, port: int, *, shutdown_s: float = 5.0) -> None:
        """`app` may also be given to `start`, later."""
        self.host = host
        self.port = port
        self._app = app
        self._shutdown_s = shutdown_s
        self._socket: socket.socket | None = None
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The URL of the server. Valid after `bind`."""
        return url_of(self.host, self.port)

    def bind(self) -> None:
        """Binds the port without answering yet, so that a port in use is reported before a model is loaded.

        Port 0 takes a free port; `port` is then that port. Raises ConfigError with the address and the remedy.
        """
        if not 0 <= self.port <= 65535:  # getaddrinfo would use the number modulo 65536
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
        """Releases the port unless it is being served. Idempotent."""
        if self._socket is not None and self._runner is None:
            self._socket.close()
            self._socket = None

    async def start(self, app: web.Application | None = None) -> None:
        """Starts the application, then answers requests. Calls `bind` if needed, and raises ConfigError as it does."""
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
        """Takes no new connections, and closes open ones after at most `shutdown_s`. Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._socket is not None:
            self._socket.close()


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if isinstance(error, socket.gaierror):
        return ConfigError(
            f"cannot listen on --host {host!r} --port {port!r}: {error.strerror}. Give an address of this machine"
        )
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is in use by another process: give another --port, or 0 for a free one"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} on {host} needs privileges: give a --port of 1024 or more")
    return ConfigError(f"cannot listen on --host {host!r} --port {port!r}: {error.strerror or error}")


def check_ready_file(ready_file: str | None) -> None:
    """Deletes the ready-file of an earlier run. Called before a model is loaded. Raises ConfigError.

    A script that waits for the file would else take the address of a worker that has ended.
    """
    if ready_file is None:
        return
    path = Path(ready_file).absolute()
    if not path.parent.is_dir():
        raise ConfigError(
            f"--ready-file {ready_file!r} cannot be written: its directory does not exist. Create it first"
        )
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--ready-file {ready_file!r} cannot be replaced: {error.strerror or error}") from error


def announce(ready_file: str | None, **facts: object) -> None:
    """Writes the ready-file, complete or not at all: a file that exists means ready.

    It is deleted when this process ends, unless another process has replaced it. Raises ConfigError.
    """
    if ready_file is None:
        return
    path = Path(ready_file).absolute()
    partial = path.with_name(path.name + ".partial")
    content = msgspec.json.encode({"pid": os.getpid(), **facts})
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"--ready-file {ready_file!r} cannot be written: {error.strerror or error}") from error
    atexit.register(_withdraw, path, content, os.getpid())


def _withdraw(path: Path, content: bytes, pid: int) -> None:
    with contextlib.suppress(OSError):
        if os.getpid() == pid and path.read_bytes() == content:
            path.unlink()


async def serve_until_signal(listener: Listener, drain: Drain | None = None) -> None:
    """Waits for SIGINT or SIGTERM, then stops the listener, which must have been started.

    With `drain`, the first SIGTERM begins a drain, and the listener stops when that has ended. SIGINT or a second
    SIGTERM stops the listener at once.
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
