"""Cache groups under the real scheduler, on a network that proves what it finds in the cache (positions.py)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.models.cache_spec import make_groups
from kvferry.errors import ConfigError, RequestTooLong
from kvferry.layout.description import CacheKind
from tests.engines.mini.conftest import ask, finish, tokens_of
from tests.harness.hypothesis_profile import examples
from tests.harness.positions import answer, layers_of, position_engine

GEMMA: dict[str, Any] = {"full": 1, "windows": (9, 9, 9)}
MAMBA: dict[str, Any] = {"full": 1, "states": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "full": {"full": 2},
    "gemma": GEMMA,
    "windows": {"windows": (5, 5)},
    "two windows": {"full": 1, "windows": (3, 20)},
    "mamba": MAMBA,
    "states": {"states": 2},
    "all kinds": {"full": 2, "windows": (7, 7), "states": 3},
    "a window smaller than a block": {"full": 1, "windows": (2,)},
}


def prompt(length: int, family: int = 0) -> list[int]:
    """Returns a prompt; prompts of one family have a common prefix."""
    return [(family * 31 + i * i) % 89 for i in range(length)]


def held(engine: Engine) -> int:
    """Returns the blocks that are referenced."""
    engine.check()
    return engine.blocks.num_usable - engine.blocks.num_free


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_every_shape_gives_the_right_answer(shape: str, depth: int) -> None:
    engine = position_engine(layers_of(**SHAPES[shape]), depth=depth, block_tokens=4, num_blocks=200)
    asked = {f"r{i}": prompt(3 + 11 * i, i % 2) for i in range(5)}
    for name, tokens in asked.items():
        engine.add(ask(name, tokens, max_tokens=15))
    done = finish(engine)
    for name, tokens in asked.items():
        assert tokens_of(done[name]) == answer(tokens, 15), name
    assert held(engine) == 0


@settings(max_examples=examples(60))
@given(
    shape=st.sampled_from(list(SHAPES)),
    block=st.sampled_from([1, 2, 4, 8]),
    chunk=st.integers(1, 24),
    spare=st.integers(0, 30),
    depth=st.sampled_from([1, 2, 3]),
    caching=st.booleans(),
    asked=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 50), st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=7
    ),
    aborts=st.sets(st.integers(0, 6), max_size=2),
)
def test_any_traffic_gives_right_answers_and_loses_no_block(
    shape: str, block: int, chunk: int, spare: int, depth: int, caching: bool,
    asked: list[tuple[int, int, int, int]], aborts: set[int],
) -> None:  # fmt: skip
    """Shared prefixes, chunks, preemption (few more blocks than the longest request needs), aborts, steps in flight."""
    layers = layers_of(**SHAPES[shape])
    args = {"block_tokens": block, "max_batch_tokens": chunk, "prefix_caching": caching, "depth": depth}
    sized = position_engine(layers, num_blocks=10, **args)
    need = max(sized.scheduler.groups.need(length + new) for _, length, new, _ in asked)
    engine = position_engine(layers, num_blocks=1 + need + spare, **args)
    todo = sorted(enumerate(asked), key=lambda entry: entry[1][3])
    done: dict[str, list[Any]] = {}
    for step in range(3000):
        while todo and todo[0][1][3] <= step:
            number, (family, length, new, _) = todo.pop(0)
            engine.add(ask(f"r{number}", prompt(length, family), max_tokens=new))
        if step == 12:
            for number in aborts:
                engine.abort(f"r{number}")  # type: ignore[arg-type]
        for output in engine.step():
            done.setdefault(output.request_id, []).append(output)
        engine.check()
        if not todo and not engine.has_work():
            break
    assert not engine.has_work(), engine.stats()
    for number, (family, length, new, _) in enumerate(asked):
        got = tokens_of(done[f"r{number}"])
        assert got == answer(prompt(length, family), new)[: len(got)]
        assert number in aborts or len(got) == new
    assert held(engine) == 0


@pytest.mark.parametrize(
    ("shape", "block", "asked"),
    [
        ("gemma", 1, [(1, 1), (11, 1)]),  # the window that it begins with, beside its own
        ("gemma", 1, [(34, 5), (48, 2)]),
        ("mamba", 4, [(8, 1), (11, 1)]),  # the snapshot, beside its own state
    ],
)
def test_cached_blocks_keep_no_request_out(shape: str, block: int, asked: list[tuple[int, int]]) -> None:
    """A cache that holds the longest request and nothing more."""
    args: dict[str, Any] = {"block_tokens": block, "max_batch_tokens": block}
    need = position_engine(layers_of(**SHAPES[shape]), num_blocks=10, **args).scheduler.groups.need(sum(asked[-1]))
    engine = position_engine(layers_of(**SHAPES[shape]), num_blocks=1 + need, **args)
    for number, (length, new) in enumerate(asked):
        one(engine, f"r{number}", prompt(length), max_tokens=new)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_no_request_gets_more_blocks_than_it_needs(shape: str) -> None:
    """This holds however few of its tokens another engine hands over."""
    groups = position_engine(
        layers_of(**SHAPES[shape]), block_tokens=4, num_blocks=10, max_batch_tokens=8
    ).scheduler.groups
    for num_target_tokens in range(1, 80):
        for remote_stop in (None, *range(1, num_target_tokens + 1)):
            assert sum(groups.admission(groups.nothing(), num_target_tokens, remote_stop)) <= groups.need(
                num_target_tokens
            ), (num_target_tokens, remote_stop)


def one(engine: Engine, name: str, tokens: Sequence[int], max_tokens: int = 3) -> Any:
    """Answers one request alone, checks the answer, and returns its last output."""
    engine.add(ask(name, tokens, max_tokens=max_tokens))
    done = finish(engine)[name]
    assert tokens_of(done) == answer(tokens, max_tokens)
    return done[-1]


@pytest.mark.parametrize("shape", ["full", "gemma", "windows", "two windows", "mamba", "all kinds"])
def test_a_repeated_prompt_is_found_up_to_its_last_whole_block(shape: str) -> None:
    engine = position_engine(layers_of(**SHAPES[shape]), block_tokens=4, num_blocks=200)
    assert one(engine, "a", prompt(45)).account.cached == 0
    assert one(engine, "b", prompt(45)).account.cached == 44
    assert one(engine, "c", prompt(44)).account.cached == (32 if "states" in SHAPES[shape] else 40)


def test_a_conversation_continues_after_its_answer() -> None:
    """The state at the end of an answer's last whole block serves the next turn."""
    engine = position_engine(layers_of(**MAMBA), block_tokens=4, num_blocks=200)
    one(engine, "a", prompt(21), max_tokens=20)
    turn = prompt(21) + answer(prompt(21), 20) + [1, 2, 3]
    assert one(engine, "b", turn).account.cached == 40


