"""Sends kvferry's log lines where vLLM's go, at vLLM's level: vLLM sets up only its own logger."""

import logging

__all__ = ["share_logging"]


def share_logging() -> None:
    """Adds vLLM's handlers to kvferry's logger, unless the operator has given it handlers already. Idempotent."""
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = False
