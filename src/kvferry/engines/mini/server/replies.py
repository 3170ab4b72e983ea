"""Answers in the form of the OpenAI API: complete bodies and stream chunks, for completions and chat."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.engines.mini.api import FinishReason, Output
from kvferry.engines.mini.server.generate import Job
from kvferry.engines.mini.server.prompts import Prompt
from kvferry.engines.mini.server.token_logprobs import ChoiceLogprobs, Entry, TokenNames, as_chat, as_completion
from kvferry.stats import HandoffTiming, PromptAccount, StageTimes
from kvferry.web.records import Served
from kvferry.wire.params import HandoffParams

__all__ = ["ChatReply", "Choice", "CompletionReply", "Reply"]

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """What one choice has returned so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: ChoiceLogprobs | None = None
    """None if they were not asked for."""
    entries: list[Any] = field(default_factory=list)
    """Not streamed: what its logprobs have so far, as its endpoint writes them."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    account: PromptAccount | None = None
    timing: HandoffTiming | None = None
    handoff: HandoffParams | None = None
    prompt_hashes: tuple[bytes, ...] = ()
    stages: StageTimes | None = None

    def add(self, output: Output) -> None:
        """Adds the output of a step."""
        self.text.append(output.text)
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason or self.finish_reason
        self.stop_reason = output.stop_reason if output.stop_reason is not None else self.stop_reason
        self.account = output.account or self.account
        self.timing = output.timing or self.timing
        self.handoff = output.handoff or self.handoff
        self.prompt_hashes = output.prompt_hashes or self.prompt_hashes
        self.stages = output.stages or self.stages


class Reply(ABC):
    """Collects the outputs of one job and writes the answer; each endpoint writes its choices in its own way."""

    object_whole = ""
    object_chunk = ""
    id_prefix = ""

    def __init__(self, job: Job, names: TokenNames, engine_id: str) -> None:
        self._job = job
        self._names = names
        self._engine_id = engine_id
        asked = job.num_top_logprobs is not None
        self.choices = [Choice(logprobs=ChoiceLogprobs(names) if asked else None) for _ in range(job.num_choices)]
        self.began_s: float | None = None
        """Monotonic time at which the stream began; None: it has not begun, or the answer is not streamed."""

    # ---- the two ways to answer ----

    def add(self, index: int, output: Output) -> None:
        """Adds what a step added to a choice, for an answer that is not streamed."""
        choice = self.choices[index]
        choice.add(output)
        if choice.logprobs is not None:
            choice.entries += self._written(index, choice.logprobs.take(output))

    def whole(self) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed."""
        body = {
            **self._head(self.object_whole),
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(self.choices)],
            "usage": self.usage(),
        }
        return body | self._tail()

    def chunk(self, index: int, output: Output) -> bytes | None:
        """Returns what a step added to a choice as a server-sent event, or None if there is nothing to send yet.

        The last event of a stream without `include_usage` carries `kvferry` and `kv_transfer_params`.
        """
        choice = self.choices[index]
        first = not choice.token_ids and not choice.text
        choice.add(output)
        entries = choice.logprobs.take(output) if choice.logprobs is not None else []
        if not (output.text or entries or output.finish_reason or first or self._job.return_token_ids):
            return None
        written = self._written(index, entries) if choice.logprobs is not None else None
        delta = self._chunk_choice(index, output, first) | {"logprobs": self._logprobs(written)}
        body = {**self._head(self.object_chunk), "choices": [delta]}
        if self._job.include_usage:
            body["usage"] = self.usage() if self._job.continuous_usage else None
        elif all(choice.finish_reason for choice in self.choices):
            body |= self._tail()
        return _event(body)

    def end(self) -> bytes:
        """Returns the last events of a stream."""
        if not self._job.include_usage:
            return DONE
        body = {**self._head(self.object_chunk), "choices": [], "usage": self.usage(), **self._tail()}
        return _event(body) + DONE

    # ---- what is common ----

    def served(self) -> Served:
        """Returns how the prompts were served, as far as is known: from choice 0 of each prompt, summed over prompts.

        What the other choices have computed of their prompt was computed again.
        """
        per_prompt = len(self._job.samplings)
        firsts = self.choices[::per_prompt]
        others = [choice.account for i, choice in enumerate(self.choices) if i % per_prompt and choice.account]
        accounts = [choice.account for choice in firsts if choice.account is not None]
        timings = [choice.timing for choice in firsts if choice.timing is not None]
        params = self._job.handoff
        given = next((choice.handoff for choice in firsts if choice.handoff is not None), None)
        from_other = params is not None and params.do_remote_prefill
        for_other = params is not None and params.do_remote_decode
        mode = (given.transfer_mode if given else None) or (params.transfer_mode if params else None)
        return Served.of(
            _sum_accounts(accounts, others),
            timings[0] if timings else None,
            reason=self._job.reason,
            mode=mode,
            prefill=params.remote_engine_id if params is not None and from_other else self._engine_id,
            decode=None if for_other else self._engine_id,
        )

    def headers(self) -> dict[str, str]:
        """Returns the headers that say how the prompts were served, with the counts if those are complete."""
        firsts = self.choices[:: len(self._job.samplings)]
        return self.served().headers(complete=all(choice.account is not None for choice in firsts))

    def usage(self) -> dict[str, Any]:
        """Returns the usage: each prompt counts once. `cached_tokens` counts all that was not computed here."""
        served = self.served()
        num_completion = sum(len(choice.token_ids) for choice in self.choices)
        return {
            "prompt_tokens": self._job.num_prompt_tokens,
            "completion_tokens": num_completion,
            "total_tokens": self._job.num_prompt_tokens + num_completion,
            "prompt_tokens_details": {"cached_tokens": served.cached + served.fetched + served.handed_over},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}{self._job.request_id}",
            "object": kind,
            "created": self._job.created,
            "model": self._job.model,
        }

    def _tail(self) -> dict[str, Any]:
        tail: dict[str, Any] = {"kvferry": msgspec.to_builtins(self.served())}
        handoff = self.choices[0].handoff
        if handoff is not None:
            tail["kv_transfer_params"] = handoff.to_dict()
        return tail

    def _finish(self, choice: Choice | Output) -> dict[str, Any]:
        reason = choice.finish_reason.value if choice.finish_reason else None
        return {"finish_reason": reason, "stop_reason": choice.stop_reason}

    @property
    def _with_top(self) -> bool:
        return bool(self._job.num_top_logprobs)

    @abstractmethod
    def _written(self, index: int, entries: Sequence[Entry]) -> list[Any]:
        """Returns entries as this endpoint writes them."""

    @abstractmethod
    def _logprobs(self, written: list[Any] | None) -> dict[str, Any] | None:
        """Returns `logprobs` of a choice or a chunk; None if they were not asked for."""

    @abstractmethod
    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """Returns a choice of an answer that is not streamed."""

    @abstractmethod
    def _chunk_choice(self, index: int, output: Output, first: bool) -> dict[str, Any]:
        """Returns a choice of a chunk of a stream; `first` says that it is the first one of this choice."""


