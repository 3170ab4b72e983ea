"""Tensor and pipeline parallel: several rank processes compute what one rank computes, and live and die together.

All tests here share one launcher: it loads torch once, and forks every set of ranks.
"""

import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.connector.base import StepOrders
from kvferry.engines.mini.api import Failure, FinishReason, Output
from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.models.progress import Progress, ProgressState, set_progress_display
from kvferry.engines.mini.ranks.build import build_executor
from kvferry.engines.mini.ranks.control import Channel
from kvferry.engines.mini.ranks.executor import Executor
from kvferry.engines.mini.ranks.launcher import Launcher
from kvferry.engines.mini.ranks.processes import ProcessExecutor, _RankHandle
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.step import ChunkInput, StepInput
from kvferry.errors import ConfigError, RanksLost, UnknownModel
from kvferry.layout.blocks import BlockTable
from kvferry.layout.description import CacheKind
from tests.engines.mini.conftest import ask, finish, prompt_of, tokens_of
from tests.harness.tiny_model import FAMILIES, make_tiny_model
from tests.harness.until import until

pytestmark = [pytest.mark.engine, pytest.mark.process, pytest.mark.timeout(180)]

SHAPES = ((2, 1), (1, 2), (2, 2))
THOROUGHLY = ("llama", "gemma3")
"""The families that are tested in every shape; the others are tested in the last one, which has everything."""
LENGTHS = (5, 17, 40, 130)


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """Yields the launcher of all sets of ranks, and checks at the end that none of them is left."""
    with_torch = Launcher()
    yield with_torch
    with_torch.close()
    assert not with_torch.running


def _settings(directory: Path, **changes: Any) -> EngineSettings:
    common = {"model": str(directory), "dtype": "float32", "num_blocks": 96, "max_batch_tokens": 64, "threads": 1}
    return EngineSettings(**{**common, **changes})


@pytest.fixture
def make_ranked(launcher: Launcher) -> Iterator[Any]:
    """Makes engines on ranks, and closes them after the test, whatever happened."""
    engines: list[Engine] = []

    def make(settings: EngineSettings, *, revives: bool = False) -> Engine:
        model, executor = build_executor(settings, launcher)

        revive = (lambda: (build_executor(settings, launcher)[1], None)) if revives else None
        engines.append(Engine(model, executor, settings, revive=revive))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        assert not [pid for pid in engine.executor.pids if Path(f"/proc/{pid}").exists()]


def _logits(executor: Executor, prompt: list[int]) -> torch.Tensor:
    """Returns the logits of every token of a prompt: all but three at once, then two, and then one, as in decoding.

    Each cache group has clean blocks of its own, because nothing else was computed yet.
    """
    size, tables = 1 + len(prompt) // 16, []
    for group, spec in enumerate(executor.layouts[0].groups):
        first = 1 + group * size
        tables.append(BlockTable(group, 0, range(first, first + (1 if spec.kind is CacheKind.STATE else size))))
    parts = []
    for start, stop in ((0, len(prompt) - 3), (len(prompt) - 3, len(prompt) - 1), (len(prompt) - 1, len(prompt))):
        chunk = ChunkInput(tuple(prompt[start:stop]), start, stop, tuple(tables), stop - start)
        executor.submit(StepInput((chunk,)), StepOrders())
        logits = executor.collect().logits
        assert logits is not None
        parts.append(logits.clone())
    used = [block for table in tables for block in table.block_ids]
    executor.submit(StepInput(clear=tuple(used)), StepOrders())
    return torch.cat(parts)


