"""Handshakes between real processes over real NIXL: a refusal that explains itself, and releases that differ.

R1, R10, R11, R24.
"""

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.main import main
from kvferry.handshake.exchange import LocalSide, ask
from kvferry.handshake.facts import Facts
from kvferry.settings import Role, SideChannelSettings
from kvferry.sidechannel.client import SideChannelClient
from kvferry.wire.envelope import Kind, decode_envelope
from kvferry.wire.hello import Hello, RankHello
from tests.harness.client import Answer, complete, get, metrics
from tests.harness.fleet import Fleet, Process
from tests.harness.tiny_model import make_tiny_model
from tests.harness.until import until

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(180)]

FLAGS = (
    "--num-blocks", "200", "--threads", "1", "--lease-ttl", "2", "--lease-renew-every", "0.3", "--quarantine", "0.5",
    "--transfer-deadline", "8",
)  # fmt: skip
WITHIN_S = 1.0
_dice = random.Random(4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module", params=["pull", "push"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fleet(mode: str, tiny: Path, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, *FLAGS, model=str(tiny), mode=mode) as fleet:
        yield fleet


def a_prompt(num_tokens: int = 48) -> list[int]:
    """Returns a new prompt each time, so that no cache has it."""
    return [_dice.randint(3, 263) for _ in range(num_tokens)]


def hand_over(p: Process, d: Process, prompt: list[int], transfer: str) -> tuple[Answer, float]:
    """Asks prefill, then decode, as a router in pull mode does. Returns decode's answer, and how long it took."""
    first = complete(
        p.url, prompt, max_tokens=1, ignore_eos=True,
        kv_transfer_params={"do_remote_decode": True, "transfer_id": transfer},
    )  # fmt: skip
    assert first.whole, first
    assert first.params is not None, first
    begin_s = time.monotonic()
    answer = complete(d.url, prompt, max_tokens=4, ignore_eos=True, kv_transfer_params=first.params)
    return answer, time.monotonic() - begin_s


def refused_by(process: Process) -> dict[str, str]:
    """Returns the refused peers of GET /health."""
    health: dict[str, Any] = get(process.url, "/health")
    assert health["status"] == "ok"
    refused: dict[str, str] = health["refused_peers"]
    return refused


def test_a_refusal_is_clear_quick_and_repaired_on_one_side(fleet: Fleet) -> None:  # R1 R10 R24
    p = fleet.worker("p", "--dtype", "bfloat16", role="prefill")
    d = fleet.worker("d", "--dtype", "float32", role="decode")
    strict = fleet.worker("strict", "--dtype", "float32", "--on-failure", "fail", role="decode")
    for process in (p, d, strict):
        process.wait_ready()
    right = complete(strict.url, (prompt := a_prompt()), max_tokens=4, ignore_eos=True)

    answer, after_s = hand_over(p, d, prompt, "t1")
    assert answer.whole, answer
    assert answer.token_ids == right.token_ids  # recomputed
    assert answer.kvferry["handed_over"] == 0
    for word in ("kv.dtype", "model.dtype", "'bfloat16'", "'float32'", "'p'", "'d'", "--dtype bfloat16"):
        assert word in answer.kvferry["why"], answer.kvferry
    assert after_s < WITHIN_S

    failed, after_s = hand_over(p, strict, a_prompt(), "t2")
    assert failed.clear_error, failed
    assert failed.error is not None
    assert "kv.dtype" in failed.error["message"]
    assert "--dtype bfloat16" in failed.error["message"]
    assert after_s < WITHIN_S

    for process, peer in ((d, "p"), (strict, "p")):
        assert "kv.dtype" in refused_by(process)[peer]
        assert metrics(process.url)["kvferry_engine_handoff_refused_peers"] == 1
    assert set(refused_by(p)) == {"d", "strict"}
    assert any(name.startswith('kvferry_peer_refused{peer="d"') for name in metrics(p.url))

    incarnation = d.describe()["incarnation"]
    p.set_flag("--dtype", "float32")
    p.restart()
    for number, process in enumerate((d, strict)):
        mended, _ = hand_over(p, process, prompt := a_prompt(), f"mended-{number}")
        assert mended.kvferry["handed_over"] == len(prompt), (mended, fleet.tails())
    assert d.describe()["incarnation"] == incarnation  # it was not restarted
    assert refused_by(d) == {}


@pytest.mark.parametrize("older", ["p", "d"])
def test_an_old_and_a_new_worker_serve_together(fleet: Fleet, older: str) -> None:  # R9 R11
    roles = {"p": "prefill", "d": "decode"}
    workers = {
        name: fleet.worker(
            name, "--dtype", "float32", *(["--protocol-max", "1"] if name == older else []), role=roles[name]
        )
        for name in roles
    }
    for process in workers.values():
        process.wait_ready()
    answer, _ = hand_over(workers["p"], workers["d"], prompt := a_prompt(), "t1")
    assert answer.kvferry["handed_over"] == len(prompt), (answer, fleet.tails())
    spoken = workers["d"].log.read_text()
    assert "handshake accepted peer=p" in spoken
    assert "protocol=1 verdict=notes" in spoken


def test_a_thousand_refusals_leave_a_real_worker_as_it_was(fleet: Fleet) -> None:  # R24
    p = fleet.worker("p", "--dtype", "float32", role="prefill").wait_ready()
    info = p.describe()
    theirs = Facts.from_json(info["facts"])
    stranger = LocalSide(
        theirs.replace({"role": "decode", "kv.dtype": "fp8_e4m3"}), _hello("stranger"), lambda peer: None
    )
    question = ask(stranger)
    settings = SideChannelSettings(port=info["side_channel"]["port"])
    client = SideChannelClient(settings)
    try:

        def refuse(num: int) -> None:
            num_refused = 0
            while num_refused < num:
                reply = decode_envelope(client.ask(info["side_channel"]["host"], settings.port, question))
                assert reply.kind in (Kind.REFUSE, Kind.BUSY)
                num_refused += reply.kind is Kind.REFUSE
                assert reply.kind is Kind.BUSY or "kv.dtype" in reply.reason

        refuse(100)  # what is created once
        before = _holds(p.pid)
        refuse(1000)
        # No more than before: some connections of the first hundred may still have been open when they were counted.
        until(
            lambda: all(now <= then for now, then in zip(_holds(p.pid)[:2], before[:2], strict=True)),
            f"at most {before[:2]} descriptors and threads",
        )
        assert _holds(p.pid)[2] - before[2] < 8 << 20
    finally:
        client.close()
    assert list(refused_by(p)) == ["stranger"]


def _hello(name: str) -> Hello:
    rank = RankHello(layout=b"never decoded", transport="nixl", transport_metadata=b"never used")
    return Hello(engine=name, incarnation="i1", role=Role.DECODE, ranks=(rank,))


def _holds(pid: int) -> tuple[int, int, int]:
    """Returns the descriptors, threads and resident bytes of a process."""
    proc = Path(f"/proc/{pid}")
    resident = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(list((proc / "fd").iterdir())), len(list((proc / "task").iterdir())), resident


def test_saved_facts_are_what_the_worker_states(
    fleet: Fleet, tiny: Path, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    p = fleet.worker("p", "--dtype", "bfloat16", role="prefill").wait_ready()
    saved = tmp_path / "facts.json"
    argv = ["facts", str(tiny), "--role", "prefill", "--dtype", "bfloat16", "--transfer-mode", mode, "-o", str(saved)]
    assert main(argv) == 0
    assert json.loads(saved.read_text())["facts"] == p.describe()["facts"]
    assert main(["compare", str(saved), p.url]) == 0  # two prefill workers may fetch from each other
    assert "the two hand nothing over to each other" in capsys.readouterr().out
