"""In front of stock vLLM servers: mode and address are learned from prefill's parameters, never guessed (R15, R16)."""

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest

from kvferry.router.fleet.probes import metrics_of_vllm
from kvferry.settings import TransferMode
from tests.harness.scripted_vllm import VllmServer
from tests.harness.scripted_worker import a_decode, a_prefill, fleet
from tests.harness.until import until_async
from tests.router.test_dispatch import BODY, post


def a_pair(mode: str) -> tuple[VllmServer, VllmServer]:
    p = VllmServer("engine-p", "prefill", mode)
    return p, VllmServer("engine-d", "decode", mode, partner=p)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_pull_copies_the_parameters_byte_for_byte(path: str) -> None:  # R15 R16
    p, d = a_pair("pull")
    async with fleet(p, d) as (url, router):
        for _ in range(2):
            response, _raw = await post(url, BODY, path)
            assert (response.status, response.headers["x-kvferry-route"]) == (200, "pull")
        assert router.fleet.prefill[0].mode is TransferMode.PULL
    outcome = p.asked[0].body["kv_transfer_params"]
    assert (outcome["do_remote_decode"], outcome["do_remote_prefill"], outcome["remote_engine_id"]) == (
        True,
        False,
        None,
    )
    assert d.asked[0].body["kv_transfer_params"]["remote_block_ids"] == [[1, 2]]
    assert [len(p.asked), len(d.asked)] == [2, 2]
    assert response.headers["x-kvferry-prefill"] == "engine-p"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_push_is_learned_from_the_first_answer_and_then_goes_to_both_at_once(path: str) -> None:  # R16 R17
    p, d = a_pair("push")
    async with fleet(p, d) as (url, router):
        mode_at_first = router.fleet.prefill[0].mode
        assert mode_at_first is None  # nothing in its description shows it
        first, _ = await post(url, BODY, path, headers={"X-Request-Id": "r1"})
        assert (first.status, first.headers["x-kvferry-route"]) == (200, "pull")  # P then D, which works with both
        assert router.fleet.prefill[0].mode is TransferMode.PUSH
        second, _ = await post(url, BODY, path, headers={"X-Request-Id": "r1"})
        _third, _ = await post(url, BODY, path, headers={"X-Request-Id": "r1"})
        assert (second.status, second.headers["x-kvferry-route"]) == (200, "push")
        assert second.headers["X-Request-Id"] == "r1"
    to_p, to_d = p.asked[1], d.asked[1]
    params = to_d.body["kv_transfer_params"]
    both = to_d.headers["x-request-id"]
    assert both == to_p.headers["x-request-id"]
    assert both.startswith("r1-")
    assert both != d.asked[2].headers["x-request-id"], "a client may send an id again, and the two match by it"
    expected: dict[str, Any] = {
        "do_remote_prefill": True, "remote_engine_id": "engine-p", "remote_host": "10.0.0.9", "remote_port": 5600,
        "tp_size": 2, "pp_size": 3, "remote_request_id": f"chatcmpl-{both}" if "chat" in path else f"cmpl-{both}-0",
    }  # fmt: skip
    assert {name: params[name] for name in expected} == expected


async def test_a_restart_is_learned() -> None:
    p, d = a_pair("push")
    async with fleet(p, d) as (url, router):
        await post(url, BODY)
        p.name, p.started = "engine-new", 2000.0
        await until_async(lambda: router.fleet.prefill[0].mode is None)
        response, _ = await post(url, BODY)
        assert (response.status, response.headers["x-kvferry-route"]) == (200, "pull")
        response, _ = await post(url, BODY)
        assert response.headers["x-kvferry-route"] == "push"


async def test_an_unnoticed_restart_does_not_leave_decode_waiting() -> None:
    p, d = a_pair("push")
    async with fleet(p, d) as (url, _):
        await post(url, BODY)
        p.name = "engine-new"  # the same start time: only its parameters show it
        d.partner = p
        response, _ = await asyncio.wait_for(post(url, BODY), 5)
    assert response.status == 200


async def test_the_view_of_a_vllm_server() -> None:
    p, d = a_pair("pull")
    d.running, d.waiting, d.usage = 3, 1, 0.5
    async with fleet(p, d) as (url, router), aiohttp.ClientSession() as session:
        view = await (await session.get(f"{url}/v1/kvferry")).json()
        worker = router.fleet.decode[0]
        assert (worker.load, worker.free_blocks) == (4, 50)
    worker = view["workers"][1]
    assert (worker["kind"], worker["version"], worker["model"], worker["mode"]) == ("vllm", "0.32.0", "tiny", None)


async def test_other_versions_and_other_engines_are_not_paired() -> None:
    p, d = a_pair("pull")
    d.version = "0.31.0"
    async with fleet(p, d) as (url, _):
        response, _ = await post(url, BODY)
    assert response.headers["x-kvferry-route"] == "alone"
    assert "vLLM version" in response.headers["x-kvferry-why"]
    assert "'0.32.0'" in response.headers["x-kvferry-why"]

    async with fleet(VllmServer("p", "prefill"), a_decode()) as (url, _):
        response, _ = await post(url, BODY)
    assert response.headers["x-kvferry-route"] == "alone"
    assert "pair servers of one kind" in response.headers["x-kvferry-why"]


