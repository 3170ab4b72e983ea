"""Communication between the ranks of one engine: sums within a stage, hidden states from stage to stage.

It uses torch.distributed: NCCL if every rank has its own CUDA device, else gloo, which moves CUDA tensors through CPU
memory. The ranks find each other by a file in a private directory; their sockets are bound to loopback.
"""

import os
from collections import deque
from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore

from kvferry.engines.mini.models.parallel import Shard

__all__ = ["GroupComm", "Stages", "join", "leave"]


class GroupComm:
    """Implements parallel.Comm with torch.distributed."""

    def __init__(self, group: distributed.ProcessGroup, tp_size: int, *, through_cpu: bool) -> None:
        self._group = group
        self._tp_size = tp_size
        self._through_cpu = through_cpu

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the group."""
        total = x.cpu() if self._through_cpu else x.contiguous()
        distributed.all_reduce(total, group=self._group)
        return total.to(x.device)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns the parts of all ranks, joined along `dim`. They are padded to the longest one while they travel."""
        part = (x.cpu() if self._through_cpu else x).movedim(dim, 0).contiguous()
        length = torch.tensor([len(part)], device=part.device)
        lengths = [torch.empty_like(length) for _ in range(self._tp_size)]
        distributed.all_gather(lengths, length, group=self._group)
        sizes = [int(one) for one in lengths]
        if len(part) < max(sizes):
            part = torch.cat([part, part.new_zeros(max(sizes) - len(part), *part.shape[1:])])
        parts = [torch.empty_like(part) for _ in sizes]
        distributed.all_gather(parts, part, group=self._group)
        whole = torch.cat([one[:size] for one, size in zip(parts, sizes, strict=True)])
        return whole.movedim(0, dim).to(x.device)


class Stages:
    """Connects this rank to its neighbours: the ranks at the same place in the previous and in the next stage."""

    def __init__(
        self, shard: Shard, *, hidden: int, dtype: torch.dtype, device: torch.device, through_cpu: bool
    ) -> None:
        self._previous = shard.index - shard.tp_size
        self._next = shard.index + shard.tp_size
        self._depth = shard.pp_size
        self._hidden = hidden
        self._dtype = dtype
        self._device = device
        self._wire_device = torch.device("cpu") if through_cpu else device
        self._sent: deque[tuple[distributed.Work, torch.Tensor]] = deque()

    def receive(self, num_tokens: int) -> torch.Tensor:
        """Returns the hidden states [num_tokens, hidden] of the previous stage, for the same step. Blocks."""
        x = torch.empty(num_tokens, self._hidden, dtype=self._dtype, device=self._wire_device)
        distributed.recv(x, self._previous)
        return x.to(self._device)

    def send(self, hidden: torch.Tensor) -> None:
        """Sends to the next stage without waiting for it.

        Blocks only while more sends are unfinished than there are stages.
        """
        x = hidden.to(self._wire_device).contiguous()
        work = distributed.isend(x, self._next)
        assert work is not None, "every rank is in the default group, so isend returns work"
        self._sent.append((work, x))
        while len(self._sent) > self._depth:
            self._sent.popleft()[0].wait()


def join(shard: Shard, store: str, *, device: torch.device, timeout_s: float) -> tuple[Shard, bool]:
    """Joins the other ranks. Returns the shard with its group, and whether tensors go through CPU memory.

    Blocks. `store` is the path of a file that all ranks share. Raises RuntimeError if the others do not join within
    `timeout_s`, which is also how long later calls wait for a rank.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")
    on_cuda = device.type == "cuda"
    with_nccl = on_cuda and distributed.is_nccl_available() and shard.num_ranks <= torch.cuda.device_count()
    if with_nccl:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if with_nccl else "gloo",
        store=FileStore(store, shard.num_ranks),
        rank=shard.index,
        world_size=shard.num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    through_cpu = on_cuda and not with_nccl
    if shard.tp_size == 1:
        return shard, through_cpu
    groups = [  # every rank must make all of them, in the same order
        distributed.new_group(list(range(first, first + shard.tp_size)))
        for first in range(0, shard.num_ranks, shard.tp_size)
    ]
    comm = GroupComm(groups[shard.pp_rank], shard.tp_size, through_cpu=through_cpu)
    return Shard(shard.tp_rank, shard.tp_size, shard.pp_rank, shard.pp_size, comm), through_cpu


def leave() -> None:
    """Closes what `join` opened."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
