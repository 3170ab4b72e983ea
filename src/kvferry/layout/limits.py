"""Bounds on the values of a layout. A layout may come from a peer, so every value is hostile until it has been checked.

All sizes are capped, so that sums of them stay far below 2**63 and numpy's int64 never wraps.
"""

from kvferry.errors import MalformedMessage

__all__ = [
    "MAX_ADDRESS",
    "MAX_AXES",
    "MAX_BLOCK_TOKENS",
    "MAX_BYTES",
    "MAX_GROUPS",
    "MAX_NAME",
    "MAX_RANKS",
    "MAX_REGIONS",
    "MAX_TENSORS",
    "check_name",
    "check_within",
]

MAX_BYTES = 1 << 48
"""The largest region, offset, stride or count."""
MAX_ADDRESS = (1 << 63) - 1
MAX_BLOCK_TOKENS = 1 << 20
MAX_AXES = 8
MAX_REGIONS = 4096
MAX_GROUPS = 256
MAX_TENSORS = 16384
MAX_NAME = 256
MAX_RANKS = 4096


def check_within(name: str, value: int, low: int, high: int) -> None:
    """Raises MalformedMessage unless low <= value <= high."""
    if not low <= value <= high:
        raise MalformedMessage(f"layout: {name} is {value!r}; it must be between {low} and {high}")


def check_name(name: str, value: str) -> None:
    """Raises MalformedMessage unless the value is 1 to MAX_NAME printable characters long."""
    if not 1 <= len(value) <= MAX_NAME or not value.isprintable():
        raise MalformedMessage(
            f"layout: {name} is {value[:MAX_NAME]!r}; it must be 1 to {MAX_NAME} printable characters"
        )
