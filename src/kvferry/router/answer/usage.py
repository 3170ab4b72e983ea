"""Adds how a request was served to the body's usage, for a client that asks for it (`X-KVFerry-Usage: 1`).

Only then does the router look into the bytes of an answer. It adds `usage.kvferry`; everything else stays as the worker
wrote it, except for the JSON's spacing in that one event.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = ["TokenCounter", "UsageWriter", "asked_for"]

HEADER = "X-KVFerry-Usage"
_MARK = b'"usage"'
_COMPLETION = re.compile(rb'"completion_tokens":\s*(\d{1,9})')
_TAIL_BYTES = 4096
"""The usage is in the last bytes of a body, or of the last event but one."""
_NULL = msgspec.Raw(b"null")
_NUMBERS = ("handed_over", "fetched", "cached", "computed", "recomputed")
_WORDS = ("route", "prefill", "decode", "mode", "source", "why")


class TokenCounter:
    """Counts the tokens of an answer without decoding it: by its usage if that is there, else one per event of its
    stream, which is too few if the worker sends several in one."""

    def __init__(self) -> None:
        self._num_events = 0
        self._reported: int | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far."""
        return self._num_events if self._reported is None else self._reported

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes of a stream, or a whole body."""
        self._num_events += chunk.count(b"data: {")
        found = _COMPLETION.findall(chunk, max(0, len(chunk) - _TAIL_BYTES))
        if found:
            self._reported = int(found[-1])


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
