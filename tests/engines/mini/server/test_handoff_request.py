"""A request's kv_transfer_params: those of a push router that names no transfer id, too."""

import pytest

from kvferry.engines.mini.server.handoff_request import read_handoff
from kvferry.errors import RequestError

BARE = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": "r-1"}


def test_an_ordinary_request_has_none() -> None:
    assert read_handoff(None, request_id="r-1", engine="p", mode="push") is None


def test_both_workers_of_a_push_derive_one_id() -> None:  # R17
    prefill = read_handoff({"do_remote_decode": True}, request_id="r-1", engine="p", mode="push")
    decode = read_handoff(BARE, request_id="r-1", engine="d", mode="push")
    assert prefill is not None
    assert decode is not None
    assert prefill.transfer_id == decode.transfer_id == "p/r-1/0"
    assert decode.transfer_mode == "push"


def test_pull_derives_nothing() -> None:
    decode = read_handoff(BARE, request_id="r-1", engine="d", mode="pull")
    assert decode is not None
    assert decode.transfer_id is None


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(RequestError, match="remote_port"):
        read_handoff({"remote_port": "x"}, request_id="r-1", engine="d", mode="push")
