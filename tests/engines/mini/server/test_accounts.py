"""R36: prompt tokens add up in every answer of every shape, and equal what the engine was given to compute.

What was computed is counted where steps reach the model (ForwardCount), not by the engine's books: prompts are made of
tokens below `ANSWER`, and every token of an answer is `ANSWER`, so each computed token tells which of both it is.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.speculation_settings import SpeculationSettings
from kvferry.settings import LeaseSettings, TransferMode
from tests.harness.client import Answer, Stream, complete, metrics, post
from tests.harness.hypothesis_profile import examples
from tests.harness.served_workers import LoopThread, ServedWorker, settle
from tests.harness.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

ANSWER = 200
PROMPT_TOKENS = range(3, ANSWER)
COUNTS = ("handed_over", "cached", "recomputed")
DRAFTS = SpeculationSettings(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "no cache": ("llama", {"prefix_caching": False}),
    "drafts": ("llama", {"speculation": DRAFTS}),
    "hybrid": ("granite", {}),
    "hybrid, no cache": ("granite", {"prefix_caching": False}),
    "preempted": ("llama", {"num_blocks": 1 + 24}),
}


@dataclass
class Pair:
    """A prefill and a decode worker, and the names of the requests that were sent so far."""

    prefill: ServedWorker
    decode: ServedWorker
    mode: TransferMode
    number: int = 0

    def settle(self) -> None:
        settle((self.prefill, self.decode))


@pytest.fixture
def make_pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    loop = LoopThread()
    workers: list[ServedWorker] = []

    def make(kind: str, mode: TransferMode) -> Pair:
        family, changes = ENGINES[kind]
        model = make_tiny_model(tmp_path / family, family)
        base = {"model": str(model), "dtype": "float32", "num_blocks": 300, "block_tokens": 4, "max_batch_tokens": 48}
        lease = LeaseSettings(ttl_s=4.0, renew_every_s=0.5, quarantine_s=0.2, standstill_s=0.2)
        for name, own in (("p", {**changes, "num_blocks": 300}), ("d", changes)):
            engine = EngineSettings(**{**base, **own})
            workers.append(ServedWorker(loop, engine, mode=mode, engine_id=name, lease=lease))
        return Pair(workers[-2], workers[-1], mode)

    yield make
    for worker in workers:
        worker.close()
    loop.close()


@dataclass(frozen=True)
class Shape:
    """One request."""

    lengths: tuple[int, ...]
    family: int
    """Prompts of one family begin alike."""
    n: int = 1
    max_tokens: int = 3
    stream: bool = False
    route: str = "local"
    stops: bool = False
    """Whether the first token ends the answer."""

    @property
    def fields(self) -> dict[str, Any]:
        stops = {"stop_token_ids": [ANSWER]} if self.stops else {}
        return {"n": self.n, "logit_bias": {str(ANSWER): 100}, "ignore_eos": True, **stops}

    @property
    def prompts(self) -> Any:
        prompts = [[3 + (self.family * 31 + i * i) % 190 for i in range(length)] for length in self.lengths]
        return prompts[0] if len(prompts) == 1 else prompts


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Any request; one that is handed over has one prompt."""
    route = draw(st.sampled_from(["local", "handed over", "failed", "cancelled"]))
    num_prompts = draw(st.integers(1, 3)) if route == "local" else 1
    return Shape(
        lengths=tuple(draw(st.integers(1, 40)) for _ in range(num_prompts)),
        family=draw(st.integers(0, 3)),
        n=draw(st.integers(1, 3)),
        max_tokens=draw(st.sampled_from([1, 2, 7])),
        stream=draw(st.booleans()),
        route=route,
        stops=draw(st.booleans()),
    )


