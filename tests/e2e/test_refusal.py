"""Workers that must not be paired, seen from the router and from decode: another model of the same name, another mode.

The workers' own handshakes are in test_handshake.py. Here: the router never tries such a pair, says why, and uses it as
soon as one side was mended, with no restart of the router or of the other side.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.client import Answer, complete
from tests.harness.fleet import Fleet
from tests.harness.tiny_model import make_tiny_model
from tests.harness.until import until

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(180)]

FLAGS = ("--dtype", "float32", "--num-blocks", "200", "--threads", "1", "--handshake-timeout", "1")
_dice = random.Random(9)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Writes two models of one shape and one name, with different weights."""
    root: Path = tmp_path_factory.mktemp("models")
    return str(make_tiny_model(root / "a" / "llama", seed=1)), str(make_tiny_model(root / "b" / "llama", seed=2))


@pytest.fixture(params=["pull", "push"])
def fleet(request: pytest.FixtureRequest, models: tuple[str, str], tmp_path: Path) -> Iterator[Fleet]:
    """Yields the fleet; tests make decode and router."""
    with Fleet(tmp_path, *FLAGS, model=models[0], mode=request.param) as fleet:
        yield fleet


def ask(url: str, **fields: Any) -> tuple[list[int], Answer]:
    """Returns a new prompt."""
    prompt = [_dice.randint(3, 263) for _ in range(70)]
    return prompt, complete(url, prompt, max_tokens=4, ignore_eos=True, **fields)


def assert_mended(fleet: Fleet) -> None:
    """Waits until prompts are handed over."""
    until(
        lambda: ask(fleet.url)[1].kvferry.get("handed_over") == 70, "a prompt is handed over", within_s=10, every_s=0.3
    )


def why_not(fleet: Fleet) -> str:
    """Returns the router's view of its only pair."""
    (pair,) = fleet.routers["router"].describe()["pairs"]
    return str(pair["why_not"] or "")


def test_two_models_with_one_name(fleet: Fleet, models: tuple[str, str]) -> None:  # R1, R2, R10
    p = fleet.worker("p", role="prefill", model=models[1])
    d = fleet.worker("d", role="decode")
    for worker in (p, d):
        worker.wait_ready()
    fleet.route(prefill=[p], decode=[d])
    assert "model.fingerprint" in why_not(fleet)
    prompt, answer = ask(fleet.url)
    assert answer.whole, answer
    assert answer.token_ids == complete(d.url, prompt, max_tokens=4, ignore_eos=True).token_ids  # decode's model
    assert answer.kvferry["recomputed"] == 70, answer.kvferry
    assert "model.fingerprint" in answer.kvferry["why"], answer.kvferry
    assert answer.headers["x-kvferry-route"] == "alone"

    incarnations = d.describe()["incarnation"], fleet.routers["router"].pid
    p.argv[p.argv.index(models[1])] = models[0]
    p.restart()
    assert_mended(fleet)
    assert why_not(fleet) == ""
    assert (d.describe()["incarnation"], fleet.routers["router"].pid) == incarnations


def test_two_modes(fleet: Fleet) -> None:  # R13
    other = "push" if fleet.mode == "pull" else "pull"
    p = fleet.worker("p", role="prefill")
    d = fleet.worker("d", role="decode")
    d.set_flag("--transfer-mode", other)
    for worker in (p, d):
        worker.wait_ready()
    d.restart()  # it began in the other side's mode
    fleet.route(prefill=[p], decode=[d])
    assert "--transfer-mode" in why_not(fleet)
    _, answer = ask(fleet.url)
    assert answer.whole, answer
    assert answer.kvferry["recomputed"] == 70, answer.kvferry
    assert "--transfer-mode" in answer.kvferry["why"], answer.kvferry
    d.set_flag("--transfer-mode", fleet.mode)
    d.restart()
    assert_mended(fleet)


def test_a_wrong_role_is_refused(fleet: Fleet) -> None:
    """A decode worker is given as --prefill: the router reports it, with the remedy."""
    d = fleet.worker("d", role="decode").wait_ready()
    fleet.route(prefill=[d], decode=[d])
    workers = fleet.routers["router"].describe()["workers"]
    (wrong,) = [one for one in workers if one["wanted"] == "prefill"]
    assert not wrong["usable"]
    assert "--decode" in wrong["why"], wrong
    _, answer = ask(fleet.url)
    assert answer.whole, answer
    assert "--decode" in answer.kvferry["why"], answer.kvferry
