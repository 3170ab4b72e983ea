"""SIGKILL and SIGSTOP of prefill or decode at random moments under load: no answer is wrong, and nothing is lost.

Several clients stream through the router all the time. Each answer must be whole and right, or end with a clear error,
and what was said before the error must be right as well. Afterwards every block is free and the pair works again.
The seed is printed; CHAOS_SEED=n repeats it. `make chaos` runs 20 moments of each kind, mode and worker.
"""

import logging
import os
import random
import re
import secrets
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.harness.client import Answer, complete
from tests.harness.fleet import Fleet, Process
from tests.harness.tiny_model import make_tiny_model
from tests.harness.until import until

pytestmark = [pytest.mark.process, pytest.mark.engine]

logger = logging.getLogger(__name__)

NUM_CLIENTS = 4
ANSWER_TOKENS = 40
CLIENT_S = 60.0
"""No client waits longer than this, whatever happens; anything longer is a hang."""
FREE_S = 15.0
"""The deadline (5 s), the lease (2 s) and the quarantine (0.5 s), and some time for a busy machine."""
FLAGS = (
    "--dtype", "float32", "--num-blocks", "700", "--max-batch-tokens", "64", "--threads", "1",
    "--lease-ttl", "2", "--lease-renew-every", "0.3", "--quarantine", "0.5", "--standstill", "20",
    "--transfer-deadline", "5", "--handshake-timeout", "1", "--verify", "all", "--no-prefix-caching",
)  # fmt: skip
ROUTE_FLAGS = ("--health-timeout", "1", "--hung-after", "2")
"""Limits on waits stay at minutes: only its health checks can find a stopped worker, or a client hangs."""


@dataclass(frozen=True)
class Question:
    """A prompt, and the answer of one engine alone to it."""

    prompt: list[int]
    right: list[int]


