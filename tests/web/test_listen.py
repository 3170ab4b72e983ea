"""A listener whose application cannot start gives its port back."""

import socket

import pytest
from aiohttp import web

from kvferry.web.listen import Listener


async def test_an_application_that_does_not_start_leaves_no_socket() -> None:
    async def fail(_: web.Application) -> None:
        raise RuntimeError("no worker answers")

    app = web.Application()
    app.on_startup.append(fail)
    listener = Listener(app, "127.0.0.1", 0)
    listener.bind()
    with pytest.raises(RuntimeError, match="no worker answers"):
        await listener.start()
    with socket.socket() as again:
        again.bind(("127.0.0.1", listener.port))
