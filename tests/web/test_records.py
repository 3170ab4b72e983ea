"""How a request was served, as a record, a body and headers."""

import pytest

from kvferry.errors import ConfigError, Overloaded, RequestError, RequestTooLong, TransferError
from kvferry.settings import TransferMode
from kvferry.stats import HandoffTiming, PromptAccount
from kvferry.web.api_errors import as_api_error
from kvferry.web.listen import announce, url_of
from kvferry.web.records import Served, header_value


def test_served_comes_from_the_engines_records() -> None:
    served = Served.of(
        PromptAccount(handed_over=5, cached=2, recomputed=1, reason="the tail"),
        HandoffTiming(num_bytes=10, num_runs=3, transfer_s=0.0015, wait_s=0.25, verified_cells=4),
        reason="the router's reason",
        mode=TransferMode.PUSH,
        prefill="p",
        decode="d",
    )
    assert (served.why, served.transfer_ms, served.wait_ms, served.verified) == ("the tail", 1.5, 250.0, 4)
    assert served.headers() == {
        "x-kvferry-handed-over": "5",
        "x-kvferry-cached": "2",
        "x-kvferry-computed": "1",
        "x-kvferry-recomputed": "1",
        "x-kvferry-why": "the tail",
        "x-kvferry-mode": "push",
        "x-kvferry-prefill": "p",
        "x-kvferry-decode": "d",
    }


def test_headers_of_an_ordinary_request_leave_out_what_does_not_apply() -> None:
    assert set(Served.of(None, None, decode="d").headers()) == {
        "x-kvferry-handed-over",
        "x-kvferry-cached",
        "x-kvferry-computed",
        "x-kvferry-recomputed",
        "x-kvferry-decode",
    }


def test_a_reason_cannot_add_a_header() -> None:
    assert header_value("a\r\nSet-Cookie: x\u00e9") == "a??Set-Cookie: x?"
    assert len(header_value("x" * 5000)) == 400


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (RequestTooLong("x"), 400, "context_length_exceeded", None),
        (RequestError("top_p=7 is out of range"), 400, None, "top_p"),
        (RequestError("the prompt has no tokens"), 400, None, None),
        (Overloaded("full"), 503, "overloaded", None),
        (TransferError("lost"), 500, "internal_error", None),
    ],
)
def test_errors_of_the_engine_have_a_status(error: Exception, status: int, code: str | None, param: str | None) -> None:
    answer = as_api_error(error)  # type: ignore[arg-type]
    assert (answer.status, answer.code, answer.param) == (status, code, param)
    assert ("Retry-After" in answer.headers()) == (status == 503)


def test_addresses() -> None:
    assert url_of("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert url_of("::1", 80) == "http://[::1]:80"


def test_a_ready_file_that_cannot_be_written_is_reported() -> None:
    with pytest.raises(ConfigError, match="--ready-file '/nowhere/x' cannot be written: No such file or directory"):
        announce("/nowhere/x", url="u")