def _answers(engine: Engine, **sampling: Any) -> dict[str, list[int]]:
    for i, length in enumerate(LENGTHS):
        engine.add(ask(str(i), prompt_of(length, i), **sampling))
    return {name: tokens_of(outputs) for name, outputs in finish(engine).items()}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ranks_compute_what_one_rank_computes(family: str, tmp_path: Path, make_ranked: Any) -> None:  # R23, R36
    """Compares the logits of every token, and the greedy tokens of requests that are batched, cut and preempted."""
    directory = make_tiny_model(tmp_path / family, family)
    alone = Engine.load(_settings(directory))
    want_logits, want = _logits(alone.executor, prompt_of(50, 9)), _answers(alone)
    for tp, pp in SHAPES if family in THOROUGHLY else SHAPES[-1:]:
        engine = make_ranked(_settings(directory, tp=tp, pp=pp))
        found = _logits(engine.executor, prompt_of(50, 9))
        torch.testing.assert_close(found, want_logits, rtol=0, atol=1e-4)
        assert _answers(engine) == want, (tp, pp)
        engine.close()


@pytest.mark.parametrize(
    ("tp", "kv_heads", "kept"),
    [(3, 3, [(0, 1), (1, 2), (2, 3)]), (2, 3, [(0, 2), (2, 3)]), (3, 2, [(0, 1), (0, 1), (1, 2)])],
    ids=["split", "uneven", "replicated"],
)
def test_kv_heads_are_split_unevenly_or_replicated(
    tp: int, kv_heads: int, kept: list[tuple[int, int]], tmp_path: Path, make_ranked: Any
) -> None:
    directory = make_tiny_model(tmp_path / "m", num_key_value_heads=kv_heads)
    want = _answers(Engine.load(_settings(directory)))
    engine = make_ranked(_settings(directory, tp=tp))
    axes = [layout.tensors[0].axes[0] for layout in engine.executor.layouts]
    assert [(axis.start, axis.stop) for axis in axes] == kept
    assert {axis.extent for axis in axes} == {kv_heads}
    assert _answers(engine) == want


def test_ranks_agree_on_the_smallest_cache_and_name_their_layers(tmp_path: Path, make_ranked: Any) -> None:
    """With three layers on two stages, the first stage has two of them, so it has room for half as many blocks."""
    directory = make_tiny_model(tmp_path / "m")
    engine = make_ranked(_settings(directory, pp=2, num_blocks=None, cache_bytes=1 << 20))
    two_layers = 2 * 2 * 2 * 16 * 16 * 4
    assert engine.executor.num_blocks == (1 << 20) // two_layers
    layouts = engine.executor.layouts
    assert [{t.layer for t in one.tensors} for one in layouts] == [
        {"layers.0.attn", "layers.1.attn"},
        {"layers.2.attn"},
    ]
    assert [one.rank.index for one in layouts] == [0, 1]
    assert {t.paging.num_blocks for one in layouts for t in one.tensors} == {engine.executor.num_blocks}


def test_stages_work_on_different_requests_at_once(tmp_path: Path, make_ranked: Any) -> None:
    engine = make_ranked(_settings(make_tiny_model(tmp_path / "m"), pp=2))
    flights: list[set[str]] = []
    submit = engine.executor.submit

    def watch(step: StepInput, orders: StepOrders) -> None:
        submit(step, orders)
        flights.append({r.request_id for r in engine._requests.values() if r.in_flight})

    engine.executor.submit = watch
    for i in range(4):
        engine.add(ask(str(i), prompt_of(20, i)))
    answers = finish(engine)
    assert {len(tokens_of(outputs)) for outputs in answers.values()} == {8}
    # Decoding: two requests in the step before, two more with this one.
    assert max(len(flight) for flight in flights) >= 2
    assert engine.stats().steps >= 2 * 8


def test_an_abort_between_two_stages_leaves_the_other_requests_as_they_were(tmp_path: Path, make_ranked: Any) -> None:
    directory = make_tiny_model(tmp_path / "m")
    want = _answers(Engine.load(_settings(directory)))
    engine = make_ranked(_settings(directory, pp=2))
    for i, length in enumerate(LENGTHS):
        engine.add(ask(str(i), prompt_of(length, i)))
    engine.add(ask("gone", prompt_of(30, 7)))
    outputs: dict[str, list[Output]] = {}
    for number in range(200):
        if not engine.has_work():
            break
        if number == 4:
            assert engine._in_flight, "a step is on its way"
            engine.abort("gone")
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check()
    assert outputs.pop("gone")[-1].finish_reason is FinishReason.ABORT
    assert {name: tokens_of(found) for name, found in outputs.items()} == want


