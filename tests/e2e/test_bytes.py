"""R36, R12, R30: the KV that lands on decode is prefill's, byte for byte; two processes, real NIXL, both modes."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from kvferry.engines.mini.api import GenerateRequest, Output, SamplingParams
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.worker import Worker, WorkerSettings, build_worker
from kvferry.ids import RequestId
from kvferry.settings import FerrySettings, Role, TransferMode, TransferSettings, Verify
from kvferry.wire.params import HandoffParams
from tests.harness.byte_worker import Computed, Identity, serve_bytes, tokens_in
from tests.harness.forked import fork_context
from tests.harness.tiny_model import make_tiny_model
from tests.harness.until import let_threads_run, until

pytestmark = [pytest.mark.process, pytest.mark.engine]

WITHIN_S = 30.0


class Pair:
    """Prefill in a child process, and decode in this one."""

    def __init__(self, decode: Worker, pipe: Connection, prefill: Identity) -> None:
        self.decode = decode
        self.pipe = pipe
        self.prefill = prefill

    def hand_over(self, name: str, prompt: list[int]) -> tuple[Computed, torch.Tensor, Output, int]:
        """One hand-off: prefill's KV; decode's KV after its own prefix hits; its first output; the number of hits."""
        engine, transfer = self.decode.engine, f"transfer-{name}"
        push = self.decode.settings.ferry.transfer.mode is TransferMode.PUSH
        self.pipe.send((name, tuple(prompt), transfer))
        computed: Computed | None = None
        if push:  # R17: decode asks before or while prefill computes
            params = HandoffParams(
                do_remote_prefill=True, transfer_mode=TransferMode.PUSH, transfer_id=transfer,
                remote_engine_id=self.prefill.engine, remote_incarnation=self.prefill.incarnation,
                remote_host=self.prefill.host, remote_port=self.prefill.port,
            )  # fmt: skip
        else:
            computed = self.pipe.recv()
            params = HandoffParams.from_dict(computed.params)
        sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        engine.add(GenerateRequest(request_id=RequestId(name), prompt_token_ids=tuple(prompt), sampling=sampling,
                                   handoff=params))  # fmt: skip
        first: Output | None = None
        until_s = time.monotonic() + WITHIN_S
        while first is None or computed is None:
            assert time.monotonic() < until_s, f"{name} has not begun in {WITHIN_S:g} s: {engine.stats()}"
            if first is None:
                first = next((output for output in engine.step() if output.request_id == name), None)
            if computed is None and self.pipe.poll(0):
                computed = self.pipe.recv()
            let_threads_run()
        request = next(one for one in engine.scheduler.running if one.request_id == name)
        landed = tokens_in(self.decode, request.block_ids, request.account.cached, len(prompt))
        num_cached = request.account.cached
        self.step_until_idle()
        return computed, landed, first, num_cached

    def step_until_idle(self) -> None:
        """Waits until decode has no request and no hand-off."""

        def idle() -> bool:
            self.decode.engine.step()
            return not self.decode.engine.has_work()

        until(idle, "decode is idle", within_s=WITHIN_S, every_s=0.0005)

    def num_blocks_in_use(self) -> tuple[int, int]:
        """Prompts on prefill and on decode."""
        self.pipe.send("stats")
        return self.pipe.recv(), self.decode.engine.blocks.num_usable - self.decode.engine.blocks.num_free


@contextmanager
def pair(model: Path, mode: TransferMode, *, prefill_block: int = 16, decode_block: int = 16) -> Iterator[Pair]:
    """Yields both workers as `kvferry serve` makes them; everything that lands is also compared by digest."""
    torch.set_num_threads(1)
    ferry = FerrySettings(transfer=TransferSettings(mode=mode, verify=Verify.ALL))

    def settings(role: Role, block_tokens: int) -> WorkerSettings:
        engine = EngineSettings(
            model=str(model), dtype="float32", num_blocks=96, block_tokens=block_tokens, max_batch_tokens=64, threads=1
        )
        return WorkerSettings(engine=engine, ferry=ferry, role=role, engine_id=str(role))

    context = fork_context()
    ours, theirs = context.Pipe()
    child = context.Process(target=serve_bytes, args=(theirs, settings(Role.PREFILL, prefill_block)), daemon=True)
    child.start()
    theirs.close()
    decode = build_worker(settings(Role.DECODE, decode_block))
    try:
        assert ours.poll(90.0), "prefill has not started in 90 s"
        both = Pair(decode, ours, ours.recv())
        yield both
        until(lambda: both.num_blocks_in_use() == (0, 0), "all blocks are free", within_s=WITHIN_S)
        decode.engine.check()
        ours.send(None)
        child.join(20.0)
        assert child.exitcode == 0, f"prefill ended with {child.exitcode}"
    finally:
        decode.close()
        ours.close()
        if child.is_alive():
            child.kill()
            child.join()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns random weights, so that KV differs for any two tokens."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to 600 tokens, of part of a block, whole blocks and both; every third begins like an earlier one."""
    dice = random.Random(seed)
    made: list[list[int]] = []
    for number in range(count):
        length = dice.choice([1, 2, 15, 16, 17, 31, 32, 64, 65, 128, dice.randint(1, 600), dice.randint(100, 600)])
        prompt = [dice.randint(3, 263) for _ in range(length)]
        if number % 3 == 2:
            earlier = max(made[-2:], key=len)  # one that is still in the small cache
            prompt = earlier[: dice.randint(len(earlier) // 2, len(earlier))] + prompt[: max(1, length // 2)]
        made.append(prompt)
    return made


def _compare(both: Pair, name: str, prompt: list[int]) -> int:
    """Makes one hand-off and compares its bytes. Returns the number of decode's own prefix hits."""
    config = both.decode.engine.model.config
    computed, landed, first, num_cached = both.hand_over(name, prompt)
    shape = (config.num_layers, 2, config.num_kv_heads, len(prompt), config.head_dim)
    sent = torch.from_numpy(np.frombuffer(computed.kv, np.float32).reshape(shape).copy())[:, :, :, num_cached:]
    assert torch.equal(sent, landed), f"{name}: {len(prompt)} tokens, {num_cached} cached: bytes differ"
    assert len(prompt) == num_cached or sent.abs().amin(dim=(0, 1, 2, 4)).max() > 0, "prefill's cache is empty"
    account = first.account
    assert account is not None, first
    assert (account.cached, account.recomputed, account.reason) == (num_cached, 0, ""), account
    assert account.handed_over == len(prompt) - num_cached, account
    assert first.token_ids[0] == computed.params["first_token"], first
    return num_cached


@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", [TransferMode.PULL, TransferMode.PUSH])
def test_bytes_that_land_are_those_of_prefill(tiny: Path, mode: TransferMode) -> None:  # R12, R30
    with pair(tiny, mode) as both:
        hits = [_compare(both, f"{i}", prompt) for i, prompt in enumerate(prompts(60, seed=1))]
        stats = both.decode.handoff_stats()
    assert sum(1 for hit in hits if hit) >= 10, f"too few prefix hits to prove anything: {hits}"
    assert stats.landed >= 50, stats
    assert stats.failed == 0, stats


@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", [TransferMode.PULL, TransferMode.PUSH])
@pytest.mark.parametrize(("prefill_block", "decode_block"), [(16, 24), (24, 8)])
def test_bytes_between_unequal_blocks(  # R22
    tiny: Path, mode: TransferMode, prefill_block: int, decode_block: int
) -> None:
    with pair(tiny, mode, prefill_block=prefill_block, decode_block=decode_block) as both:
        for i, prompt in enumerate(prompts(12, seed=2)):
            _compare(both, f"{i}", prompt)
        assert both.decode.handoff_stats().failed == 0
