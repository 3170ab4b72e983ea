"""The cost model chooses by measured curves; a calibration that cannot be read is ignored."""

import json
import logging
from pathlib import Path

import pytest

from kvferry.errors import ConfigError
from kvferry.layout.blocks import TokenRange
from kvferry.transport.base import Operation
from kvferry.transport.staging.chunks import chunk_plans
from kvferry.transport.staging.cost import CostModel, Route, calibration_path, choose, load_cost_model, save_cost_model
from tests.harness.caches import NUM_TOKENS, PAIRS, edge, table

READ, WRITE = Operation.READ, Operation.WRITE


def choice(name: str, operation: Operation, total_bytes: int) -> Route:
    source, destination = PAIRS[name]
    plans = chunk_plans(edge(source, destination), table(source, 1), table(destination, 2), TokenRange(0, NUM_TOKENS))
    return choose(CostModel(), operation, list(plans), total_bytes).route


@pytest.mark.parametrize(
    ("name", "operation", "route"),
    [
        ("same", READ, Route.DIRECT),
        ("nhd-hnd", READ, Route.STAGED),
        ("nhd-hnd", WRITE, Route.DIRECT),  # our staging would not make the peer's runs longer
        ("tp2-tp1-nhd", READ, Route.STAGED),
        ("tp1-tp2-nhd", READ, Route.DIRECT),  # short at the peer's side
        ("tp1-tp2-nhd", WRITE, Route.STAGED),
    ],
)
def test_short_runs_are_staged_if_that_makes_them_long(name: str, operation: Operation, route: Route) -> None:
    assert choice(name, operation, 64 << 20) is route


def test_a_small_transfer_is_not_worth_staging() -> None:
    assert choice("nhd-hnd", READ, 512) is Route.DIRECT


def test_costs_are_interpolated_and_grow_with_runs_and_bytes() -> None:
    model = CostModel(read=((1000, 1e-6), (100_000, 10e-6)))
    assert model.transfer_s(READ, 1, 1000) == pytest.approx(1e-6)
    assert model.transfer_s(READ, 7, 700_000) == pytest.approx(70e-6)
    assert model.transfer_s(READ, 10, 10 * 10_000) == pytest.approx(10 * 10_000 / 10**9.5)
    assert model.transfer_s(READ, 10, 100) == pytest.approx(10e-6), "shorter than measured: as the shortest"
    assert model.transfer_s(READ, 1, 10**6) == pytest.approx(100e-6), "longer than measured: at the longest one's rate"
    assert model.transfer_s(READ, 0, 0) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"read": ()},
        {"read": ((10, 1.0), (10, 1.0))},
        {"copy": ((20, 1.0), (10, 1.0))},
        {"write": ((0, 1.0),)},
        {"write": ((10, 0.0),)},
        {"overlap": 1.5},
        {"start_s": -1.0},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="cost model"):
        CostModel(**wrong)  # type: ignore[arg-type]


def test_a_calibration_is_saved_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    assert load_cost_model() == CostModel()
    model = CostModel(read=((4096, 1e-6),), overlap=0.9, origin="a test")
    assert save_cost_model(model) == calibration_path() == tmp_path / "cache" / "calibration.json"
    assert load_cost_model() == model
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["calibration.json"]


def test_the_default_place_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFERRY_CACHE", raising=False)
    assert calibration_path().parts[-3:] == (".cache", "kvferry", "calibration.json")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        json.dumps({"version": 2}),
        json.dumps({"version": 1, "colour": "blue", "read": [], "write": [], "copy": []}),
        json.dumps({"version": 1, "read": [["x", 1]], "write": [], "copy": []}),
        json.dumps({"version": 1, "read": [[1, 1]], "write": [[1, 1]]}),
        json.dumps({"version": 1, "read": [[1, -1]], "write": [[1, 1]], "copy": [[1, 1]]}),
    ],
)
def test_a_bad_calibration_is_reported_and_ignored(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert load_cost_model(path) == CostModel()
    assert "kvferry bench calibrate" in caplog.text
