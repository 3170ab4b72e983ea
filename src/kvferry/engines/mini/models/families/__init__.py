"""The model families that the engine runs, one module each. To add one, write a module and add a line to FAMILIES.

A family is a module with the functions of `base.Family`: it reads config.json, states which tensors a checkpoint has
and what its layers keep in the cache, and builds the network of one rank.
"""

import importlib
from collections.abc import Mapping
from typing import cast

from kvferry.engines.mini.models.families.base import Family
from kvferry.errors import UnknownModel

__all__ = ["FAMILIES", "family_of"]

FAMILIES: Mapping[str, str] = {
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "Gemma3ForCausalLM": "gemma3",
    "GraniteMoeHybridForCausalLM": "granite",
    "KvferryByteMtpForCausalLM": "byte_mtp",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "moe",
    "Qwen2ForCausalLM": "llama",
    "Qwen3ForCausalLM": "llama",
    "Qwen3MoeForCausalLM": "moe",
}
"""Maps an architecture, as config.json names it, to the module of this package that runs it."""


def family_of(architecture: str) -> Family:
    """Returns the module that runs an architecture. Raises UnknownModel with those that are supported."""
    if architecture not in FAMILIES:
        raise UnknownModel(f"architecture {architecture!r} is unknown. Known: {', '.join(FAMILIES)}.")
    return cast(Family, importlib.import_module(f"{__name__}.{FAMILIES[architecture]}"))
