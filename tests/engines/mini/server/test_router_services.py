"""What a worker does for routers: it reports blocks, meets peers early, and continues a first token that was sent."""

import base64
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec
import pytest

from kvferry.engines.mini.server.router_services import prompt_blocks
from kvferry.wire.prompt_digest import pack_tokens
from tests.harness.scripted_engine import ScriptedWorker, answer_of, listening

HASHES = [bytes([i]) * 32 for i in range(3)]


@dataclass
class FleetWorker(ScriptedWorker):
    """A scripted worker that reports its blocks and meets peers."""

    states: list[str] = field(default_factory=lambda: ["asking", "asking", "accepted"])
    met: list[tuple[str, str | None, str, int]] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "limits": {"block_tokens": 4}}

    def cached_blocks(self) -> list[bytes]:
        return HASHES

    def meet(self, engine: str, incarnation: str | None, host: str, port: int) -> str:
        self.met.append((engine, incarnation, host, port))
        return self.states.pop(0)


async def ask(url: str, path: str, body: Any = None, **more: Any) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session:
        method = session.get(url + path) if body is None else session.post(url + path, json=body, **more)
        async with method as response:
            return response.status, await response.read()


async def test_blocks_are_reported_by_the_first_bytes_of_their_hashes() -> None:
    async with listening(FleetWorker()) as url:
        assert await ask(url, "/v1/kvferry/blocks") == (200, b"".join(one[:8] for one in HASHES))
    async with listening() as url:  # an engine that does not know any
        assert await ask(url, "/v1/kvferry/blocks") == (200, b"")


async def test_meeting_waits_until_the_handshake_ends() -> None:
    worker = FleetWorker()
    body = {"engine": "p0", "incarnation": "i1", "host": "127.0.0.1", "port": 5}
    async with listening(worker) as url:
        assert await ask(url, "/v1/kvferry/meet", body) == (200, b'{"state":"accepted"}')
        assert worker.met == [("p0", "i1", "127.0.0.1", 5)] * 3
        for wrong in ({"port": 0}, {"port": 70000}, {"port": "x"}, {"engine": ""}, {"host": "h" * 300}):
            status, _ = await ask(url, "/v1/kvferry/meet", {**body, **wrong})
            assert status == 400
    assert len(worker.met) == 3
    async with listening() as url:
        assert await ask(url, "/v1/kvferry/meet", body) == (200, b'{"state":"unsupported"}')


TICKET = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}


async def test_prefill_reports_the_prompts_blocks_if_asked() -> None:
    prompt = list(range(40, 50))
    body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": TICKET}
    wants = {"x-kvferry-want": "prompt-blocks"}
    hashes = [bytes([number]) * 32 for number in range(3)]
    worker = FleetWorker()
    worker.engine.script = lambda request: [replace(one, prompt_hashes=tuple(hashes)) for one in answer_of(request)]
    async with listening(worker) as url:
        _, raw = await ask(url, "/v1/completions", body, headers=wants)
        assert base64.b64decode(_json(raw)["prompt_blocks"]) == b"".join(one[:8] for one in hashes)
        for asked in ({"json_body": body}, {"json_body": {**body, "kv_transfer_params": None}, "headers": wants}):
            _, raw = await ask(url, "/v1/completions", asked.pop("json_body"), **asked)
            assert "prompt_blocks" not in _json(raw)
    assert prompt_blocks([]) == ""


async def test_a_prompt_is_packed_once_for_all_its_choices() -> None:
    worker = ScriptedWorker()
    async with listening(worker) as url:
        for prompt in ([40, 41, 42], "abc"):
            status, _ = await ask(url, "/v1/completions", {"prompt": prompt, "max_tokens": 1, "n": 2})
            assert status == 200
    assert len(worker.engine.added) == 4
    for first, second in (worker.engine.added[:2], worker.engine.added[2:]):
        assert first.packed == pack_tokens(first.prompt_token_ids)
        assert first.packed is second.packed


def _json(raw: bytes) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(raw)
    return body


@pytest.mark.parametrize(("handoff", "sent"), [(True, True), (False, False)])
async def test_a_first_token_that_was_sent_reaches_the_engine(handoff: bool, sent: bool) -> None:
    worker = ScriptedWorker()
    params = {"do_remote_prefill": True, "remote_engine_id": "p", "first_token": 65} if handoff else None
    body = {"prompt": "abc", "max_tokens": 3, "kv_transfer_params": params}
    async with listening(worker) as url:
        await ask(url, "/v1/completions", body, headers={"x-kvferry-first-token": "sent"})
        await ask(url, "/v1/completions", body)
    assert [request.first_token_sent for request in worker.engine.added] == [sent, False]
