"""MTP modules in the form of DeepSeek-V3 (arXiv 2412.19437, section 2.2), each with one layer of the Llama kind.

The target's own checkpoint has `num_nextn_predict_layers` of them, after its L layers: `model.layers.<L + i>.enorm`,
`hnorm`, `eh_proj`, `shared_head.norm`, and the usual tensors of a layer. Embedding and head are the target's.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from kvferry.engines.mini.models.config import common_entries
from kvferry.engines.mini.models.families.base import Batch, Weights
from kvferry.engines.mini.models.families.layers import Ends, GatedMlp
from kvferry.engines.mini.models.families.llama import Attention, LlamaConfig
from kvferry.engines.mini.models.families.rope import rope_tables
from kvferry.engines.mini.models.parallel import Shard

__all__ = ["MtpModule", "build_modules", "expected_tensors", "read_modules"]


def read_modules(raw: dict[str, Any]) -> LlamaConfig | None:
    """Reads the modules from a checkpoint's config.json, as layers of a config of their own; None if it has none.

    Raises KeyError, TypeError and ValueError as families.base.Family.read does.
    """
    count = int(raw.get("num_nextn_predict_layers") or 0)
    if not count:
        return None
    common = common_entries(raw)
    first, window = common["num_layers"], raw.get("sliding_window")
    kinds = list(raw.get("layer_types") or ())[first:]
    kinds += ["full_attention"] * (count - len(kinds))
    return LlamaConfig(
        **{**common, "num_layers": count},
        windows=tuple(int(window) if kind == "sliding_attention" and window else None for kind in kinds),
        intermediate=int(raw.get("shared_intermediate_size") or raw["intermediate_size"]),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )


def expected_tensors(config: LlamaConfig, first: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of every tensor of the modules. `first`: the number of layers of the target."""
    hidden, inner = config.hidden, config.intermediate
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for i in range(config.num_layers):
        name = f"model.layers.{first + i}"
        for norm in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm"):
            yield f"{name}.{norm}.weight", (hidden,)
        yield f"{name}.eh_proj.weight", (hidden, 2 * hidden)
        yield f"{name}.self_attn.q_proj.weight", (query, hidden)
        yield f"{name}.self_attn.k_proj.weight", (key, hidden)
        yield f"{name}.self_attn.v_proj.weight", (key, hidden)
        yield f"{name}.self_attn.o_proj.weight", (hidden, query)
        yield f"{name}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{name}.mlp.up_proj.weight", (inner, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, inner)


def build_modules(config: LlamaConfig, weights: Weights, shard: Shard, *, first: int) -> "list[MtpModule]":
    """Returns all modules, for one tensor-parallel rank of the last stage."""
    # The modules load embedding and head themselves: a last stage that is not the first may have no embedding.
    ends = Ends(weights, config, replace(shard, pp_rank=0, pp_size=1))
    table = rope_tables(config.rope, config.head_dim, config.max_positions, weights.dtype, weights.device)
    return [MtpModule(config, weights, shard, i, first, ends, table) for i in range(config.num_layers)]


class MtpModule:
    """One MTP module. Implements chain.Module."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        shard: Shard,
        index: int,
        first: int,
        ends: Ends,
        table: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        name = f"model.layers.{first + index}"
        self._ends, self._table = ends, table
        self._width, self._eps = (config.hidden,), config.norm_eps
        self._enorm = weights.take(f"{name}.enorm.weight")
        self._hnorm = weights.take(f"{name}.hnorm.weight")
        self._join = weights.linear(f"{name}.eh_proj")
        self._attention_norm = weights.take(f"{name}.input_layernorm.weight")
        self._attention = Attention(weights, f"{name}.self_attn", f"mtp.{index}.attn", config, shard)
        self._mlp_norm = weights.take(f"{name}.post_attention_layernorm.weight")
        self._mlp = GatedMlp(weights, f"{name}.mlp", config.intermediate, shard)
        self._norm = weights.take(f"{name}.shared_head.norm.weight")

    def lift(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the target's hidden states unchanged."""
        return hidden

    def run(self, tokens: torch.Tensor, before: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Implements chain.Module."""
        width, eps = self._width, self._eps
        embedded = functional.rms_norm(self._ends.embed(tokens), width, self._enorm, eps)
        x = self._join(torch.cat([embedded, functional.rms_norm(before, width, self._hnorm, eps)], dim=-1))
        cos, sin = (part[batch.positions].unsqueeze(1) for part in self._table)
        x = self._attention.plus(functional.rms_norm(x, width, self._attention_norm, eps), x, batch, (cos, sin))
        return self._mlp.plus(functional.rms_norm(x, width, self._mlp_norm, eps), x)

    def choose(self, out: torch.Tensor) -> torch.Tensor:
        """Implements chain.Module."""
        return self.logits(out).argmax(dim=-1)

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Implements chain.Module."""
        return self._ends.project(functional.rms_norm(out, self._width, self._norm, self._eps))
