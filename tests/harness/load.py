"""Clients that send requests through a router without a pause and judge every answer. Some hang up in the middle.

The right answers come from one worker alone. An answer is whole and right; or it ends with a clear error, and its text
before that is right as well; or its client hung up. Anything else is a fault.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.harness.client import Answer, Stream, complete

__all__ = ["Load", "Question", "ask_alone"]

CLIENT_S = 60.0
"""The longest time that a client waits; anything longer counts as a hang."""


@dataclass(frozen=True)
class Question:
    """A prompt, and the answer of one engine alone to it."""

    prompt: list[int]
    right: list[int]


def ask_alone(url: str, prompts: Sequence[list[int]], num_tokens: int) -> list[Question]:
    """Returns each prompt with the answer of the worker at `url` alone."""
    answers = [complete(url, prompt, max_tokens=num_tokens, ignore_eos=True) for prompt in prompts]
    assert all(answer.whole for answer in answers), answers
    return [Question(prompt, answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]


@dataclass
class Tally:
    """How many answers of each kind the clients got."""

    whole: int = 0
    handed_over: int = 0
    hung_up: int = 0
    latest_s: float = 0.0
    """The longest time that a client waited for the end of its answer."""
    errors: Counter[str] = field(default_factory=Counter)
    whys: list[str] = field(default_factory=list)
    """The reasons why prompts were not handed over."""
    faults: list[str] = field(default_factory=list)

    @property
    def ended(self) -> int:
        """The number of all requests that have ended."""
        return self.whole + self.hung_up + sum(self.errors.values()) + len(self.faults)


class Load:
    """Runs clients in `num_clients` threads from now until `end`. They hang up on the share `hang_up` of streams."""

    def __init__(
        self, url: str, questions: Sequence[Question], *, num_clients: int = 3, hang_up: float = 0.0, seed: int = 0
    ) -> None:
        self.tally = Tally()
        self._url = url
        self._questions = list(questions)
        self._hang_up = hang_up
        self._seed = seed
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(num_clients)
        self._clients = [self._pool.submit(self._ask, number) for number in range(num_clients)]

    def end(self) -> Tally:
        """Waits for the open answers, and returns the counts."""
        self._ending.set()
        for client in self._clients:
            client.result(CLIENT_S * 2)
        self._pool.shutdown()
        return self.tally

    def _ask(self, number: int) -> None:
        dice = random.Random(self._seed * 1000 + number)
        while not self._ending.is_set():
            question = dice.choice(self._questions)
            began_s = time.monotonic()
            if dice.random() < self._hang_up:
                answer = self._leave(question, dice.randint(0, len(question.right) - 1))
            else:
                answer = complete(
                    self._url, question.prompt, max_tokens=len(question.right), ignore_eos=True,
                    stream=dice.random() < 0.7, timeout_s=CLIENT_S,
                )  # fmt: skip
            with self._lock:
                self.tally.latest_s = max(self.tally.latest_s, time.monotonic() - began_s)
                if answer is None:
                    self.tally.hung_up += 1
                else:
                    self._note(question, answer)
            if answer is not None and not answer.whole:
                self._ending.wait(0.1)  # as a client would before it tries again

    def _leave(self, question: Question, after: int) -> Answer | None:
        """Hangs up after this many events. Returns the answer if it ended before that."""
        body = {
            "prompt": question.prompt, "max_tokens": len(question.right), "ignore_eos": True, "temperature": 0.0,
            "return_token_ids": True,
        }  # fmt: skip
        stream = Stream(self._url, body, timeout_s=CLIENT_S)
        for number, _ in enumerate(stream.events()):
            if number >= after:
                stream.hang_up()
                return None
        return stream.answer

    def _note(self, question: Question, answer: Answer) -> None:
        tally = self.tally
        said = f"prompt of {len(question.prompt)}: status={answer.status} broken={answer.broken!r} "
        said += f"error={answer.error} tokens={len(answer.token_ids)} done={answer.done} kvferry={answer.kvferry}"
        if answer.token_ids != question.right[: len(answer.token_ids)]:
            tally.faults.append("wrong tokens: " + said)
        elif answer.whole:
            tally.whole += 1
            tally.handed_over += answer.kvferry["handed_over"] > 0
            if answer.kvferry["why"]:
                tally.whys.append(answer.kvferry["why"])
            elif not answer.kvferry["handed_over"] + answer.kvferry["cached"]:
                tally.faults.append("not handed over, and without a reason: " + said)
            if len(answer.token_ids) != len(question.right):
                tally.faults.append("truncated: " + said)
        elif answer.clear_error and not (answer.done and answer.status == 200 and answer.finish_reason):
            assert answer.error is not None, "clear_error"
            tally.errors[answer.error["message"][:300]] += 1
        else:
            tally.faults.append("neither an answer nor a clear error: " + said)
