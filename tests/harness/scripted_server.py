"""Every scripted worker beneath its script: an HTTP server at a port that stays its own, started and stopped."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from kvferry.web.listen import Listener


@dataclass(kw_only=True)
class ScriptedServer(ABC):
    """A subclass says what it answers: `routes`."""

    port: int = 0
    """0: a free one; from the first start on it stays the same, as that of a worker that restarts."""
    listener: Listener | None = None

    @abstractmethod
    def routes(self) -> Sequence[web.RouteDef]:
        """Paths and handlers."""

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
