"""What a client sees when something is missing, dies, or is wrong: real processes, real NIXL, both modes.

Every test ends with every block free and every process well (fixture `healed`); the fleet ends with nothing left.
"""

import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.harness.client import Answer, Stream, complete, metrics, post
from tests.harness.fleet import Fleet, Process
from tests.harness.tiny_model import make_tiny_model
from tests.harness.until import until

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(180)]

LEASE_S, QUARANTINE_S = 2.0, 0.5
FLAGS = (
    "--dtype", "float32", "--num-blocks", "600", "--max-batch-tokens", "32", "--threads", "1",
    "--lease-ttl", str(LEASE_S), "--lease-renew-every", "0.3", "--quarantine", str(QUARANTINE_S),
    "--transfer-deadline", "8", "--handshake-timeout", "1",
)  # fmt: skip
LONG = 3000
"""A number of prompt tokens that takes prefill a while: about a hundred steps."""
FREE_S = 12.0
"""The deadline, the lease and the quarantine, and some time for a busy machine."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a model with a context of 4,096."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", max_position_embeddings=4096)


@pytest.fixture(scope="module", params=["pull", "push"])
def fleet(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Yields p, d and a router. `strict` is a decode worker whose policy is to fail; it gives reference answers."""
    with Fleet(tmp_path_factory.mktemp(request.param), *FLAGS, model=str(tiny), mode=request.param) as fleet:
        fleet.worker("p", role="prefill")
        fleet.worker("d", role="decode")
        fleet.worker("strict", "--on-failure", "fail", role="decode")
        for worker in fleet.workers.values():
            worker.wait_ready()
        fleet.route("--restart-wait", "0", prefill=[fleet.workers["p"]], decode=[fleet.workers["d"]])
        yield fleet


@pytest.fixture(autouse=True)
def healed(fleet: Fleet) -> Iterator[None]:
    """After each test: restarts what was killed, waits until the router knows it, and until every block is free."""
    yield
    for worker in fleet.workers.values():
        worker.signal(signal.SIGCONT)
        if not worker.running:
            worker.restart()
    _wait_usable(fleet)
    fleet.wait_blocks_free(FREE_S)


def _wait_usable(fleet: Fleet) -> None:
    router = fleet.routers["router"]

    def usable() -> bool:
        view = router.describe()
        known = {worker["url"]: worker["incarnation"] for worker in view.get("workers", []) if worker["usable"]}
        return all(known.get(w.url) == w.describe().get("incarnation") for n, w in fleet.workers.items() if n in "pd")

    until(usable, "the router uses both workers", within_s=15)


_dice = random.Random(20)


def a_prompt(length: int) -> list[int]:
    """Returns a new prompt each time, so that no cache has it."""
    return [_dice.randint(3, 263) for _ in range(length)]


def right(fleet: Fleet, prompt: list[int], max_tokens: int = 8) -> list[int]:
    """Returns the answer of one engine alone."""
    answer = complete(fleet.workers["strict"].url, prompt, max_tokens=max_tokens, ignore_eos=True)
    assert answer.whole, answer
    return answer.token_ids


def ask(fleet: Fleet, prompt: list[int], **fields: Any) -> Answer:
    """Sends a request through the router."""
    return complete(fleet.url, prompt, ignore_eos=True, **fields)


def prefill(fleet: Fleet, prompt: list[int], transfer: str) -> dict[str, Any]:
    """Does what a router does first in pull mode: returns the parameters for decode."""
    answer = complete(
        fleet.workers["p"].url, prompt, max_tokens=1, ignore_eos=True,
        kv_transfer_params={"do_remote_decode": True, "transfer_id": transfer},
    )  # fmt: skip
    assert answer.whole, answer
    assert answer.params is not None, answer
    return answer.params


def decode(worker: Process, prompt: list[int], params: object, **fields: Any) -> Answer:
    """Does what a router does next: sends the request to decode."""
    return complete(worker.url, prompt, ignore_eos=True, kv_transfer_params=params, **fields)


def assert_recomputed(answer: Answer, expected: list[int], num_prompt: int, *why: str) -> None:
    """Checks that the client got the right tokens, and an account that says why nothing was handed over."""
    assert answer.whole, answer
    assert answer.token_ids == expected
    account = answer.kvferry
    # A first attempt at the same decode worker may have computed part of it before the router retried there.
    assert (account["handed_over"], account["cached"] + account["recomputed"]) == (0, num_prompt), account
    assert account["recomputed"] > 0, account
    for part in why:
        assert part in answer.kvferry["why"], answer.kvferry


