"""Two living engines under one id: the later one is refused by name, never the two by turns; a restart is none."""

from typing import Any

import aiohttp
import pytest

from kvferry.router.fleet.worker import Source
from kvferry.router.settings import RouterSettings
from kvferry.settings import Role
from tests.harness.scripted_worker import Worker, a_decode, a_prefill, fleet
from tests.harness.until import until_async
from tests.router.test_dispatch import BODY, post

FAST = RouterSettings(health_every_s=0.05, restart_wait_s=0)
RARELY = RouterSettings(health_every_s=60.0, restart_wait_s=0)
both_modes = pytest.mark.parametrize("mode", ["pull", "push"])


def another(worker: Worker, mode: str) -> Worker:
    """Another process under the same engine id."""
    made = (a_prefill if worker.role == "prefill" else a_decode)(worker.name, mode=mode)
    assert made.info is not None
    made.info["incarnation"] = "i2"
    return made


async def view(url: str, role: str) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/kvferry") as response:
        return [worker for worker in (await response.json())["workers"] if worker["wanted"] == role]


@both_modes
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_of_two_engines_with_one_id_only_one_is_used(mode: str, role: str) -> None:
    p, d = a_prefill(mode=mode), a_decode(mode=mode)
    first = p if role == "prefill" else d
    second = another(first, mode)
    async with fleet(p, d, second, settings=FAST) as (url, _):
        for _ in range(6):
            response, _raw = await post(url, BODY)
            assert (response.status, response.headers["x-kvferry-route"]) == (200, mode)
        used, refused = sorted(await view(url, role), key=lambda worker: not worker["usable"])
        assert (used["usable"], refused["usable"]) == (True, False)
        assert f"two engines have the id '{first.name}'" in refused["why"]
        assert used["url"] in refused["why"]
        assert refused["url"] in refused["why"]
        assert "--engine-id" in refused["why"]
    assert sorted((len(first.asked), len(second.asked))) == [0, 6]


@both_modes
async def test_the_later_one_is_used_at_once_when_the_first_has_gone(mode: str) -> None:
    """A restart at another address: only the next health check, a minute away, would notice the end of the old one."""
    p, d = a_prefill(mode=mode), a_decode(mode=mode)
    second = another(p, mode)
    async with fleet(p, d, settings=RARELY) as (url, router):
        await p.stop()
        await second.start()
        router.fleet.add(second.url, Role.PREFILL, Source.REGISTERED)
        await until_async(lambda: router.fleet.prefill[1].unavailable_reason() is None)
        response, _raw = await post(url, BODY)
        assert (response.status, response.headers["x-kvferry-route"]) == (200, mode)
    assert len(second.asked) == 1
    await second.stop()


async def test_a_restart_at_the_same_address_is_no_conflict() -> None:
    p = a_prefill()
    async with fleet(p, a_decode(), settings=FAST) as (url, router):
        assert p.info is not None
        p.info["incarnation"] = "i2"
        await until_async(lambda: router.fleet.prefill[0].info.incarnation == "i2")  # type: ignore[union-attr]
        response, _raw = await post(url, BODY)
        assert (response.status, response.headers["x-kvferry-route"]) == (200, "pull")


async def test_one_engine_at_two_addresses_is_no_conflict() -> None:
    """The same process, known by two names of its host."""
    p0, p1 = a_prefill("same"), a_prefill("same")
    async with fleet(p0, p1, a_decode(), settings=FAST) as (url, _):
        for _ in range(4):
            await post(url, BODY)
        assert all(worker["usable"] for worker in await view(url, "prefill"))


async def test_a_refused_engine_is_used_once_it_has_an_id_of_its_own() -> None:
    p = a_prefill()
    second = another(p, "pull")
    async with fleet(p, second, a_decode(), settings=FAST) as (_, router):
        one, other = router.fleet.prefill
        assert {one.conflict is None, other.conflict is None} == {True, False}
        assert second.info is not None
        second.info |= {"engine": "p1", "incarnation": "i3"}
        await until_async(lambda: one.unusable_reason is None and other.unusable_reason is None)
