"""What can be refused is refused before anything is queued or computed, and prefill learns of it at once."""

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvferry.engines.mini.settings import EngineSettings
from kvferry.settings import FailurePolicy, LeaseSettings, TransferMode
from kvferry.wire.params import HandoffParams
from tests.engines.mini.conftest import prompt_of
from tests.harness.client import Stream, complete, post
from tests.harness.scripted_engine import ScriptedEngine, ScriptedWorker, listening
from tests.harness.served_workers import LoopThread, ServedWorker, settle
from tests.harness.tiny_model import make_tiny_model
from tests.harness.until import until_async

MODES = list(TransferMode)
LONG_LEASE = LeaseSettings(ttl_s=300.0, renew_every_s=60.0, quarantine_s=0.2, standstill_s=0.2)
"""No block comes back because a lease has ended."""
MakeWorker = Callable[..., ServedWorker]


@pytest.fixture
def make_worker(tmp_path: Path) -> Iterator[MakeWorker]:
    loop = LoopThread()
    workers: list[ServedWorker] = []
    model = make_tiny_model(tmp_path / "llama")

    def make(name: str, mode: TransferMode = TransferMode.PULL, **changes: Any) -> ServedWorker:
        settings = {"model": str(model), "dtype": "float32", "num_blocks": 1 + 40, "block_tokens": 4, **changes}
        workers.append(
            ServedWorker(loop, EngineSettings(**settings), mode=mode, engine_id=name, lease=LONG_LEASE, deadline_s=60.0)
        )
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()
    loop.close()


# ---- before anything is queued

TOO_LONG: dict[str, dict[str, Any]] = {
    "beyond the context": {"prompt": prompt_of(2050), "max_tokens": 5},
    "with its answer": {"prompt": prompt_of(20), "max_tokens": 2040},
    "beyond the cache": {"prompt": prompt_of(158), "max_tokens": 5},
    "for several choices": {"prompt": prompt_of(158), "max_tokens": 5, "n": 3},
    "the second of two prompts": {"prompt": [prompt_of(8), prompt_of(158)], "max_tokens": 5},
    "for a decode engine": {"prompt": prompt_of(161), "kv_transfer_params": {"do_remote_decode": True}},
    "its answer, which decode would judge": {
        "prompt": prompt_of(20), "max_tokens": 2040, "kv_transfer_params": {"do_remote_decode": True},
    },
}  # fmt: skip


@pytest.mark.engine
def test_what_can_never_fit_is_400_at_once_also_beside_others(make_worker: MakeWorker) -> None:
    """And without a step: a stream fills the cache, so nothing that is queued could begin."""
    worker = make_worker("one")
    stream = Stream(worker.url, {"prompt": prompt_of(100), "max_tokens": 59, "ignore_eos": True})
    events = stream.events()
    next(events)
    for name, body in TOO_LONG.items():
        for streamed in (False, True):
            answer = complete(
                worker.url, body["prompt"], stream=streamed, **{k: v for k, v in body.items() if k != "prompt"}
            )
            assert answer.status == 400, (name, answer)
            assert answer.error is not None
            assert answer.error["code"] == "context_length_exceeded", name
    stream.hang_up()
    settle([worker])
    assert worker.engine.stats().prompt_tokens == 100, "nothing of the others was queued"


@pytest.mark.engine
def test_at_the_limit_it_is_served(make_worker: MakeWorker) -> None:
    worker = make_worker("one")
    assert complete(worker.url, prompt_of(156), max_tokens=5, ignore_eos=True).whole
    assert post(worker.url, {"prompt": prompt_of(160), "kv_transfer_params": {"do_remote_decode": True}}).status == 200


# ---- a hand-off that is refused with its request


def handed_over(prefill: ServedWorker, prompt: list[int], mode: TransferMode) -> dict[str, Any]:
    """Has prefill compute the prompt, and returns what a router would give to decode."""
    ask = {"do_remote_decode": True, "transfer_id": "t"}
    answer = post(prefill.url, {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, "kv_transfer_params": ask})
    assert answer.params is not None
    assert prefill.engine.blocks.num_held > 0
    if mode is TransferMode.PULL:
        return answer.params
    names = ("do_remote_prefill", "transfer_id", "remote_engine_id", "remote_host", "remote_port")
    return {name: answer.params[name] for name in names}


BAD: dict[str, dict[str, Any]] = {
    "longer than decode's context": {"max_tokens": 3000},
    "longer than decode's cache": {"max_tokens": 30},
    "a value out of range": {"temperature": -1},
    "a value of a wrong type": {"temperature": "hot"},
    "another model": {"model": "gpt-9"},
}