def test_a_rank_that_is_killed_ends_its_requests_and_others_go_on(tmp_path: Path, make_ranked: Any) -> None:
    directory = make_tiny_model(tmp_path / "m")
    want = _answers(Engine.load(_settings(directory)))
    engine = make_ranked(_settings(directory, tp=2), revives=True)
    old = engine.executor.pids
    for i in range(3):
        engine.add(ask(str(i), prompt_of(20, i), max_tokens=200))
    engine.step()
    os.kill(old[1], signal.SIGKILL)
    ended: list[Output] = []
    while len(ended) < 3:
        ended += [output for output in engine.step() if output.finish_reason is not None]
    assert {output.finish_reason for output in ended} == {FinishReason.ERROR}
    assert all("rank 1 was killed by signal 9" in str(output.error) for output in ended), ended
    assert {output.failure for output in ended} <= {Failure.ENGINE_CRASHED, Failure.ENGINE_DEAD}
    assert _answers(engine) == want
    assert engine.stats().revivals == 1
    assert not set(engine.executor.pids) & set(old)
    assert not [pid for pid in old if Path(f"/proc/{pid}").exists()]


def test_an_idle_engine_whose_rank_was_killed_has_work(tmp_path: Path, make_ranked: Any) -> None:
    engine = make_ranked(_settings(make_tiny_model(tmp_path / "m"), tp=2), revives=True)
    woken: list[bool] = []
    engine.on_wake(lambda: woken.append(True))
    assert not engine.has_work()
    os.kill(engine.executor.pids[0], signal.SIGKILL)
    until(lambda: bool(woken), "the engine is woken")
    assert engine.has_work()
    assert engine.step() == []
    engine.add(ask("r", prompt_of(20)))
    assert len(tokens_of(finish(engine)["r"])) == 8


def test_without_a_revival_the_step_says_which_rank_died(tmp_path: Path, make_ranked: Any) -> None:
    engine = make_ranked(_settings(make_tiny_model(tmp_path / "m"), pp=2))
    engine.add(ask("r", prompt_of(20), max_tokens=200))
    engine.step()
    os.kill(engine.executor.pids[0], signal.SIGKILL)
    with pytest.raises(RanksLost, match="rank 0 was killed by signal 9"):
        finish(engine)


def test_a_rank_that_fails_reports_its_error(tmp_path: Path, make_ranked: Any) -> None:
    engine = make_ranked(_settings(make_tiny_model(tmp_path / "m"), tp=2))
    beyond = ChunkInput((1 << 20,), 0, 1, (BlockTable(0, 0, (1,)),), 1)
    engine.executor.submit(StepInput((beyond,)), StepOrders())
    with pytest.raises(RanksLost, match=r"rank [01]: IndexError: index out of range"):
        engine.executor.collect()


@pytest.mark.parametrize("shape", [{"tp": 2}, {"pp": 2}], ids=["tp", "pp"])
def test_a_request_that_makes_a_rank_raise_ends_and_others_go_on(
    shape: dict[str, int], tmp_path: Path, make_ranked: Any
) -> None:
    """New ranks compute the others again: those of the failed step one by one, until the cause is found."""
    directory = make_tiny_model(tmp_path / "m")
    want = _answers(Engine.load(_settings(directory)))
    engine = make_ranked(_settings(directory, **shape), revives=True)
    engine.add(ask("bad", prompt_of(30, 7)))
    for i, length in enumerate(LENGTHS):
        engine.add(ask(str(i), prompt_of(length, i)))
    engine._requests["bad"].tokens[3] = 1 << 20  # as if no check had seen it
    outputs = finish(engine)
    last = outputs.pop("bad")[-1]
    assert (last.finish_reason, last.failure) == (FinishReason.ERROR, Failure.REQUEST_FAILED)
    assert "IndexError" in str(last.error)
    assert {name: tokens_of(found) for name, found in outputs.items()} == want
    assert engine.stats().revivals == 2
    assert _answers(engine) == want


