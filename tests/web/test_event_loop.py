"""Servers run on uvloop if it is installed, and on the standard library's loop without it."""

import asyncio
import sys

import pytest

from kvferry.web.event_loop import run_event_loop


async def _loop_module() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_uvloop_is_used_if_it_is_installed() -> None:
    pytest.importorskip("uvloop")
    assert run_event_loop(_loop_module()).partition(".")[0] == "uvloop"


def test_without_uvloop_the_standard_loop_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)  # makes its import raise ImportError
    assert run_event_loop(_loop_module()).partition(".")[0] == "asyncio"
