"""Which requests go through a proxy of the environment, and that no request to this machine does."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvferry.cli.support.worker_description import fetch
from kvferry.errors import PeerLost
from kvferry.web.proxies import is_loopback, proxy_of

PROXY_VARIABLES = tuple(
    name for one in ("http_proxy", "https_proxy", "all_proxy", "no_proxy") for name in (one, one.upper())
)


@pytest.fixture(autouse=True)
def no_proxy_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@contextmanager
def server(status: int, body: bytes = b"{}") -> Iterator[tuple[str, list[str]]]:
    """Yields the address of a server that answers everything so, and the paths or URLs that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815  # its name in the base class

        def log_message(self, format: str, *args: object) -> None:  # its name in the base class
            pass

    made = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{made.server_port}", asked
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:80", True), ("http://127.9.9.9", True), ("http://[::1]:80", True),
        ("http://localhost", True),
        ("http://a.localhost:1", True), ("http://10.0.0.1", False), ("http://worker", False), ("http://", False),
    ],
)  # fmt: skip
def test_loopback(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected


def test_the_environments_proxy_applies_by_scheme_and_not_to_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy_of("http://worker:1") is None
    monkeypatch.setenv("http_proxy", "http://user:secret@proxy:3128")
    monkeypatch.setenv("NO_PROXY", "worker-2,.fleet.example")
    assert proxy_of("http://worker:1") == "proxy:3128"
    assert proxy_of("http://127.0.0.1:1") is None
    assert proxy_of("https://worker:1") is None
    assert proxy_of("http://worker-2:1") is None
    assert proxy_of("http://a.fleet.example:1") is None


def test_a_worker_on_loopback_is_asked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with server(200, b"its facts") as (address, asked):
        assert fetch(f"http://{address}") == b"its facts"
    assert asked == ["/v1/kvferry"]


def test_any_other_worker_is_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(200, b"its facts") as (address, asked):
        monkeypatch.setenv("http_proxy", f"http://{address}")
        assert fetch("http://worker.invalid:8100") == b"its facts"
    assert asked == ["http://worker.invalid:8100/v1/kvferry"]


def test_an_error_that_comes_from_a_proxy_names_it_and_how_to_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(502) as (address, _):
        monkeypatch.setenv("http_proxy", f"http://user:secret@{address}")
        with pytest.raises(PeerLost) as failed:
            fetch("http://worker.invalid:8100")
    text = str(failed.value)
    assert text == (
        f"'http://worker.invalid:8100' answers 502 Bad Gateway. It was asked through the proxy "
        f"{address}, which the environment names (http_proxy): the answer may be the proxy's. To ask the worker "
        "directly: export NO_PROXY=worker.invalid"
    )


def test_an_error_without_a_proxy_names_none() -> None:
    with pytest.raises(PeerLost, match=r"Connection refused\. Is it the URL of a kvferry worker"):
        fetch("http://127.0.0.1:1")


def test_traces_to_loopback_go_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    tracing = pytest.importorskip("kvferry.router.observe.tracing", reason="needs kvferry[otel]")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "elsewhere")
    monkeypatch.setenv("NO_PROXY", "")
    with server(200) as (address, asked):
        exporter = tracing.otlp_exporter(f"http://{address}")
        exporter.export([])
        exporter.shutdown()
    assert asked == ["/v1/traces"]
