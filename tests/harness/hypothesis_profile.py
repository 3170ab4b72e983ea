"""Property tests try the same examples every time: a failure is the change's. `make fuzz` looks for new ones."""

import os

from hypothesis import settings

FUZZ = int(os.environ.get("FUZZ", "0"))
"""How many times as many examples as usual, new ones each time. 0: the usual number, the same ones."""

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("fuzz", print_blob=True, deadline=None)
settings.load_profile("fuzz" if FUZZ else "same")


def examples(number: int) -> int:
    """For `settings(max_examples=...)`."""
    return number * max(1, FUZZ)
