"""May a prefill and a decode worker serve a request together? Answered from what both say of themselves.

The workers' own handshake remains the judge: what is not told here (a stock vLLM server tells little) is not refused.
"""

import functools

import msgspec

from kvferry.errors import MalformedMessage
from kvferry.handshake.facts import Facts
from kvferry.handshake.verdict import verdict
from kvferry.settings import TransferMode
from kvferry.web.records import WorkerInfo
from kvferry.wire.versions import PROTOCOL_MAX, PROTOCOL_MIN

__all__ = ["why_not", "why_not_modes"]


class _Protocol(msgspec.Struct, frozen=True):
    oldest: int = PROTOCOL_MIN
    newest: int = PROTOCOL_MAX


def why_not(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    """The reason against the pair; None: it fits."""
    if prefill.kind != decode.kind:
        return (
            f"{prefill.engine} is a {prefill.kind} server and {decode.engine} a {decode.kind} one: "
            "their caches are not known to fit; pair servers of one kind"
        )
    modes = why_not_modes(prefill.engine, prefill.mode, decode.engine, decode.mode)
    if modes is not None:
        return modes
    if prefill.kind == "vllm":
        return _why_not_vllm(prefill, decode)
    no_version = _why_no_version(prefill.engine, bytes(prefill.protocol), decode.engine, bytes(decode.protocol))
    return no_version or _by_facts(prefill.engine, bytes(prefill.facts), decode.engine, bytes(decode.facts))


def why_not_modes(prefill: str, its_mode: TransferMode | None, decode: str, other: TransferMode | None) -> str | None:
    """R13: push never pairs with pull. One that is not known yet is not held against a pair."""
    if its_mode is None or other is None or its_mode is other:
        return None
    return f"transfer mode: {prefill}={its_mode!s} {decode}={other!s}; start both with the same --transfer-mode"


def _why_not_vllm(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    """Its NIXL connector's digest has the version in it: unequal ones refuse each other."""
    if prefill.version != decode.version:
        return (
            f"vLLM version: {prefill.engine}={prefill.version!r} {decode.engine}={decode.version!r}; "
            "its connector refuses other versions: run the same on both"
        )
    if prefill.model and decode.model and prefill.model != decode.model:
        return f"model: {prefill.engine}={prefill.model!r} {decode.engine}={decode.model!r}; serve the same model"
    return None


@functools.lru_cache(maxsize=4096)
def _why_no_version(prefill: str, ours: bytes, decode: str, theirs: bytes) -> str | None:
    """R11: no protocol version that both speak."""
    try:
        a, b = (msgspec.json.decode(raw, type=_Protocol | None) or _Protocol() for raw in (ours, theirs))
    except msgspec.MsgspecError as error:
        return f"the protocol versions that they tell are malformed: {error}"
    if min(a.newest, b.newest) >= max(a.oldest, b.oldest):
        return None
    return (
        f"protocol: {prefill} speaks {a.oldest} to {a.newest}, {decode} {b.oldest} to {b.newest}: "
        "upgrade the older one, or set --protocol-max on neither"
    )


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
