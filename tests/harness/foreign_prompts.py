"""Pairs of prompts that get each other's hand-off: the worst that a proxy can do to them (R51); and bursts of prompts.

For each pair both prompts are prefilled, each is decoded with the parameters of the other, and then both are asked
again plainly. Every answer must be the one that the engine gives alone: wrong tokens in the first answer mean that a
hand-off was not bound to its tokens, wrong tokens in the second that the prefix cache was poisoned.

A burst is some prompts with the same beginning, at the same time, each with its own hand-off: prefill finds blocks in
its prefix cache that a step in flight is still writing.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from tests.harness.client import Answer, complete

__all__ = ["KINDS", "Servers", "Tally", "bursts_of_prompts", "hand_over_all", "pairs_of_prompts", "swap_all"]

KINDS = ("same length", "shorter", "longer", "one shorter", "one longer", "common prefix", "prefix of the other")
ANSWER_TOKENS = 5
_LONGEST = 150

Prompt = tuple[int, ...]
_Given = TypeVar("_Given")


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


def bursts_of_prompts(
    count: int, *, seed: int, vocab: range, size: int = 6, longest: int = _LONGEST
) -> Iterator[tuple[Prompt, ...]]:
    """Yields bursts of `size` prompts. Each burst has a beginning of its own, of two thirds of the longest length."""
    dice = random.Random(seed)
    for _ in range(count):
        begin = dice.choices(vocab, k=2 * longest // 3)
        yield tuple((*begin, *dice.choices(vocab, k=dice.randint(1, longest - len(begin)))) for _ in range(size))


class _Group:
    """Asks the prompts of a group at the same time, each with its own hand-off, or `swapped`: with another one's."""

    def __init__(self, servers: Servers, tally: Tally, alone: Callable[[Prompt], list[int]], *, swapped: bool) -> None:
        self._servers, self._tally, self._alone, self._swapped = servers, tally, alone, swapped

    def __call__(self, number: int, prompts: Sequence[Prompt]) -> None:
        with ThreadPoolExecutor(2 * len(prompts)) as pool:
            answers = self._pull(pool, prompts) if self._servers.mode == "pull" else self._push(pool, number, prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            self._judge(number, prompt, answer, self._tally.wrong)
        for prompt in prompts:
            self._judge(number, prompt, self._decode(prompt, None), self._tally.poisoned)

    def _mixed_up(self, given: Sequence[_Given]) -> Sequence[_Given]:
        return given[::-1] if self._swapped else given

    def _pull(self, pool: ThreadPoolExecutor, prompts: Sequence[Prompt]) -> list[Answer]:
        returned = list(pool.map(lambda prompt: self._prefill(prompt, {"do_remote_decode": True}), prompts))
        return list(pool.map(self._decode, prompts, self._mixed_up(returned)))

    def _push(self, pool: ThreadPoolExecutor, number: int, prompts: Sequence[Prompt]) -> list[Answer]:
        """Both halves of all requests at once, as a router sends them."""
        kind = "swap" if self._swapped else "burst"  # one dispatch, one id
        names = [f"{kind}-{number}-{side}" for side in range(len(prompts))]
        decodes = [
            pool.submit(self._decode, prompt, {"do_remote_prefill": True, "transfer_id": name, **self._servers.peer})
            for prompt, name in zip(prompts, self._mixed_up(names), strict=True)
        ]
        for prompt, name in zip(prompts, names, strict=True):
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
        what = f"pair {number} ({KINDS[number % len(KINDS)]})" if self._swapped else f"burst {number}"
        what += f", {len(prompt)} tokens"
        if answer.status != 200:
            tally.failed.append(f"{what}: {answer.status} {answer.error} {answer.broken}")
        elif answer.token_ids != (right := self._alone(prompt)):
            faults.append(f"{what}: {answer.token_ids} instead of {right} {answer.kvferry}")
        if reason := answer.kvferry.get("why"):
            tally.reasons["".join("#" if char.isdigit() else char for char in reason)[:90]] += 1


def swap_all(servers: Servers, pairs: Sequence[tuple[Prompt, Prompt]], *, at_once: int = 1) -> Tally:
    """Asks all pairs with each other's hand-offs, `at_once` at a time, and returns what became of them."""
    return _ask_all(servers, pairs, at_once, swapped=True)


def hand_over_all(servers: Servers, bursts: Sequence[tuple[Prompt, ...]], *, at_once: int = 1) -> Tally:
    """Asks all bursts with their own hand-offs, `at_once` bursts at a time, and returns what became of them."""
    return _ask_all(servers, bursts, at_once, swapped=False)


def _ask_all(servers: Servers, groups: Sequence[tuple[Prompt, ...]], at_once: int, *, swapped: bool) -> Tally:
    tally = Tally()

    @cache  # each prompt is judged twice
    def alone(prompt: Prompt) -> list[int]:
        more = {"model": servers.model, **servers.alone_fields}
        return complete(
            servers.alone, prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, timeout_s=120.0, **more
        ).token_ids

    ask = _Group(servers, tally, alone, swapped=swapped)
    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(ask, number, prompts) for number, prompts in enumerate(groups)]:
            done.result()
    return tally
