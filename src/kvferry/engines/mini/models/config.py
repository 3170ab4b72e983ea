"""What config.json says of a model, as one record for all families that the engine runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ROPE_KINDS", "ModelConfig", "Rope", "common_entries", "read_rope", "token_ids"]

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
"""The kinds of rotary embeddings that `families.rope` computes."""


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions rotate queries and keys."""

    theta: float
    kind: str
    options: Mapping[str, Any]
    """The numbers that this kind needs, under their names in config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder: what every family states of its model. A family's own record adds what only its network reads."""

    architecture: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """The number of elements of one key, and of one value."""
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    """How many tokens back each layer sees, the token itself included; None: all of them."""
    dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """What each layer keeps of the past: `full`, `window`, or the kind of its recurrent state."""
        return tuple("full" if window is None else "window" for window in self.windows)


def common_entries(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns what most families write alike in config.json, as arguments of ModelConfig; all but `windows`."""
    num_heads = int(raw["num_attention_heads"])
    hidden = int(raw["hidden_size"])
    return {
        "architecture": str(raw["architectures"][0]),
        "num_layers": int(raw["num_hidden_layers"]),
        "hidden": hidden,
        "num_heads": num_heads,
        "num_kv_heads": int(raw.get("num_key_value_heads") or num_heads),
        "head_dim": int(raw.get("head_dim") or hidden // num_heads),
        "vocab_size": int(raw["vocab_size"]),
        "max_positions": int(raw["max_position_embeddings"]),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope": read_rope(raw),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        "eos_token_ids": token_ids(raw.get("eos_token_id")),
    }


def read_rope(raw: dict[str, Any]) -> Rope:
    """Reads either spelling: rope_parameters (transformers 5), or rope_theta beside rope_scaling (earlier ones)."""
    options = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = str(options.pop("rope_type", None) or options.pop("type", None) or "default")
    theta = float(options.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    options.setdefault("original_max_position_embeddings", raw["max_position_embeddings"])
    return Rope(theta=theta, kind=kind, options=options)


def token_ids(value: object) -> tuple[int, ...]:
    """Reads an entry such as eos_token_id, which is absent, one id, or a list of ids."""
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(str(value)),)