def test_a_state_that_is_found_only_at_a_shorter_prefix() -> None:
    """FULL blocks cannot be used without the state at their end."""
    engine = position_engine(layers_of(**MAMBA), block_tokens=4, num_blocks=200, max_batch_tokens=16)
    one(engine, "a", prompt(45))  # snapshots at the ends of chunks: 16, 32, 44
    assert one(engine, "b", [*prompt(42), 7]).account.cached == 32


def test_a_state_that_a_step_is_changing_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is aborted while its step is in flight, so its block already has the state of a later token."""
    engine = position_engine(layers_of(**MAMBA), block_tokens=4, num_blocks=200, depth=2)
    monkeypatch.setattr(engine.scheduler.groups, "snapshot", lambda request, changes: None)
    for name in ("a", "b"):
        engine.add(ask(name, prompt(20, ord(name)), max_tokens=40))
    while True:
        engine.step()
        caught = [
            r for r in engine.scheduler.running if r.in_flight and r.num_computed % 4 == 0 and r.num_computed > 20
        ]
        if caught:
            break
    tokens = caught[0].tokens
    engine.abort(caught[0].request_id)
    finish(engine)
    one(engine, "again", [*tokens, 1])


def test_window_blocks_are_freed_as_the_window_moves() -> None:
    engine = position_engine(layers_of(windows=(9,)), block_tokens=4, max_batch_tokens=8, prefix_caching=False)
    engine.add(ask("r", prompt(400), max_tokens=40))
    most = 0
    while engine.has_work():
        engine.step()
        most = max(most, held(engine))
    assert most <= engine.scheduler.groups.peak(0) == 5  # 8 tokens back and 8 in a chunk: 4 blocks, wherever they begin


def test_decoding_keeps_only_the_window() -> None:
    engine = position_engine(layers_of(windows=(9,)), block_tokens=4, max_batch_tokens=64, prefix_caching=False)
    engine.add(ask("r", prompt(60), max_tokens=10))
    engine.step()
    engine.step()
    assert held(engine) == 3


def test_blocks_that_a_window_has_left_may_still_serve_other_requests() -> None:
    """Freed blocks stay in the prefix cache until they are allocated again."""
    engine = position_engine(layers_of(**GEMMA), block_tokens=4, num_blocks=400)
    one(engine, "a", prompt(200))
    assert one(engine, "b", [*prompt(100), 5, 5, 5]).account.cached == 100


def test_a_hit_needs_the_window_before_it() -> None:
    """If the blocks of a window are gone, the full group's blocks cannot be used: everything is computed again."""
    engine = position_engine(layers_of(**GEMMA), block_tokens=4, num_blocks=400)
    one(engine, "a", prompt(101))
    groups = engine.scheduler.groups
    for group, spec in enumerate(groups.specs):
        if spec.window_tokens is not None:
            engine.blocks.forget(_hashes(engine, prompt(101))[24], group)
    assert (
        one(engine, "b", prompt(101)).account.cached == 96
    )  # block 24 is computed again, the window before it is there


