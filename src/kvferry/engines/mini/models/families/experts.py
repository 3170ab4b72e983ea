"""A mixture of experts: each token goes through a few of many small networks, whose results are weighted and added.

Tokens are sorted by expert, so each selected expert is called once, with all its tokens. Under tensor parallelism every
expert is split by its inner rows, as a dense network is: every rank has a part of every expert.
"""

import torch

from kvferry.engines.mini.models.families.base import Weights
from kvferry.engines.mini.models.families.layers import MLP_NAMES, GatedMlp
from kvferry.engines.mini.models.parallel import Shard

__all__ = ["Experts"]


class Experts:
    """The experts of one layer."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        num_experts: int,
        inner: int,
        shard: Shard,
        *,
        names: tuple[str, str, str] = MLP_NAMES,
    ) -> None:
        """`names` are those of the three matrices of each expert."""
        self._experts = [GatedMlp(weights, f"{name}.{i}", inner, shard, names=names) for i in range(num_experts)]

    def partial(self, x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns this rank's summand. `selected` and `weights` [tokens, k]: each token's experts and their weights."""
        order = selected.flatten().argsort(stable=True)
        tokens = order // selected.shape[1]
        sorted_x = x[tokens]
        counts = selected.flatten().bincount(minlength=len(self._experts)).tolist()
        first, results = 0, []
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                results.append(expert.partial(sorted_x[first : first + count]))
                first += count
        weighted = torch.cat(results) * weights.flatten()[order].unsqueeze(-1).to(x.dtype)
        return torch.zeros_like(x).index_add_(0, tokens, weighted)
