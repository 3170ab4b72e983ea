"""Random pairs of engines compared with the slow model: every cell that D needs arrives, and nothing else changes.

A failing case is run again with `python -m tests.layout.test_property SEED`.
"""

import os
import random
import sys
import time

import pytest

from kvferry.layout.packing import plan_staged
from kvferry.layout.pairing import pair
from kvferry.layout.planning import plan
from tests.layout.reference import Planner, WrongBytesError, check_case
from tests.layout.worlds import random_case

PLANNER = Planner(pair, plan, plan_staged)
CHUNKS, CASES = 20, 520
FRESH = f"{time.time_ns():x}"
"""Half of the cases are the same in every run; half are new."""


def one(seed: str, planner: Planner = PLANNER) -> bool:
    rng = random.Random(seed)
    limit = rng.choice((1, 3, 10, 1 << 20, 1 << 20))
    return check_case(random_case(seed), planner, staged=rng.random() < 0.5, limit=limit, cells=rng.random() < 0.2)


@pytest.mark.parametrize("chunk", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, CHUNKS))])
def test_every_needed_cell_arrives_and_nothing_else_changes(chunk: int) -> None:  # R18 R22 R23 R30 R36
    base = f"fixed.{chunk}" if chunk % 2 else f"{FRESH}.{chunk}"
    sys.stdout.write(f"seeds {base}.0 to {base}.{CASES - 1}\n")
    refused = 0
    for number in range(CASES):
        seed = f"{base}.{number}"
        try:
            refused += not one(seed)
        except Exception as error:
            raise WrongBytesError(f"python -m tests.layout.test_property {seed}: {error}") from error
    assert refused < CASES * 0.15, "the worlds are meant to be served, not refused"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        os.write(1, f"{random_case(name)}\n".encode())
        one(name)
