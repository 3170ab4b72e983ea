"""R17: in push both sides derive one transfer id, whichever router, endpoint, engine and number of choices there are.

The spellings are those of vLLM 0.32's servers, and of the requests that vllm-router 0.1.17, vLLM's own push proxy and
llm-d's sidecar were seen to send.
"""

import itertools

import pytest

from kvferry.errors import RequestError
from kvferry.wire.handoff_messages import MAX_ID_CHARS
from kvferry.wire.params import HandoffParams
from kvferry.wire.push_ids import ClientRequest, push_transfer_id

ROUTER_ID = "___prefill_addr_127.0.0.1:8100___decode_addr_127.0.0.1:8200_02765f5e1a884267984c6725bb70854b"
CLIENT_IDS = [
    ROUTER_ID, "7", "req-89abcdef", "req-3-12345678", "cmpl-mine", "cmpl-mine-3", "chatcmpl-mine", "0_x", "a\nb",
]  # fmt: skip


def of_completion(client: str, prompt: int = 0, choice: str = "") -> ClientRequest:
    return ClientRequest.of_vllm(f"{choice}cmpl-{client}-{prompt}-0a1b2c3d")


def of_chat(client: str, choice: str = "") -> ClientRequest:
    return ClientRequest.of_vllm(f"{choice}chatcmpl-{client}-89012345")


def on_prefill(own: ClientRequest) -> str | None:
    return push_transfer_id(HandoffParams(do_remote_decode=True), "p", own)


def on_decode(own: ClientRequest, remote_request_id: str | None) -> str | None:
    params = HandoffParams(do_remote_prefill=True, remote_engine_id="p", remote_request_id=remote_request_id)
    return push_transfer_id(params, "d", own)


@pytest.mark.parametrize("client", CLIENT_IDS)
def test_the_bare_request_id_of_vllm_router_and_of_vllms_proxy(client: str) -> None:
    for prefill, decode in itertools.product(
        (of_completion(client), of_completion(client, choice="1_"), ClientRequest(client)), repeat=2
    ):
        assert on_prefill(prefill) == on_decode(decode, client) == f"p/{client}/0"
    for prefill, decode in itertools.product((of_chat(client), of_chat(client, "0_"), ClientRequest(client)), repeat=2):
        assert on_prefill(prefill) == on_decode(decode, client) == f"p/{client}/0"


@pytest.mark.parametrize("client", CLIENT_IDS)
def test_a_request_id_in_vllms_spelling(client: str) -> None:
    completion, chat = f"cmpl-{client}-0", f"chatcmpl-{client}"
    assert on_decode(of_completion(client), completion) == on_prefill(of_completion(client))
    assert on_decode(of_completion("another"), completion + "-01234567") == on_prefill(of_completion(client))
    assert on_decode(of_chat("another"), chat + "-01234567") == on_prefill(of_chat(client))


def test_prompts_of_one_request_have_ids_of_their_own() -> None:
    assert on_prefill(of_completion(ROUTER_ID, 1)) == on_decode(of_completion(ROUTER_ID, 1), ROUTER_ID)
    assert on_prefill(of_completion(ROUTER_ID, 1)) != on_prefill(of_completion(ROUTER_ID, 0))


def test_an_id_that_the_router_names_is_kept() -> None:  # kvferry's router, llm-d's sidecar
    for own in (of_completion("x"), ClientRequest("y")):
        assert push_transfer_id(HandoffParams(do_remote_decode=True, transfer_id="t"), "p", own) == "t"
        assert push_transfer_id(HandoffParams(do_remote_prefill=True, transfer_id="t"), "d", own) == "t"


def test_nothing_is_guessed_without_prefills_request() -> None:
    assert on_decode(of_completion("x"), None) is None
    assert push_transfer_id(HandoffParams(do_remote_prefill=True, remote_request_id="x"), "d", of_chat("x")) is None
    assert push_transfer_id(HandoffParams(), "d", of_chat("x")) is None


def test_a_long_id_fits_into_a_message_on_both_sides() -> None:
    client = "c" * 500
    made = on_prefill(of_completion(client))
    assert made is not None
    assert len(made) <= MAX_ID_CHARS
    assert made == on_decode(of_completion(client), client) != on_prefill(of_completion(client, 1))


def test_a_transfer_id_that_no_message_can_carry_is_refused() -> None:
    HandoffParams.from_dict({"transfer_id": "t" * MAX_ID_CHARS})
    with pytest.raises(RequestError, match=r"transfer_id"):
        HandoffParams.from_dict({"transfer_id": "t" * (MAX_ID_CHARS + 1)})
