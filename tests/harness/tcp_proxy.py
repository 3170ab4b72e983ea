"""A TCP proxy that can refuse connections and keep those on which a POST is open, as a server that is ending does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

__all__ = ["TcpProxy"]


class TcpProxy:
    """Forwards connections to a port of this machine. `url` is where it listens."""

    def __init__(self, server: asyncio.Server, idle: set[asyncio.StreamWriter]) -> None:
        self._server = server
        self._idle = idle
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator["TcpProxy"]:
        """Runs a proxy until the context ends."""
        pumps: set[asyncio.Task[None]] = set()
        idle: set[asyncio.StreamWriter] = set()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while chunk := await reader.read(1 << 16):
                    if chunk.startswith(b"GET "):
                        idle.add(writer)
                    elif chunk.startswith(b"POST "):
                        idle.discard(writer)
                    writer.write(chunk)
                    await writer.drain()
            writer.close()

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
            for task in (
                asyncio.create_task(pump(reader, to_writer)),
                asyncio.create_task(pump(to_reader, writer)),
            ):
                pumps.add(task)
                task.add_done_callback(pumps.discard)

        server = await asyncio.start_server(connect, "127.0.0.1", 0)
        try:
            yield cls(server, idle)
        finally:
            server.close()
            for task in list(pumps):
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def refuse(self) -> None:
        """Closes the listening socket, and the connections whose last request was a GET."""
        self._server.close()
        for writer in self._idle:
            writer.close()
