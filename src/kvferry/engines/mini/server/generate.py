"""One HTTP request as sequences of the engine: `n` choices per prompt, merged into one stream of outputs.

Life of a choice: choice 0 of a prompt is submitted at once, with the hand-off if there is one. When it has its first
token, the prompt's KV is in this engine's cache; only then are the other choices submitted, as ordinary requests that
hit the prefix cache. So a prompt is handed over or computed once, whatever `n` is. Only choice 0 continues from the
first token that prefill sampled; the others sample their own.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from kvferry.engines.mini.api import Failure, FinishReason, GenerateRequest, Output, SamplingParams
from kvferry.engines.mini.server.engine_thread import EngineThread
from kvferry.engines.mini.server.prompts import Prompt
from kvferry.errors import FerryError
from kvferry.ids import RequestId
from kvferry.settings import FailurePolicy
from kvferry.web.api_errors import ApiError
from kvferry.web.records import CREATED
from kvferry.wire.params import HandoffParams

__all__ = ["Generation", "Job", "created_of"]

_AT_ONCE = 8
"""After this many outputs that were already waiting, the event loop serves others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request: what to compute and how to answer."""

    request_id: str
    model: str
    prompts: tuple[Prompt, ...]
    samplings: tuple[SamplingParams, ...]
    """One per choice: `n` of them."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Whether every event of the stream has the usage so far."""
    echo: bool = False
    num_top_logprobs: int | None = None
    return_token_ids: bool = False
    salt: str = ""
    """What the KV depends on besides the tokens (wire.salt)."""
    handoff: HandoffParams | None = None
    on_failure: FailurePolicy | None = None
    reason: str = ""
    """Why the router sent this prompt without a hand-off."""
    created: int = field(default_factory=lambda: int(time.time()))
    """When the answer was created, in seconds since 1970."""
    first_token_sent: bool = False
    """Whether the router has sent the hand-off's first token to the client."""

    @property
    def num_choices(self) -> int:
        """The number of choices over all prompts."""
        return len(self.prompts) * len(self.samplings)

    @property
    def num_prompt_tokens(self) -> int:
        """The number of prompt tokens; each prompt counts once, as OpenAI counts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


def created_of(headers: Mapping[str, str]) -> int:
    """Returns the time that a router sent for `created`, else now."""
    text = headers.get(CREATED, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else int(time.time())


class Generation:
    """A running job. `close` must always be called, so that nothing is left in the engine."""

    def __init__(self, engine: EngineThread, job: Job, unique: str) -> None:
        self._engine = engine
        self._job = job
        self._unique = unique
        self._events: asyncio.Queue[tuple[int, Output | FerryError]] = asyncio.Queue()
        self._unfinished: set[int] = set(range(job.num_choices))
        self._waiting: dict[int, list[int]] = {}

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """Yields (choice index, output) until every choice has ended. Raises the first error of any choice."""
        per_prompt = len(self._job.samplings)
        for first in range(0, self._job.num_choices, per_prompt):
            self._waiting[first] = list(range(first + 1, first + per_prompt))
            self._submit(first, self._job.handoff)
        num_at_once = 0
        while self._unfinished:
            num_at_once = 0 if self._events.empty() else num_at_once + 1
            if num_at_once > _AT_ONCE:  # otherwise `get` returns without a pause for as long as there are events
                num_at_once = 0
                await asyncio.sleep(0)
            index, event = await self._events.get()
            if isinstance(event, FerryError):
                raise event
            if event.finish_reason is FinishReason.ERROR:
                raise _failed(event)
            if event.finish_reason is FinishReason.ABORT:
                raise ApiError(503, "the request was aborted by this worker: send it again", code="aborted")
            if event.token_ids or event.finish_reason is not None:
                for other in self._waiting.pop(index, ()):
                    self._submit(other, None)
            if event.finish_reason is not None:
                self._unfinished.discard(index)
            yield index, event

    def close(self) -> None:
        """Aborts choices that have not ended."""
        for index in self._unfinished:
            self._engine.abort(self._id(index))

    def _id(self, index: int) -> RequestId:
        return RequestId(f"{self._unique}-{index}" if self._job.num_choices > 1 else self._unique)

    def _submit(self, index: int, handoff: HandoffParams | None) -> None:
        prompt_index, choice = divmod(index, len(self._job.samplings))
        request = GenerateRequest(
            request_id=self._id(index),
            prompt_token_ids=self._job.prompts[prompt_index].token_ids,
            packed=self._job.prompts[prompt_index].packed,
            sampling=self._job.samplings[choice],
            salt=self._job.salt,
            handoff=handoff,
            on_failure=self._job.on_failure,
            first_token_sent=handoff is not None and self._job.first_token_sent,
        )
        self._engine.submit(request, lambda event: self._events.put_nowait((index, event)))


def _failed(output: Output) -> ApiError:
    """Returns the error for the client. The page of the HTTP interface says what a router does about each code."""
    message = output.error or "the request failed in the engine: try again"
    if output.failure in (Failure.ENGINE_CRASHED, Failure.ENGINE_DEAD):
        return ApiError(503, message, code=output.failure.value, retry_after_s=1)
    return ApiError(500, message, code=output.failure.value)