def assert_error(answer: Answer, status: int, *parts: str, code: str | None = None) -> None:
    """Checks for an OpenAI error body with this status, and a message with these parts."""
    assert answer.status == status, answer
    assert answer.clear_error, answer
    assert answer.error is not None
    assert set(answer.error) == {"message", "type", "param", "code"}, answer.error
    for part in parts:
        assert part in answer.error["message"], answer.error
    if code is not None:
        assert answer.error["code"] == code, answer.error


def assert_hands_over(fleet: Fleet) -> None:
    """Checks that the pair works: new prompts are answered correctly, and soon handed over completely.

    Not at once: a decode worker that has just failed to reach a prefill worker asks again after a second.
    """

    def handed_over() -> bool:
        prompt = a_prompt(100)
        answer = ask(fleet, prompt)
        assert answer.whole, answer
        assert answer.token_ids == right(fleet, prompt)
        assert answer.kvferry["why"] or answer.kvferry["handed_over"] == 100, answer.kvferry
        return not answer.kvferry["why"]

    until(handed_over, "a prompt is handed over", within_s=6, every_s=0.5)


def in_background(work: Callable[[], Answer]) -> Future[Answer]:
    """Starts the process now."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def wait_sent(fleet: Fleet, engine: str, result: Future[Answer]) -> None:
    """Waits until the router waits for that worker, or until the answer is there if it need not wait."""

    def sent() -> bool:
        workers = fleet.routers["router"].describe()["workers"]
        return result.done() or any(w["open_requests"] for w in workers if w["engine"] == engine)

    until(sent, f"the router waits for {engine}")


def wait_steps(worker: Process, more_than: float) -> None:
    """Waits until the worker computes."""
    until(
        lambda: metrics(worker.url).get("kvferry_engine_steps", 0) > more_than,
        f"{worker.name} computes",
        within_s=30,
        every_s=0.002,
    )


def steps(worker: Process) -> float:
    """Returns the number of steps since the start."""
    return metrics(worker.url)["kvferry_engine_steps"]


# ---- prefill


def test_prefill_is_not_running(fleet: Fleet) -> None:
    prompt = a_prompt(70)
    fleet.workers["p"].kill()
    for streamed in (False, True):
        answer = ask(fleet, prompt, stream=streamed)
        if not streamed:
            assert_recomputed(answer, right(fleet, prompt), 70, "p", fleet.workers["p"].url)
        assert answer.whole, answer
        assert answer.token_ids == right(fleet, prompt)


def test_prefill_dies_before_it_computes(fleet: Fleet) -> None:
    """It has accepted the connection, and does not answer any more."""
    prompt = a_prompt(70)
    fleet.workers["p"].signal(signal.SIGSTOP)
    result = in_background(lambda: ask(fleet, prompt))
    wait_sent(fleet, "p", result)
    fleet.workers["p"].kill()
    assert_recomputed(result.result(60), right(fleet, prompt), 70, "p" if fleet.mode == "push" else "broke the")


def test_prefill_dies_while_it_computes(fleet: Fleet) -> None:
    prompt, p = a_prompt(LONG), fleet.workers["p"]
    before = steps(p)
    result = in_background(lambda: ask(fleet, prompt))
    wait_steps(p, before + 5)
    p.kill()
    assert_recomputed(result.result(60), right(fleet, prompt), LONG, "p")


def test_prefill_dies_after_it_has_computed(fleet: Fleet) -> None:
    """Decode asks for the KV, and prefill is gone; decode may know that worker, or not."""
    for known in (True, False):
        if known:
            assert_hands_over(fleet)
        elif fleet.workers["d"].running:
            fleet.workers["d"].restart()
        prompt = a_prompt(50)
        params = prefill(fleet, prompt, f"after-{fleet.mode}-{known}")
        fleet.workers["p"].kill()
        answer = decode(fleet.workers["d"], prompt, params)
        assert_recomputed(answer, right(fleet, prompt), 50)
        reason = answer.kvferry["why"]  # if decode did not know it, the router may have made them meet since then
        # Whichever comes first: the transport sees the end of the connection, or a whole lease is silent.
        gone = ("prefill rank 0 is gone", "prefill rank 0 gave no sign of life")
        assert any(text in reason for text in gone) or (not known and params["remote_host"] in reason), reason
        fleet.workers["p"].restart()
        _wait_usable(fleet)


def test_policy_fail_gives_the_reason(fleet: Fleet) -> None:
    prompt = a_prompt(50)
    params = prefill(fleet, prompt, f"fail-{fleet.mode}")
    fleet.workers["p"].kill()
    for streamed in (False, True):
        answer = decode(fleet.workers["strict"], prompt, params, stream=streamed)
        assert_error(answer, 500, "p")
        assert answer.error is not None
        assert "on_failure" in answer.error["message"] or "gone" in answer.error["message"], answer.error


def test_a_prefill_that_restarts_at_its_address_works_again(fleet: Fleet) -> None:
    assert_hands_over(fleet)
    for _ in range(2):
        fleet.workers["p"].restart()
        _wait_usable(fleet)
        assert_hands_over(fleet)


def test_params_of_a_prefill_that_has_restarted_since(fleet: Fleet) -> None:
    """The new incarnation does not have that KV, so it must not be asked for it."""
    prompt = a_prompt(60)
    params = prefill(fleet, prompt, f"old-{fleet.mode}")
    fleet.workers["p"].restart()
    params |= {"remote_port": fleet.workers["p"].describe()["side_channel"]["port"]}
    answer = decode(fleet.workers["d"], prompt, params)
    assert_recomputed(answer, right(fleet, prompt), 60, params["remote_incarnation"])


# ---- decode


def test_decode_is_not_running(fleet: Fleet) -> None:
    fleet.workers["d"].kill()
    for streamed in (False, True):
        answer = ask(fleet, a_prompt(40), stream=streamed)
        assert answer.status in (502, 503), answer
        assert_error(answer, answer.status, "d", fleet.workers["d"].url)


def test_decode_dies_in_the_middle_of_its_answer(fleet: Fleet) -> None:
    """Text that was sent cannot be taken back: the stream reports that it is incomplete, and never ends well."""
    stream = Stream(
        fleet.url,
        {"prompt": a_prompt(40), "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "return_token_ids": True},
    )
    for number, _ in enumerate(stream.events()):
        if number == 3:
            fleet.workers["d"].kill()
    answer = stream.answer
    assert (answer.status, answer.done, answer.finish_reason) == (200, False, None), answer
    assert answer.error is not None, answer
    assert "incomplete" in answer.error["message"], answer


def test_decode_dies_before_it_has_answered(fleet: Fleet) -> None:
    prompt = a_prompt(40)
    fleet.workers["d"].signal(signal.SIGSTOP)
    result = in_background(lambda: ask(fleet, prompt))
    wait_sent(fleet, "d", result)
    fleet.workers["d"].kill()
    answer = result.result(60)
    assert answer.status in (502, 503), answer
    assert_error(answer, answer.status, "d")


def test_a_decode_that_restarts_at_its_address_works_again(fleet: Fleet) -> None:
    assert_hands_over(fleet)
    for _ in range(2):
        fleet.workers["d"].restart()
        _wait_usable(fleet)
        assert_hands_over(fleet)


# ---- the client


def test_a_client_that_hangs_up_while_decode_answers(fleet: Fleet) -> None:
    stream = Stream(fleet.url, {"prompt": a_prompt(80), "max_tokens": 3900, "temperature": 0, "ignore_eos": True})
    for number, _ in enumerate(stream.events()):
        if number == 2:
            stream.hang_up()
            break
    fleet.wait_blocks_free(5.0)


def test_a_client_that_hangs_up_while_prefill_computes(fleet: Fleet) -> None:
    p = fleet.workers["p"]
    before = steps(p)
    result = in_background(lambda: complete(fleet.url, a_prompt(LONG), timeout_s=0.3, ignore_eos=True))
    wait_steps(p, before)
    assert result.result(60).broken
    fleet.wait_blocks_free(FREE_S)


def test_a_client_that_hangs_up_while_decode_waits_for_kv(fleet: Fleet) -> None:
    """Prefill is suspended, so that decode waits; both forget the request."""
    if fleet.mode == "pull":
        params = prefill(fleet, prompt := a_prompt(60), "hang-up")
        fleet.workers["p"].signal(signal.SIGSTOP)
        answer = decode(fleet.workers["d"], prompt, params, timeout_s=1.0)
    else:
        fleet.workers["p"].signal(signal.SIGSTOP)
        answer = ask(fleet, a_prompt(60), timeout_s=1.0)
    fleet.workers["p"].signal(signal.SIGCONT)
    assert answer.broken, answer
    fleet.wait_blocks_free(FREE_S)
    assert_hands_over(fleet)


# ---- wrong requests


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remote_port": "seven"}, "remote_port"),
        ({"remote_block_ids": 7}, "remote_block_ids"),
        ({"transfer_mode": "teleport"}, "transfer_mode"),
        ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
        ({"remote_num_tokens": 1.5}, "remote_num_tokens"),
    ],
)
def test_params_of_a_wrong_type_are_refused(fleet: Fleet, change: dict[str, Any], message: str) -> None:
    params = {"do_remote_prefill": True, "transfer_id": "x", **change}
    assert_error(decode(fleet.workers["d"], a_prompt(20), params), 400, "kv_transfer_params", message)


def test_params_that_are_no_object_are_refused(fleet: Fleet) -> None:
    assert_error(decode(fleet.workers["d"], a_prompt(20), [1, 2]), 400, "kv_transfer_params")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"transfer_id": None}, "kv_transfer_params lack transfer_id"),
        ({"remote_host": None, "remote_port": None}, "kv_transfer_params lack remote_host, remote_port"),
        ({"transfer_mode": "OTHER"}, "--transfer-mode"),
        ({"remote_engine_id": "nobody"}, "nobody"),
        ({"remote_engine_id": "d"}, "two engines have the id 'd'"),
        ({"remote_incarnation": "0123456789abcdef"}, "0123456789abcdef"),
        ({"remote_engine_id": "nobody-1", "remote_port": 1}, "127.0.0.1:1"),
        ({"remote_engine_id": "nobody-2", "remote_host": "no-such-host.invalid"}, "no-such-host.invalid"),
        ({"remote_num_tokens": 0}, "offered"),
        ({"remote_num_tokens": -5}, "offered"),
        ({"transfer_id": "never-offered"}, ""),
    ],
)
def test_params_that_lead_nowhere(fleet: Fleet, change: dict[str, Any], why: str) -> None:
    """The client gets the right tokens, computed by decode, with the reason; the wrong peer is not asked."""
    if change.get("transfer_mode") == "OTHER":
        change = {"transfer_mode": "push" if fleet.mode == "pull" else "pull"}
    if change == {"transfer_id": None} and fleet.mode == "push":
        why = (
            "it has not ended"  # the id is made from the request's, as for stock routers, and no prefill worker has it
        )
    prompt = a_prompt(45)
    params = prefill(fleet, prompt, f"nowhere-{random.getrandbits(40)}")
    answer = decode(fleet.workers["d"], prompt, {**params, **change, "first_token": None}, timeout_s=30)
    assert_recomputed(answer, right(fleet, prompt), 45, why)
    assert answer.kvferry["why"], answer.kvferry


def test_block_ids_and_counts_of_a_router_are_not_used(fleet: Fleet) -> None:
    """Decode asks prefill itself, so wrong numbers in between lead to no wrong token."""
    prompt = a_prompt(45)
    params = prefill(fleet, prompt, f"wrong-{fleet.mode}")
    wrong = {"remote_block_ids": [[0, -1, 10**9]], "remote_num_tokens": 10**9, "tp_size": 64, "first_token": None}
    answer = decode(fleet.workers["d"], prompt, {**params, **wrong})
    assert answer.whole, answer
    assert answer.token_ids == right(fleet, prompt)


def test_one_transfer_id_twice(fleet: Fleet) -> None:
    """The first request takes it; the second one is computed, and gives the reason."""
    prompt = a_prompt(45)
    params = prefill(fleet, prompt, f"twice-{fleet.mode}")
    first = decode(fleet.workers["d"], prompt, params)
    assert first.whole, first
    assert first.kvferry["handed_over"] == 45, first.kvferry
    second = decode(fleet.workers["strict"], prompt, params)
    assert_error(second, 500, "taken")


def test_a_prompt_that_is_too_long(fleet: Fleet) -> None:
    for url in (fleet.url, fleet.workers["p"].url, fleet.workers["d"].url):
        answer = complete(url, a_prompt(4097), max_tokens=1)
        assert_error(answer, 400, "4097", "4096", code="context_length_exceeded")


def test_bodies_that_are_no_request(fleet: Fleet) -> None:
    for raw, status in ((b"{", 400), (b"[]", 400), (b"", 400), (b'{"prompt": "x", "n": "two"}', 400)):
        answer = post(fleet.url, None, raw=raw)
        assert_error(answer, status)


# ---- time


def test_a_lease_that_ended_before_decode_came(fleet: Fleet) -> None:  # R25
    prompt = a_prompt(45)
    params = prefill(fleet, prompt, f"late-{fleet.mode}")
    until(lambda: not fleet.workers["p"].blocks_in_use(), "prefill has its blocks back", within_s=LEASE_S + 5)
    answer = decode(fleet.workers["d"], prompt, params)
    assert_recomputed(answer, right(fleet, prompt), 45, "lease")
    assert metrics(fleet.workers["p"].url)["kvferry_engine_handoff_expired_leases"] > 0


def test_a_prefill_that_hangs_in_the_middle_is_not_waited_for(fleet: Fleet) -> None:
    """SIGSTOP after it has computed: decode recomputes by its deadline at the latest; prefill resumes and is well."""
    assert_hands_over(fleet)
    prompt = a_prompt(45)
    params = prefill(fleet, prompt, f"stopped-{fleet.mode}")
    fleet.workers["p"].signal(signal.SIGSTOP)
    answer = decode(fleet.workers["d"], prompt, params, timeout_s=20)
    fleet.workers["p"].signal(signal.SIGCONT)
    assert_recomputed(answer, right(fleet, prompt), 45, "p")
