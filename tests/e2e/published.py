"""The published case, on a model that fits: Gemma 3 270M, P PP2 TP1 -> D PP1 TP1, hybrid cache on, push and pull.

    make setup-gemma && python -m tests.e2e.published [--prompts 300] [--mode pull --mode push]

(There it was Gemma-4-26B-A4B, in push only.) Prompts are pieces of Python's own documentation, shorter and longer than
the window. For each of them the tokens of P + D are held against those of the same decode engine alone, every byte that
was moved against prefill's digest, and the accounting against the prompt: no token of it is computed twice. Accuracy is
how often the first token of an answer is the one with which the text continues. It prints JSON, one object per mode.
"""

import argparse
import json
import pydoc_data.topics
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvferry.engines.mini.models.catalog import model_directory
from kvferry.engines.mini.models.tokenizer import Tokenizer
from tests.harness.client import Answer, complete
from tests.harness.fleet import Fleet, Process

__all__ = ["Question", "ask_all", "main", "questions", "tally"]

MODEL = "gemma3-270m"
ANSWER_TOKENS = 8
LENGTHS = (16, 700)
"""The numbers of tokens of prompts; Gemma's window is 512."""
AT_ONCE = 2
"""The number of requests in flight: one per pipeline stage."""


@dataclass(frozen=True)
class Question:
    """A prompt, and the token with which its text continues."""

    prompt: tuple[int, ...]
    next_token: int


def questions(count: int, model: str = MODEL, *, seed: int = 0, lengths: tuple[int, int] = LENGTHS) -> list[Question]:
    """Returns pieces of the language reference as the model's tokens, with the start token if the model has one."""
    tokenizer = Tokenizer.from_directory(model_directory(model))
    text = "\n".join(pydoc_data.topics.topics.values())
    tokens = tokenizer.encode(text)
    dice = random.Random(seed)
    made = []
    for _ in range(count):
        length = dice.randint(*lengths)
        start = dice.randrange(1, len(tokens) - length)
        made.append(Question((tokens[0], *tokens[start : start + length - 1]), tokens[start + length - 1]))
    return made


def ask_all(url: str, asked: Sequence[Question], report: Callable[[int], None] = lambda done: None) -> list[Answer]:
    """Sends every question, `AT_ONCE` at a time, and returns the answers in order."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = []
        for answer in pool.map(
            lambda q: complete(url, q.prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, timeout_s=300.0), asked
        ):
            answers.append(answer)
            report(len(answers))
        return answers


def tally(mode: str, asked: Sequence[Question], alone: Sequence[Answer], handed: Sequence[Answer]) -> dict[str, object]:
    """Returns the results of one mode as one object."""
    broken = [answer for answer in (*alone, *handed) if not answer.whole]
    assert not broken, f"{len(broken)} requests had no whole answer, the first: {broken[0]}"

    def accuracy(answers: Sequence[Answer]) -> float:
        right = sum(answer.token_ids[0] == q.next_token for q, answer in zip(asked, answers, strict=True))
        return round(right / len(asked), 4)

    return {
        "model": MODEL,
        "mode": mode,
        "prefill": "PP2 TP1",
        "decode": "PP1 TP1",
        "prompts": len(asked),
        "prompt_tokens": sum(len(q.prompt) for q in asked),
        "tokens_equal": sum(a.token_ids == h.token_ids for a, h in zip(alone, handed, strict=True)),
        "accuracy_alone": accuracy(alone),
        "accuracy": accuracy(handed),
        "handed_over": sum(answer.kvferry["handed_over"] for answer in handed),
        "recomputed": sum(answer.kvferry["recomputed"] for answer in handed),
        "cached": sum(answer.kvferry["cached"] for answer in handed),
        "verified": sum(answer.kvferry["verified"] > 0 for answer in handed),
    }


def run(
    directory: Path, mode: str, asked: Sequence[Question], alone: list[Answer], report: Callable[[str], None]
) -> dict[str, object]:
    """Runs one mode: the decode worker alone, unless `alone` has answers already; then both behind a router."""
    flags = ("--dtype", "float32", "--cache-gb", "0.5", "--no-prefix-caching", "--verify", "all", "--threads", "1")
    with Fleet(directory, *flags, model=MODEL, mode=mode) as fleet:
        workers: list[Process] = [
            fleet.worker("p", "--pp", "2", role="prefill"),
            fleet.worker("d", role="decode"),
        ]
        for worker in workers:
            worker.wait_ready()
        router = fleet.route(prefill=workers[:1], decode=workers[1:])
        if not alone:
            alone += ask_all(workers[1].url, asked, lambda done: report(f"{mode}: alone {done}/{len(asked)}"))
        handed = ask_all(router.url, asked, lambda done: report(f"{mode}: handed over {done}/{len(asked)}"))
        return tally(mode, asked, alone, handed)


def _tell(line: str) -> None:
    sys.stderr.write(f"\r{line}")
    sys.stderr.flush()


def main() -> int:
    """Runs what the module describes."""
    assert __doc__ is not None, "the module says what it is"
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.published", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--mode", action="append", choices=("pull", "push"))
    args = parser.parse_args()
    asked = questions(args.prompts)
    wrong = False
    alone: list[Answer] = []
    with tempfile.TemporaryDirectory() as directory:
        for mode in args.mode or ("pull", "push"):
            found = run(Path(directory) / mode, mode, asked, alone, _tell)
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
            wrong = wrong or found["recomputed"] != 0 or found["handed_over"] != found["prompt_tokens"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