def test_a_message_that_cannot_be_read_ends_the_ranks_and_every_wait(tmp_path: Path) -> None:
    executor = ProcessExecutor(_settings(tmp_path), num_blocks=2)
    ours, theirs = socket.socketpair()
    executor._ranks.append(_RankHandle(0, 0, Channel(ours)))
    executor._reader.start()
    with theirs:
        theirs.sendall(struct.pack("<IQ", 4, 0) + b"junk")
        with pytest.raises(RanksLost, match="a message of a rank cannot be read: UnpicklingError"):
            executor._await(lambda: False, 30, "loaded")
    executor.close()


def test_outputs_of_the_step_in_which_ranks_die_are_not_lost(tmp_path: Path, make_ranked: Any) -> None:
    """A request that ended in that step ended well, and its client receives the output."""
    engine = make_ranked(_settings(make_tiny_model(tmp_path / "m"), tp=2), revives=True)
    engine.add(ask("ends", prompt_of(20), max_tokens=1))
    engine.add(ask("open", prompt_of(20), max_tokens=100))
    collect = engine._collect

    def then_die(*args: Any) -> None:
        collect(*args)
        os.kill(engine.executor.pids[0], signal.SIGKILL)
        until(lambda: engine.executor.has_reports, "it is noticed")
        engine.executor.reports()  # raises, as does everything else that needs the ranks from now on

    engine._collect = then_die
    reasons = {output.request_id: output.finish_reason for output in engine.step() if output.finish_reason}
    assert reasons == {"ends": FinishReason.LENGTH, "open": FinishReason.ERROR}


def test_a_rank_that_hangs_is_treated_as_dead(tmp_path: Path, make_ranked: Any) -> None:
    engine = make_ranked(_settings(make_tiny_model(tmp_path / "m"), tp=2, rank_timeout_s=2))
    stopped = engine.executor.pids[1]
    os.kill(stopped, signal.SIGSTOP)
    engine.add(ask("r", prompt_of(20)))
    # Its sibling waits for it equally long, so either of them may time out first.
    with pytest.raises(RanksLost, match=r"no rank has computed a step in 2 s|rank 0: "):
        finish(engine)


def test_progress_of_a_rank_reaches_the_display_of_the_engines_process(tmp_path: Path, make_ranked: Any) -> None:
    shown: list[Progress] = []
    set_progress_display(shown.append)
    try:
        make_ranked(_settings(make_tiny_model(tmp_path / "m"), tp=2))
    finally:
        set_progress_display(None)
    done = [progress.title for progress in shown if progress.state is ProgressState.DONE]
    assert done == [f"load {tmp_path / 'm'}"]


@pytest.mark.parametrize(
    ("changes", "settings", "error", "message"),
    [
        (
            {},
            {"tp": 4},
            ConfigError,
            r"tp=4 does not divide the model's 6 attention heads.* --tp with one of 1, 2, 3, 6",
        ),
        ({}, {"pp": 4}, ConfigError, r"pp=4 stages for the model's 3 layers: .* Use --pp 3 or fewer"),
        ({}, {"tp": 2, "num_blocks": None, "cache_bytes": 100}, ConfigError, "cache_bytes=100 holds 0 blocks"),
        ({}, {"tp": 2, "model": "/nowhere"}, UnknownModel, "there is no model at '/nowhere'"),
        (
            {},
            {"tp": 2, "num_blocks": 1 << 40},
            ConfigError,
            "no memory for 2 ranks whose caches need .* Set cache_bytes",
        ),
    ],
    ids=["tp", "pp", "cache", "model", "memory"],
)
def test_bad_input_gives_an_error_with_the_operators_flags(
    changes: dict[str, Any],
    settings: dict[str, Any],
    error: type[Exception],
    message: str,
    tmp_path: Path,
    launcher: Launcher,
) -> None:
    directory = make_tiny_model(tmp_path / "m", **changes)
    with pytest.raises(error, match=message):
        build_executor(_settings(directory, **settings), launcher)
