"""Pairs of prompts that get each other's hand-off: the worst that a proxy can do to them (R51).

For each pair both prompts are prefilled, each is decoded with the parameters of the other, and then both are asked
again plainly. Every answer must be the one that the engine gives alone: wrong tokens in the first answer mean that a
hand-off was not bound to its tokens, wrong tokens in the second that the prefix cache was poisoned.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tests.harness.client import Answer, complete

__all__ = ["KINDS", "Servers", "Tally", "pairs_of_prompts", "swap_all"]

KINDS = ("same length", "shorter", "longer", "one shorter", "one longer", "common prefix", "prefix of the other")
ANSWER_TOKENS = 5
_LONGEST = 150

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Servers:
    """Where a prefill worker, a decode worker and an engine that knows no peer answer."""

    prefill: str
    decode: str
    alone: str
    mode: str
    model: str = "model"
    alone_fields: dict[str, Any] = field(default_factory=dict)
    """What makes a request to `alone` independent of every other one there, such as a cache salt."""
    peer: dict[str, Any] = field(default_factory=dict)
    """Push: the parameters that name the prefill worker (engine, host, port)."""


@dataclass
class Tally:
    """What became of the pairs."""

    answers: int = 0
    handed_over: int = 0
    """Prompt tokens that were handed over, as far as the answers say."""
    wrong: list[str] = field(default_factory=list)
    poisoned: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> bool:
        """Whether every answer was right, and every request was answered."""
        return not (self.wrong or self.poisoned or self.failed)

    def to_json(self) -> dict[str, Any]:
        """The numbers, and the first of each fault."""
        faults = {"wrong": self.wrong, "poisoned": self.poisoned, "failed": self.failed}
        numbers = {name: len(found) for name, found in faults.items()}
        first = {f"first_{name}": found[0] for name, found in faults.items() if found}
        return {"answers": self.answers, "handed_over": self.handed_over, **numbers, **first,
                "reasons": dict(self.reasons.most_common(4))}  # fmt: skip


def pairs_of_prompts(
    count: int, *, seed: int, vocab: range, longest: int = _LONGEST
) -> Iterator[tuple[Prompt, Prompt]]:
    """Yields pairs of each kind in turn; common prefixes end at, before and after multiples of 16, and in between."""
    dice = random.Random(seed)
    kinds = itertools.cycle(KINDS)

    def fresh(length: int) -> Prompt:
        return tuple(dice.choices(vocab, k=length))

    for number, kind in zip(range(count), kinds, strict=False):
        length = dice.randint(20, longest)
        first = fresh(length)
        if kind == "same length":
            yield first, fresh(length)
        elif kind == "shorter":
            yield first, fresh(dice.randint(2, length - 1))
        elif kind == "longer":
            yield first, fresh(length + dice.randint(1, 40))
        elif kind == "one shorter":
            yield first, first[:-1]
        elif kind == "one longer":
            yield first, (*first, *fresh(1))
        elif kind == "prefix of the other":
            yield first, first[: dice.randint(1, length - 1)]
        else:
            common = min(length - 1, number // len(KINDS) % (longest - 1) + 1)
            other = fresh(max(1, length - common + dice.randint(-3, 3)))
            differs = (other[0] if other[0] != first[common] else vocab[other[0] - vocab[0] - 1], *other[1:])
            yield first, (*first[:common], *differs)


class _Swap:
    def __init__(self, servers: Servers, tally: Tally, alone: Callable[[Prompt], list[int]]) -> None:
        self._servers, self._tally, self._alone = servers, tally, alone

    def __call__(self, number: int, pair: tuple[Prompt, Prompt]) -> None:
        if self._servers.mode == "pull":
            returned = [self._prefill(prompt, {"do_remote_decode": True}) for prompt in pair]
            answers = [self._decode(prompt, params) for prompt, params in zip(pair, reversed(returned), strict=True)]
        else:
            answers = self._push(number, pair)
        for prompt, answer in zip(pair, answers, strict=True):
            self._judge(number, prompt, answer, self._tally.wrong)
        for prompt in pair:
            self._judge(number, prompt, self._decode(prompt, None), self._tally.poisoned)

    def _push(self, number: int, pair: tuple[Prompt, Prompt]) -> list[Answer]:
        """Both halves of both requests at once, as a router sends them; the transfer ids are swapped."""
        names = [f"swap-{number}-{side}" for side in "ab"]
        with ThreadPoolExecutor(4) as pool:
            decodes = [
                pool.submit(
                    self._decode, prompt, {"do_remote_prefill": True, "transfer_id": name, **self._servers.peer}
                )
                for prompt, name in zip(pair, reversed(names), strict=True)
            ]
            for prompt, name in zip(pair, names, strict=True):
                pool.submit(self._prefill, prompt, {"do_remote_decode": True, "transfer_id": name})
            return [future.result() for future in decodes]

    def _prefill(self, prompt: Prompt, params: dict[str, Any]) -> dict[str, Any]:
        answer = self._ask(self._servers.prefill, prompt, 1, params)
        return answer.params or {}

    def _decode(self, prompt: Prompt, params: dict[str, Any] | None) -> Answer:
        return self._ask(self._servers.decode, prompt, ANSWER_TOKENS, params)

    def _ask(self, url: str, prompt: Prompt, max_tokens: int, params: dict[str, Any] | None) -> Answer:
        more: dict[str, Any] = {} if params is None else {"kv_transfer_params": params}
        return complete(url, prompt, max_tokens=max_tokens, ignore_eos=True, timeout_s=120.0, model=self._servers.model,
                        **more)  # fmt: skip

    def _judge(self, number: int, prompt: Prompt, answer: Answer, faults: list[str]) -> None:
        tally = self._tally
        tally.answers += 1
        tally.handed_over += answer.kvferry.get("handed_over", 0)
        what = f"pair {number} ({KINDS[number % len(KINDS)]}), {len(prompt)} tokens"
        if answer.status != 200:
            tally.failed.append(f"{what}: {answer.status} {answer.error} {answer.broken}")
        elif answer.token_ids != (right := self._alone(prompt)):
            faults.append(f"{what}: {answer.token_ids} instead of {right} {answer.kvferry}")
        if reason := answer.kvferry.get("why"):
            tally.reasons["".join("#" if char.isdigit() else char for char in reason)[:90]] += 1


def swap_all(servers: Servers, pairs: Sequence[tuple[Prompt, Prompt]], *, at_once: int = 1) -> Tally:
    """Asks all pairs, `at_once` at a time, and returns what became of them."""
    tally = Tally()

    @cache  # each prompt is judged twice
    def alone(prompt: Prompt) -> list[int]:
        more = {"model": servers.model, **servers.alone_fields}
        return complete(
            servers.alone, prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, timeout_s=120.0, **more
        ).token_ids

    swap = _Swap(servers, tally, alone)
    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(swap, number, pair) for number, pair in enumerate(pairs)]:
            done.result()
    return tally