class CompletionReply(Reply):
    """/v1/completions."""

    object_whole = object_chunk = "text_completion"
    id_prefix = "cmpl-"

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = self._echoed(index) + "".join(choice.text)
        logprobs = self._logprobs(choice.entries if choice.logprobs is not None else None)
        body = {"index": index, "text": text, "logprobs": logprobs, **self._finish(choice)}
        if self._job.return_token_ids:
            body |= {"token_ids": choice.token_ids, "prompt_token_ids": self._prompt(index).token_ids}
        return body

    def _chunk_choice(self, index: int, output: Output, first: bool) -> dict[str, Any]:
        echoed = self._echoed(index) if first else ""
        body = {"index": index, "text": echoed + output.text, "logprobs": None, **self._finish(output)}
        if self._job.return_token_ids:
            body["token_ids"] = output.token_ids
            if first:
                body["prompt_token_ids"] = self._prompt(index).token_ids
        return body

    def _prompt(self, index: int) -> Prompt:
        return self._job.prompts[index // len(self._job.samplings)]

    def _echoed(self, index: int) -> str:
        return (self._prompt(index).text or "") if self._job.echo else ""

    def _written(self, index: int, entries: Sequence[Entry]) -> list[Any]:
        return as_completion(entries, self._names, with_top=self._with_top, offset=len(self._echoed(index)))

    def _logprobs(self, written: list[Any] | None) -> dict[str, Any] | None:
        if written is None:
            return None
        return {
            "tokens": [one.token for one in written],
            "token_logprobs": [one.logprob for one in written],
            "top_logprobs": [one.top for one in written] if self._with_top else None,
            "text_offset": [one.offset for one in written],
        }


class ChatReply(Reply):
    """/v1/chat/completions."""

    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text)}
        logprobs = self._logprobs(choice.entries if choice.logprobs is not None else None)
        body = {"index": index, "message": message, "logprobs": logprobs, **self._finish(choice)}
        if self._job.return_token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def _chunk_choice(self, index: int, output: Output, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant", "content": output.text} if first else {"content": output.text}
        body = {"index": index, "delta": delta, "logprobs": None, **self._finish(output)}
        if self._job.return_token_ids:
            body["token_ids"] = output.token_ids
        return body

    def _written(self, index: int, entries: Sequence[Entry]) -> list[Any]:
        return as_chat(entries, self._names, with_top=self._with_top)

    def _logprobs(self, written: list[Any] | None) -> dict[str, Any] | None:
        return None if written is None else {"content": written}


def _sum_accounts(accounts: list[PromptAccount], others: list[PromptAccount]) -> PromptAccount:
    return PromptAccount(
        handed_over=sum(one.handed_over for one in accounts),
        fetched=sum(one.fetched for one in accounts),
        source=next((one.source for one in accounts if one.source), ""),
        cached=sum(one.cached for one in accounts),
        recomputed=sum(one.recomputed for one in accounts),
        computed_again=sum(one.computed_again for one in (*accounts, *others)) + sum(one.recomputed for one in others),
        reason="; ".join(dict.fromkeys(one.reason for one in accounts if one.reason)),
    )


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
