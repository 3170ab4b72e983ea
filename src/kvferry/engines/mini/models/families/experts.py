"""A mixture of experts: each token goes through a few of many small networks, and what they say is weighed.

Tokens are sorted by expert, so each expert that was chosen is called once, with all its tokens. Under tensor
parallelism every expert is split by its inner rows, as a dense network is: all ranks have a part of all experts.
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
        """`names`: of the three matrices of each."""
        self._experts = [GatedMlp(weights, f"{name}.{i}", inner, shard, names=names) for i in range(num_experts)]

    def partial(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """This rank's summand. `chosen`: [tokens, k] which experts; `shares`: [tokens, k] how much each counts."""
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        sorted_x = x[tokens]
        counts = chosen.flatten().bincount(minlength=len(self._experts)).tolist()
        first, found = 0, []
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                found.append(expert.partial(sorted_x[first : first + count]))
                first += count
        weighed = torch.cat(found) * shares.flatten()[order].unsqueeze(-1).to(x.dtype)
        return torch.zeros_like(x).index_add_(0, tokens, weighed)
