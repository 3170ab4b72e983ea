"""The base of every scripted worker: an HTTP server that can be stopped and started again at the same port."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from kvferry.web.listen import Listener


@dataclass(kw_only=True)
class ScriptedServer(ABC):
    """A server; a subclass says what it answers, in `routes`."""

    port: int = 0
    """The port. 0 means a free one, which stays the same after the first start, like that of a worker that restarts."""
    listener: Listener | None = None

    @abstractmethod
    def routes(self) -> Sequence[web.RouteDef]:
        """Returns the paths and their handlers."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_routes(self.routes())
        self.listener = Listener(app, "127.0.0.1", self.port, shutdown_s=0.1)
        await self.listener.start()
        self.port = self.listener.port

    async def stop(self) -> None:
        if self.listener is not None:
            await self.listener.stop()
