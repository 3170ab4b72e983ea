"""kvferry's log lines go where vLLM's go, at vLLM's level: vLLM sets up its own logger alone."""

import logging

__all__ = ["share_logging"]


def share_logging() -> None:
    """Idempotent. Whoever has set up a handler for kvferry keeps it."""
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = False
