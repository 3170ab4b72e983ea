"""In push both requests leave within a millisecond of each other; in pull never (R16)."""

import asyncio
from collections.abc import Mapping

import pytest

from kvferry.router.observe.observer import Field
from tests.harness.scripted_vllm import VllmServer
from tests.harness.scripted_worker import Worker, a_decode, a_prefill, fleet
from tests.router.test_dispatch import BODY, post

DISPATCHES = 40
ROUNDS = 5
"""A busy machine may be slow at times, but it is never fast by chance."""
WITHIN_S = 0.001


class Log:
    """An Observer that records what was sent when."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_event(self, dispatch: int, name: str, at_s: float, fields: Mapping[str, Field]) -> None:
        if name == "arrived":
            self.seen.append({})
        self.seen[-1].setdefault(name, at_s)

    def worker_headers(self, dispatch: int, stage: str) -> Mapping[str, str]:
        return {"traceparent": f"00-{dispatch:032x}-{len(stage):016x}-01"}


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def a_pair(kind: str) -> tuple[Worker | VllmServer, Worker | VllmServer]:
    if kind == "vllm":
        p = VllmServer("p", "prefill", "push")
        return p, VllmServer("d", "decode", "push", partner=p)
    return a_prefill(mode="push"), a_decode(mode="push")


@pytest.mark.parametrize("kind", ["kvferry", "vllm"])
async def test_push_leaves_for_both_within_a_millisecond(kind: str) -> None:  # R16
    p, d = a_pair(kind)
    log, seen = Log(), []
    async with fleet(p, d) as (url, router):
        router.observers.add(log)
        await post(url, BODY)  # a vLLM server is learned, and connections are opened
        for _ in range(ROUNDS):
            del log.seen[:], p.asked[:], d.asked[:]
            for _ in range(DISPATCHES):
                response, _raw = await post(url, BODY)
                assert response.headers["x-kvferry-route"] == "push"
            left = [abs(one["decode.sent"] - one["prefill.sent"]) for one in log.seen]
            came = [abs(to_d.at_s - to_p.at_s) for to_p, to_d in zip(p.asked, d.asked, strict=True)]
            seen.append((median(left), median(came)))
            if max(seen[-1]) < WITHIN_S:
                break
    assert min(max(one) for one in seen) < WITHIN_S, seen
    # In none of them does either wait for the other: prefill has not answered when decode is asked.
    assert all(one["decode.sent"] < one["prefill.answered"] for one in log.seen if "prefill.answered" in one)
    headers = {asked.headers["traceparent"][-4:-3] for asked in (*p.asked, *d.asked)}
    assert headers == {"7", "6"}  # an observer's headers: one per stage


async def test_pull_asks_decode_after_prefill_has_answered_every_time() -> None:  # R16
    log = Log()
    async with fleet(a_prefill(), a_decode()) as (url, router):
        router.observers.add(log)
        await asyncio.gather(*(post(url, BODY) for _ in range(3)))
        log.seen.clear()
        for _ in range(DISPATCHES):
            await post(url, BODY)
    order = ["arrived", "prefill.sent", "prefill.answered", "decode.sent", "decode.began", "first_byte", "ended"]
    for one in log.seen:
        assert [name for name in one if name in order] == order
        assert sorted(one.values()) == list(one.values())


async def test_an_observer_that_fails_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def on_event(self, dispatch: int, name: str, at_s: float, fields: Mapping[str, Field]) -> None:
            raise RuntimeError("on_event is broken")

        def worker_headers(self, dispatch: int, stage: str) -> Mapping[str, str]:
            raise RuntimeError("worker_headers is broken")

    async with fleet(a_prefill(), a_decode()) as (url, router):
        router.observers.add(Broken())
        response, _ = await post(url, BODY)
    assert response.status == 200
    assert "on_event is broken" in caplog.text
    assert "worker_headers is broken" in caplog.text
