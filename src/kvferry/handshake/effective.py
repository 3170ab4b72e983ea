"""Effective values that several facts are made from."""

from kvferry.handshake.engine_description import EngineDescription
from kvferry.handshake.values import effective_dtype

__all__ = ["GARBAGE", "kv_dtype", "model_dtype", "revision"]

GARBAGE = "a cell's bytes would be read as other numbers"
"""Why facts about encodings must match."""


def model_dtype(engine: EngineDescription) -> str:
    """The dtype that the model runs in. Raises ConfigError where `auto` cannot be known."""
    return effective_dtype(engine.dtype, engine.checkpoint_dtype, "dtype")


def kv_dtype(engine: EngineDescription) -> str:
    """The dtype that the cache is stored in."""
    return effective_dtype(engine.kv_dtype, model_dtype(engine), "kv_dtype")


def revision(name: str | None) -> str | None:
    """None for the default branch, however it was asked for."""
    return None if name in (None, "", "main") else name
