"""The drafter's KV across the hand-off: every number of drafts on both sides, every length, with prefix hits. No slot
is shifted, and none is read that was never computed (R31 to R36)."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from kvferry.connector.lookahead import handoff_tokens
from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.ranks.executor import LocalExecutor
from kvferry.engines.mini.scheduling.request import Request
from kvferry.settings import TransferMode
from kvferry.wire.params import HandoffParams
from tests.engines.mini.speculation.conftest import MakeServing, accepted, ask, engine, text, texts, tokens
from tests.harness.serving import Alone, Pair
from tests.harness.until import let_threads_run

pytestmark = pytest.mark.engine
Plain = Callable[..., list[list[int]]]

PULL, PUSH = TransferMode.PULL, TransferMode.PUSH
LENGTHS = texts(range(1, 17), stride=700)  # each length from 1 to 4 blocks
DEPTHS = (0, 1, 2, 3, 5)
FULL = os.environ.get("SPEC_MATRIX") == "full"
SOME = [(3, 3), (1, 3), (3, 1), (2, 5), (5, 2), (0, 3), (3, 0), (1, 1)]
PAIRS = [
    (k_p, k_d, mode)
    for k_p, k_d in product(DEPTHS, DEPTHS)
    for mode in (PULL, PUSH)
    if FULL or (mode is PULL and (k_p, k_d) in SOME) or (mode is PUSH and (k_p, k_d) == (3, 3))
]


@pytest.mark.parametrize(("k_p", "k_d", "mode"), PAIRS)
def test_any_depth_on_either_side(
    serving: MakeServing, plain: Plain, byte_mtp: str, k_p: int, k_d: int, mode: TransferMode
) -> None:
    """R5, R32, R36: tokens and, position by position, accepted drafts are those of one engine at decode's depth."""
    pair = serving(Pair, engine(byte_mtp, "mtp", k_p), engine(byte_mtp, "mtp", k_d), mode=mode)
    alone = serving(Alone, engine(byte_mtp, "mtp", k_d))
    expected = plain(byte_mtp, LENGTHS)
    served = pair.serve(ask(LENGTHS))
    assert tokens(served) == expected
    assert tokens(alone.serve(ask(LENGTHS))) == expected
    cuts = [min(handoff_tokens(len(p), mamba=False, lookahead=k) for k in (k_p, k_d)) for p in LENGTHS]
    for prompt, one, cut in zip(LENGTHS, served, cuts, strict=True):
        assert one.last is not None
        assert one.last.account is not None
        account = one.last.account
        assert (account.handed_over, account.cached, account.recomputed) == (cut, 0, len(prompt) - cut), len(prompt)
        if k_d >= k_p:
            assert ("the drafter reads ahead" in account.reason) == (cut < len(prompt)), account
        assert bool(account.reason) == (cut < len(prompt)), account
    same = k_d > 0 and max(k_p, k_d) > 1  # otherwise the first step has no hidden state and no drafts: see below
    if same:
        assert accepted(pair) == accepted(alone)
    again = pair.serve(ask(LENGTHS))  # decode has some of each in its prefix cache
    assert tokens(again) == expected
    assert sum(one.last.account.cached for one in again if one.last and one.last.account) > 0
    if same:
        alone.serve(ask(LENGTHS))
        assert accepted(pair) == accepted(alone)
    for worker in (pair.prefill, pair.decode):  # type: ignore[attr-defined]
        worker.engine.check()
        assert worker.engine.stats().free_blocks == worker.engine.stats().blocks


@pytest.mark.parametrize("k_p", [0, 1])
def test_one_draft_is_accepted_as_by_one_engine(serving: MakeServing, plain: Plain, byte_mtp: str, k_p: int) -> None:
    """Nothing is held back for one draft. Where decode computes the last token of the prompt itself, it has the hidden
    state of one engine alone, and accepts the very same drafts: the slots that were handed over are right."""
    pair = serving(Pair, engine(byte_mtp, "mtp", k_p), engine(byte_mtp, "mtp", 1), first_token=False)
    alone = serving(Alone, engine(byte_mtp, "mtp", 1))
    assert tokens(pair.serve(ask(LENGTHS))) == tokens(alone.serve(ask(LENGTHS))) == plain(byte_mtp, LENGTHS)
    assert accepted(pair) == accepted(alone)


