"""Issue 5, item 6: SIGTERM to a worker in use, and hand-offs that are given up. Real processes, real NIXL."""

import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.client import Stream, complete, get, post
from tests.harness.fleet import Fleet, Process
from tests.harness.tiny_model import make_tiny_model
from tests.harness.until import until

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(180)]

LEASE_S, RENEW_S = 40.0, 0.5
FLAGS = (
    "--dtype", "float32", "--num-blocks", "300", "--threads", "1",
    "--lease-ttl", str(LEASE_S), "--lease-renew-every", str(RENEW_S),
    "--drain-timeout", "100",
)  # fmt: skip
PROMPT = [3 + i % 200 for i in range(120)]
END_S = 20.0
"""Shorter than the lease, so the lease cannot be what ends it."""


@pytest.fixture(scope="module", params=["pull", "push"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")
    with Fleet(tmp_path_factory.mktemp(request.param), *FLAGS, model=str(model), mode=request.param) as fleet:
        for name, role in (("p", "prefill"), ("d", "decode")):
            fleet.worker(name, role=role)
        for worker in fleet.workers.values():
            worker.wait_ready()
        yield fleet


def prefill(p: Process, prompt: list[int], transfer: str) -> dict[str, Any]:
    answer = complete(
        p.url, prompt, max_tokens=1, ignore_eos=True,
        kv_transfer_params={"do_remote_decode": True, "transfer_id": transfer},
    )  # fmt: skip
    assert answer.params is not None, answer
    return answer.params


def test_a_hand_off_that_is_given_up_frees_its_blocks_before_the_lease_ends(fleet: Fleet) -> None:
    p, d = fleet.workers["p"], fleet.workers["d"]
    prompt = PROMPT[7:]
    params = prefill(p, prompt, "given-up")
    assert "held_blocks" in p.blocks_in_use()
    body = {"transfer_id": "given-up", "reason": "the client hung up"}
    assert json.loads(post(p.url, body, path="/v1/kvferry/release").body) == {"released": True}
    assert json.loads(post(p.url, body, path="/v1/kvferry/release").body) == {"released": False}
    until(lambda: not p.blocks_in_use(), "prefill's blocks are free", within_s=END_S)
    late = complete(d.url, prompt, ignore_eos=True, kv_transfer_params=params)
    assert late.whole, late
    assert late.kvferry["recomputed"] == len(prompt), late.kvferry
    assert "the client hung up" in late.kvferry["why"], late.kvferry


def test_prefill_serves_what_it_has_offered_and_gives_up_what_no_peer_claims(fleet: Fleet) -> None:
    p, d = fleet.workers["p"], fleet.workers["d"]
    params = prefill(p, PROMPT, "warm")
    assert complete(d.url, PROMPT, ignore_eos=True, kv_transfer_params=params).kvferry["handed_over"] == len(PROMPT)
    other = PROMPT[::-1]
    params = prefill(p, other, "claimed")
    prefill(p, PROMPT, "orphan")
    assert "held_blocks" in p.blocks_in_use()
    p.signal(signal.SIGTERM)
    until(lambda: get(p.url, "/health").get("reason") == "draining", "it drains")
    refused = complete(p.url, PROMPT)
    assert (refused.status, refused.error and refused.error["code"]) == (503, "draining")
    taken = complete(d.url, other, ignore_eos=True, kv_transfer_params=params, max_tokens=4)
    assert taken.whole, taken
    assert taken.kvferry["handed_over"] == len(other), taken.kvferry
    assert p.wait_ended(END_S) == 0, p.tail()
    assert p.logged("drained after_s=")
    assert not p.logged("drain timed out")


def test_decode_finishes_its_answer(fleet: Fleet) -> None:
    d = fleet.workers["d"]
    stream = Stream(d.url, {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "temperature": 0})
    events = stream.events()
    next(events)
    d.signal(signal.SIGTERM)
    until(lambda: get(d.url, "/health").get("reason") == "draining", "it drains")
    assert d.describe()["state"] == "draining"
    for _ in events:
        pass
    assert stream.answer.whole, stream.answer
    assert d.wait_ended(END_S) == 0, d.tail()


def test_a_second_signal_does_not_wait(fleet: Fleet) -> None:
    d = fleet.workers["d"].restart()
    stream = Stream(d.url, {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "temperature": 0})
    events = stream.events()  # it hangs up when the last reference goes
    next(events)
    began_s = time.monotonic()
    d.signal(signal.SIGTERM)
    until(lambda: get(d.url, "/health").get("reason") == "draining", "it drains")
    d.signal(signal.SIGINT)
    stream.hang_up()
    assert d.wait_ended(END_S) == 0, d.tail()
    assert time.monotonic() - began_s < END_S
    assert d.logged("stopping url=")
