"""A router in front of real workers that registered themselves: prefixes, early handshakes, prefill's first token."""

import http.client
import json
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.harness.client import Stream, complete, get, metrics, post
from tests.harness.cores import pin
from tests.harness.fleet import Fleet, Process
from tests.harness.tiny_model import make_tiny_model
from tests.harness.until import until

FLAGS = (
    "--dtype", "float32", "--num-blocks", "400", "--threads", "1", "--lease-ttl", "3", "--lease-renew-every", "0.5",
    "--quarantine", "0.5", "--transfer-deadline", "10",
)  # fmt: skip

PAIRS = 60
"""The number of requests in the comparison of times."""

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


MODES = ["pull", "push"] if os.environ.get("CHAOS") == "full" else ["push"]
"""Yields the mode: pull is tested with a fleet of four; `make chaos` tests both here too."""


@pytest.fixture(scope="module", params=MODES)
def fleet(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Starts the router first, without any worker. Then p and d start, and register."""
    with Fleet(tmp_path_factory.mktemp("fleet"), *FLAGS, model=str(tiny), mode=str(request.param)) as fleet:
        policies = ("--prefill-policy", "prefix_aware", "--decode-policy", "prefix_aware")
        waits = ("--registration-lease", "2", "--restart-wait", "150")  # a busy machine loads torch slowly
        router = fleet.route(*waits, *policies, prefill=[], decode=[])
        p = fleet.worker("p", "--router", router.url, role="prefill")
        d = fleet.worker("d", "--router", router.url, role="decode")
        p.wait_ready()
        d.wait_ready()
        until(lambda: _usable(router) == {"p", "d"}, "both are known")
        yield fleet


def _usable(router: Process) -> set[str]:
    return {worker["engine"] for worker in get(router.url, "/v1/kvferry")["workers"] if worker["usable"]}


def a_prompt(length: int, first: int = 3) -> list[int]:
    return [first + (i * 7) % 200 for i in range(length)]


def test_registered_workers_have_met_before_the_first_request(fleet: Fleet) -> None:
    d = fleet.workers["d"]
    until(lambda: {peer["state"] for peer in d.describe()["peers"]} == {"accepted"}, "they have met")
    assert metrics(fleet.url)["kvferry_router_first_byte_seconds_count"] == 0
    answer = complete(fleet.url, prompt := a_prompt(40), max_tokens=4, ignore_eos=True)
    assert answer.kvferry["handed_over"] == len(prompt), answer
    assert answer.headers["x-kvferry-route"] == fleet.mode
    # No request waited for a handshake, which takes tens of milliseconds; the router only asked the two to meet.
    assert fleet.workers["d"].log.read_text().count("handshake asked") <= 1


def test_a_stream_begins_with_prefills_token_and_has_the_same_text(fleet: Fleet) -> None:
    prompt = a_prompt(60, 5)
    whole = complete(fleet.url, prompt, max_tokens=8, ignore_eos=True)
    body: dict[str, Any] = {
        "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0.0, "return_token_ids": True,
    }  # fmt: skip
    seen = 0
    for attempt in range(10):
        fresh = [*prompt[:-1], 3 + attempt]
        right = complete(fleet.url, fresh, max_tokens=8, ignore_eos=True)
        stream = Stream(fleet.url, {**body, "prompt": fresh})
        events = list(stream.events())
        assert stream.answer.whole, stream.answer
        assert (stream.answer.text, stream.answer.token_ids) == (right.text, right.token_ids)
        assert len([event for event in events if event["choices"]]) == 8
        assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
        seen += stream.answer.headers.get("x-kvferry-first-token") == "prefill"
    assert whole.whole
    assert seen > 0, "prefill's token stood by itself in none of ten streams"


def test_a_later_turn_that_decode_has_in_its_cache_is_not_handed_over(fleet: Fleet) -> None:
    """Decode has the first turn's prompt of 300 tokens, and the 100 of its own answer."""
    router = fleet.route("--local-below", "64", name="local-below", prefill=[fleet.workers["p"]],
                         decode=[fleet.workers["d"]])  # fmt: skip
    prompt = a_prompt(300, 9)
    first = complete(router.url, prompt, max_tokens=100, ignore_eos=True)
    assert first.headers["x-kvferry-route"] == fleet.mode, first
    second = complete(router.url, [*prompt, *first.token_ids, *a_prompt(18, 4)], max_tokens=4, ignore_eos=True)
    assert second.headers["x-kvferry-route"] == "local", second
    assert second.kvferry["cached"] >= 384


def test_the_router_learns_what_is_cached(fleet: Fleet) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 12
    answer = post(fleet.url, {"prompt": text, "max_tokens": 4, "ignore_eos": True, "temperature": 0.0})
    assert answer.whole, answer

    def both_reported() -> bool:
        return all(worker["cached_blocks"] > 3 for worker in get(fleet.url, "/v1/kvferry")["workers"])

    until(both_reported, "both tell their blocks")
    again = post(fleet.url, {"prompt": text, "max_tokens": 4, "ignore_eos": True, "temperature": 0.0})
    assert again.kvferry["cached"] > 0
    assert again.text == answer.text
    usage = post(fleet.url, {"prompt": text, "max_tokens": 4}).usage
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_worker_that_leaves_says_so_and_one_that_dies_is_forgotten(fleet: Fleet) -> None:
    p = fleet.workers["p"]
    p.kill()
    until(lambda: len(get(fleet.url, "/v1/kvferry")["workers"]) == 1, "its lease ends")
    p.start()
    p.wait_ready()
    until(lambda: _usable(fleet.routers["router"]) == {"p", "d"}, "it is known again", within_s=5.0)
    answer = complete(fleet.url, prompt := a_prompt(33, 9), max_tokens=4, ignore_eos=True)
    assert answer.whole, answer
    account = answer.kvferry  # a prompt of another test may have begun in the same way
    assert account["handed_over"] + account["cached"] == len(prompt) or account["why"], answer
    assert p.stop(30.0) == 0
    assert _usable(fleet.routers["router"]) == {"d"}
    assert get(fleet.url, "/health")["status"] == "degraded"
    p.start()
    p.wait_ready()
    until(lambda: _usable(fleet.routers["router"]) == {"p", "d"}, "it is known again", within_s=5.0)


def test_a_restart_of_the_only_decode_worker_fails_no_request(fleet: Fleet) -> None:
    """It drains, announces its end, and comes back as another process; requests that arrive in between wait."""
    d, prompt = fleet.workers["d"], a_prompt(45, 11)
    right = complete(fleet.url, prompt, max_tokens=4, ignore_eos=True)
    assert right.whole, right
    assert d.stop(30.0) == 0
    with ThreadPoolExecutor(3) as pool:
        asking = [
            pool.submit(complete, fleet.url, prompt, max_tokens=4, ignore_eos=True, stream=streamed, timeout_s=170.0)
            for streamed in (False, True, False)
        ]
        until(lambda: metrics(fleet.url)["kvferry_router_waiting"] == 3, "they wait")
        d.start()
        d.wait_ready()
        answers = [one.result() for one in asking]
    assert all(answer.whole and answer.token_ids == right.token_ids for answer in answers), answers


def _send(url: str, body: dict[str, Any]) -> http.client.HTTPConnection:
    """Sends a request; `_answered` reads its answer. Without threads, which would disturb each other."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60.0)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def _answered(connection: http.client.HTTPConnection) -> dict[str, Any]:
    response = connection.getresponse()
    body: dict[str, Any] = json.loads(response.read())
    connection.close()
    assert response.status == 200, body
    return body


@pytest.fixture
def cores_apart(fleet: Fleet) -> Iterator[None]:
    """Moves prefill to a core of its own, if there are two, so that decode and the test do not slow it down."""
    cores = sorted(os.sched_getaffinity(0))
    ours = set(cores[1:]) or set(cores)
    before = {pid: os.sched_getaffinity(pid) for pid in (fleet.workers["p"].pid, fleet.workers["d"].pid, os.getpid())}
    pin(fleet.workers["p"].pid, {cores[0]})
    for pid in (fleet.workers["d"].pid, os.getpid()):
        pin(pid, ours)
    yield
    for pid, allowed in before.items():
        pin(pid, allowed)


@pytest.mark.slow
@pytest.mark.usefixtures("cores_apart")
@pytest.mark.skipif(os.environ.get("CHAOS") != "full", reason="a comparison of times: make chaos")
def test_push_to_both_at_once_saves_the_registration(fleet: Fleet) -> None:
    """As the router dispatches, and as one that knows no push would; by the same client, without a router's hop.

    Time to decode's first token, in turns, with a pause so that nothing of the last request is left. What is saved is
    at least the registration: from the arrival on decode until prefill may write (`grant_ms`, where decode came
    second). The figures are printed (-s): medians of many, for a busy machine.
    """
    if fleet.mode != "push":
        pytest.skip("there is nothing to overlap in pull mode")
    p, d, pause = fleet.workers["p"], fleet.workers["d"], threading.Event()
    info = p.describe()
    seen: dict[str, list[float]] = defaultdict(list)
    for number in range(2 * PAIRS):
        way = ("at_once", "in_turn")[number % 2]
        prompt = [3 + number // 200, 3 + number % 200, *a_prompt(198, 3 + number % 50)]
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        ask = {**body, "kv_transfer_params": {"do_remote_decode": True, "transfer_id": f"{way}-{number}"}}
        take = {**body, "kv_transfer_params": {
            "do_remote_prefill": True, "transfer_mode": "push", "transfer_id": f"{way}-{number}",
            "remote_engine_id": "p", "remote_incarnation": info["incarnation"],
            "remote_host": info["side_channel"]["host"], "remote_port": info["side_channel"]["port"],
        }}  # fmt: skip
        began_s = time.monotonic()
        first = _send(p.url, ask)
        if way == "in_turn":
            _answered(first)
            seen["in_turn_prefill"].append(time.monotonic() - began_s)
        served = _answered(_send(d.url, take))["kvferry"]
        seen[way].append(time.monotonic() - began_s)
        if way == "at_once":
            _answered(first)
        assert served["handed_over"] == len(prompt), served
        for name in ("grant", "wait", "transfer"):
            seen[f"{way}_{name}"].append(served[f"{name}_ms"] / 1e3)
        pause.wait(0.05)
    ms = {name: round(statistics.median(times[4:]) * 1e3, 2) for name, times in sorted(seen.items())}
    saved, registration = ms["in_turn"] - ms["at_once"], ms["in_turn_grant"]
    # A median is uncertain by about 1.25 standard errors; the middle half is 1.35 deviations wide. Two medians.
    quartiles = [statistics.quantiles(seen[way][4:], n=4) for way in ("at_once", "in_turn")]
    spread = sum(((three - one) / 1.35) ** 2 for one, _, three in quartiles) ** 0.5 * 1e3
    noise = 2 * 1.25 * spread / (PAIRS - 2) ** 0.5
    print(json.dumps({**ms, "saved": round(saved, 2), "noise": round(noise, 2)}))  # noqa: T201  # for people
    assert saved > 0
    assert saved >= registration - noise, (saved, registration, noise)
