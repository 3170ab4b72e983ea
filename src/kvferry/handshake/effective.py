"""Computes effective values that several facts are made from."""

from kvferry.handshake.engine_description import EngineDescription
from kvferry.handshake.values import effective_dtype

__all__ = ["GARBAGE", "kv_dtype", "model_dtype", "revision"]

GARBAGE = "the bytes would be read as other numbers"
"""What would go wrong if facts about encodings differed."""


def model_dtype(engine: EngineDescription) -> str:
    """Returns the dtype in which the model runs. Raises ConfigError if `auto` cannot be resolved."""
    return effective_dtype(engine.dtype, engine.checkpoint_dtype, "dtype")


def kv_dtype(engine: EngineDescription) -> str:
    """Returns the dtype in which the cache is stored."""
    return effective_dtype(engine.kv_dtype, model_dtype(engine), "kv_dtype")


def revision(name: str | None) -> str | None:
    """Returns a revision, or None for the default branch, however that was named."""
    return None if name in (None, "", "main") else name
