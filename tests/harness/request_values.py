"""Values for the fields of request bodies, made from the table of fields."""

import math
from collections.abc import Iterator
from typing import Any

from kvferry.engines.mini.server.request_body import ChatBody, CommonBody, CompletionBody
from kvferry.engines.mini.server.request_fields import Field

__all__ = ["BASES", "KINDS", "at_bounds", "beyond_bounds"]

KINDS: dict[str, type[CommonBody]] = {"completions": CompletionBody, "chat/completions": ChatBody}
BASES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Hi", "max_tokens": 2},
    "chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
}


def at_bounds(name: str, entry: Field) -> Iterator[dict[str, Any]]:
    """Yields fields with the lowest and the highest value that is taken; nothing for a field without a range."""
    if entry.low is None or entry.high is None:
        return
    for number in (entry.low, entry.high, *((-0.0,) if isinstance(entry.low, float) and entry.low <= 0 else ())):
        if name == "stop_token_ids":
            number = min(number, 5)  # the vocabulary is a bound, too
        within: dict[str, Any] = {"stop_token_ids": [number], "logit_bias": {"1": number}}
        fields = {name: within.get(name, number)}
        if name == "top_logprobs":
            fields["logprobs"] = True
        if name == "max_completion_tokens":
            fields["max_tokens"] = None
        if name == "min_tokens":
            fields[name] = min(number, 2)  # `max_tokens` is a bound, too
        yield fields


def beyond_bounds(name: str, entry: Field) -> Iterator[str]:
    """Yields values as JSON that are out of range, or no numbers: just below and beyond the bounds, and far away."""
    if entry.low is None or entry.high is None:
        return
    whole = name not in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    near: list[Any] = [entry.low - 1, entry.high + 1]
    if not whole:
        near = [math.nextafter(entry.low, -math.inf), math.nextafter(entry.high, math.inf)]
    far: list[str] = ["1e400", "-1e400", "1e308", "-1e308", "NaN", "Infinity", "-Infinity"]
    far += [str(10**20), str(-(10**20)), "9" * 400, "9" * 5000, "true", '"1"', "[]"]
    for raw in [*map(repr, near), *far]:
        if name == "stop_token_ids":
            yield f"[{raw}]"
        elif name == "logit_bias":
            yield f'{{"1": {raw}}}'
        else:
            yield raw
