"""Workers of many ranks, as operators start them: hand-offs between unequal ones; ranks that die. R22, R23, R26, R36.

The tokens of one engine of one rank, in this process, are the reference.
"""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.settings import EngineSettings
from tests.engines.mini.conftest import ask, finish, prompt_of, tokens_of
from tests.harness.client import Answer, complete
from tests.harness.fleet import Fleet, Process
from tests.harness.tiny_model import make_tiny_model
from tests.harness.until import until

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(480)]

LENGTHS = (5, 17, 64, 150)
FLAGS = ("--dtype", "float32", "--num-blocks", "256", "--max-batch-tokens", "64", "--no-prefix-caching",
         "--verify", "all", "--lease-ttl", "3", "--lease-renew-every", "0.5", "--quarantine", "1")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a Llama of three layers, six query heads and two KV heads."""
    return make_tiny_model(tmp_path_factory.mktemp("ranks") / "llama")


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[int, list[int]]:
    """Returns the answer of one engine of one rank to each prompt."""
    engine = Engine.load(EngineSettings(model=str(model), dtype="float32", num_blocks=256, max_batch_tokens=64))
    for length in LENGTHS:
        engine.add(ask(str(length), prompt_of(length, length)))
    return {int(name): tokens_of(outputs) for name, outputs in finish(engine).items()}


@contextlib.contextmanager
def _pair(directory: Path, model: Path, mode: str, prefill: Sequence[str], decode: Sequence[str]) -> Iterator[Fleet]:
    """Yields prefill and decode of unequal shapes, and a router; checks at the end that nothing of them is left."""
    with Fleet(directory, *FLAGS, model=str(model), mode=mode) as fleet:
        both = [fleet.worker("p", *prefill, role="prefill"), fleet.worker("d", *decode, role="decode")]
        for process in both:
            process.wait_ready()
        fleet.route(prefill=both[:1], decode=both[1:])
        yield fleet


@pytest.fixture(scope="module")
def pull(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet of four ranks and two stages; ranks that die are restarted."""
    with _pair(tmp_path_factory.mktemp("pull"), model, "pull", ("--tp", "2", "--pp", "2"), ("--pp", "2")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def push(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet of two stages and three ranks, two of which share a KV head; decode ends with its ranks."""
    decode = ("--tp", "3", "--on-rank-death", "exit")
    with _pair(tmp_path_factory.mktemp("push"), model, "push", ("--pp", "2"), decode) as fleet:
        yield fleet


def _ask(fleet: Fleet, length: int, **changes: Any) -> Answer:
    return complete(fleet.url, prompt_of(length, length), **{"max_tokens": 8, "ignore_eos": True, **changes})


def _handed_over(answer: Answer, length: int) -> str:
    """Returns what is wrong with the answer, or "": every prompt token was handed over, and every byte verified."""
    account = answer.kvferry
    if not answer.whole:
        return f"not whole: {answer}"
    if (account["handed_over"], account["cached"], account["recomputed"]) != (length, 0, 0) or not account["verified"]:
        return f"not handed over: {account}"
    return ""


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_unequal_ranks_hand_over_every_token(
    mode: str, alone: dict[int, list[int]], request: pytest.FixtureRequest
) -> None:  # R22, R23, R36
    fleet: Fleet = request.getfixturevalue(mode)
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        answers = dict(zip(LENGTHS, pool.map(lambda length: _ask(fleet, length), LENGTHS), strict=True))
    for length, answer in answers.items():
        assert not _handed_over(answer, length)
        assert answer.token_ids == alone[length], length
    fleet.wait_blocks_free()
    for process in fleet.workers.values():
        view = process.describe()
        assert len(view["ranks"]) == view["tp_size"] * view["pp_size"] > 1
        assert len({rank["pid"] for rank in view["ranks"]} | {process.pid}) == len(view["ranks"]) + 1


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_rank_that_is_killed(side: str, pull: Fleet, alone: dict[int, list[int]]) -> None:  # R26, R29
    """Open requests of its engine end with an error or are computed elsewhere; none hangs; then all is as before."""
    fleet, length = pull, LENGTHS[-1]
    worker = fleet.workers[side]
    before = worker.describe()
    decode = fleet.workers["d"]

    def stream(number: int) -> Answer:
        return _ask(fleet, 40 + number, max_tokens=600, timeout_s=60)

    with ThreadPoolExecutor(3) as pool:
        open_ones = [pool.submit(stream, number) for number in range(3)]
        until(lambda: decode.describe().get("load", {}).get("open_requests") == 3, "it decodes", every_s=0.005)
        worker.note_shared_memory()
        os.kill(before["ranks"][-1]["pid"], signal.SIGKILL)
        answers = [one.result(90) for one in open_ones]
    # Requests that were not in that engine at that moment are answered.
    assert all(answer.whole or answer.clear_error or answer.broken for answer in answers), answers
    after = until(lambda: _revived(worker, before), "it has new ranks", within_s=60)
    assert worker.running
    assert after["engine"] == before["engine"]
    assert not {rank["pid"] for rank in after["ranks"]} & {rank["pid"] for rank in before["ranks"]}
    answer = until(
        lambda: (a := _ask(fleet, length)) and not _handed_over(a, length) and a, "hand-offs work again", within_s=60
    )
    assert answer.token_ids == alone[length]
    fleet.wait_blocks_free(30)


def _revived(worker: Process, before: dict[str, Any]) -> dict[str, Any] | None:
    view = worker.describe()
    return view if view.get("incarnation", before["incarnation"]) != before["incarnation"] else None


def test_ranks_end_with_their_engines_process(pull: Fleet) -> None:
    """SIGKILL leaves no process that could inform them."""
    worker = pull.workers["d"]
    worker.kill()
    until(lambda: not worker.leftovers(), "nothing of it is left", within_s=20)


def test_a_worker_may_be_set_to_end_with_its_ranks(push: Fleet) -> None:
    worker = push.workers["d"]
    worker.note_shared_memory()
    os.kill(worker.describe()["ranks"][0]["pid"], signal.SIGKILL)
    assert worker.wait_ended(20) == 1
    assert "rank 0 was killed by signal 9. Start the worker again." in worker.tail()
    assert not worker.leftovers()


def test_a_worker_of_many_ranks_drains(push: Fleet) -> None:
    worker = push.workers["p"]
    assert worker.stop(within_s=25) == 0
    assert worker.logged("drained after_s"), worker.tail()
    assert not worker.leftovers()