def served(pair: Pair, shape: Shape) -> Answer:
    """Sends a request on its route and returns decode's answer."""
    pair.number += 1
    fields = {**shape.fields, "max_tokens": shape.max_tokens}
    if shape.route == "cancelled":
        stream = Stream(pair.decode.url, {"prompt": shape.prompts, **fields, "max_tokens": 30})
        next(stream.events(), None)
        stream.hang_up()
        return stream.answer
    if shape.route == "local":
        return complete(pair.decode.url, shape.prompts, stream=shape.stream, **fields)
    transfer = f"t-{pair.number}"
    ask = {"do_remote_decode": True, "transfer_id": transfer}
    to_prefill = {"prompt": shape.prompts, **shape.fields, "n": 1, "max_tokens": 1, "kv_transfer_params": ask}
    if pair.mode is TransferMode.PULL:
        first = post(pair.prefill.url, to_prefill)
        assert_adds_up(first, shape, pair, sum(shape.lengths) if first.params is None else None)
        if first.params is None:
            return first  # the first token ended the answer: prefill's answer is the answer
        params = dict(first.params)
        if shape.route == "failed":
            params["remote_incarnation"] = "gone"
        return complete(pair.decode.url, shape.prompts, stream=shape.stream, kv_transfer_params=params, **fields)
    identity = pair.prefill.worker.identity
    params = {
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_engine_id": identity.engine,
        "remote_host": identity.host,
        "remote_port": identity.port,
        "remote_incarnation": "gone" if shape.route == "failed" else identity.incarnation,
    }
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(post, pair.prefill.url, to_prefill)
        answer = complete(pair.decode.url, shape.prompts, stream=shape.stream, kv_transfer_params=params, **fields)
        if shape.route == "failed":  # a router does that
            release(pair, transfer, writing.result())
        assert_adds_up(writing.result(), shape, pair)
    return answer


def release(pair: Pair, transfer: str, prefilled: Answer) -> None:
    assert prefilled.status == 200
    post(pair.prefill.url, {"transfer_id": transfer}, path="/v1/kvferry/release")


def assert_adds_up(answer: Answer, shape: Shape, pair: Pair, num_prompt: int | None = None) -> None:
    """The account, the usage and the headers of one answer."""
    assert answer.status == 200, answer.body
    account = answer.kvferry
    counts = [account[name] for name in COUNTS]
    if account["decode"] is None and answer.params is not None:
        assert sum(counts) == answer.params["remote_num_tokens"], "in prefill's answer to a hand-off"
        return
    total = sum(shape.lengths)
    assert sum(counts) == total, account
    assert min(counts) >= 0 <= account["computed_again"], account
    if answer.usage:
        assert answer.usage["prompt_tokens"] == total
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] == account["handed_over"] + account["cached"]
    names = [f"x-kvferry-{name.replace('_', '-')}" for name in COUNTS]
    if shape.stream and len(shape.lengths) > 1 and names[0] not in answer.headers:
        return
    assert [int(answer.headers[name]) for name in names] == counts, "the headers say the same"
    assert answer.headers.get("x-kvferry-why", "") == account["why"]


def totals(worker: ServedWorker) -> tuple[int, ...]:
    """What the worker's metrics have counted: by source, and computed again."""
    found = metrics(worker.url)
    by_source = tuple(int(found[f'kvferry_prompt_tokens_total{{source="{name}"}}']) for name in COUNTS)
    return (*by_source, int(found["kvferry_prompt_tokens_computed_again_total"]))


def assert_books_equal_forwards(worker: ServedWorker) -> None:
    stats = worker.engine.stats()
    assert stats.recomputed_tokens + stats.computed_again_tokens == worker.forwards.num_of(PROMPT_TOKENS), stats


MODES = [TransferMode.PULL, TransferMode.PUSH]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [kind for kind in ENGINES if kind != "preempted"])
def test_every_answer_adds_up_and_equals_what_was_computed(
    make_pair: Callable[..., Pair], kind: str, mode: TransferMode
) -> None:  # R36
    pair = make_pair(kind, mode)

    @settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
    @given(shapes())
    def check(shape: Shape) -> None:
        before, computed = totals(pair.decode), pair.decode.forwards.num_of(PROMPT_TOKENS)
        answer = served(pair, shape)
        pair.settle()
        assert_books_equal_forwards(pair.decode)
        assert_books_equal_forwards(pair.prefill)
        if shape.route == "cancelled":
            return
        assert_adds_up(answer, shape, pair)
        account = answer.kvferry
        if account["decode"] != "d":
            return  # prefill's answer was the answer
        grown = tuple(after - old for after, old in zip(totals(pair.decode), before, strict=True))
        assert grown == (*(account[name] for name in COUNTS), account["computed_again"]), "metrics"
        again = pair.decode.forwards.num_of(PROMPT_TOKENS) - computed
        assert account["recomputed"] + account["computed_again"] == again, (shape, account)
        if shape.route == "handed over":
            assert "withdrew" not in account["why"], account
            assert account["handed_over"] + account["cached"] >= sum(shape.lengths) - 1, account

    check()


