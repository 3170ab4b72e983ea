"""A draining worker finishes what it has begun: the server over a scripted engine."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from kvferry.engines.mini.server.app import WorkerServer
from kvferry.engines.mini.settings import ServerSettings
from kvferry.errors import ConfigError
from kvferry.web.listen import Listener, serve_until_signal
from tests.harness.scripted_engine import ScriptedWorker, a_server
from tests.harness.until import until_async

BODY = {"prompt": "abc", "max_tokens": 4}


@dataclass
class Serving:
    """A listening server, and a task that waits for the end of its drain."""

    server: WorkerServer
    url: str
    session: aiohttp.ClientSession
    ended: "asyncio.Task[None]" = field(init=False)

    def __post_init__(self) -> None:
        self.ended = asyncio.create_task(self.server.draining.wait_ended())

    async def status(self, path: str, **body: object) -> tuple[int, str]:
        """Sends a POST (with a body) or a GET. Returns the status, and the reason or the error's code."""
        method = "POST" if body else "GET"
        async with self.session.request(method, self.url + path, json=body or None) as response:
            answer = await response.json()
        return response.status, answer.get("reason") or answer.get("state") or answer.get("error", {}).get("code", "")


@asynccontextmanager
async def serving(worker: ScriptedWorker, **settings: Any) -> AsyncIterator[Serving]:
    server = a_server(worker, **settings)
    listener = Listener(server.app, "127.0.0.1", 0, shutdown_s=0.2)
    await listener.start()
    try:
        async with aiohttp.ClientSession() as session:
            one = Serving(server, listener.url, session)
            yield one
            one.ended.cancel()
    finally:
        await listener.stop()


async def test_an_open_answer_ends_and_then_the_hand_offs_do() -> None:
    worker = ScriptedWorker(drained=False)
    worker.engine.steps_left = 0
    async with serving(worker) as one:
        pending = asyncio.create_task(one.session.post(f"{one.url}/v1/completions", json=BODY))
        await until_async(lambda: len(worker.engine.added) == 1)
        one.server.draining.begin("a test")
        assert await one.status("/health") == (503, "draining")
        assert await one.status("/v1/kvferry") == (200, "draining")
        assert await one.status("/v1/completions", **BODY) == (503, "draining")
        assert worker.num_drains == 0, "a request in progress may still be claimed for the first time"
        assert not one.ended.done()

        worker.engine.steps_left = 1000
        answer = await pending
        assert (answer.status, (await answer.json())["choices"][0]["text"]) == (200, "The ")
        await until_async(lambda: worker.num_drains == 1)
        assert not one.ended.done(), "a peer still holds our blocks"
        worker.drained = True
        await until_async(one.ended.done)
        assert one.ended.exception() is None


async def test_it_ends_at_once_if_nothing_is_open() -> None:
    async with serving(ScriptedWorker()) as one:
        assert not one.ended.done()
        assert await one.status("/v1/kvferry/drain", any=1) == (200, "draining")
        await until_async(one.ended.done)


@pytest.mark.parametrize("path", ["drain", "release", "meet"])
async def test_a_web_page_may_not_ask_for_a_drain(path: str) -> None:
    """A browser sends such a POST for any page that it shows, even to loopback."""
    async with serving(ScriptedWorker()) as one:
        headers = {"Origin": "http://page.example"}
        async with one.session.post(f"{one.url}/v1/kvferry/{path}", json={}, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (403, "web_page")
        assert not one.server.draining.begun


@pytest.mark.parametrize("stuck", ["answer", "hand-off"])
async def test_the_time_is_limited(stuck: str, caplog: pytest.LogCaptureFixture) -> None:
    worker = ScriptedWorker(drained=stuck != "hand-off")
    worker.engine.steps_left = 0
    async with serving(worker, drain_timeout_s=0.2) as one:
        if stuck == "answer":
            pending = asyncio.create_task(one.session.post(f"{one.url}/v1/completions", json=BODY))
            await until_async(lambda: len(worker.engine.added) == 1)
        one.server.draining.begin("a test")
        await until_async(one.ended.done)
        assert one.ended.exception() is None
        if stuck == "answer":
            cut_off = await pending
            assert (cut_off.status, (await cut_off.json())["error"]["code"]) == (503, "stopping")
    assert "drain timed out" in caplog.text


async def test_a_dead_engine_is_not_waited_for() -> None:
    worker = ScriptedWorker(drained=False)
    worker.engine.crash = ValueError("boom")
    async with serving(worker) as one:
        assert (await one.status("/v1/completions", **BODY))[0] == 503
        # The drain begins by itself, so that the process ends and a supervisor starts it again.
        await until_async(one.ended.done)
        assert one.ended.exception() is None


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server\.drain_timeout_s=-1 must be 0 or more: set --drain-timeout"):
        ServerSettings(model_name="m", max_model_len=1, vocab_size=1, drain_timeout_s=-1)


# ---- signals


@asynccontextmanager
async def under_signals(worker: ScriptedWorker) -> AsyncIterator["asyncio.Task[None]"]:
    """Runs what `kvferry serve` runs, until it ends."""
    loop = asyncio.get_running_loop()
    server = a_server(worker)
    listener = Listener(server.app, "127.0.0.1", 0, shutdown_s=0.2)
    await listener.start()
    task = asyncio.create_task(serve_until_signal(listener, server.draining))
    await until_async(lambda: signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
    try:
        yield task
        assert task.exception() is None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)
        task.cancel()
        await listener.stop()


async def test_the_first_sigterm_drains() -> None:
    worker = ScriptedWorker(drained=False)
    async with under_signals(worker) as task:
        os.kill(os.getpid(), signal.SIGTERM)
        await until_async(lambda: worker.num_drains == 1)
        assert not task.done()
        worker.drained = True
        await until_async(task.done)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(second: signal.Signals) -> None:
    worker = ScriptedWorker(drained=False)
    async with under_signals(worker) as task:
        os.kill(os.getpid(), signal.SIGTERM)
        await until_async(lambda: worker.num_drains == 1)
        os.kill(os.getpid(), second)
        await until_async(task.done)


async def test_ctrl_c_does_not_drain() -> None:
    worker = ScriptedWorker(drained=False)
    async with under_signals(worker) as task:
        os.kill(os.getpid(), signal.SIGINT)
        await until_async(task.done)
    assert worker.num_drains == 0
