"""A prefill worker in its own process that reports the content of its cache, for tests that compare bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvferry.engines.mini.api import GenerateRequest, SamplingParams
from kvferry.engines.mini.ranks.executor import LocalExecutor
from kvferry.engines.mini.worker import Worker, WorkerSettings, build_worker
from kvferry.ids import RequestId
from kvferry.wire.params import HandoffParams
from tests.harness.until import let_threads_run

__all__ = ["Computed", "Identity", "serve_bytes", "tokens_in"]


@dataclass(frozen=True)
class Identity:
    """The address of the worker, for the parameters of a push."""

    engine: str
    incarnation: str
    host: str
    port: int


@dataclass(frozen=True)
class Computed:
    """A prompt that was computed: the parameters for decode, and a copy of its KV in the cache."""

    params: dict[str, Any]
    kv: bytes


def tokens_in(worker: Worker, block_ids: Sequence[int], start: int, stop: int) -> torch.Tensor:
    """Returns a copy of the KV of tokens [start, stop) in these blocks, as [layers, 2, heads, tokens, head_dim]."""
    assert isinstance(worker.engine.executor, LocalExecutor)
    cache, ids = worker.engine.executor.cache, torch.tensor(block_ids)
    layers = dict.fromkeys(name for group in cache.groups for name in group.layers)
    blocks = torch.stack([torch.stack([cache.view(layer, part)[ids] for part in "kv"]) for layer in layers])
    num_layers, two, num_blocks, heads, block_tokens, dim = blocks.shape
    rows = blocks.transpose(2, 3).reshape(num_layers, two, heads, num_blocks * block_tokens, dim)
    return rows[:, :, :, start:stop].clone()


def serve_bytes(pipe: Connection, settings: WorkerSettings) -> None:
    """Runs in the child. Answers (name, prompt, transfer id) with Computed, `stats` with free blocks; None ends it."""
    torch.set_num_threads(1)
    worker = build_worker(settings)
    try:
        identity = worker.identity
        pipe.send(Identity(identity.engine, identity.incarnation, identity.host, identity.port))
        while True:
            if pipe.poll(0.0 if worker.engine.has_work() else 0.02):
                order = pipe.recv()
                if order is None:
                    return
                if order == "stats":
                    pipe.send(worker.engine.blocks.num_usable - worker.engine.blocks.num_free)
                    continue
                pipe.send(_compute(worker, *order))
            elif worker.engine.has_work():
                worker.engine.step()
                let_threads_run()
    finally:
        worker.close()
        pipe.close()


def _compute(worker: Worker, name: str, prompt: tuple[int, ...], transfer: str) -> Computed:
    handoff = HandoffParams(do_remote_decode=True, transfer_id=transfer)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    worker.engine.add(
        GenerateRequest(request_id=RequestId(name), prompt_token_ids=prompt, sampling=sampling, handoff=handoff)
    )
    while True:
        for output in worker.engine.step():
            if output.request_id == name and output.finish_reason is not None:
                assert output.handoff is not None, output
                assert output.handoff.remote_block_ids is not None, output
                kv = tokens_in(worker, output.handoff.remote_block_ids[0], 0, len(prompt))
                return Computed(output.handoff.to_dict(), kv.numpy().tobytes())
