"""Tokens with speculation equal those without it, for every drafter: alone, batched, with preemption, sampled."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.lookahead import extra_window_tokens
from tests.engines.mini.speculation.conftest import MakeServing, accepted, ask, engine, text, tokens
from tests.harness.serving import Alone

pytestmark = pytest.mark.engine
Plain = Callable[..., list[list[int]]]

PROMPTS = [text(length, 1500 * i) for i, length in enumerate((1, 2, 5, 16, 17, 40, 63))]
METHODS = [("mtp", 1), ("mtp", 2), ("mtp", 3), ("mtp", 5), ("mtp", 0), ("ngram", 3), ("suffix", 4)]


@pytest.mark.parametrize(("method", "count"), METHODS)
def test_tokens_are_the_same(serving: MakeServing, plain: Plain, byte_mtp: str, method: str, count: int) -> None:
    one = serving(Alone, engine(byte_mtp, method, count, max_batch_tokens=24))
    expected = plain(byte_mtp, PROMPTS, 24)
    assert tokens(one.serve(ask(PROMPTS, 24))) == expected
    assert tokens(one.serve(ask(PROMPTS, 24))) == expected  # with hits in the prefix cache
    one.engine.check()
    stats = one.engine.stats()
    assert stats.free_blocks == stats.blocks
    got = accepted(one)
    assert len(got.by_position) == count or method in ("ngram", "suffix")
    if method == "mtp" and count:
        assert got.by_position[0] > 0.6  # it is a drafter
        assert stats.steps < 2 * 24 * 0.9


@pytest.mark.parametrize(("method", "count"), [("mtp", 3), ("mtp", 5), ("suffix", 4)])
def test_preemption_changes_no_token(
    serving: MakeServing, plain: Plain, byte_mtp: str, method: str, count: int
) -> None:
    """The cache has room for about two of the seven requests."""
    one = serving(Alone, engine(byte_mtp, method, count, num_blocks=44, max_batch_tokens=24))
    assert tokens(one.serve(ask(PROMPTS, 60))) == plain(byte_mtp, PROMPTS, 60)
    assert one.engine.stats().preemptions > 0
    one.engine.check()


@pytest.mark.parametrize("count", [3, 5])
def test_windows(serving: MakeServing, plain: Plain, windowed: str, count: int) -> None:  # R34
    """A module's window starts at slots that are computed again, so their earlier blocks must still be there."""
    one = serving(Alone, engine(windowed, "mtp", count, max_batch_tokens=24))
    assert tokens(one.serve(ask(PROMPTS, 30))) == plain(windowed, PROMPTS, 30)
    one.engine.check()


def with_modules(model: str, num_modules: int, directory: Path) -> str:
    """Returns the same model with only the first modules."""
    for file in Path(model).iterdir():
        shutil.copy(file, directory)
    config = json.loads((directory / "config.json").read_text())
    config["num_nextn_predict_layers"] = num_modules
    config["layer_types"] = config["layer_types"][: config["num_hidden_layers"] + num_modules]
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.parametrize("modules", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_window_keeps_as_many_tokens_as_are_read(
    serving: MakeServing,
    plain: Plain,
    windowed: str,
    modules: int,
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R34, to the token: with blocks of one token, answers are right, and with one token less a step fails."""
    model = windowed if modules == 3 else with_modules(windowed, modules, tmp_path)
    settings = engine(model, "mtp", count, block_tokens=1, num_blocks=2000)
    one = serving(Alone, settings)
    assert tokens(one.serve(ask(PROMPTS, 12))) == plain(windowed, PROMPTS, 12)
    kept = one.engine.scheduler.groups.first_needed
    name = "kvferry.engines.mini.scheduling.scheduler.extra_window_tokens"
    monkeypatch.setattr(name, lambda *args: extra_window_tokens(*args) - 1)
    less = serving(Alone, settings)
    assert kept(0, 20) == less.engine.scheduler.groups.first_needed(0, 20) - 1
    less.serve(ask(PROMPTS, 12))
    # With more drafts than modules, the rule lets a window keep more than modules read.
    assert ("the window needs tokens from" in caplog.text) == (modules == 1 or count <= modules)


@pytest.mark.parametrize("sampling", [{"temperature": 0.9, "seed": 3}, {"temperature": 1.2, "top_p": 0.8, "seed": 5}])
def test_each_sampled_answer_is_the_one_without_drafts(
    serving: MakeServing, plain: Plain, byte_mtp: str, sampling: dict[str, Any]
) -> None:
    one = serving(Alone, engine(byte_mtp, "mtp", 3))
    assert tokens(one.serve(ask(PROMPTS, 24, **sampling))) == plain(byte_mtp, PROMPTS, 24, **sampling)
    assert 0 < accepted(one).rate < 1


def test_an_answer_ends_where_it_would_without_drafts(serving: MakeServing, byte_mtp: str) -> None:
    """There is a stop token among accepted drafts: nothing after it is returned."""
    one = serving(Alone, engine(byte_mtp, "mtp", 3))
    whole = tokens(one.serve(ask([PROMPTS[5]], 30)))[0]
    stop = whole[7]
    cut = whole[: whole.index(stop) + 1]
    assert tokens(one.serve(ask([PROMPTS[5]], 30, stop_token_ids=(stop,)))) == [cut]
    for length in range(1, 9):
        assert tokens(one.serve(ask([PROMPTS[5]], length))) == [whole[:length]]


def test_an_abort_leaves_nothing_behind(serving: MakeServing, byte_mtp: str) -> None:
    one = serving(Alone, engine(byte_mtp, "mtp", 3))
    requests = ask(PROMPTS, 200)
    for request in requests:
        one.engine.add(request)
    for _ in range(6):
        one.engine.step()
    for request in requests:
        one.engine.abort(request.request_id)
    while one.engine.has_work():
        one.engine.step()
    one.engine.check()
    assert one.engine.stats().free_blocks == one.engine.stats().blocks
    one.serve(ask(PROMPTS[:1], 2))  # a step informs the drafter which requests to forget
    executor: Any = one.engine.executor
    assert len(executor._rank._drafter._states) <= 1