def _hashes(engine: Engine, tokens: Sequence[int]) -> list[Any]:
    from kvferry.engines.mini.scheduling.block_manager import chain_hashes

    hashes: list[Any] = []
    chain_hashes(hashes, tokens, engine.settings.block_tokens)
    return hashes


def test_a_request_that_never_fits_is_refused_with_the_size_that_would() -> None:
    engine = position_engine(layers_of(**MAMBA), block_tokens=4, num_blocks=13)
    with pytest.raises(RequestTooLong, match="this worker's cache of 44 tokens"):
        engine.add(ask("r", prompt(50)))
    engine = position_engine(layers_of(windows=(9,)), block_tokens=4, max_batch_tokens=8, num_blocks=7)
    one(engine, "long", prompt(1000))


def test_all_groups_have_one_size() -> None:
    """Gemma 3: each group has as many layers as there are full ones, and every pipeline stage has a part of each."""
    windows = [None if i % 6 == 5 else 512 for i in range(18)]
    layers = [
        replace(layers_of(full=1)[0], layer=f"layers.{i}.attn", window_tokens=window,
                kind=CacheKind.FULL if window is None else CacheKind.WINDOW)
        for i, window in enumerate(windows)
    ]  # fmt: skip
    groups = make_groups(layers)
    assert [len(group.layers) for group in groups] == [3] * 6
    first_stage = {layer.layer for layer in layers[:9]}
    assert all(first_stage & set(group.layers) for group in groups)


def test_a_state_larger_than_any_block_sets_the_size_of_pages(caplog: pytest.LogCaptureFixture) -> None:
    """Then a group has one layer, blocks of tokens share a page as well as they can, and the operator gets a
    warning."""
    attention, state = layers_of(full=2, states=1)[::2]
    large = replace(state, parts=(replace(state.parts[0], axes=(("field", 4000, 0, 4000),)),))
    layers = [replace(large if i % 3 else attention, layer=f"layers.{i}.x") for i in range(6)]
    groups = make_groups(layers)
    assert [len(group.layers) for group in groups] == [2, 1, 1, 1, 1]
    cache = KVCache(layers, groups, num_blocks=3, block_tokens=16, device="cpu")
    assert cache.placement.page_bytes == 4000 * 8 + 256  # whole rows of attention: 16 tokens of 24 bytes
    assert "block_tokens=672 (--block-tokens)" in caplog.text


def test_too_little_memory_for_the_cache_is_reported_with_what_is_free() -> None:
    layers = layers_of(full=2)
    with pytest.raises(
        ConfigError, match=r"no memory for a cache of \d+ bytes: \d+ bytes are free on 'cpu'. Set cache_b"
    ):
        KVCache(layers, make_groups(layers), num_blocks=1 << 40, block_tokens=16, device="cpu")


def test_all_of_a_copy_is_read_before_anything_is_written() -> None:
    layers = layers_of(full=1)
    cache = KVCache(layers, make_groups(layers), num_blocks=5, block_tokens=4, device="cpu")
    for block in range(5):
        cache.data[block] = block
    cache.copy([(1, 2), (2, 3), (3, 1)])
    assert cache.data[:, 0].tolist() == [0, 3, 1, 2, 4]


def test_lookahead_keeps_a_longer_window() -> None:  # R34
    from kvferry.engines.mini.scheduling.block_manager import BlockManager
    from kvferry.engines.mini.scheduling.cache_groups import Groups

    specs = position_engine(layers_of(windows=(9,))).executor.layouts[0].groups
    args: dict[str, Any] = {"block_tokens": 4, "chunk_tokens": 8, "prefix_caching": True}
    plain = Groups(specs, BlockManager(9), **args)
    longer = Groups(specs, BlockManager(9), extra_window_tokens=3, **args)
    assert (plain.first_needed(0, 20), longer.first_needed(0, 20)) == (3, 2)
