"""The byte-level models of kvferry-models (training/byte_mtp.py): layers of the Llama kind, some with a window.

Their MTP modules are not part of the network; engines/mini/speculation/mtp.py runs them.
"""

from typing import Any

from kvferry.engines.mini.models.config import common_entries
from kvferry.engines.mini.models.families.llama import LlamaConfig, build, caches, expected_tensors

__all__ = ["build", "caches", "expected_tensors", "read"]


def read(raw: dict[str, Any]) -> LlamaConfig:
    """Reads config.json (base.Family). Its `layer_types` also lists the MTP modules, after the layers."""
    common = common_entries(raw)
    window = raw.get("sliding_window")
    kinds = raw["layer_types"][: common["num_layers"]]
    return LlamaConfig(
        **common,
        windows=tuple(int(window) if kind == "sliding_attention" and window else None for kind in kinds),
        intermediate=int(raw["intermediate_size"]),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )
