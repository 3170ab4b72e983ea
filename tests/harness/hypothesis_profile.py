"""Property tests try the same examples each time, so a failure comes from the change; `make fuzz` tries new ones."""

import os

from hypothesis import settings

FUZZ = int(os.environ.get("FUZZ", "0"))
"""How many times as many examples as usual are tried, new ones each time. 0: the usual number of fixed examples."""

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("fuzz", print_blob=True, deadline=None)
settings.load_profile("fuzz" if FUZZ else "same")


def examples(number: int) -> int:
    """Returns the value for `settings(max_examples=...)`."""
    return number * max(1, FUZZ)
