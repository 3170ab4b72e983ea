"""Reads in the headers of decode's answer how the prompt was served."""

from collections.abc import Mapping
from enum import StrEnum

__all__ = ["HandoffOutcome", "handed_over_tokens", "outcome_of", "prompt_tokens"]


class HandoffOutcome(StrEnum):
    """How a hand-off that was requested of decode has ended, as far as the answer says it."""

    LANDED = "landed"
    FAILED = "failed"
    """Nothing was handed over: decode has computed the prompt. Prefill may never have learned of it."""
    UNKNOWN = "unknown"
    """The answer does not say: that of a vLLM server."""


def outcome_of(headers: Mapping[str, str]) -> HandoffOutcome:
    """Returns the outcome of the hand-off that an answer's headers report."""
    handed_over = headers.get("x-kvferry-handed-over")
    if handed_over is None:
        return HandoffOutcome.UNKNOWN
    failed = handed_over == "0" and bool(headers.get("x-kvferry-why"))
    return HandoffOutcome.FAILED if failed else HandoffOutcome.LANDED


def handed_over_tokens(headers: Mapping[str, str]) -> int:
    """Returns the number of prompt tokens that were handed over; 0 if the headers do not say it."""
    return _number(headers.get("x-kvferry-handed-over", "")) or 0


def prompt_tokens(headers: Mapping[str, str]) -> int:
    """Returns the number of prompt tokens: those handed over, cached and computed. 0 if the headers do not say it."""
    counts = [_number(headers.get(f"x-kvferry-{name}", "")) for name in ("handed-over", "cached", "recomputed")]
    return 0 if None in counts else sum(count or 0 for count in counts)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
