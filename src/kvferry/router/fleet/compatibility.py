"""Decides whether a prefill and a decode worker can serve a request together, from what both say about themselves.

The workers' own handshake has the last word: what a worker does not say here (a stock vLLM server says little) is not
held against the pair.
"""

import functools

import msgspec

from kvferry.errors import MalformedMessage
from kvferry.handshake.fact import FactKind
from kvferry.handshake.facts import Facts
from kvferry.handshake.verdict import show, verdict
from kvferry.settings import TransferMode
from kvferry.web.records import WorkerInfo
from kvferry.wire.versions import PROTOCOL_MAX, PROTOCOL_MIN

__all__ = ["differences", "mismatch_reason", "mode_mismatch"]


class _Protocol(msgspec.Struct, frozen=True):
    oldest: int = PROTOCOL_MIN
    newest: int = PROTOCOL_MAX


def mismatch_reason(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    """Returns the reason why the pair does not fit, or None if it fits."""
    if prefill.kind != decode.kind:
        return (
            f"{prefill.engine} is a {prefill.kind} server and {decode.engine} is a {decode.kind} server: "
            "their caches are not known to fit; pair servers of one kind"
        )
    modes = mode_mismatch(prefill.engine, prefill.mode, decode.engine, decode.mode)
    if modes is not None:
        return modes
    if prefill.kind == "vllm":
        return _vllm_mismatch(prefill, decode)
    protocol = _protocol_mismatch(prefill.engine, bytes(prefill.protocol), decode.engine, bytes(decode.protocol))
    return protocol or _fact_mismatch(prefill.engine, bytes(prefill.facts), decode.engine, bytes(decode.facts))


def mode_mismatch(
    prefill: str, prefill_mode: TransferMode | None, decode: str, decode_mode: TransferMode | None
) -> str | None:
    """Returns the reason if one worker pushes and the other pulls. An unknown mode is not held against the pair."""
    if prefill_mode is None or decode_mode is None or prefill_mode is decode_mode:
        return None
    return (
        f"transfer mode: {prefill}={prefill_mode!s} {decode}={decode_mode!s}; start both with the same --transfer-mode"
    )


def _vllm_mismatch(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    """vLLM's NIXL connector compares digests that include the version, so unequal versions refuse each other."""
    if prefill.version != decode.version:
        return (
            f"vLLM version: {prefill.engine}={prefill.version!r} {decode.engine}={decode.version!r}; "
            "its connector refuses other versions: run the same on both"
        )
    if prefill.model and decode.model and prefill.model != decode.model:
        return f"model: {prefill.engine}={prefill.model!r} {decode.engine}={decode.model!r}; serve the same model"
    return None


def differences(prefill: WorkerInfo, decode: WorkerInfo) -> list[dict[str, str]]:
    """Returns a row for each thing in which the two differ, for people: `fact`, `class`, both values, and `remedy`."""
    rows = []
    if prefill.mode is not None and decode.mode is not None and prefill.mode is not decode.mode:
        rows.append(_row("transfer mode", prefill.mode, decode.mode, "start both with the same --transfer-mode"))
    if prefill.kind != decode.kind:
        rows.append(_row("server", prefill.kind, decode.kind, "pair servers of one kind"))
    elif prefill.kind == "vllm" and prefill.version != decode.version:
        rows.append(_row("vLLM version", prefill.version, decode.version, "run the same version on both"))
    try:
        ours, theirs = (msgspec.json.decode(bytes(one.facts)) for one in (prefill, decode))
        if ours and theirs:
            rows += [
                {
                    "fact": row.fact,
                    "class": str(row.kind),
                    "prefill": show(row.a),
                    "decode": show(row.b),
                    "remedy": row.remedy(prefill.engine, decode.engine),
                }
                for row in verdict(Facts.from_json(ours), Facts.from_json(theirs)).rows
            ]
    except (MalformedMessage, msgspec.MsgspecError):
        return rows  # `mismatch_reason` says that they are malformed
    return rows


def _row(fact: str, prefill: str, decode: str, remedy: str) -> dict[str, str]:
    return {
        "fact": fact,
        "class": str(FactKind.MUST_MATCH),
        "prefill": str(prefill),
        "decode": str(decode),
        "remedy": remedy,
    }


@functools.lru_cache(maxsize=4096)
def _protocol_mismatch(prefill: str, prefill_raw: bytes, decode: str, decode_raw: bytes) -> str | None:
    """Returns the reason if there is no protocol version that both speak."""
    try:
        a, b = (msgspec.json.decode(raw, type=_Protocol | None) or _Protocol() for raw in (prefill_raw, decode_raw))
    except msgspec.MsgspecError as error:
        return f"the protocol versions that they report are malformed: {error}"
    if min(a.newest, b.newest) >= max(a.oldest, b.oldest):
        return None
    return (
        f"protocol: {prefill} speaks {a.oldest} to {a.newest}, {decode} {b.oldest} to {b.newest}: "
        "upgrade the older one, or set --protocol-max on neither"
    )


@functools.lru_cache(maxsize=4096)
def _fact_mismatch(prefill: str, prefill_raw: bytes, decode: str, decode_raw: bytes) -> str | None:
    """Returns the refusal of the compatibility verdict, if it is one. Cached, because it is needed for every request
    and facts change only when a worker restarts."""
    try:
        ours, theirs = (msgspec.json.decode(raw) for raw in (prefill_raw, decode_raw))
        if not ours or not theirs:
            return None
        answer = verdict(Facts.from_json(ours), Facts.from_json(theirs))
    except MalformedMessage as error:
        return f"the facts that they report are malformed: {error}"
    return answer.refusal(prefill, decode) if answer.refused else None
