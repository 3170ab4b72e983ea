"""Memory does not grow with requests: a short soak of real processes. `make soak` is the long one."""

from pathlib import Path

import pytest

from tests.e2e.soak import run_soak
from tests.harness.resident import Samples
from tests.harness.tiny_model import make_tiny_model

BAR = 0.04
"""Four times that of the long soak, for rings of the latest requests still fill; what leaked grew by a tenth."""


@pytest.mark.process
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_process_grows_by_four_percent_in_2000_requests_of_every_kind(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", num_hidden_layers=1)
    result = run_soak(tmp_path / "fleet", model=str(model), num_requests=3000, warm_up=1500, every=250)
    grown = {name: part for name, part in result["growth"].items() if part >= BAR}
    assert not grown, Samples(result["samples"]).table()
    assert not result["unexpected"], result["outcomes"]


def test_growth_counts_from_the_warm_up_on_and_by_the_lowest_of_the_last_samples() -> None:
    samples = Samples([(0, {"p": 50.0}), (100, {"p": 100.0}), (200, {"p": 104.0}), (300, {"p": 103.0})])
    assert samples.growth(150) == {"p": pytest.approx(103 / 104 - 1)}
    assert samples.growth(0) == {"p": pytest.approx(1.0)}
    samples.rows.append((400, {"p": 130.0}))
    samples.rows.append((500, {"p": 129.0}))
    samples.rows.append((600, {"p": 128.0}))
    assert samples.growth(100) == {"p": pytest.approx(0.28)}


def test_without_a_sample_after_the_warm_up_there_is_no_verdict() -> None:
    assert Samples([(0, {"p": 50.0})]).growth(1000) == {}
