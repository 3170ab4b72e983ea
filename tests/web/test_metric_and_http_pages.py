"""The reference pages name everything that the code has."""

import re

from aiohttp import web

from kvferry.engines.mini.server.app import ReleaseBody
from kvferry.engines.mini.server.metrics import WorkerMetrics
from kvferry.engines.mini.server.request_body import ChatBody, CompletionBody
from kvferry.engines.mini.server.router_services import MeetBody
from kvferry.router.app import Router
from kvferry.router.fleet.discovery import Registration
from kvferry.router.observe.metrics import RouterMetrics
from kvferry.settings import TransferMode
from kvferry.web.records import (
    CacheMark,
    DecodeChecks,
    Handoffs,
    Limits,
    Load,
    ModelCard,
    Room,
    Served,
    SideChannelAddress,
    WorkerInfo,
)
from tests.harness.repository import DOCS, SRC
from tests.harness.scripted_engine import a_server

REFERENCE = DOCS / "reference"


def _paths(app: web.Application) -> set[str]:
    return {resource.canonical for resource in app.router.resources()}


def test_every_endpoint_is_in_the_page() -> None:
    page = (REFERENCE / "http.md").read_text()
    router = Router([], ["http://127.0.0.1:1"])
    for path in _paths(a_server().app) | _paths(router.app):
        assert f"{path}`" in page, path


def test_every_field_is_in_the_page() -> None:
    page = (REFERENCE / "request-fields.md").read_text()
    fields = {*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__}
    assert not {field for field in fields if f"| `{field}`" not in page}
    page = (REFERENCE / "http.md").read_text()
    assert not {field for field in Served.__struct_fields__ if f"`{field}" not in page}


def test_every_header_and_field_between_router_and_workers_is_in_the_page() -> None:
    page = (REFERENCE / "http.md").read_text()
    files = [file for room in ("web", "router", "engines/mini/server") for file in (SRC / room).rglob("*.py")]
    headers = {name for file in files for name in re.findall(r'"(x-kvferry-[a-z-]*[a-z])"', file.read_text().lower())}
    headers |= Served(why="x", mode=TransferMode.PULL, prefill="p", decode="d").headers().keys()
    assert len(headers) > 10
    assert not {header for header in headers if f"`{header}`" not in page}
    records = (WorkerInfo, SideChannelAddress, Load, Room, Handoffs, Limits, CacheMark, ModelCard, DecodeChecks)
    fields = {field for record in records for field in record.__struct_fields__}
    fields |= {field for record in (MeetBody, ReleaseBody, Registration) for field in record.__struct_fields__}
    assert not {field for field in fields if not re.search(rf"[`\"]{field}[`\"]", page)}


def test_every_error_code_is_in_the_page() -> None:
    page = (REFERENCE / "http.md").read_text()
    files = [file for room in ("web", "router", "engines/mini/server") for file in (SRC / room).rglob("*.py")]
    codes = {code for file in files for code in re.findall(r'code="(\w+)"', file.read_text())}
    assert len(codes) > 20
    assert not {code for code in codes if f"`{code}`" not in page}


def test_every_metric_is_in_the_page() -> None:
    page = (REFERENCE / "metrics.md").read_text()
    names = {family.name for metrics in (WorkerMetrics(), RouterMetrics()) for family in metrics._registry.collect()}
    assert len(names) > 15
    assert not {name for name in names if f"`{name}`" not in page}
