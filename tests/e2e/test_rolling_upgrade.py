"""A fleet of 2 + 2 is upgraded from protocol 1 to 2, one worker at a time, under load: no request fails (R9, R11).

Each worker is drained (SIGTERM), ends, and starts again as the newer release at the same address. In between old and
new serve side by side, every pair with a version that both speak.
"""

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.client import Answer, complete, eventually, get, metrics
from tests.e2e.fleet import Fleet, Process
from tests.engines.tiny_model import make_tiny_model

FULL = os.environ.get("CHAOS") == "full"
MODES = ["pull", "push"] if FULL else ["pull"]
"""`make chaos` runs both."""
NUM_CLIENTS = 3
NUM_PROMPTS = 12
ANSWER_TOKENS = 12
FLAGS = (
    "--dtype", "float32", "--num-blocks", "400", "--threads", "1", "--lease-ttl", "3", "--lease-renew-every", "0.5",
    "--quarantine", "0.5", "--transfer-deadline", "10", "--protocol-max", "1", "--no-prefix-caching",
)  # fmt: skip

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(params=MODES)
def fleet(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, *FLAGS, model=str(tiny), mode=str(request.param)) as fleet:
        yield fleet


class Load:
    """Clients that ask all the time, streaming and not, and keep every answer."""

    def __init__(self, url: str, prompts: list[list[int]], right: list[list[int]]) -> None:
        self._url = url
        self._questions = list(zip(prompts, right, strict=True))
        self._ending = threading.Event()
        self.answers: list[tuple[list[int], Answer]] = []
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        self._clients = [self._pool.submit(self._ask, number) for number in range(NUM_CLIENTS)]

    def _ask(self, number: int) -> None:
        dice = random.Random(number)
        while not self._ending.is_set():
            prompt, right = dice.choice(self._questions)
            answer = complete(
                self._url, prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, stream=dice.random() < 0.5, timeout_s=60.0
            )
            self.answers.append((right, answer))

    def end(self) -> None:
        """Wait for the answers that are open."""
        self._ending.set()
        for client in self._clients:
            client.result(90.0)
        self._pool.shutdown()


def versions_in(log: str) -> set[str]:
    return {line.split("protocol=")[1].split()[0] for line in log.splitlines() if "handshake accepted" in line}


def upgrade(process: Process, router: Process) -> None:
    """The rolling restart of one worker."""
    assert process.stop(30.0) == 0, process.tail()
    at = process.argv.index("--protocol-max")
    del process.argv[at : at + 2]
    process.start()
    process.wait_ready()

    def used() -> bool:
        view = get(router.url, "/v1/kvferry")
        return any(worker["engine"] == process.name and worker["usable"] for worker in view["workers"])

    eventually(f"{process.name} is used again", used, within_s=10.0)


def test_no_request_fails_while_each_worker_is_replaced(fleet: Fleet) -> None:
    workers = [fleet.worker(name, role="prefill" if name[0] == "p" else "decode") for name in ("p0", "p1", "d0", "d1")]
    for process in workers:
        process.wait_ready()
    router = fleet.route(prefill=workers[:2], decode=workers[2:])
    dice = random.Random(8)
    prompts = [[dice.randint(3, 263) for _ in range(dice.randint(20, 90))] for _ in range(NUM_PROMPTS)]
    right = [
        complete(workers[2].url, prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True).token_ids for prompt in prompts
    ]
    load = Load(router.url, prompts, right)
    try:
        for process in (workers[0], workers[2], workers[1], workers[3]):
            before = len(load.answers)
            upgrade(process, router)
            eventually("requests go on", lambda before=before: len(load.answers) > before + 2 * NUM_CLIENTS)
    finally:
        load.end()
    failed = [answer for tokens, answer in load.answers if not answer.whole or answer.token_ids != tokens]
    assert not failed, (len(failed), len(load.answers), failed[:3], fleet.tails())
    not_handed = [a.kvferry["why"] for _, a in load.answers if not a.kvferry["handed_over"]]
    assert len(not_handed) < len(load.answers) / 2, not_handed[:5]
    assert all(not_handed), "every prompt that was not handed over says why"
    spoken = set().union(*(versions_in(process.log.read_text()) for process in workers))
    assert spoken == {"1", "2"}
    assert metrics(router.url)['kvferry_router_requests_total{endpoint="/v1/completions",status="200"}'] == len(
        load.answers
    )
