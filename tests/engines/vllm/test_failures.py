"""R29: however a hand-off fails, and wherever kvferry's connector stands, its request ends: computed, or with an error.

Every policy, every place in a chain of connectors, every failure, on vLLM's own scheduler objects.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.vllm_only import VLLM_MARKS, require_vllm

require_vllm()

from vllm.v1.request import RequestStatus

from kvferry.engines.vllm.metrics import of_unstarted, of_worker
from kvferry.stats import HandoffStats
from tests.harness.vllm_engine import CHAINS, Engine, failed, landed, released
from tests.harness.vllm_models import make_model

pytestmark = VLLM_MARKS

UNREACHABLE = {
    "do_remote_prefill": True, "transfer_id": "x", "remote_engine_id": "q",
    "remote_host": "127.0.0.1", "remote_port": 1,
}  # fmt: skip
BEFORE_BLOCKS: dict[str, dict[str, Any]] = {
    "unreachable": UNREACHABLE,
    "no transfer id": UNREACHABLE | {"transfer_id": None},
    "the other mode": UNREACHABLE | {"transfer_mode": "push"},
    "rubbish": {"do_remote_prefill": True, "remote_port": "x"},
}
AFTER_BLOCKS = ("prefill is gone", "the digests differ", "the deadline has passed")
POLICIES = [
    (chain, vllm_policy, child_policy)
    for chain, vllm_policy, child_policy in itertools.product(
        CHAINS, ("fail", "recompute"), (None, "fail", "recompute")
    )
    if chain != CHAINS[0] or child_policy is None
]
"""The policy of vLLM itself, and that in a child's own configuration, which is fail if it is not given."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def prefill(model: Path) -> Iterator[Engine]:
    with Engine(model, "kv_producer", "p") as engine:
        yield engine


@pytest.fixture(params=POLICIES, ids=lambda each: "-".join(map(str, each)), scope="module")
def decode(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    chain, policy, child_policy = request.param
    with Engine(model, "kv_consumer", "d", policy=policy, child_policy=child_policy, chain=chain) as engine:
        yield engine


@pytest.fixture
def wanted(decode: Engine) -> str:
    """How a request ends whose hand-off has failed: recomputed, if either of the two policies says so."""
    return "length" if "recompute" in (decode.policy, decode.child_policy) else "error"


@pytest.mark.parametrize("why", BEFORE_BLOCKS)
def test_a_handoff_that_fails_before_it_has_blocks(decode: Engine, wanted: str, why: str) -> None:
    before = decode.count("handoffs_failed")
    request = decode.add(f"r-{why}", 40, BEFORE_BLOCKS[why])
    assert decode.until_idle() == [wanted]
    assert request.is_finished()
    assert decode.num_free == decode.free
    assert decode.count("handoffs_failed") == before + 1, "counted once, also if it is recomputed"


@pytest.mark.parametrize("release", ["released at once", "released later"])
@pytest.mark.parametrize("why", AFTER_BLOCKS)
def test_a_handoff_that_fails_when_it_has_blocks(
    prefill: Engine, decode: Engine, wanted: str, why: str, release: str
) -> None:  # R28
    before = decode.count("handoffs_failed")
    params = prefill.prefilled(name=f"p-{why}-{release}-{id(decode)}")
    request = decode.add(f"r-{why}-{release}", 40, params)
    decode.until(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
    at_once = [released(params)] if release == "released at once" else []
    assert decode.until_idle(failed(request, params, why), *at_once) == [wanted]
    if not at_once:
        assert decode.num_free < decode.free, "a peer may still write into its first blocks"
        decode.step(released(params))
    assert decode.num_free == decode.free
    assert decode.count("handoffs_failed") == before + 1
    assert not decode.scheduler.has_requests()
    prefill.step(released(params))


def test_a_good_handoff_is_counted_as_one(prefill: Engine, decode: Engine) -> None:
    before = decode.count("handoffs_failed"), decode.count("handoffs_landed")
    params = prefill.prefilled(name=f"p-good-{id(decode)}")
    request = decode.add("r-good", 40, params)
    decode.until(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
    assert decode.until_idle(landed(request, params)) == ["length"]
    assert (decode.count("handoffs_failed"), decode.count("handoffs_landed")) == (before[0], before[1] + 1)
    prefill.step(released(params))


def test_one_bad_handoff_delays_no_other(prefill: Engine, decode: Engine, wanted: str) -> None:
    params = prefill.prefilled(name=f"p-both-{id(decode)}")
    bad = decode.add("r-bad", 40, UNREACHABLE)
    good = decode.add("r-good-2", 40, params)
    plain = decode.add("r-plain", 40, None)
    decode.until(good, RequestStatus.WAITING_FOR_REMOTE_KVS)
    decode.until_idle(landed(good, params))
    assert good.status == plain.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert (bad.status == RequestStatus.FINISHED_LENGTH_CAPPED) is (wanted == "length")
    prefill.step(released(params))


def test_only_handoffs_that_ended_write_a_line_into_vllms_log() -> None:
    """Gauges change on prefill with each grant; its log then had a line of zeros every ten seconds."""
    gauges = of_worker(HandoffStats(open_grants=1), HandoffStats())
    assert gauges is not None
    assert gauges.is_empty()
    assert gauges.data["now"]["open_grants"] == 1, "but vLLM's metrics have it"
    failed_once = of_unstarted(1)
    assert failed_once is not None
    assert not failed_once.is_empty()
    assert failed_once.reduce()["failed"] == 1
    assert of_unstarted(0) is None
