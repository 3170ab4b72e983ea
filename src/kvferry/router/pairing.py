"""May a prefill and a decode worker serve a request together? Answered from what both say of themselves."""

import functools

import msgspec

from kvferry.errors import MalformedMessage
from kvferry.handshake.facts import Facts
from kvferry.handshake.verdict import verdict
from kvferry.http.records import WorkerInfo

__all__ = ["why_not"]


def why_not(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    """The reason against the pair; None: it fits. The workers' own handshake remains the judge."""
    if prefill.mode is not decode.mode:  # R13
        return (
            f"transfer mode: {prefill.engine}={prefill.mode!s} {decode.engine}={decode.mode!s}; "
            "start both with the same --transfer-mode"
        )
    return _by_facts(prefill.engine, bytes(prefill.facts), decode.engine, bytes(decode.facts))


@functools.lru_cache(maxsize=4096)
def _by_facts(prefill: str, prefill_facts: bytes, decode: str, decode_facts: bytes) -> str | None:
    """Cached: asked for every request, and facts change only when a worker restarts."""
    try:
        ours, theirs = (msgspec.json.decode(raw) for raw in (prefill_facts, decode_facts))
        if not ours or not theirs:
            return None
        answer = verdict(Facts.from_json(ours), Facts.from_json(theirs))
    except MalformedMessage as error:
        return f"the facts that they tell are malformed: {error}"
    return answer.refusal(prefill, decode) if answer.refused else None
