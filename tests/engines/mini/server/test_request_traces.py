"""GET /v1/kvferry/trace: the stages of a worker's latest requests, by its own clock."""

import itertools
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvferry.engines.mini.api import GenerateRequest, SamplingParams
from kvferry.engines.mini.server.generate import Job
from kvferry.engines.mini.server.prompts import Prompt
from kvferry.engines.mini.server.replies import CompletionReply
from kvferry.engines.mini.server.request_traces import Traces
from kvferry.engines.mini.server.token_logprobs import TokenNames
from kvferry.web.stages import MAX_ASKED, TRACE_PATH, HandoffTotals, TraceAnswer
from tests.harness.scripted_engine import CharTokenizer, listening

PULL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_mode": "pull",
    "transfer_id": "t1",
    "remote_engine_id": "p0",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_num_tokens": 5,
    "remote_block_ids": [[1]],
    "tp_size": 1,
    "pp_size": 1,
}


async def _asked(url: str, **query: Any) -> TraceAnswer:
    async with aiohttp.ClientSession() as session, session.get(url + TRACE_PATH, params=query) as answer:
        assert answer.status == 200
        return msgspec.json.decode(await answer.read(), type=TraceAnswer)


async def _complete(url: str, request_id: str, **more: Any) -> None:
    body = {"prompt": "hello", "max_tokens": 2, **more}
    async with aiohttp.ClientSession() as session, session.post(
        url + "/v1/completions", json=body, headers={"X-Request-Id": request_id}
    ) as answer:  # fmt: skip
        assert answer.status == 200, await answer.text()
        await answer.read()


async def test_a_request_is_reported_with_its_times_and_totals() -> None:
    async with listening() as url:
        before_s = time.monotonic()
        await _complete(url, "one", stream=True)
        await _complete(url, "two", kv_transfer_params=PULL)
        answer = await _asked(url, request="one")
        assert [one.request_id for one in answer.requests] == ["one"]
        one = answer.requests[0]
        # The same machine has the same clock, so events are in their real order.
        assert (
            before_s
            < one.received_s
            <= one.began_s
            <= one.ended_s
            <= answer.received_s
            <= answer.now_s
            <= time.monotonic()
        )
        assert (one.status, one.num_tokens) == (200, 2)
        assert answer.handoffs == {"p0": HandoffTotals(landed=1, failed=0, bytes=1000, transfer_s=0.002)}


async def test_an_unknown_request_is_no_error_and_the_clock_is_reported() -> None:
    async with listening() as url:
        answer = await _asked(url, request="unknown")
        assert answer.requests == ()
        assert answer.now_s >= answer.received_s > 0


def _reply(request_id: str) -> tuple[Job, CompletionReply]:
    sampling = SamplingParams(max_tokens=1)
    job = Job(request_id=request_id, model="m", prompts=(Prompt((97,), "a"),), samplings=(sampling,))
    return job, CompletionReply(job, TokenNames(CharTokenizer()), "e")


def test_memory_is_bounded_in_requests_and_in_repeats() -> None:
    traces = Traces()
    for index in range(3000):
        job, reply = _reply(f"r{index}")
        traces.remember(job, reply, received_s=float(index), status=200)
    for index in range(10):
        job, reply = _reply("again")
        traces.remember(job, reply, received_s=float(index), status=200)
    ids = [f"r{index}" for index in range(3000)]
    answer = traces.answer(ids[-MAX_ASKED:], engine="e", incarnation="i", received_s=0.0)
    assert len(answer.requests) == MAX_ASKED
    assert traces.answer(ids[:MAX_ASKED], engine="e", incarnation="i", received_s=0.0).requests == ()
    again = traces.answer(["again"], engine="e", incarnation="i", received_s=0.0).requests
    assert [one.received_s for one in again] == [6.0, 7.0, 8.0, 9.0]
    assert len(traces.answer(ids, engine="e", incarnation="i", received_s=0.0).requests) <= MAX_ASKED


@pytest.mark.engine
def test_a_real_engine_records_queue_prefill_and_decode(tmp_path: Path) -> None:
    from kvferry.engines.mini.engine import Engine, EngineSettings
    from kvferry.ids import RequestId
    from kvferry.web.stages import stages_of
    from tests.harness.tiny_model import make_tiny_model

    engine = Engine.load(EngineSettings(model=str(make_tiny_model(tmp_path)), num_blocks=32, threads=1))
    try:
        sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        engine.add(GenerateRequest(request_id=RequestId("a"), prompt_token_ids=(1, 2, 3), sampling=sampling))
        last = None
        while engine.has_work():
            last = engine.step()[-1]
        assert last is not None
        assert last.stages is not None
        stages = stages_of(last.stages)
        assert [one.name for one in stages] == ["queue", "prefill", "decode"]
        assert all(before.end_s == after.begin_s for before, after in itertools.pairwise(stages))
    finally:
        engine.close()