@dataclass
class Tally:
    """The answers that the clients got."""

    whole: int = 0
    handed_over: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Counts of errors by message, without addresses and ids."""
    whys: Counter[str] = field(default_factory=Counter)
    """The reasons why prompts were not handed over."""
    faults: list[str] = field(default_factory=list)

    def note(self, question: Question, answer: Answer) -> None:
        """Classifies one answer. A fault is anything that must never happen."""
        said = f"prompt of {len(question.prompt)}: status={answer.status} broken={answer.broken!r} "
        said += f"error={answer.error} tokens={len(answer.token_ids)} done={answer.done} account={answer.kvferry}"
        if answer.token_ids != question.right[: len(answer.token_ids)]:
            self.faults.append("wrong tokens: " + said)
        elif answer.whole:
            self.whole += 1
            self.handed_over += answer.kvferry["handed_over"] > 0
            if answer.kvferry["why"]:
                self.whys[_kind(answer.kvferry["why"])] += 1
            if len(answer.token_ids) != len(question.right):
                self.faults.append("truncated: " + said)
        elif answer.broken or not answer.clear_error:
            self.faults.append("neither an answer nor a clear error: " + said)
        elif answer.done or answer.finish_reason:
            self.faults.append("an error with a good end: " + said)
        else:
            assert answer.error is not None, "clear_error"
            self.errors[_kind(answer.error["message"])] += 1


def _kind(text: str) -> str:
    """Returns the message without the parts that differ between runs."""
    return re.sub(r"\d+|'[^']*'|\bp/\w+", "_", text)[:160]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a small model with a context of 2,048."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def questions(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Question]:
    """Returns 40 prompts of 20 to 1,500 tokens, some with a common beginning."""
    dice = random.Random(5)
    common = [dice.randint(3, 263) for _ in range(400)]
    prompts = []
    for number in range(40):
        tail = [dice.randint(3, 263) for _ in range(dice.randint(20, 1100))]
        prompts.append(common[: dice.randint(1, 400)] + tail if number % 3 == 0 else tail)
    with Fleet(tmp_path_factory.mktemp("alone"), *FLAGS, model=str(tiny)) as fleet:
        url = fleet.worker("alone", role="both").wait_ready().url
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(complete, url, one, max_tokens=ANSWER_TOKENS, ignore_eos=True) for one in prompts]
        answers = [one.result() for one in asked]
    assert all(answer.whole for answer in answers)
    return [Question(prompt, answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.fixture
def seed() -> int:
    """Returns a new seed, and prints it."""
    chosen = int(os.environ.get("CHAOS_SEED") or secrets.randbits(32))
    logger.warning("CHAOS_SEED=%s", chosen)
    return chosen


class Load:
    """Clients that send requests until the context ends."""

    def __init__(self, url: str, questions: list[Question], seed: int) -> None:
        self.tally = Tally()
        self._url = url
        self._questions = questions
        self._seed = seed
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)

    def _client(self, number: int) -> None:
        dice = random.Random(self._seed * NUM_CLIENTS + number)
        while not self._stop.is_set():
            question = dice.choice(self._questions)
            answer = complete(
                self._url, question.prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, stream=True, timeout_s=CLIENT_S
            )
            with self._lock:
                self.tally.note(question, answer)
            if not answer.whole:
                self._stop.wait(0.1)  # as a client that retries does

    def __enter__(self) -> "Load":
        self._running = [self._pool.submit(self._client, number) for number in range(NUM_CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._running:
            client.result(CLIENT_S * 2)
        self._pool.shutdown()


def strike(worker: Process, how: str, dice: random.Random) -> str:
    """Kills a worker, or suspends it for a while and then resumes or kills it. Restarts it at its address."""
    if how == "kill":
        worker.restart()
        return "killed"
    pause_s = dice.choice([0.05, 0.5, 1.5, 3.0, 6.0])
    worker.signal(signal.SIGSTOP)
    threading.Event().wait(pause_s)
    if dice.random() < 0.3:
        worker.restart()
        return f"stopped for {pause_s:g} s and killed"
    worker.signal(signal.SIGCONT)
    return f"stopped for {pause_s:g} s"


@pytest.fixture(params=["pull", "push"])
def fleet(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> Iterator[Fleet]:
    """Yields p, d and a router with short limits on health checks. In push no event loop may be held for long."""
    monitored = request.param == "push"  # pull keeps the loop that workers have
    with Fleet(tmp_path, *FLAGS, model=str(tiny), mode=request.param, monitored=monitored) as fleet:
        fleet.worker("p", role="prefill")
        fleet.worker("d", role="decode")
        for worker in fleet.workers.values():
            worker.wait_ready()
        fleet.route(*ROUTE_FLAGS, prefill=[fleet.workers["p"]], decode=[fleet.workers["d"]])
        yield fleet
    if monitored:
        logger.warning("longest holds of event loops: %s", fleet.longest_holds())


def _goes_on(load: Load, before: int) -> bool:
    """Returns whether prompts are handed over again, or an answer was wrong: then nothing need be waited for."""
    return load.tally.handed_over > before + 2 or bool(load.tally.faults)


def storm(fleet: Fleet, questions: list[Question], moments: list[tuple[str, str]], seed: int) -> None:
    """Disturbs a worker at each of the moments, (worker, how), under load, and checks everything after that."""
    dice = random.Random(seed)
    struck = []
    with Load(fleet.url, questions, seed) as load:
        for name, how in moments:
            threading.Event().wait(dice.uniform(0.1, 1.2))
            struck.append(f"{name} {strike(fleet.workers[name], how, dice)}")
            before = load.tally.handed_over
            until(
                partial(_goes_on, load, before),
                f"prompts are handed over again after: {struck}\n{load.tally}",
                within_s=60,
            )
            assert not load.tally.faults, f"seed {seed}, {struck}: {load.tally.faults}\n{fleet.tails()}"
    tally = load.tally
    logger.warning(
        "seed=%s mode=%s struck=%s whole=%s handed_over=%s whys=%s errors=%s",
        seed, fleet.mode, struck, tally.whole, tally.handed_over, dict(tally.whys), dict(tally.errors),
    )  # fmt: skip
    assert not tally.faults, f"seed {seed}, {struck}: {tally.faults}\n{fleet.tails()}"
    assert tally.handed_over > len(moments), tally
    fleet.wait_blocks_free(FREE_S)
    until(lambda: _hands_over(fleet, questions[0]), "the pair hands over again", within_s=20, every_s=0.5)
    fleet.wait_blocks_free(FREE_S)


def _hands_over(fleet: Fleet, question: Question) -> bool:
    fresh = [*random.Random().choices(range(3, 264), k=64), *question.prompt]
    answer = complete(fleet.url, fresh[:500], max_tokens=4, ignore_eos=True)
    assert answer.whole, answer
    return bool(answer.kvferry["handed_over"] > 0 and not answer.kvferry["why"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_few_moments_of_each_kind(fleet: Fleet, questions: list[Question], seed: int) -> None:  # R28, R29
    moments = [("p", "kill"), ("d", "stop"), ("d", "kill"), ("p", "stop")]
    random.Random(seed).shuffle(moments)
    storm(fleet, questions, moments, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.environ.get("CHAOS") != "full", reason="20 moments of each kind take a while: make chaos")
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("name", ["p", "d"])
def test_twenty_moments(fleet: Fleet, questions: list[Question], seed: int, name: str, how: str) -> None:
    storm(fleet, questions, [(name, how)] * 20, seed)
