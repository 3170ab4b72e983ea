"""Two prefill and two decode workers behind a router, under load: a rolling upgrade, and then kills and hang-ups.

Upgrade: each worker is drained (SIGTERM), ends, and starts again as the newer release (protocol N-1 to N) at the same
address; old and new serve side by side, every pair with a version that both speak. No request fails (R9, R11).

Kills: a prefill and a decode worker are killed and restarted in turn while a tenth of the clients hang up: no wrong
text, no hang, no leak, every failure explained (R28, R29). `make load` does this for longer, under aiperf.

No event loop of a worker or the router may be held for long meanwhile.
"""

import logging
import os
import random
from collections.abc import Callable, Iterator

import pytest

from kvferry.wire.versions import PROTOCOL_MAX
from tests.harness.client import get, metrics
from tests.harness.fleet import Fleet, Process
from tests.harness.load import Load, Question, ask_alone
from tests.harness.tiny_model import make_tiny_model
from tests.harness.until import until

FULL = os.environ.get("CHAOS") == "full"
MODES = ["pull", "push"] if FULL else ["pull"]
"""`make chaos` runs both of them."""
NAMES = ("p0", "p1", "d0", "d1")
ANSWER_TOKENS = 12
FLAGS = (
    "--dtype", "float32", "--num-blocks", "400", "--threads", "1", "--lease-ttl", "3", "--lease-renew-every", "0.5",
    "--quarantine", "0.5", "--transfer-deadline", "10", "--protocol-max", str(PROTOCOL_MAX - 1), "--no-prefix-caching",
)  # fmt: skip

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(400)]


def wait_more(count: Callable[[], int], more: int, what: str) -> None:
    """Waits until `count` has risen by more than `more`."""
    before = count()
    until(lambda: count() > before + more, what, within_s=30.0)


@pytest.fixture(scope="module", params=MODES)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Yields all four workers and the router. The workers start as the older release."""
    model = make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")
    with Fleet(tmp_path_factory.mktemp("fleet"), *FLAGS, model=str(model), mode=str(request.param),
               monitored=True) as fleet:  # fmt: skip
        workers = [fleet.worker(name, role="prefill" if name[0] == "p" else "decode") for name in NAMES]
        for process in workers:
            process.wait_ready()
        fleet.route("--health-timeout", "1", "--hung-after", "2", prefill=workers[:2], decode=workers[2:])
        yield fleet
    logger.warning("longest holds of event loops: %s", fleet.longest_holds())


@pytest.fixture(scope="module")
def questions(fleet: Fleet) -> list[Question]:
    dice = random.Random(8)
    prompts = [[dice.randint(3, 263) for _ in range(dice.randint(20, 90))] for _ in range(12)]
    return ask_alone(fleet.workers["d0"].url, prompts, ANSWER_TOKENS)


def versions_in(log: str) -> set[str]:
    return {line.split("protocol=")[1].split()[0] for line in log.splitlines() if "handshake accepted" in line}


def wait_used(fleet: Fleet, process: Process) -> None:
    """Waits until the router uses the new incarnation."""
    incarnation = process.describe()["incarnation"]

    def used() -> bool:
        workers = get(fleet.url, "/v1/kvferry")["workers"]
        return any(worker["incarnation"] == incarnation and worker["usable"] for worker in workers)

    until(used, f"{process.name} is used again", within_s=10.0)


def test_no_request_fails_while_each_worker_is_upgraded(fleet: Fleet, questions: list[Question]) -> None:  # R9 R11
    load = Load(fleet.url, questions)
    try:
        for name in ("p0", "d0", "p1", "d1"):
            process = fleet.workers[name]
            assert process.stop(30.0) == 0, process.tail()
            at = process.argv.index("--protocol-max")
            del process.argv[at : at + 2]
            process.start()
            process.wait_ready()
            wait_used(fleet, process)
            wait_more(lambda: load.tally.ended, 6, "requests go on")
    finally:
        tally = load.end()
    assert not tally.faults, (tally.faults[:3], fleet.tails())
    assert not tally.errors, (tally.errors, fleet.tails())
    assert tally.handed_over > tally.whole / 2, tally.whys[:5]
    spoken = set().union(*(versions_in(process.log.read_text()) for process in fleet.workers.values()))
    assert spoken == {str(PROTOCOL_MAX - 1), str(PROTOCOL_MAX)}
    good = metrics(fleet.url)['kvferry_router_requests_total{endpoint="/v1/completions",status="200"}']
    assert good == tally.whole


def test_kills_and_hang_ups(fleet: Fleet, questions: list[Question]) -> None:  # R28 R29
    load = Load(fleet.url, questions, num_clients=4, hang_up=0.1, seed=1)
    try:
        for name in ("p0", "d1"):
            wait_more(lambda: load.tally.handed_over, 8, "prompts are handed over")
            fleet.workers[name].restart()
            wait_used(fleet, fleet.workers[name])
        wait_more(lambda: load.tally.handed_over, 8, "and again")
        until(lambda: load.tally.hung_up >= 3, "some hang up", within_s=30.0)
    finally:
        tally = load.end()
    assert not tally.faults, (tally.faults[:3], fleet.tails())
    assert all("d1" in text or "decode" in text for text in tally.errors), tally.errors
    fleet.wait_blocks_free()
