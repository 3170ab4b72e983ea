"""The small router that the vLLM benchmark needs: pull, push after prefill, and push with decode first.

It says to either connector what existing routers say. Both requests carry one X-Request-Id (the built-in push connector
matches by it) and one transfer id (kvferry matches by it).
"""

import http.client
import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import FerryError
from tests.harness.vllm_servers import SERVED_AS, VllmServer

__all__ = ["MODES", "Answer", "Served", "ask", "decode_first_params", "decode_params", "prefill_params", "serve_pair"]

MODES = ("pull", "push-after", "push-first")
"""Decode gets its request after prefill in the first two, and before it in the last."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one server. `status` 0 means that it did not answer in time, or hung up; `error` says which."""

    status: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    error: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    first_token_s: float = 0.0
    """The time from the request to the first token, if it was streamed."""
    total_s: float = 0.0

    @property
    def ok(self) -> bool:
        """True if it is a 200 with tokens."""
        return self.status == 200 and not self.error


@dataclass(frozen=True, slots=True)
class Served:
    """One request through a pair of servers."""

    prefill: Answer
    decode: Answer
    first_token_s: float
    """The time from the first request to decode's first token."""
    decode_part_s: float
    """The time that passed after prefill had answered."""


def ask(
    server: VllmServer,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    params: dict[str, Any] | None = None,
    request_id: str | None = None,
    stream: bool = False,
    timeout_s: float = 120.0,
    **more: Any,
) -> Answer:
    """Sends token ids to /v1/completions, greedily. Never raises: an error is in the answer."""
    body: dict[str, Any] = {
        "model": SERVED_AS, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "stream": stream, **more,
    }  # fmt: skip
    if params is not None:
        body["kv_transfer_params"] = params
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id or uuid.uuid4().hex}
    begun_s = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if stream and response.status == 200:
            return _streamed(response, begun_s)
        return _whole(response, begun_s)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(0, error=f"{type(error).__name__}: {error}", total_s=time.perf_counter() - begun_s)
    finally:
        connection.close()


def _whole(response: http.client.HTTPResponse, begun_s: float) -> Answer:
    raw = response.read()
    total_s = time.perf_counter() - begun_s
    if response.status != 200:
        return Answer(response.status, error=_error_text(raw), total_s=total_s)
    body = json.loads(raw)
    choice = body["choices"][0]
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
    return Answer(
        200,
        tokens=tuple(choice.get("token_ids") or ()),
        logprobs=tuple(float(one) for one in logprobs),
        error="" if choice.get("finish_reason") != "error" else "finish_reason is 'error'",
        params=body.get("kv_transfer_params") or {},
        total_s=total_s,
    )


def _streamed(response: http.client.HTTPResponse, begun_s: float) -> Answer:
    tokens: list[int] = []
    first_s, error = 0.0, ""
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            error = str(event["error"])
            continue
        for choice in event.get("choices", ()):
            if choice.get("token_ids") and not first_s:
                first_s = time.perf_counter() - begun_s
            tokens.extend(choice.get("token_ids") or ())
    error = error or ("" if tokens else "the stream ended without a token")
    return Answer(200, tokens=tuple(tokens), error=error, first_token_s=first_s, total_s=time.perf_counter() - begun_s)


def _error_text(raw: bytes) -> str:
    try:
        body = json.loads(raw)
        return str((body.get("error") or body).get("message", body))
    except (ValueError, AttributeError):
        return raw.decode(errors="replace")[:300]


def prefill_params(transfer_id: str, **more: Any) -> dict[str, Any]:
    """Returns what a router sends to a prefill worker."""
    return {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None, "transfer_id": transfer_id, **more,
    }  # fmt: skip


def decode_params(body: dict[str, Any], transfer_id: str) -> dict[str, Any]:
    """Returns prefill's parameters, for decode."""
    return {"transfer_id": transfer_id, **body}


def decode_first_params(prefill: VllmServer, request_id: str, transfer_id: str) -> dict[str, Any]:
    """Returns what a router sends to decode before prefill has answered."""
    return {
        "do_remote_prefill": True, "do_remote_decode": False, "transfer_mode": "push", "transfer_id": transfer_id,
        "remote_engine_id": prefill.spec.name, "remote_request_id": f"cmpl-{request_id}-0",
        "remote_host": "127.0.0.1", "remote_port": prefill.side_port,
        "tp_size": prefill.spec.tp, "pp_size": prefill.spec.pp,
    }  # fmt: skip


def serve_pair(
    prefill: VllmServer,
    decode: VllmServer,
    prompt: Sequence[int],
    *,
    way: str = "pull",
    max_tokens: int = 2,
    timeout_s: float = 120.0,
    stream: bool = True,
    between: Callable[[Answer], dict[str, Any]] | None = None,
) -> Served:
    """Sends one request, which one server prefills and the other decodes.

    `between` may change what prefill returned before decode gets it. If prefill failed, decode gets no request.
    """
    request_id, transfer_id = uuid.uuid4().hex, uuid.uuid4().hex
    begun_s = time.perf_counter()
    if way == "push-first":
        return _decode_first(prefill, decode, prompt, request_id, transfer_id, max_tokens, timeout_s, stream)
    first = ask(prefill, prompt, max_tokens=1, params=prefill_params(transfer_id), request_id=request_id,
                timeout_s=timeout_s)  # fmt: skip
    if not first.ok:
        return Served(first, Answer(0, error="was not asked: prefill failed"), 0.0, 0.0)
    body = between(first) if between is not None else first.params
    asked_s = time.perf_counter()
    second = ask(decode, prompt, max_tokens=max_tokens, params=decode_params(body, transfer_id), request_id=request_id,
                 stream=stream, timeout_s=timeout_s)  # fmt: skip
    part_s = second.first_token_s or second.total_s
    return Served(first, second, asked_s - begun_s + part_s, part_s)


def _decode_first(
    prefill: VllmServer, decode: VllmServer, prompt: Sequence[int], request_id: str, transfer_id: str,
    max_tokens: int, timeout_s: float, stream: bool,
) -> Served:  # fmt: skip
    answers: list[Answer] = []
    params = decode_first_params(prefill, request_id, transfer_id)
    waiting = threading.Thread(
        target=lambda: answers.append(
            ask(decode, prompt, max_tokens=max_tokens, params=params, request_id=request_id, stream=stream,
                timeout_s=timeout_s)
        )
    )  # fmt: skip
    begun_s = time.perf_counter()
    waiting.start()
    first = ask(prefill, prompt, max_tokens=1, params=prefill_params(transfer_id), request_id=request_id,
                timeout_s=timeout_s)  # fmt: skip
    prefilled_s = time.perf_counter() - begun_s
    waiting.join()
    if not answers:
        raise FerryError("the thread that asked decode ended without an answer: see its traceback above")
    second = answers[0]
    total_s = second.first_token_s or second.total_s
    return Served(first, second, total_s, max(0.0, total_s - prefilled_s))