def test_tokens_that_a_preempted_request_computes_again_are_counted(make_pair: Callable[..., Pair]) -> None:
    """Several requests grow until the cache is full: what each header said stays true, and the rest is `again`."""
    pair = make_pair("preempted", TransferMode.PULL)
    wanted = [Shape((9 + 3 * i,), i, max_tokens=24, stream=i % 2 == 0) for i in range(5)]
    with ThreadPoolExecutor(len(wanted)) as threads:
        answers = list(threads.map(lambda shape: served(pair, shape), wanted))
    pair.settle()
    assert pair.decode.engine.stats().preemptions > 0
    for answer, shape in zip(answers, wanted, strict=True):
        assert_adds_up(answer, shape, pair)
    assert sum(answer.kvferry["computed_again"] for answer in answers) > 0
    assert_books_equal_forwards(pair.decode)


@pytest.mark.parametrize(
    ("kind", "least"), [("no cache", 3 * 39), ("hybrid, no cache", 3 * 39), ("hybrid", 39), ("plain", 3 * 3)]
)
def test_choices_that_compute_the_prompt_again_say_so(make_pair: Callable[..., Pair], kind: str, least: int) -> None:
    """With the prefix cache a choice computes what is after the last whole block; without it, the whole prompt."""
    pair = make_pair(kind, TransferMode.PULL)
    answer = served(pair, Shape((39,), 0, n=4, route="handed over"))
    tail = 1 if "hybrid" in kind else 0
    assert (answer.kvferry["handed_over"], answer.kvferry["recomputed"]) == (39 - tail, tail)
    assert answer.kvferry["computed_again"] >= least, answer.kvferry
    assert answer.kvferry["computed_again"] == least or kind == "hybrid", "its choices may find each other's states"
    pair.settle()
    assert pair.decode.forwards.num_of(PROMPT_TOKENS) == tail + answer.kvferry["computed_again"]


@pytest.mark.parametrize("stream", [False, True])
def test_in_push_an_answer_that_ends_with_its_first_token_is_handed_over(
    make_pair: Callable[..., Pair], stream: bool
) -> None:
    pair = make_pair("plain", TransferMode.PUSH)
    answer = served(pair, Shape((30,), 0, max_tokens=5, route="handed over", stops=True, stream=stream))
    assert (answer.token_ids, answer.finish_reason) == ([ANSWER], "stop")
    assert (answer.kvferry["handed_over"], answer.kvferry["why"]) == (30, "")
    pair.settle()
    assert pair.decode.forwards.token_ids == [], "decode computed nothing"
    assert metrics(pair.decode.url)['kvferry_handoffs_total{outcome="landed"}'] == 1


def test_a_completion_is_as_long_as_max_tokens_says(make_pair: Callable[..., Pair]) -> None:
    """`max_completion_tokens` belongs to chat, where it goes before `max_tokens`; it must not shorten a completion."""
    pair = make_pair("plain", TransferMode.PULL)
    messages = [{"role": "user", "content": "Hello"}]
    both = {"max_tokens": 5, "max_completion_tokens": 2, "return_token_ids": True, "ignore_eos": True}
    assert len(post(pair.decode.url, {"messages": messages, **both}, path="/v1/chat/completions").token_ids) == 2
    answer = post(pair.decode.url, {"prompt": [5, 6, 7], **both})
    assert answer.status == 400 or len(answer.token_ids) == 5
