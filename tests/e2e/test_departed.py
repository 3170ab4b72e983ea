"""R24, I5, I6: workers that are killed and come back under their id and port. Real processes, real NIXL."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.client import complete, metrics
from tests.harness.fleet import Fleet, Process
from tests.harness.tiny_model import make_tiny_model
from tests.harness.until import until

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(240)]

FLAGS = ("--dtype", "float32", "--num-blocks", "300", "--threads", "1", "--lease-ttl", "5", "--lease-renew-every", "1")


def knows_one_peer(process: Process) -> bool:
    """Returns whether the worker knows exactly one peer."""
    return metrics(process.url)["kvferry_engine_handoff_peers"] == 1


def hand_over(p: Process, d: Process, seed: int) -> dict[str, Any]:
    """Sends one request as a router does, and returns its account."""
    prompt = [3 + (seed * 37 + i * 11) % 260 for i in range(100)]
    ticket = {"do_remote_decode": True, "transfer_id": f"t{seed}"}
    first = complete(p.url, prompt, max_tokens=1, ignore_eos=True, kv_transfer_params=ticket)
    assert first.params is not None, first
    answer = complete(d.url, prompt, ignore_eos=True, kv_transfer_params=first.params)
    assert answer.whole, answer
    return answer.kvferry


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_the_first_request_after_a_restart_is_handed_over(mode: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "llama")
    with Fleet(tmp_path / "fleet", *FLAGS, model=str(model), mode=mode) as fleet:
        p, d = fleet.worker("p", role="prefill"), fleet.worker("d", role="decode")
        for process in (p, d):
            process.wait_ready()
        assert hand_over(p, d, 0)["handed_over"] == 100
        for number, killed in enumerate((p, d, p), start=1):
            killed.restart()
            account = hand_over(p, d, number)
            assert account["handed_over"] == 100, account
        for process in (p, d):
            until(partial(knows_one_peer, process), "one peer is known")
            assert [peer["state"] for peer in process.describe()["peers"]] == ["accepted"]
        assert d.logged("peer forgotten peer=p/")
