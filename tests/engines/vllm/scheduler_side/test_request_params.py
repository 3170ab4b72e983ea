"""kv_transfer_params as a record, including those of routers that were made for vLLM's own connectors."""

from typing import Any

import pytest

from kvferry.engines.vllm.scheduler_side.request_params import handoff_params
from kvferry.errors import RequestError
from kvferry.settings import TransferMode
from kvferry.wire.params import HandoffParams


def read(raw: Any, mode: TransferMode = TransferMode.PULL, request_id: str = "cmpl-7-0-0123abcd") -> Any:
    return handoff_params(raw, engine_id="p0", request_id=request_id, mode=mode)


@pytest.mark.parametrize("raw", [None, {}])
def test_an_ordinary_request_has_none(raw: Any) -> None:
    assert read(raw) is None


def test_what_prefill_returned_is_read_again() -> None:  # R15
    params = HandoffParams(
        do_remote_prefill=True, transfer_mode=TransferMode.PULL, transfer_id="t", remote_engine_id="p"
    )
    assert read({key: value for key, value in params.to_dict().items() if value is not None}) == params


def test_unknown_fields_and_other_connectors_block_ids_are_skipped() -> None:
    raw = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "dcp_size": 1, "remote_blocks_expiry_time": None}
    assert read(raw) == HandoffParams(do_remote_prefill=True)


@pytest.mark.parametrize("raw", [[1], "text", {"do_remote_prefill": "yes"}, {"remote_port": "x"}])
def test_garbage_is_a_request_error_with_its_place(raw: Any) -> None:
    with pytest.raises(RequestError, match="kv_transfer_params"):
        read(raw)


def test_push_with_decode_first_is_matched_by_prefills_request_id() -> None:  # R17
    prefill = read({"do_remote_decode": True}, TransferMode.PUSH, request_id="cmpl-abc-0-89abcdef")
    raw = {"do_remote_prefill": True, "remote_engine_id": "p0", "remote_request_id": "cmpl-abc-0"}
    assert prefill.transfer_id == read(raw, TransferMode.PUSH).transfer_id == "p0/abc/0"


def test_push_after_prefill_has_the_id_that_prefill_returned() -> None:
    raw = {"do_remote_prefill": True, "remote_engine_id": "p0", "remote_request_id": "x", "transfer_id": "mine"}
    assert read(raw, TransferMode.PUSH).transfer_id == "mine"


def test_pull_makes_no_id_of_its_own() -> None:
    assert read({"do_remote_decode": True}).transfer_id is None
