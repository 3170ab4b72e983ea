"""Workers come and go: by a file, or by registrations with a lease; keys; early meetings."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvferry.engines.mini.server.router_services import Registrar
from kvferry.errors import ConfigError
from kvferry.router.app import Router, RouterFiles
from kvferry.router.fleet.discovery import FleetFile, Registration, Registrations
from kvferry.router.fleet.worker import Source
from kvferry.router.fleet.workers import Fleet
from kvferry.router.keys import read_keys
from kvferry.router.settings import RouterSettings
from kvferry.settings import Role
from kvferry.web.api_errors import ApiError
from tests.harness.scripted_worker import FAST, Worker, a_decode, a_prefill, fleet, hanging, routing
from tests.harness.until import until_async
from tests.router.test_dispatch import BODY, post

KEY = "a-key-of-a-client"


@asynccontextmanager
async def started(*workers: Worker) -> AsyncIterator[None]:
    for worker in workers:
        await worker.start()
    try:
        yield
    finally:
        for worker in workers:
            await worker.stop()


# ---- a file ----


def write(path: Path, **roles: list[str]) -> None:
    path.write_text(json.dumps(roles))


async def test_a_fleet_file_is_watched(tmp_path: Path) -> None:
    path, p, d0, d1 = tmp_path / "fleet.json", a_prefill(), a_decode("d0"), a_decode("d1", hanging)
    async with started(p, d0, d1):
        write(path, prefill=[p.url], decode=[d0.url])
        router = Router([], [], FAST, files=RouterFiles(fleet=str(path)))
        async with routing(router) as url:
            response, _ = await post(url, BODY)
            assert (response.status, response.headers["x-kvferry-decode"]) == (200, "d0")
            write(path, prefill=[p.url], decode=[d1.url + "/"])
            await until_async(lambda: [w.name for w in router.fleet.decode] == ["d1"])
            stuck = asyncio.create_task(post(url, BODY))
            await until_async(lambda: len(d1.asked) == 1)
            write(path, prefill=[p.url], decode=[d0.url])
            await until_async(lambda: [w.name for w in router.fleet.decode] == ["d0"])
            assert not d1.asked[0].cancelled  # open requests continue
            stuck.cancel()
            await asyncio.gather(stuck, return_exceptions=True)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"decodes": []}',
        '{"decode": ["nonsense"]}',
        '{"decode": ["http://127.0.0.1:2", "nonsense"]}',
        '{"decode": [3]}',
    ],
)
async def test_a_file_that_makes_no_sense_changes_nothing(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fleet.json"
    write(path, decode=["http://127.0.0.1:1"])
    known = Fleet([], [], RouterSettings())
    file = FleetFile(str(path), known)
    await file.start()
    path.write_text(text)
    file.look()
    file.look()
    assert [worker.url for worker in known.decode] == ["http://127.0.0.1:1"]
    assert caplog.text.count("fleet file ignored") == 1
    path.unlink()
    file.look()
    assert len(known.decode) == 1
    await file.stop()


async def test_a_router_that_cannot_read_its_file_leaves_nothing_open(caplog: pytest.LogCaptureFixture) -> None:
    router = Router([], [], FAST, files=RouterFiles(fleet="/nowhere/fleet.json"))
    with pytest.raises(ConfigError, match="cannot be read"):
        await router._on_startup(router.app)
    with pytest.raises(AssertionError, match="opens the session"):
        router._upstream.session  # noqa: B018


async def test_a_file_that_cannot_be_read_at_the_start_is_reported() -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        await FleetFile("/nowhere/fleet.json", Fleet([], [], RouterSettings())).start()


async def test_a_file_does_not_touch_workers_given_by_flags(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    write(path, decode=["http://127.0.0.1:2"])
    known = Fleet(["http://127.0.0.1:3"], [], RouterSettings())
    file = FleetFile(str(path), known)
    await file.start()
    write(path)
    file.look()
    assert [worker.url for worker in known.workers] == ["http://127.0.0.1:3"]
    await file.stop()


# ---- registration ----


def test_a_lease_ends_unless_it_is_renewed() -> None:
    known = Fleet([], ["http://127.0.0.1:9"], RouterSettings())
    leases = Registrations(known, RouterSettings(registration_lease_s=10.0, max_registered=3))
    assert leases.take(Registration(url="http://127.0.0.1:1", role=Role.PREFILL), 0.0) == 10.0
    leases.take(Registration(url="http://127.0.0.1:2/", role=Role.BOTH), 5.0)
    leases.end_leases(9.9)
    assert len(known.workers) == 4
    leases.end_leases(10.0)
    assert [worker.url for worker in known.prefill] == ["http://127.0.0.1:2"]
    leases.take(Registration(url="http://127.0.0.1:2", role=Role.BOTH), 14.0)
    leases.end_leases(20.0)
    assert len(known.workers) == 3
    leases.take(Registration(url="http://127.0.0.1:2", role=Role.BOTH, leaving=True), 20.0)
    # The operator's own worker needs no lease, and cannot be registered away.
    leases.take(Registration(url="http://127.0.0.1:9", role=Role.DECODE), 20.0)
    leases.take(Registration(url="http://127.0.0.1:9", role=Role.DECODE, leaving=True), 20.0)
    leases.end_leases(1000.0)
    assert [(worker.url, worker.source) for worker in known.workers] == [("http://127.0.0.1:9", Source.FLAG)]


def test_registrations_are_bounded_and_checked() -> None:
    leases = Registrations(Fleet([], [], RouterSettings()), RouterSettings(max_registered=1))
    leases.take(Registration(url="http://127.0.0.1:1", role=Role.PREFILL), 0.0)
    with pytest.raises(ApiError, match="raise --max-registered"):
        leases.take(Registration(url="http://127.0.0.1:2", role=Role.PREFILL), 0.0)
    leases = Registrations(Fleet([], [], RouterSettings()), RouterSettings())
    for url in ("ftp://x", "http://", "http://x:99999", "http://[x"):
        with pytest.raises(ApiError) as caught:
            leases.take(Registration(url=url, role=Role.PREFILL), 0.0)
        assert caught.value.status == 400


async def test_workers_register_serve_and_leave() -> None:
    p, d = a_prefill(), a_decode()
    async with started(p, d):
        router = Router([], [], RouterSettings(health_every_s=0.05, registration_lease_s=3.0), open_registration=True)
        leases = router._registrations
        async with routing(router) as url:
            response, _ = await post(url, BODY)
            assert response.status == 503
            both = [Registrar([url], p.url, "prefill", None), Registrar([url], d.url, "decode", None)]
            for registrar in both:
                await registrar.start()
            await until_async(lambda: [w.unusable_reason for w in router.fleet.workers] == [None, None])
            response, _ = await post(url, BODY)
            assert response.headers["x-kvferry-route"] == "pull"
            first_s = min(leases._until_s.values())
            await until_async(lambda: min(leases._until_s.values()) > first_s)  # they renewed in time
            await both[0].stop()  # it announces that it leaves
            assert router.fleet.prefill == []
            for task in both[1]._tasks:  # a process that dies announces nothing
                task.cancel()
            leases.end_leases(max(leases._until_s.values()) - 0.01)
            assert len(router.fleet.decode) == 1
            leases.end_leases(max(leases._until_s.values()))
            assert router.fleet.decode == []
            await both[1].stop()


async def test_a_registrar_outlives_its_routers_absence(caplog: pytest.LogCaptureFixture) -> None:
    registrar = Registrar(["http://127.0.0.1:1"], "http://127.0.0.1:2", "decode", None)
    await registrar.start()
    await until_async(lambda: "registration failed router=http://127.0.0.1:1" in caplog.text)
    await registrar.stop()
    await registrar.stop()


# ---- keys ----


async def register(url: str, key: str | None) -> tuple[int, dict[str, Any]]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"url": "http://127.0.0.1:1", "role": "decode"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/kvferry/register", json=body, headers=headers) as response,
    ):
        return response.status, await response.json()


async def test_registration_needs_the_key_or_is_off(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a-registration-key\n")
    router = Router([], ["http://127.0.0.1:1"], FAST)
    async with routing(router) as url:
        status, body = await register(url, None)
        assert (status, body["error"]["code"]) == (403, "registration_off")
    # On loopback there may be a proxy in front: if clients need a key, registration needs one too.
    files = RouterFiles(api_keys=str(tmp_path / "key"))
    router = Router([], ["http://127.0.0.1:1"], FAST, files=files, open_registration=True)
    async with routing(router) as url:
        assert (await register(url, None))[0] == 403
    router = Router([], [], FAST, open_registration=True)
    async with routing(router) as url, aiohttp.ClientSession(headers={"Origin": "http://page.example"}) as page:
        body = {"url": "http://127.0.0.1:1", "role": "decode"}
        response = await page.post(f"{url}/v1/kvferry/register", data=json.dumps(body))
        assert (response.status, router.fleet.workers) == (403, [])
        assert (await register(url, None))[0] == 200
    router = Router([], [], FAST, files=RouterFiles(register_key=str(tmp_path / "key")))
    async with routing(router) as url:
        for key in (None, "another-key"):
            status, body = await register(url, key)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert router.fleet.workers == []
        assert await register(url, "a-registration-key") == (200, {"lease_s": 10.0})


async def test_clients_need_a_key_and_workers_get_another_one(tmp_path: Path) -> None:
    (tmp_path / "clients").write_text(f"# two of them\n{KEY}\n\nanother-client-key\n")
    (tmp_path / "worker").write_text("the-key-of-workers")
    files = RouterFiles(api_keys=str(tmp_path / "clients"), worker_key=str(tmp_path / "worker"))
    p, d = a_prefill(), a_decode()
    async with started(p, d):
        router = Router([p.url], [d.url], FAST, files=files)
        async with routing(router) as url:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
                response, raw = await post(url, BODY, headers=headers)
                error = json.loads(raw)["error"]
                assert (response.status, error["code"], error["type"]) == (
                    401,
                    "invalid_api_key",
                    "invalid_request_error",
                )
            response, _ = await post(url, BODY, headers={"Authorization": f"Bearer {KEY}"})
            assert response.status == 200
            async with aiohttp.ClientSession() as session:
                assert (await session.get(f"{url}/health")).status == 200
                assert (await session.get(f"{url}/v1/kvferry")).status == 401
    for asked in (*p.asked, *d.asked):
        assert asked.headers["authorization"] == "Bearer the-key-of-workers"


async def test_the_clients_key_is_passed_on_if_the_router_has_none() -> None:
    p, d = a_prefill(), a_decode()
    async with fleet(p, d) as (url, _):
        await post(url, BODY, headers={"Authorization": "Bearer x"})
    assert p.asked[0].headers["authorization"] == d.asked[0].headers["authorization"] == "Bearer x"


@pytest.mark.parametrize("text", ["", "# none\n", "short\n", "has a space\n", "umlaut-\u00e4\u00e4\u00e4\n"])
def test_a_key_file_without_a_valid_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match="key file"):
        read_keys(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "none"))


# ---- meeting ----


async def test_pairs_that_fit_meet_before_the_first_request() -> None:
    p, d, other = a_prefill(), a_decode("d0"), a_decode("d1", mode="push")
    for worker in (p, d, other):
        assert worker.info is not None
        worker.info["abilities"] = ["meet"]
    async with fleet(p, d, other):
        await until_async(lambda: len(d.met) == 1)
        assert d.met == [{"engine": "p0", "incarnation": "i1", "host": "10.0.0.1", "port": 77}]
        assert p.info is not None
        p.info["incarnation"] = "i2"
        await until_async(lambda: len(d.met) == 2)
        assert d.met[1]["incarnation"] == "i2"
    assert (p.asked, d.asked, other.met) == ([], [], [])


async def test_the_series_of_a_worker_that_left_are_gone() -> None:
    p, d = a_prefill(), a_decode()
    async with fleet(p, d) as (url, router), aiohttp.ClientSession() as session:
        await post(url, BODY)
        assert 'decode="d0"' in await (await session.get(f"{url}/metrics")).text()
        router.fleet.remove(router.fleet.decode[0], "a test")
        text = await (await session.get(f"{url}/metrics")).text()
    assert 'decode="d0"' not in text
    assert d.url not in text
    assert 'kvferry_router_routes_total{route="pull"} 1.0' in text