@pytest.mark.parametrize("blocks", [(4, 8), (8, 4), (4, 16)])
def test_unequal_blocks(serving: MakeServing, plain: Plain, byte_mtp: str, blocks: tuple[int, int]) -> None:
    settings = [engine(byte_mtp, "mtp", 3, block_tokens=size) for size in blocks]
    pair, alone = serving(Pair, *settings), serving(Alone, settings[1])
    assert tokens(pair.serve(ask(LENGTHS))) == tokens(alone.serve(ask(LENGTHS))) == plain(byte_mtp, LENGTHS)
    assert accepted(pair) == accepted(alone)


@pytest.mark.parametrize(("k_p", "k_d"), [(3, 3), (1, 3), (3, 1), (5, 3)])
def test_windows(serving: MakeServing, plain: Plain, windowed: str, k_p: int, k_d: int) -> None:  # R34
    pair = serving(Pair, engine(windowed, "mtp", k_p), engine(windowed, "mtp", k_d))
    alone = serving(Alone, engine(windowed, "mtp", k_d))
    prompts = [*LENGTHS, text(40, 9000)]
    assert tokens(pair.serve(ask(prompts))) == tokens(alone.serve(ask(prompts))) == plain(windowed, prompts)
    if k_d > 1:
        assert accepted(pair) == accepted(alone)


@pytest.mark.parametrize(("k_p", "k_d"), [(0, 5), (1, 3), (1, 5), (2, 5), (3, 3)])
def test_windows_of_a_prompt_in_chunks(
    serving: MakeServing, plain: Plain, windowed: str, k_p: int, k_d: int
) -> None:  # R34
    """Decode drafts deeper and begins further back than prefill computed, also after a last chunk of one token."""
    chunked = {"block_tokens": 1, "num_blocks": 2000, "max_batch_tokens": 4, "prefix_caching": False}
    pair = serving(Pair, engine(windowed, "mtp", k_p, **chunked), engine(windowed, "mtp", k_d, **chunked))
    prompts = texts(range(17, 25), stride=700)
    served = pair.serve(ask(prompts))
    assert tokens(served) == plain(windowed, prompts)
    cuts = [min(handoff_tokens(len(p), mamba=False, lookahead=k) for k in (k_p, k_d)) for p in prompts]
    assert [one.last.account.handed_over for one in served if one.last and one.last.account] == cuts


@pytest.mark.parametrize(("method", "count"), [("ngram", 3), ("suffix", 4)])
def test_text_drafters(serving: MakeServing, plain: Plain, byte_mtp: str, method: str, count: int) -> None:  # R3 R7
    """Speculation on decode only is a note, not an error, and accepts as many drafts as a single engine."""
    pair = serving(Pair, engine(byte_mtp), engine(byte_mtp, method, count))
    alone = serving(Alone, engine(byte_mtp, method, count))
    assert tokens(pair.serve(ask(LENGTHS))) == tokens(alone.serve(ask(LENGTHS))) == plain(byte_mtp, LENGTHS)
    assert accepted(pair).drafted[0] > 0


def test_the_unsafe_switch_warns_and_nearly_all_drafts_are_rejected(
    serving: MakeServing, plain: Plain, byte_mtp: str, caplog: pytest.LogCaptureFixture
) -> None:  # R35
    settings = engine(byte_mtp, "mtp", 3, spec_unsafe_without_backoff=True)
    pair, safe = serving(Pair, settings, settings), serving(Pair, *[engine(byte_mtp, "mtp", 3)] * 2)
    assert sum("UNSAFE" in line and "2 places off" in line for line in caplog.messages) == 2
    prompts = [text(30 + i, 900 * i) for i in range(6)]
    assert tokens(pair.serve(ask(prompts, 32))) == tokens(safe.serve(ask(prompts, 32))) == plain(byte_mtp, prompts, 32)
    assert accepted(pair).rate < 0.35 < 0.6 < accepted(safe).rate


