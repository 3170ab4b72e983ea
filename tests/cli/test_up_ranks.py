"""`kvferry up` with workers of several ranks: what each worker is started with."""

import argparse
import os

import pytest

from kvferry.cli import route, serve, up
from kvferry.cli.support.router_flags import router_argv, router_files, router_settings
from kvferry.cli.support.worker_flags import engine_settings, worker_argv
from kvferry.cli.up import FleetPlan
from kvferry.engines.mini.settings import EngineSettings
from kvferry.errors import ConfigError


def _parsed(module: object, *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)  # type: ignore[attr-defined]
    return parser.parse_args(argv)


def _children(*flags: str) -> list[EngineSettings]:
    """Parses the plan's command lines as `kvferry serve` does."""
    args = _parsed(up, "model", "--prefill", "1", "--decode", "2", *flags)
    common = engine_settings("model", args)
    prefill, decode = (up._sized(common, args, role) for role in ("prefill", "decode"))
    plan = FleetPlan(
        model="model",
        num_decode=2,
        worker_argv=tuple(worker_argv(args)),
        prefill_ranks=(prefill.tp, prefill.pp),
        decode_ranks=(decode.tp, decode.pp),
    )
    return [engine_settings("model", _parsed(serve, *spec.argv[1:])) for spec in plan.workers()]


def test_sizes_of_one_role_override_those_of_all() -> None:
    shapes = [(one.tp, one.pp) for one in _children("--tp", "2", "--prefill-pp", "2", "--decode-tp", "1")]
    assert shapes == [(2, 2), (1, 1), (1, 1)]


def test_cores_are_divided_among_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 24)
    assert [one.threads for one in _children("--prefill-tp", "4", "--decode-pp", "2")] == [3, 3, 3]
    assert [one.threads for one in _children("--prefill-tp", "4", "--threads", "5")] == [5, 5, 5]


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp=0 must be at least 1"):
        _children("--decode-tp", "0")


def test_flags_of_the_router_reach_the_router() -> None:
    args = _parsed(
        up,
        "model",
        "--decode-policy",
        "prefix_aware",
        "--room-wait",
        "5",
        "--api-key-file",
        "/keys",
        "--max-body-bytes",
        "9",
    )
    again = _parsed(route, *router_argv(args))
    assert router_settings(again) == router_settings(args)
    assert (router_settings(again).decode_policy, router_settings(again).room_wait_s) == ("prefix_aware", 5.0)
    assert router_files(again).api_keys == "/keys"
    assert router_argv(_parsed(up, "model")) == []


def test_names_and_limits_reach_the_workers() -> None:
    flags = up._worker_argv(_parsed(up, "model", "--served-model-name", "m", "also", "--max-body-bytes", "9"))
    worker = _parsed(serve, "model", *flags)
    assert (worker.served_model_name, worker.max_body_bytes) == (["m", "also"], 9)