async def outcomes(session: aiohttp.ClientSession, url: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns the pair's counters, from /metrics and from the fleet's view."""
    text = await (await session.get(f"{url}/metrics")).text()
    lines = [line for line in text.splitlines() if line.startswith("kvferry_router_pair_handoffs_total{")]
    counted = {line.partition('outcome="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}
    (pair,) = (await (await session.get(f"{url}/v1/kvferry")).json())["pairs"]
    return counted, pair


async def test_what_a_vllm_server_does_not_say_is_unknown() -> None:
    p, d = a_pair("pull")
    async with fleet(p, d) as (url, router), aiohttp.ClientSession() as session:
        for _ in range(3):
            await post(url, BODY)
        counted, pair = await outcomes(session, url)
        assert counted == {"unknown": 3.0}, "neither landed nor failed"
        assert (pair["unknown"], pair["landed"], pair["failed"]) == (3, 0, 0)
        assert router.context.alarm.share(time.monotonic()) == 0.0


async def test_a_kvferry_worker_says_what_has_landed() -> None:
    async with fleet(a_prefill(), a_decode()) as (url, _), aiohttp.ClientSession() as session:
        await post(url, BODY)
        counted, pair = await outcomes(session, url)
    assert counted == {"landed": 1.0}
    assert (pair["unknown"], pair["landed"]) == (0, 1)


async def test_the_alarm_counts_handoffs_that_fail_on_a_vllm_server_with_our_connector() -> None:
    p, d = a_pair("pull")
    d.landed, d.failed = 7, 5  # before the router has known it
    async with fleet(p, d) as (url, router), aiohttp.ClientSession() as session:
        alarm = router.context.alarm
        await until_async(lambda: router.fleet.decode[0].info is not None)
        assert not alarm.rings(time.monotonic())
        d.failed += 3
        await until_async(lambda: alarm.rings(time.monotonic()), "the alarm rings")
        assert "hand-offs fail on" in alarm.last_reason
        assert d.url in alarm.last_reason
        text = await (await session.get(f"{url}/metrics")).text()
        assert "kvferry_router_decode_only_alarm 1.0" in text
        d.landed += 997
        await until_async(lambda: not alarm.rings(time.monotonic()), "three of a thousand are few")


async def test_a_restart_of_a_vllm_server_is_no_failure() -> None:
    p, d = a_pair("pull")
    d.landed, d.failed = 0, 0
    async with fleet(p, d) as (_, router):
        await until_async(lambda: router.fleet.decode[0].info is not None)
        d.failed, d.started = 9, 2000.0
        await until_async(lambda: (info := router.fleet.decode[0].info) and info.incarnation == "2000.0")
        assert router.context.alarm.share(time.monotonic()) == 0.0


async def test_several_choices_are_handed_over_to_a_vllm_server_with_our_connector() -> None:
    p, d = a_pair("pull")
    d.landed = 0
    async with fleet(p, d) as (url, router):
        await until_async(lambda: router.fleet.decode[0].shares_handoffs)
        response, _ = await post(url, {**BODY, "n": 2})
    assert response.headers["x-kvferry-route"] == "pull"
    assert p.asked[0].body.get("n", 1) == 1
    assert d.asked[0].body["n"] == 2


async def test_a_server_with_two_names_gets_the_requests_for_both() -> None:
    p, d = a_pair("pull")
    other = VllmServer("engine-e", "decode")
    p.models = d.models = ("tiny", "tiny-adapter")
    async with fleet(p, d, other) as (url, router), aiohttp.ClientSession() as session:
        await until_async(lambda: all(worker.info is not None for worker in router.fleet.workers))
        for _ in range(4):
            response, _raw = await post(url, {**BODY, "model": "tiny-adapter"})
            assert response.status == 200
        models = await (await session.get(f"{url}/v1/models")).json()
    assert (len(d.asked), len(other.asked)) == (4, 0)
    assert [model["id"] for model in models["data"]] == ["tiny", "tiny-adapter"]


async def test_several_choices_are_not_handed_over_to_vllm() -> None:
    p, d = a_pair("pull")
    async with fleet(p, d) as (url, _):
        response, _ = await post(url, {**BODY, "n": 2})
    assert p.asked == []
    assert response.headers["x-kvferry-route"] == "local"
    assert "kv_transfer_params" not in d.asked[0].body


async def test_a_mixed_fleet_pairs_each_kind_with_its_own() -> None:
    ours = [a_prefill("p0"), a_decode("d0")]
    theirs = a_pair("pull")
    async with fleet(*ours, *theirs) as (url, _):
        pairs = set()
        for _ in range(8):
            response, _raw = await post(url, BODY)
            pairs.add((response.headers["x-kvferry-prefill"], response.headers["x-kvferry-decode"][:4]))
            assert response.headers["x-kvferry-route"] == "pull"
    assert pairs == {("p0", "d0"), ("engine-p", "vllm")}


async def test_prefills_own_token_is_not_the_answer_for_vllm() -> None:
    """For some models it leaves the prompt's end to decode, so its token comes from a shortened prompt."""
    p, d = a_pair("pull")
    p.finish = "stop"
    async with fleet(p, d) as (url, _):
        response, _ = await post(url, BODY)
    assert response.headers["x-kvferry-route"] == "pull"
    assert len(d.asked) == 1


async def test_if_vllm_gives_no_reason_the_client_learns_where_to_find_it() -> None:
    p, d = a_pair("pull")
    async with fleet(p, d) as (url, _):
        for text, more in (("Internal server error", "its log does"), ("no room", "")):
            d.fails = text
            response, raw = await post(url, BODY)
            assert response.status == 502
            message = json.loads(raw)["error"]["message"]
            assert f"answered 500: {text}" in message
            assert ("its log does" in message) is bool(more)


def test_metrics_of_vllm_are_read() -> None:
    text = b"""vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 3.0
vllm:kv_cache_usage_perc{engine="0"} NaN
other 1
vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0
"""
    assert metrics_of_vllm(text) == {"running": 5.0, "block_size": 16.0}