def slots(one: Engine, request: Request, layer: str, part: str, count: int) -> torch.Tensor:
    """Returns the slots [0, count) of a request from the cache, as [count, heads, dim]."""
    executor = one.executor
    assert isinstance(executor, LocalExecutor)
    cache = executor.cache
    table, size = request.tables[cache.group_of(layer)], cache.block_tokens
    view = cache.view(layer, part)
    return torch.stack([view[table.block_ids[p // size]][:, p % size] for p in range(count)])


def run_to(length: int, one: Engine, *others: Engine) -> Request:
    """Steps engines until the only request of the first has this many tokens computed."""
    give_up_s = time.monotonic() + 30.0
    while time.monotonic() < give_up_s:
        request = next(iter(one.scheduler.running), None)
        if request is not None and request.num_computed >= length:
            return request
        for each in (one, *others):
            each.step()
        if request is None:
            let_threads_run()
    raise AssertionError(f"no request came to {length} tokens")


@pytest.mark.parametrize("less", [0, 1])
def test_every_slot_of_every_module_is_the_one_of_a_repaired_engine(
    serving: MakeServing, byte_mtp: str, less: int
) -> None:
    """R35: the bytes of each module on decode. `less`: hand over one token more than handoff_tokens says, and exactly
    the slot before the cut differs, in exactly the last module: it has read the first token of the answer."""
    prompt, depth = text(22, 4000), 3
    pair, alone = serving(Pair, *[engine(byte_mtp, "mtp", depth)] * 2), serving(Alone, engine(byte_mtp, "mtp", depth))
    assert isinstance(pair, Pair)
    cut = handoff_tokens(len(prompt), mamba=False, lookahead=depth) + less
    for worker in (pair.prefill, pair.decode):
        worker._scheduler_half._handoff_tokens = lambda _: cut
    alone.engine.add(ask([prompt], 20)[0])
    here = run_to(len(prompt) + 6, alone.engine)
    request = ask([prompt], 20)[0]
    params = HandoffParams(do_remote_decode=True, transfer_id="t")
    pair.prefill.engine.add(replace(request, handoff=params, sampling=replace(request.sampling, max_tokens=1)))
    done = [output for _ in range(20) for output in pair.prefill.engine.step()]
    pair.engine.add(replace(request, handoff=done[-1].handoff))
    there = run_to(len(prompt) + 6, pair.engine, pair.prefill.engine)
    wrong = []
    for i, part in product(range(3), "kv"):
        layer = f"mtp.{i}.attn"
        a = slots(alone.engine, here, layer, part, len(prompt) + 2)
        b = slots(pair.engine, there, layer, part, len(prompt) + 2)
        wrong += [(layer, p) for p in range(len(a)) if not torch.allclose(a[p], b[p], atol=1e-4, rtol=1e-4)]
    expected = [("mtp.2.attn", cut - 1)] * 2 if less else []
    assert wrong == expected


def test_truncation_happens_once_and_preemption_does_not_change_it(
    serving: MakeServing, plain: Plain, byte_mtp: str
) -> None:  # R33
    """Neither side has room for all requests at once; what prefill leaves to decode stays what it was."""
    prompts = [text(30 + i, 2000 * i) for i in range(6)]
    small = engine(byte_mtp, "mtp", 3, num_blocks=28, max_batch_tokens=16)
    pair = serving(Pair, small, small)
    served = pair.serve(ask(prompts, 24))
    assert tokens(served) == plain(byte_mtp, prompts, 24)
    assert pair.engine.stats().preemptions > 0
    for prompt, one in zip(prompts, served, strict=True):
        assert one.last is not None
        assert one.last.account is not None
        assert one.last.account.handed_over in (len(prompt) - 3, 0) or "preempted" in one.last.account.reason


def test_aborts_on_either_side_leave_nothing_open(serving: MakeServing, byte_mtp: str) -> None:  # R28
    pair = serving(Pair, *[engine(byte_mtp, "mtp", 3, max_batch_tokens=16)] * 2)
    assert isinstance(pair, Pair)
    sides = pair.prefill.engine, pair.engine
    on_prefill, on_decode = ask([text(60), text(60, 3000)], 40)
    first, second = (HandoffParams(do_remote_decode=True, transfer_id=name) for name in "ab")
    sides[0].add(replace(on_prefill, handoff=first))
    sides[0].step()  # a chunk of it is offered
    sides[0].abort(on_prefill.request_id)
    sides[0].add(replace(on_decode, handoff=second))
    done = [output for _ in range(20) for output in sides[0].step() if output.handoff is not None]
    sides[1].add(replace(on_decode, handoff=done[-1].handoff))
    run_to(64, sides[1], sides[0])
    sides[1].abort(on_decode.request_id)
    give_up_s = time.monotonic() + 30.0
    while any(side.has_work() or side.stats().held_blocks for side in sides):
        for side in sides:
            side.step()
        let_threads_run()
        assert time.monotonic() < give_up_s, [side.stats() for side in sides]
    for side in sides:
        side.check()
        assert side.stats().free_blocks == side.stats().blocks