@pytest.mark.engine
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", list(BAD))
def test_decodes_400_frees_prefills_blocks_at_once(make_worker: MakeWorker, bad: str, mode: TransferMode) -> None:
    """The router is a foreign one, which does not tell prefill; the lease would last five minutes."""
    prefill, decode = make_worker("p", mode), make_worker("d", mode, num_blocks=1 + 8)
    prompt = prompt_of(20)
    params = handed_over(prefill, prompt, mode)
    answer = complete(decode.url, prompt, kv_transfer_params=params, **BAD[bad])
    assert 400 <= answer.status < 500, answer
    settle([prefill, decode], within_s=5.0)


@pytest.mark.engine
@pytest.mark.parametrize("policy", list(FailurePolicy))
def test_a_transfer_that_prefill_does_not_know_is_computed_at_once(
    make_worker: MakeWorker, policy: FailurePolicy
) -> None:  # R29
    prefill, decode = make_worker("p"), make_worker("d")
    prompt = prompt_of(20)
    params = handed_over(prefill, prompt, TransferMode.PULL)
    unknown = {**params, "transfer_id": "another"}
    answer = complete(decode.url, prompt, kv_transfer_params=unknown, kv_on_failure=str(policy), timeout_s=10.0)
    if policy is FailurePolicy.FAIL:
        assert (answer.status, answer.error is not None) == (500, True)
        assert "prefill does not know it" in str(answer.error)
    else:
        assert answer.whole
        assert (answer.kvferry["handed_over"], answer.kvferry["recomputed"]) == (0, 20)
        assert "prefill does not know it" in answer.kvferry["why"]
    assert complete(decode.url, prompt, kv_transfer_params=params).whole
    settle([prefill, decode])


@pytest.mark.engine
def test_a_transfer_that_has_ended_is_refused_at_once(make_worker: MakeWorker) -> None:
    prefill, decode = make_worker("p"), make_worker("d")
    prompt = prompt_of(20)
    params = handed_over(prefill, prompt, TransferMode.PULL)
    assert post(prefill.url, {"transfer_id": "t"}, path="/v1/kvferry/release").status == 200
    settle([prefill])
    answer = complete(decode.url, prompt, kv_transfer_params=params, timeout_s=10.0)
    assert "the router gave it up" in answer.kvferry["why"]
    settle([prefill, decode])


# ---- the same, on a scripted engine


@dataclass
class DecliningEngine(ScriptedEngine):
    """Remembers what it was asked to decline."""

    declined: list[tuple[str | None, str]] = field(default_factory=list)

    def decline(self, handoff: HandoffParams | None, reason: str) -> None:
        assert handoff is not None
        self.declined.append((handoff.transfer_id, reason))


HANDOFF = {"do_remote_prefill": True, "transfer_id": "t1", "remote_engine_id": "p0"}


async def status_of(url: str, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session:
        sent = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with session.post(url + path, headers=headers, **sent) as response:
            return response.status, await response.text()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_4xx_is_final_for_its_hand_off_and_a_503_is_not(path: str) -> None:
    engine = DecliningEngine(steps_left=0)
    prompt: dict[str, Any] = (
        {"prompt": "Hello"} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    )
    async with listening(ScriptedWorker(engine=engine), max_open_requests=2) as url:
        body = {**prompt, "kv_transfer_params": HANDOFF}
        assert (await status_of(url, {**body, "n": 5}, path))[0] == 503, "another decode worker may take it"
        assert engine.declined == []
        assert (await status_of(url, {**body, "max_tokens": 9999}, path))[0] == 400
        await until_async(lambda: engine.declined)
        assert (await status_of(url, {"kv_transfer_params": HANDOFF}, path))[0] == 400
        await until_async(lambda: len(engine.declined) == 2)
        for_prefill = {**prompt, "kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 9999}
        for plain in (for_prefill, {**prompt, "max_tokens": 9999}, {**prompt, "kv_transfer_params": 3}):
            assert (await status_of(url, plain, path))[0] == 400
    assert [transfer for transfer, _ in engine.declined] == ["t1", "t1"]
    assert "9999" in engine.declined[0][1]


# ---- bodies that are not what their headers say

GOOD = b'{"prompt": "Hello", "max_tokens": 1}'
PACKED = gzip.compress(GOOD, mtime=0)


@pytest.mark.parametrize(
    ("encoding", "body", "status", "part"),
    [
        ("gzip", PACKED, 200, "text_completion"),
        ("GZIP", PACKED, 200, "text_completion"),
        ("identity", GOOD, 200, "text_completion"),
        ("gzip", GOOD, 400, "not in Content-Encoding='gzip'"),
        ("gzip", PACKED[:-12], 400, "not valid JSON"),
        ("deflate", b"no such thing", 400, "not in Content-Encoding='deflate'"),
        ("nonsense", GOOD, 415, "Content-Encoding='nonsense' is not read here"),
        ("gzip, gzip", PACKED, 415, "gzip, deflate"),
    ],
)
async def test_a_bad_content_encoding_is_the_clients_fault(encoding: str, body: bytes, status: int, part: str) -> None:
    async with listening() as url:
        found, text = await status_of(url, body, **{"Content-Encoding": encoding})
    assert found == status, text
    assert part in text
