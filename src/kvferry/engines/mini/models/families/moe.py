"""Mixtral and Qwen3-MoE: the Llama family with a mixture of experts in place of the dense feed-forward network."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn import functional

from kvferry.engines.mini.models.families import llama
from kvferry.engines.mini.models.families.base import Weights
from kvferry.engines.mini.models.families.experts import Experts
from kvferry.engines.mini.models.families.layers import MLP_NAMES, GatedMlp, add_partial
from kvferry.engines.mini.models.families.llama import Llama, LlamaConfig, caches
from kvferry.engines.mini.models.parallel import Shard

__all__ = ["MoeConfig", "build", "caches", "expected_tensors", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(LlamaConfig):
    """The record of the Llama family, and where the experts are."""

    sparse: tuple[bool, ...]
    """Whether each layer has experts."""
    num_experts: int
    num_selected: int
    expert_inner: int
    norm_weights: bool
    """Whether the weights of a token's experts are scaled to a sum of one."""
    block: str
    """The name of a layer's mixture in the checkpoint."""
    names: tuple[str, str, str]
    """The names of an expert's gate, up and down."""


def read(raw: dict[str, Any]) -> MoeConfig:
    """Reads config.json into the record of this family (base.Family)."""
    mixtral = raw["architectures"][0] == "MixtralForCausalLM"
    base = llama.read(raw)
    common = {field.name: getattr(base, field.name) for field in fields(base)}
    num_layers, num_experts = base.num_layers, int(raw["num_local_experts" if mixtral else "num_experts"])
    step, dense = int(raw.get("decoder_sparse_step", 1)), raw.get("mlp_only_layers") or ()
    config = MoeConfig(
        **{**common, "qk_norm": not mixtral},
        sparse=tuple(mixtral or (i not in dense and (i + 1) % step == 0) for i in range(num_layers)),
        num_experts=num_experts,
        num_selected=int(raw["num_experts_per_tok"]),
        expert_inner=int(raw["intermediate_size" if mixtral else "moe_intermediate_size"]),
        norm_weights=mixtral or bool(raw.get("norm_topk_prob", False)),
        block="block_sparse_moe" if mixtral else "mlp",
        names=("w1", "w3", "w2") if mixtral else MLP_NAMES,
    )
    if not 1 <= config.num_selected <= num_experts:
        raise ValueError(f"num_experts_per_tok={config.num_selected} of {num_experts} experts")
    return config


def expected_tensors(config: MoeConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and shape of every tensor of a checkpoint (base.Family)."""
    sparse = [f"model.layers.{i}.{config.block}" for i in range(config.num_layers) if config.sparse[i]]
    replaced = tuple(f"model.layers.{i}.mlp." for i in range(config.num_layers) if config.sparse[i])
    yield from (entry for entry in llama.expected_tensors(config) if not entry[0].startswith(replaced))
    hidden, inner = config.hidden, config.expert_inner
    gate, up, down = config.names
    for block in sparse:
        yield f"{block}.gate.weight", (config.num_experts, hidden)
        for expert in range(config.num_experts):
            yield f"{block}.experts.{expert}.{gate}.weight", (inner, hidden)
            yield f"{block}.experts.{expert}.{up}.weight", (inner, hidden)
            yield f"{block}.experts.{expert}.{down}.weight", (hidden, inner)


def build(config: MoeConfig, weights: Weights, shard: Shard) -> Llama:
    """Builds the network of one rank (base.Family)."""

    def mlp(i: int) -> GatedMlp | _Mixture:
        name = f"model.layers.{i}.{config.block}"
        if config.sparse[i]:
            return _Mixture(config, weights, name, shard)
        return GatedMlp(weights, name, config.intermediate, shard, bias=config.mlp_bias)

    return Llama(config, weights, shard, mlp=mlp)


class _Mixture:
    """The experts of a layer and the router that selects them."""

    def __init__(self, config: MoeConfig, weights: Weights, name: str, shard: Shard) -> None:
        self._config, self._shard = config, shard
        self._gate = weights.take(f"{name}.gate.weight")
        self._experts = Experts(
            weights, f"{name}.experts", config.num_experts, config.expert_inner, shard, names=config.names
        )

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Returns residual + mixture(x)."""
        scores = functional.linear(x, self._gate).float().softmax(-1)
        expert_weights, selected = scores.topk(self._config.num_selected, -1)
        if self._config.norm_weights:
            expert_weights = expert_weights / expert_weights.sum(-1, keepdim=True)
        return add_partial(self._experts.partial(x, selected, expert_weights), residual, self._shard)
