"""One streamed completion as benchmarks time it, and the progress that they show."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvferry.errors import FerryError

__all__ = ["Streamed", "show_progress", "stream_completion"]

_REQUEST_S = 900.0


@dataclass(slots=True)
class Streamed:
    """A whole answer."""

    first_s: float = 0.0
    """The seconds from the request to its first token."""
    tokens: list[int] = field(default_factory=list)
    served: dict[str, Any] = field(default_factory=dict)
    """The answer's own account, `kvferry`."""


async def stream_completion(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], num_tokens: int
) -> Streamed:
    """Asks for a greedy completion of exactly `num_tokens`. Raises FerryError if there is no whole answer."""
    body = {"prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True}  # fmt: skip
    answer, begun_s = Streamed(), time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
    async with session.post(f"{url}/v1/completions", json=body, timeout=timeout) as response:
        if response.status != 200:
            raise FerryError(f"{url} answered {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise FerryError(f"{url} ended its answer with {event['error']}")
            for choice in event["choices"]:
                answer.tokens += choice.get("token_ids") or []
            if answer.tokens and not answer.first_s:
                answer.first_s = time.perf_counter() - begun_s
            answer.served = event.get("kvferry") or answer.served
    return answer


def show_progress(text: str) -> None:
    """Writes a line to stderr, with the machine's load."""
    print(f"  {text} (load {os.getloadavg()[0]:.1f})", file=sys.stderr, flush=True)
