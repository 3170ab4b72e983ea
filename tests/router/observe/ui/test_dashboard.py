"""The dashboard's HTTP interface: what the page requests, from scripted workers whose clocks are far off."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvferry.router.app import Router, RouterFiles
from kvferry.router.observe.ui import handlers
from kvferry.web.listen import Listener
from kvferry.web.stages import HandoffTotals
from tests.harness.scripted_worker import FAST, fleet
from tests.harness.traced_worker import a_decode, a_prefill
from tests.harness.until import until_async


async def ask(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def complete(session: aiohttp.ClientSession, url: str, request_id: str, **more: Any) -> None:
    body = {"prompt": "hello", "max_tokens": 4, **more}
    async with session.post(url + "/v1/completions", json=body, headers={"X-Request-Id": request_id}) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.mark.parametrize(("mode", "ahead_s"), [("pull", 86_400.0), ("push", -4_000.0)])
async def test_one_time_line_joins_router_prefill_and_decode(mode: str, ahead_s: float) -> None:
    prefill = a_prefill("p0", ("queue", 0.01), ("prefill", 0.04), mode=mode, ahead_s=ahead_s)
    decode = a_decode("d0", ("handshake", 0.01), ("transfer", 0.02), ("decode", 0.03), mode=mode, ahead_s=-ahead_s)
    async with fleet(prefill, decode) as (url, _), client() as session:
        await complete(session, url, "mine")
        line = await ask(session, url + "/ui/request?id=mine")
    assert (line["request_id"], line["route"], line["status"]) == ("mine", mode, 200)
    assert (line["handed_over"], line["cached"], line["recomputed"]) == ("507", "0", "5")
    spans = {(one["lane"], one["name"]): one for one in line["spans"]}
    for lane, request, stages in (
        ("prefill", "prefill request", ("queue", "prefill")),
        ("decode", "decode request", ("handshake", "transfer", "decode")),
    ):
        asked, at_ms = spans[lane, request], 0.0
        for name in stages:
            span = spans[lane, name]
            # Clocks that differ by hours: each stage is where it was, as exactly as the exchange shows.
            assert asked["begin_ms"] <= span["begin_ms"] <= span["end_ms"] <= asked["end_ms"]
            assert span["begin_ms"] >= at_ms - 2 * span["error_ms"] - 0.01
            assert span["end_ms"] - span["begin_ms"] >= 9.0 - 2 * span["error_ms"]
            at_ms = span["end_ms"]
    # In push mode decode was asked while prefill computed; in pull mode after prefill had answered.
    overlaps = spans["decode", "decode request"]["begin_ms"] < spans["prefill", "prefill request"]["end_ms"]
    assert overlaps == (mode == "push")
    assert sum(one["ms"] for one in line["breakdown"]) == pytest.approx(line["ms"], abs=0.05)
    assert {one["engine"]: one["bytes"] for one in line["workers"]} == {"p0": 3_000_000, "d0": 3_000_000}
    assert line["silent"] == []


async def test_a_worker_that_reports_nothing_is_named_and_the_routers_own_view_remains() -> None:
    prefill, decode = a_prefill("p0", ("prefill", 0.0)), a_decode("d0", ("decode", 0.0))
    async with fleet(prefill, decode) as (url, _), client() as session:
        await complete(session, url, "mine")
        decode.reports.clear()
        line = await ask(session, url + "/ui/request?id=mine")
    assert line["silent"] == ["d0"]
    assert "decode request" in {one["name"] for one in line["spans"]}


async def test_the_state_has_the_matrix_open_requests_and_recent_ones() -> None:
    hold = asyncio.Event()
    fits, other = a_prefill("p0", ("prefill", 0.0)), a_prefill("p1", ("prefill", 0.0), mode="push")
    decode = a_decode("d0", ("decode", 0.0), hold=hold, totals={"p0": HandoffTotals(3, 0, 6_000_000, 0.003)})
    async with fleet(fits, other, decode) as (url, _), client() as session:
        await complete(session, url, "whole")
        streaming = asyncio.create_task(complete(session, url, "open", stream=True))
        async with asyncio.timeout(10), session.get(url + "/ui/events") as events:
            assert events.content_type == "text/event-stream"
            while True:  # the stream is live: it shows what happens while it is open
                now = json.loads((await events.content.readuntil(b"\n\n")).removeprefix(b"data: "))
                pair = next(one for one in now["pairs"] if one["prefill"] == "p0")
                if [one["stage"] for one in now["open"]] == ["streaming"] and pair["bytes"]:
                    break
        hold.set()
        await streaming
    assert [one["request_id"] for one in now["open"]] == ["open"]
    assert [(one["request_id"], one["status"]) for one in now["recent"]] == [("whole", 200)]
    assert (pair["why_not"], pair["bytes"], pair["bytes_per_s"]) == (None, 6_000_000, 2e9)
    refused = next(one for one in now["pairs"] if one["prefill"] == "p1")
    assert "transfer mode" in refused["why_not"]
    assert "hello" not in json.dumps(now), "no prompt is ever shown"


async def test_an_unknown_request_is_404_and_an_invalid_number_no_error() -> None:
    async with fleet(a_decode("d0")) as (url, _), client() as session:
        for query in ("id=nobody", "number=99", "number=" + "9" * 40, "number=-1", ""):
            async with session.get(f"{url}/ui/request?{query}") as answer:
                assert answer.status == 404
                assert (await answer.json())["error"]["code"] == "request_not_found"


async def test_workers_are_asked_only_while_a_dashboard_is_open() -> None:
    decode = a_decode("d0", ("decode", 0.0))
    async with fleet(decode) as (url, router), client() as session:
        await complete(session, url, "r")
        assert decode.num_traces == 0
        await ask(session, url + "/ui/state")
        await until_async(lambda: decode.num_traces > 0, "the worker is asked for its traces", within_s=5.0)
        for _ in range(20):
            await ask(session, url + "/ui/state")
        assert decode.num_traces <= 2  # every two seconds, however many dashboards are open
        assert router.timelines.num_ended == 1


async def test_too_many_dashboards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_MAX_WATCHERS", 1)
    async with fleet(a_decode("d0")) as (url, _), client() as session:
        async with session.get(url + "/ui/events") as first:
            await first.content.readuntil(b"\n\n")
            async with session.get(url + "/ui/events") as second:
                assert second.status == 503
                assert (await second.json())["error"]["code"] == "too_many_dashboards"
        async with asyncio.timeout(10):  # one that closed makes room
            while True:
                async with session.get(url + "/ui/events") as third:
                    if third.status == 200:
                        break


async def test_the_page_needs_no_key_and_its_requests_do(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-a-client\n")
    decode = a_decode("d0")
    await decode.start()
    router = Router([], [decode.url], FAST, files=RouterFiles(api_keys=str(keys)))
    listener = Listener(router.app, "127.0.0.1", 0, shutdown_s=0.2)
    await listener.start()
    try:
        async with client() as session:
            for path in ("/ui", "/ui/app.js", "/ui/charts.js", "/ui/style.css"):
                async with session.get(listener.url + path) as answer:
                    assert answer.status == 200
                    policy = answer.headers["Content-Security-Policy"]
                    assert "default-src 'none'" in policy
                    assert "unsafe" not in policy
            for path in ("/ui/state", "/ui/events", "/ui/request?id=x"):
                async with session.get(listener.url + path) as answer:
                    assert answer.status == 401
            headers = {"Authorization": "Bearer a-key-of-a-client"}
            async with session.get(listener.url + "/ui/state", headers=headers) as answer:
                assert answer.status == 200
    finally:
        await listener.stop()
        await decode.stop()


def test_nothing_of_the_page_is_loaded_from_elsewhere() -> None:
    assets = Path(handlers.__file__).parent / "assets"
    for name in ("index.html", "app.js", "charts.js", "style.css"):
        text = (assets / name).read_text().replace("http://www.w3.org/2000/svg", "")
        text = text.replace("http%3A", "")
        assert not [word for word in ("http://", "https://", "@import") if word in text], name
    assert "innerHTML" not in (assets / "app.js").read_text(), "a worker's words must never become HTML"


async def test_an_open_dashboard_does_not_hold_up_the_routers_end() -> None:
    decode = a_decode("d0")
    await decode.start()
    listener = Listener(Router([], [decode.url], FAST).app, "127.0.0.1", 0, shutdown_s=60.0)
    await listener.start()
    async with client() as session, session.get(listener.url + "/ui/events") as events:
        await events.content.readuntil(b"\n\n")
        async with asyncio.timeout(20):
            await listener.stop()
        await events.content.read()  # the stream ended in order
    await decode.stop()


async def test_the_root_leads_to_the_page_and_an_unknown_path_names_it() -> None:
    async with fleet(a_decode("d0")) as (url, _), client() as session:
        async with session.get(url + "/", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (302, "/ui")
        async with session.get(url + "/dashboard") as answer:
            assert answer.status == 404
            assert "/metrics, /ui." in (await answer.json())["error"]["message"]


async def test_a_pair_shows_in_what_it_differs() -> None:
    prefill, decode = a_prefill("p0", mode="push"), a_decode("d0", mode="pull")
    async with fleet(prefill, decode) as (url, _), client() as session:
        query = {"prefill": prefill.url, "decode": decode.url}
        async with session.get(url + "/ui/pair", params=query) as answer:
            [row] = (await answer.json())["differences"]
        assert (row["fact"], row["class"], row["prefill"], row["decode"]) == (
            "transfer mode", "must match", "push", "pull",
        )  # fmt: skip
        async with session.get(url + "/ui/pair", params={**query, "decode": "http://nowhere"}) as answer:
            assert (await answer.json())["error"]["code"] == "pair_not_found"
