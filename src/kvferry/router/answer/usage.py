"""Adds how a request was served to the body's usage, for a client that asks for it (`X-KVFerry-Usage: 1`).

Only then does the router look into the bytes of an answer. It adds `usage.kvferry`; everything else stays as the worker
wrote it, except for the JSON's spacing in that one event.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = ["UsageWriter", "asked_for"]

HEADER = "X-KVFerry-Usage"
_MARK = b'"usage"'
_NULL = msgspec.Raw(b"null")
_NUMBERS = ("handed_over", "cached", "computed", "recomputed")
_WORDS = ("route", "prefill", "decode", "mode", "why")


def asked_for(headers: Mapping[str, str]) -> bool:
    """True if the client asks for it."""
    return headers.get(HEADER, "") in ("1", "true")


class UsageWriter:
    """Adds `usage.kvferry` to one answer."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        """`headers` are those of the answer, which say how it was served."""
        self._headers = headers
        self._buffer = b""

    def whole(self, body: bytes) -> bytes:
        """Returns a body that is not a stream, with `usage.kvferry`."""
        return self._write(body)

    def feed(self, chunk: bytes) -> bytes:
        """Returns what of a stream may be sent: complete events only."""
        self._buffer += chunk
        events, end, self._buffer = self._buffer.rpartition(b"\n\n")
        if not end:
            return b""
        return b"".join(self._event(event) + b"\n\n" for event in events.split(b"\n\n"))

    def end(self) -> bytes:
        """Returns the rest of the stream."""
        rest, self._buffer = self._buffer, b""
        return rest

    def _event(self, event: bytes) -> bytes:
        if _MARK not in event or not event.startswith(b"data: "):
            return event
        return b"data: " + self._write(event[len(b"data: ") :])

    def _write(self, raw: bytes) -> bytes:
        try:
            body = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])  # the choices may be long
            usage = msgspec.json.decode(body.get("usage", _NULL))
            own = msgspec.json.decode(body.get("kvferry", _NULL))
        except (msgspec.MsgspecError, RecursionError):
            return raw
        if not isinstance(usage, dict):
            return raw
        body["usage"] = msgspec.Raw(msgspec.json.encode(usage | {"kvferry": self._served(own)}))
        return msgspec.json.encode(body)

    def _served(self, own: object) -> dict[str, Any]:
        """Returns the worker's own account if it gave one, else what the headers say."""
        words = {name: self._headers.get("x-kvferry-" + name) for name in _WORDS}
        served: dict[str, Any] = {name: value for name, value in words.items() if value}
        for name in _NUMBERS:
            value = own.get(name) if isinstance(own, dict) else self._headers.get("x-kvferry-" + name.replace("_", "-"))
            if value is not None and str(value).isdigit():
                served[name] = int(value)
        if isinstance(own, dict) and own.get("why"):
            served["why"] = own["why"]
        return served
