"""The limits of a hand-off's counts: tails as short as the back-off, preemption on prefill."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvferry.connector.lookahead import handoff_tokens
from kvferry.settings import TransferMode
from kvferry.wire.params import HandoffParams
from tests.engines.mini.speculation.conftest import MakeServing, accepted, ask, engine, text, tokens
from tests.harness.serving import Alone, Pair
from tests.harness.until import let_threads_run

pytestmark = pytest.mark.engine
Plain = Callable[..., list[list[int]]]
DEPTH = 3


@pytest.mark.parametrize("mode", list(TransferMode))
def test_tails_around_the_back_off(
    serving: MakeServing, plain: Plain, byte_mtp: str, mode: TransferMode
) -> None:  # R32
    """Both sides know a text; prompts of it end everywhere around its blocks. So what is not cached is, on prefill, as
    long as the back-off, shorter and longer (then it computes little or nothing), and on decode just the back-off (then
    nothing is handed over)."""
    depth = 5  # a hit ends a block before the last that is known: of blocks of 4 it can just reach the cut
    settings = engine(byte_mtp, "mtp", depth)
    pair, alone = serving(Pair, settings, settings, mode=mode), serving(Alone, settings)
    whole = text(24, 6000)
    prompts = [whole[:length] for length in range(1, 25)] + [whole + text(more, 400) for more in range(1, 6)]
    seen = set()
    for round_of in ([whole], prompts):
        served = pair.serve(ask(round_of))
        assert tokens(served) == tokens(alone.serve(ask(round_of))) == plain(byte_mtp, round_of)
        for prompt, one in zip(round_of, served, strict=True):
            assert one.last is not None
            assert one.last.account is not None
            account, cut = one.last.account, handoff_tokens(len(prompt), mamba=False, lookahead=depth)
            assert account.cached + account.handed_over == cut, (len(prompt), account)
            seen.add((account.cached > 0, account.handed_over > 0))
    assert seen == {(False, False), (False, True), (True, False), (True, True)}
    assert accepted(pair) == accepted(alone)
    for worker in (pair.prefill, pair.decode):  # type: ignore[attr-defined]
        worker.engine.check()
        assert worker.engine.stats().free_blocks == worker.engine.stats().blocks


@pytest.mark.parametrize("mode", list(TransferMode))
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_truncation_is_kept_when_prefill_preempts(
    serving: MakeServing, plain: Plain, byte_mtp: str, mode: TransferMode, steps: int
) -> None:  # R33
    """After its first chunk, and after the chunk that reaches the cut: what is left to decode is the same."""
    prompt = text(31, 8000)
    pair = serving(Pair, engine(byte_mtp, "mtp", DEPTH, max_batch_tokens=8), engine(byte_mtp, "mtp", DEPTH), mode=mode)
    assert isinstance(pair, Pair)
    asked = ask([prompt], 16)[0]
    params = HandoffParams(do_remote_decode=True, transfer_id="t")
    prefill, decode = pair.prefill.engine, pair.engine
    prefill.add(replace(asked, handoff=params, sampling=replace(asked.sampling, max_tokens=1)))
    request = next(iter(prefill._requests.values()))
    assert request.num_deferred == DEPTH
    if mode is TransferMode.PUSH:
        decode.add(replace(asked, handoff=pair._address(params)))
    schedule, count = prefill.scheduler.schedule, 0

    def preempt_once(now_s: float, max_chunks: int | None = None) -> object:
        nonlocal count
        if count == steps and request in prefill.scheduler.running:
            prefill.scheduler._preempt(request)
            assert (request.num_deferred, request.num_computed) == (DEPTH, 0)
        count += 1
        return schedule(now_s, max_chunks)

    prefill.scheduler.schedule = preempt_once  # type: ignore[method-assign,assignment]
    answer: list[int] = []
    give_up_s = time.monotonic() + 60.0
    while time.monotonic() < give_up_s and len(answer) < 16:
        for output in prefill.step():
            assert output.error is None
            if output.finish_reason is not None and mode is TransferMode.PULL:
                decode.add(replace(asked, handoff=output.handoff))
        for output in decode.step():
            assert output.error is None
            answer += output.token_ids
        let_threads_run()
    assert request.num_deferred == DEPTH
    assert prefill.stats().preemptions == (1 if steps < 4 else 0)
    assert [answer] == plain(byte_mtp, [prompt], 16)
    pair._settle(give_up_s)
    for one in (prefill, decode):
        one.check()
        assert one.stats().free_blocks == one.stats().blocks
