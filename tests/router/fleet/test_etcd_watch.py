"""Workers that are found in etcd: with a real one if it is installed, and with one that misbehaves."""

import asyncio
import base64
import json
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvferry.engines.mini.server.etcd_registration import EtcdRegistrar
from kvferry.errors import ConfigError
from kvferry.router.app import Router
from kvferry.router.settings import RouterSettings
from kvferry.web.etcd import DEFAULT_PREFIX, Etcd, EtcdFailed
from kvferry.web.listen import Listener
from tests.harness.scripted_worker import a_decode, a_prefill, routing
from tests.harness.until import until_async
from tests.router.test_dispatch import BODY, post

ETCD = shutil.which("etcd")
real = pytest.mark.skipif(ETCD is None, reason="there is no etcd on this machine: apt install etcd-server")
FAST = RouterSettings(health_every_s=0.05, restart_wait_s=0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RealEtcd:
    """A member that can be stopped, and started again with its data."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{_free_port()}"
        peer = f"http://127.0.0.1:{_free_port()}"
        assert ETCD is not None, "tests of the real one are skipped without it"
        self._argv = [
            ETCD, "--data-dir", str(folder / "data"), "--listen-client-urls", self.url, "--advertise-client-urls",
            self.url, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster",
            f"default={peer}", "--unsafe-no-fsync",
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "ETCD_UNSUPPORTED_ARCH": os.uname().machine.replace("aarch64", "arm64")}
        quiet = subprocess.DEVNULL
        flags = [one for one in self._argv if one != "--unsafe-no-fsync"]  # version 3.4 does not have this flag
        self._process = subprocess.Popen(flags, stdout=quiet, stderr=quiet, env=environment)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def well(self) -> None:
        async with aiohttp.ClientSession() as session:

            async def answers() -> bool:
                try:
                    await Etcd(session, self.url).read("/x/")
                except EtcdFailed:
                    return False
                return True

            await until_async(answers, "etcd answers", within_s=20.0, every_s=0.05)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[RealEtcd]:
    running = RealEtcd(tmp_path)
    running.start()
    yield running
    running.stop()


@asynccontextmanager
async def a_router(etcd_url: str) -> AsyncIterator[tuple[str, Router]]:
    router = Router([], [], FAST, etcd=etcd_url)
    async with routing(router) as url:
        yield url, router


def urls(router: Router) -> set[tuple[str, str]]:
    return {(worker.url, worker.assigned_role.value) for worker in router.fleet.workers}


@real
@pytest.mark.process
async def test_workers_come_serve_and_go(etcd: RealEtcd) -> None:
    await etcd.well()
    p, d = a_prefill(), a_decode()
    await p.start()
    await d.start()
    registrars = [EtcdRegistrar(etcd.url, one.url, one.role, one.name, ttl_s=2) for one in (p, d)]
    async with a_router(etcd.url) as (url, router):
        assert urls(router) == set()
        for registrar in registrars:
            await registrar.start()
        await until_async(
            lambda: all(worker.unusable_reason is None for worker in router.fleet.workers) and len(urls(router)) == 2
        )
        response, _raw = await post(url, BODY)
        assert (response.status, response.headers["x-kvferry-prefill"]) == (200, "p0")
        # etcd goes away: nothing changes for clients. It comes back: the leases continue.
        etcd.stop()
        assert (await post(url, BODY))[0].status == 200
        etcd.start()
        await etcd.well()
        assert len(urls(router)) == 2
        await registrars[0].stop()  # it is logged
        await until_async(lambda: urls(router) == {(d.url, "decode")})
        registrars[1]._task.cancel()  # type: ignore[union-attr]  # it dies: its lease ends
        registrars[1]._lease = ""
        await until_async(lambda: urls(router) == set())
        await registrars[1].stop()
    for worker in (p, d):
        await worker.stop()


@real
@pytest.mark.process
async def test_keys_that_make_no_sense_are_logged_and_ignored(etcd: RealEtcd, caplog: pytest.LogCaptureFixture) -> None:
    await etcd.well()
    async with aiohttp.ClientSession() as session:
        client = Etcd(session, etcd.url)
        lease = await client.grant(30)
        for key, value in (("prefill/a", "ftp://x"), ("both/b", "http://h:1"), ("decode/c", "http://127.0.0.1:9")):
            await client.put(f"{DEFAULT_PREFIX}/{key}", value, lease)
        async with a_router(etcd.url) as (_, router):
            assert urls(router) == {("http://127.0.0.1:9", "decode")}
            assert "ftp://x" in caplog.text
            assert "both/b" in caplog.text
            await client.revoke(lease)
            await until_async(lambda: urls(router) == set())


# ---- one that misbehaves


@asynccontextmanager
async def a_fake(answers: dict[str, Any]) -> AsyncIterator[str]:
    """Answers each path of /v3/ with these bytes or this status."""

    async def handle(request: web.Request) -> web.Response:
        answer = answers.get(request.match_info["path"], b"{}")
        return web.Response(status=answer) if isinstance(answer, int) else web.Response(body=answer)

    app = web.Application()
    app.router.add_post("/v3/{path:.*}", handle)
    listener = Listener(app, "127.0.0.1", 0, shutdown_s=0.1)
    await listener.start()
    try:
        yield listener.url
    finally:
        await listener.stop()


def _pairs(**found: str) -> bytes:
    coded = [{"key": base64.b64encode(f"{DEFAULT_PREFIX}/{k}".encode()).decode(), "value": v} for k, v in found.items()]
    return json.dumps({"header": {"revision": "3"}, "kvs": coded}).encode()


@pytest.mark.parametrize(
    "answer", [500, b"", b"[]", b'{"kvs":3}', b'{"kvs":[{"key":"!"}]}', _pairs(x="!"), b"x" * (5 << 20),
     b'{"x":' + b"[" * 100_000],
    ids=["500", "empty", "list", "number", "bad key", "bad value", "huge", "deep"],
)  # fmt: skip
async def test_an_answer_that_is_no_json_changes_nothing(answer: Any) -> None:
    async with a_fake({"kv/range": answer}) as url:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(EtcdFailed):
                await Etcd(session, url).read("/x/")
        async with a_router(url) as (_, router):
            assert urls(router) == set()


async def test_a_silent_watch_is_ended_and_everything_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.web.etcd._WATCH_QUIET_S", 0.05)
    silent = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"result":{"created":true}}\n')
        await silent.wait()  # like a host that vanished
        return response

    app = web.Application()
    app.router.add_post("/v3/watch", handle)
    listener = Listener(app, "127.0.0.1", 0, shutdown_s=0.1)
    await listener.start()
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(10):
            assert [change async for change in Etcd(session, listener.url).changes("/x/", 1)] == []
    finally:
        silent.set()
        await listener.stop()


async def test_a_lost_etcd_leaves_the_fleet_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    found = base64.b64encode(b"http://127.0.0.1:9").decode()
    answers: dict[str, Any] = {"kv/range": _pairs(**{"decode/a": found})}
    async with a_fake(answers) as url, a_router(url) as (_, router):
        assert urls(router) == {("http://127.0.0.1:9", "decode")}
        answers["kv/range"] = 503
        await until_async(lambda: "etcd is lost" in caplog.text)
        assert urls(router) == {("http://127.0.0.1:9", "decode")}


async def test_the_router_starts_without_a_reachable_etcd(caplog: pytest.LogCaptureFixture) -> None:
    async with a_router(f"http://127.0.0.1:{_free_port()}") as (url, _):
        assert (await post(url, BODY))[0].status == 503
        assert "etcd does not answer yet" in caplog.text


@pytest.mark.parametrize("url", ["", "127.0.0.1:2379", "etcd://h"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--etcd"):
        Router([], [], FAST, etcd=url)


async def test_a_lease_that_has_ended_is_granted_again() -> None:
    """etcd was restored from a backup, or the worker was stopped for longer than its lease."""
    puts: list[str] = []
    answers: dict[str, Any] = {"lease/grant": b'{"ID":"7","TTL":"1"}', "lease/keepalive": b'{"result":{"ID":"7"}}'}
    async with a_fake(answers) as url:
        registrar = EtcdRegistrar(url, "http://h:1", "both", "w", ttl_s=1)
        put = Etcd.put

        async def seen(self: Etcd, key: str, value: str, lease: str) -> None:
            puts.append(key)
            await put(self, key, value, lease)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Etcd, "put", seen)
            await registrar.start()
            await until_async(lambda: len(puts) >= 4)
            await registrar.stop()
    assert puts[:2] == [f"{DEFAULT_PREFIX}/prefill/w", f"{DEFAULT_PREFIX}/decode/w"]


async def test_keys_that_could_not_be_put_are_put_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """etcd failed between the lease and its keys: the lease exists, and the keys still have to be put."""
    monkeypatch.setattr("kvferry.engines.mini.server.etcd_registration._RETRY_S", 0.01)
    alive = b'{"result":{"ID":"7","TTL":"9"}}'
    answers: dict[str, Any] = {"lease/grant": b'{"ID":"7","TTL":"9"}', "lease/keepalive": alive}
    puts: list[str] = []

    async def failing_once(self: Etcd, key: str, value: str, lease: str) -> None:
        puts.append(key)
        if len(puts) == 1:
            raise EtcdFailed("etcd answered 503 to kv/put")

    monkeypatch.setattr(Etcd, "put", failing_once)
    async with a_fake(answers) as url:
        registrar = EtcdRegistrar(url, "http://h:1", "decode", "w")
        await registrar.start()
        try:
            await until_async(lambda: len(puts) == 2)
        finally:
            await registrar.stop()


@pytest.mark.parametrize("living", [True, False])
async def test_the_key_of_a_living_engine_is_not_taken_over(
    living: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two engines with one id would replace each other's key by turns. The key of a dead one is replaced at once."""
    monkeypatch.setattr("kvferry.engines.mini.server.etcd_registration._RETRY_S", 0.01)
    other = a_decode("w")
    await other.start()
    found = base64.b64encode(other.url.encode()).decode()
    answers: dict[str, Any] = {
        "lease/grant": b'{"ID":"7","TTL":"9"}',
        "lease/keepalive": b'{"result":{"ID":"7","TTL":"9"}}',
        "kv/range": _pairs(**{"decode/w": found}),
    }
    puts: list[str] = []

    async def seen(self: Etcd, key: str, value: str, lease: str) -> None:
        puts.append(value)

    monkeypatch.setattr(Etcd, "put", seen)
    if not living:
        await other.stop()
    async with a_fake(answers) as url:
        registrar = EtcdRegistrar(url, "http://h:1", "decode", "w")
        await registrar.start()
        try:
            if living:
                await until_async(lambda: "two engines have the id 'w'" in caplog.text)
                assert other.url in caplog.text
                assert "--engine-id" in caplog.text
                assert puts == []
                await other.stop()
            await until_async(lambda: puts == ["http://h:1"])
        finally:
            await registrar.stop()
