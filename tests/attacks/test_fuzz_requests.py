"""A few fuzzed requests on a whole fleet; `make fuzz` sends 10,000 in each mode."""

from pathlib import Path

import pytest

from tests.attacks.fuzz_requests import fuzz_fleet

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_no_request_ends_an_engine_and_every_answer_is_accounted(mode: str, tmp_path: Path) -> None:
    result = fuzz_fleet(tmp_path, model="byte-mtp", mode=mode, requests=250, seed=1)
    assert not result.faults, "\n".join(result.faults)
    assert result.statuses["200"] > 50, result.lines()
    assert result.handed_over > 1000, result.lines()
