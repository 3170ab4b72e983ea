"""Several choices of one prompt, and pushes whose router names no transfer id, on vLLM's own scheduler objects."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.vllm_only import VLLM_MARKS, require_vllm

require_vllm()

from vllm.v1.request import RequestStatus

from kvferry.layout.blocks import TokenRange
from tests.harness.vllm_engine import Engine, failed, finished_params, landed, released
from tests.harness.vllm_models import make_model

pytestmark = VLLM_MARKS

PARENT = "cmpl-x-0-0123abcd"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama", num_hidden_layers=1)


@pytest.fixture
def prefill(model: Path) -> Iterator[Engine]:
    with Engine(model, "kv_producer", "p") as engine:
        yield engine


@pytest.fixture(params=["fail", "recompute"])
def decode(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(model, "kv_consumer", "d", policy=request.param) as engine:
        yield engine


def test_prefill_grants_one_handoff_for_all_choices(prefill: Engine) -> None:  # R25
    for choice in range(3):
        prefill.add(f"{choice}_{PARENT}", 40, {"do_remote_decode": True}, max_tokens=1)
    returned, offers = [], []
    for _ in range(6):
        returned += finished_params(prefill.step())
        offers += [offer.transfer for offer in prefill.last.kv_connector_metadata.orders.offer if offer.final]
    assert len(returned) == 3
    assert all(params is not None and params == returned[0] for params in returned)
    assert offers == [returned[0]["transfer_id"]]
    prefill.step(released(returned[0]))
    assert prefill.num_free == prefill.free


def test_one_choice_takes_the_handoff_and_the_others_its_prefix(prefill: Engine, decode: Engine) -> None:
    params = prefill.prefilled()
    first, second = (decode.add(f"{choice}_{PARENT}", 40, params) for choice in range(2))
    decode.until(first, RequestStatus.WAITING_FOR_REMOTE_KVS)
    for _ in range(3):
        decode.step()
        assert not decode.last.num_scheduled_tokens, "the second choice waits for the first one's KV"
    decode.step(landed(first, params))
    decode.step()
    assert decode.last.num_scheduled_tokens == {first.request_id: 1, second.request_id: 8}, "two blocks are shared"
    assert decode.until_idle() == ["length", "length"]
    assert decode.num_free == decode.free


def test_the_other_choices_compute_when_the_handoff_fails(prefill: Engine, decode: Engine) -> None:  # R29
    params = prefill.prefilled()
    first, second = (decode.add(f"{choice}_{PARENT}", 40, params) for choice in range(2))
    decode.until(first, RequestStatus.WAITING_FOR_REMOTE_KVS)
    decode.step(failed(first, params))
    ends = decode.until_idle(released(params))
    assert sorted(ends) == (["error", "length"] if decode.policy == "fail" else ["length", "length"])
    assert decode.num_free == decode.free
    assert second.is_finished()


def test_a_choice_waits_for_nothing_that_has_been_aborted(prefill: Engine, decode: Engine) -> None:
    params = prefill.prefilled()
    first = decode.add(f"0_{PARENT}", 40, params)
    decode.until(first, RequestStatus.WAITING_FOR_REMOTE_KVS)
    second = decode.add(f"1_{PARENT}", 40, params)
    decode.step()
    decode.scheduler.finish_requests(first.request_id, RequestStatus.FINISHED_ABORTED)
    assert decode.until_idle(released(params)) == ["length"]
    assert second.is_finished()
    assert decode.num_free == decode.free


def test_another_prompt_with_the_same_parameters_is_computed(prefill: Engine, decode: Engine) -> None:
    """A stock router sends one set of parameters for all prompts of a request. Only the first can use them."""
    params = prefill.prefilled()
    first = decode.add("cmpl-x-0-0123abcd", 40, params)
    other = decode.add("cmpl-x-1-4567abcd", 40, params)
    decode.until(first, RequestStatus.WAITING_FOR_REMOTE_KVS)
    decode.until_idle(landed(first, params))
    assert first.status == other.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert decode.num_free == decode.free


@pytest.mark.parametrize("choice", ["", "0_"])
@pytest.mark.parametrize("endpoint", ["cmpl-{}-0-0123abcd", "chatcmpl-{}-0123abcd"])
def test_a_push_router_that_sends_the_bare_request_id(model: Path, endpoint: str, choice: str) -> None:  # R17
    client = "___prefill_addr_127.0.0.1:8100___decode_addr_127.0.0.1:8200_02765f5e1a884267984c6725bb70854b"
    with (
        Engine(model, "kv_producer", "p", mode="push") as prefill,
        Engine(model, "kv_consumer", "d", mode="push") as decode,
    ):
        params = prefill.prefilled(name=choice + endpoint.format(client))
        bare = {name: params[name] for name in ("remote_engine_id", "remote_host", "remote_port", "tp_size")}
        request = decode.add(
            choice + endpoint.format(client).replace("0123abcd", "ffffffff"), 40,
            {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": client, **bare},
        )  # fmt: skip
        decode.until(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
        (fetch,) = decode.last.kv_connector_metadata.orders.fetch
        assert (fetch.transfer, fetch.wanted) == (params["transfer_id"], TokenRange(0, 40))
