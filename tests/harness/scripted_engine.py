"""A worker whose engine computes nothing: one token per character, and answers from a script."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvferry.engines.mini.api import FinishReason, GenerateRequest, Output, TokenLogprobs
from kvferry.engines.mini.server.app import WorkerServer
from kvferry.engines.mini.settings import ServerSettings
from kvferry.errors import RequestError
from kvferry.ids import RequestId, TransferId
from kvferry.settings import TransferMode
from kvferry.stats import HandoffTiming, PromptAccount
from kvferry.web.listen import Listener
from kvferry.wire.params import HandoffParams

ANSWER = "The quick brown fox jumps over the lazy dog. "


class CharTokenizer:
    """A tokenizer whose token ids are code points."""

    max_chars_per_token = 1

    def __init__(self, *fields_read: str) -> None:
        """`fields_read`: the fields of a message, or `tools`, that the chat template reads."""
        self._fields_read = fields_read

    def template_reads(self, name: str) -> bool:
        return name in self._fields_read

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        lines = [f"tools: {tools}\n"] if tools else []
        return "".join([*lines, *(f"{m['role']}: {m['content']}\n" for m in messages)]) + "assistant: "


def answer_of(request: GenerateRequest) -> list[Output]:
    """The default script gives ANSWER, one character per step, until a stop string or max_tokens."""
    sampling, outputs = request.sampling, []
    prompt_len = len(request.prompt_token_ids)
    remote = request.handoff is not None and request.handoff.do_remote_prefill
    account = PromptAccount(
        handed_over=prompt_len - 1 if remote else 0,
        cached=0 if remote else 1,
        recomputed=1 if remote else prompt_len - 1,
    )
    timing = HandoffTiming(num_bytes=1000, num_runs=2, transfer_s=0.002, wait_s=0.003) if remote else None
    for i in range(sampling.max_tokens):
        char = ANSWER[i % len(ANSWER)]
        stopped = char in sampling.stop
        last = stopped or i == sampling.max_tokens - 1
        handoff = None
        if last and request.handoff is not None and request.handoff.do_remote_decode:
            handoff = HandoffParams(
                do_remote_prefill=True, transfer_mode=TransferMode.PULL, transfer_id=request.handoff.transfer_id,
                remote_engine_id="scripted", remote_request_id=request.request_id, remote_host="127.0.0.1",
                remote_port=1, remote_num_tokens=prompt_len, tp_size=1, pp_size=1, first_token=ord(char),
            )  # fmt: skip
        outputs.append(
            Output(
                request_id=request.request_id,
                token_ids=(ord(char),),
                text="" if stopped else char,
                logprobs=(TokenLogprobs(-0.5, ((ord(char), -0.5), (ord("z"), -1.5))),)
                if sampling.logprobs is not None
                else (),
                finish_reason=(FinishReason.STOP if stopped else FinishReason.LENGTH) if last else None,
                stop_reason=char if stopped else None,
                account=account if i == 0 or last else None,
                handoff=handoff,
                timing=timing if last else None,
            )
        )
    return outputs


@dataclass
class ScriptedEngine:
    """An engine whose `script` gives a request's outputs, one per step. `steps_left` lets a test hold a request."""

    script: Callable[[GenerateRequest], list[Output]] = answer_of
    steps_left: float = float("inf")
    added: list[GenerateRequest] = field(default_factory=list)
    aborted: list[RequestId] = field(default_factory=list)
    crash: Exception | None = None
    _open: dict[RequestId, list[Output]] = field(default_factory=dict)

    def add(self, request: GenerateRequest) -> None:
        if request.sampling.max_tokens < 1:
            raise RequestError(f"max_tokens={request.sampling.max_tokens!r} must be at least 1")
        self.added.append(request)
        self._open[request.request_id] = self.script(request)

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)
        self._open.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._open)

    def step(self) -> list[Output]:
        if self.crash is not None:
            raise self.crash
        if self.steps_left <= 0:
            return []
        self.steps_left -= 1
        outputs = [queue.pop(0) for queue in self._open.values() if queue]
        self._open = {key: queue for key, queue in self._open.items() if queue}
        return outputs

    @property
    def suspects(self) -> list[RequestId]:
        return list(self._open)

    def stats(self) -> PromptAccount:
        return PromptAccount(cached=7)


@dataclass
class ScriptedWorker:
    """A worker as the server needs it, without a model."""

    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    engine_id: str = "scripted"
    role: str = "both"
    mode: str = "pull"
    drained: bool = True
    """True if no hand-off is left."""
    num_drains: int = 0
    offered: dict[str, str] = field(default_factory=dict)
    """Hand-offs that can be released. The value is the reason after the release, and empty before it."""

    def release(self, transfer: TransferId, reason: str) -> bool:
        if self.offered.get(transfer, "gone"):
            return False
        self.offered[transfer] = reason
        return True

    def drain(self) -> None:
        self.num_drains += 1

    def describe(self) -> dict[str, Any]:
        return {
            "engine": self.engine_id,
            "incarnation": "1",
            "role": self.role,
            "mode": self.mode,
            "side_channel": {"host": "127.0.0.1", "port": 1},
        }


def a_server(
    worker: ScriptedWorker | None = None, tokenizer: CharTokenizer | None = None, **settings: Any
) -> WorkerServer:
    """Returns a server over a scripted engine that does not listen yet."""
    defaults: dict[str, Any] = {"model_name": "tiny", "max_model_len": 500, "vocab_size": 0x110000}
    return WorkerServer(
        worker or ScriptedWorker(), tokenizer or CharTokenizer(), ServerSettings(**{**defaults, **settings})
    )


@asynccontextmanager
async def listening(worker: ScriptedWorker | None = None, **settings: Any) -> AsyncIterator[str]:
    """Yields the address of a server over a scripted engine."""
    listener = Listener(a_server(worker, **settings).app, "127.0.0.1", 0, shutdown_s=0.2)
    await listener.start()
    try:
        yield listener.url
    finally:
        await listener.stop()
