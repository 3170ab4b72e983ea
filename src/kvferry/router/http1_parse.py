"""A worker's HTTP/1.1 answer, from bytes as they come: RFC 9112, the part that a client needs. No I/O.

Strict where leniency is dangerous: lengths are digits, a length beside chunks is refused, everything is bounded. What a
worker sends in excess of its answer is an error of that connection, never the beginning of the next answer.
"""

import re

from kvferry.errors import PeerError

__all__ = ["BadAnswer", "ResponseParser"]

_MAX_HEAD_BYTES = 64 << 10
_MAX_LINE_BYTES = 256
"""Of a chunk's size with its extensions."""
_MAX_TRAILER_BYTES = 16 << 10
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [^\r\n]*)?\Z")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\Z")


class BadAnswer(PeerError):
    """Not HTTP/1.1, or out of bounds."""


class ResponseParser:
    """One answer. `feed` until `complete`; `parts` are taken by the reader."""

    __slots__ = ("_buffer", "_chunked", "_left", "_state", "_trailer_bytes", "complete", "headers", "keep_alive",
                 "parts", "size", "status")  # fmt: skip

    def __init__(self) -> None:
        self.status = 0
        """0 until the head is here."""
        self.headers: dict[str, str] = {}
        """Names in lower case; one that is repeated has its values joined by a comma."""
        self.parts: list[bytes] = []
        """Of the body, as they came, without the framing of chunks."""
        self.size = 0
        """Bytes of the body so far."""
        self.complete = False
        self.keep_alive = False
        """The connection can be used again, once complete."""
        self._buffer = b""
        self._state = _HEAD
        self._left = 0
        self._chunked = False
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> None:
        """More bytes. Raises BadAnswer; then the connection is of no further use."""
        if self.complete:
            raise BadAnswer(f"{len(data)} bytes came after the end of the answer")
        if self._state == _HEAD:
            data = self._buffer + data if self._buffer else data
            self._buffer = b""
            while self._state == _HEAD:
                end = data.find(b"\r\n\r\n")
                if end < 0:
                    if len(data) > _MAX_HEAD_BYTES:
                        raise BadAnswer(f"the head has more than {_MAX_HEAD_BYTES} bytes")
                    self._buffer = data
                    return
                self._read_head(data[:end])
                data = data[end + 4 :]
        if self._state == _LENGTH:
            self._take_length(data)
        elif self._state == _UNTIL_END:
            self._take(data)
        elif self._state == _NO_BODY:
            self._finish(data)
        else:
            self._feed_chunks(data)

    def feed_end(self) -> None:
        """The worker has closed the connection. Raises BadAnswer if the answer is not whole."""
        if self._state == _UNTIL_END:
            self.complete = True
        if not self.complete:
            where = "before its head was whole" if self._state == _HEAD else "in the middle of its body"
            raise BadAnswer(f"the connection was closed {where}")

    # ---- head ----

    def _read_head(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        found = _STATUS.match(lines[0])
        if found is None:
            raise BadAnswer(f"it does not begin as HTTP/1.1 does: {lines[0][:80]!r}")
        status = int(found[2])
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon or _NAME.match(name) is None or b"\n" in value or b"\r" in value or b"\0" in value:
                raise BadAnswer(f"a header line is none: {line[:80]!r}")
            key, text = name.decode("ascii").lower(), value.strip(b" \t").decode("utf-8", "replace")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        if status == 101:
            raise BadAnswer("it switches protocols, which nobody asked for")
        if status < 200:
            return  # an interim answer: the real one follows
        self.status, self.headers = status, headers
        self._frame(found[1] == b"1")

    def _frame(self, is_1_1: bool) -> None:
        """How long the body is: RFC 9112, section 6.3."""
        headers = self.headers
        options = {option.strip().lower() for option in headers.get("connection", "").split(",")}
        self.keep_alive = "close" not in options if is_1_1 else "keep-alive" in options
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        if coding is not None:
            if coding.lower() != "chunked" or length is not None or not is_1_1:
                raise BadAnswer(f"transfer-encoding={coding!r} with content-length={length!r} is not understood")
            self._state = _SIZE_LINE
        elif self.status in (204, 304):
            self._state, self.complete = _NO_BODY, True
        elif length is not None:
            same = {one.strip() for one in length.split(",")}
            value = same.pop()
            if same or not (value.isascii() and value.isdigit() and len(value) < 16):
                raise BadAnswer(f"content-length={length!r} is no length")
            self._left = int(value)
            self._state = _LENGTH
            self.complete = not self._left
        else:
            self._state, self.keep_alive = _UNTIL_END, False

    # ---- body ----

    def _take(self, data: bytes) -> None:
        if data:
            self.parts.append(data)
            self.size += len(data)

    def _take_length(self, data: bytes) -> None:
        if len(data) > self._left:
            raise BadAnswer(f"{len(data) - self._left} bytes came after the end of the answer")
        self._take(data)
        self._left -= len(data)
        self.complete = not self._left

    def _finish(self, rest: bytes) -> None:
        self.complete = True
        if rest:
            raise BadAnswer(f"{len(rest)} bytes came after the end of the answer")

    def _feed_chunks(self, data: bytes) -> None:
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        at = 0
        while True:
            if self._state == _IN_CHUNK:
                stop = min(at + self._left, len(data))
                self._take(data[at:stop])
                self._left -= stop - at
                at = stop
                if self._left:
                    return
                self._state = _AFTER_CHUNK
            end = data.find(b"\r\n", at)
            if end < 0:
                self._keep(data[at:])
                return
            line, at = data[at:end], end + 2
            if self._state == _AFTER_CHUNK:
                if line:
                    raise BadAnswer(f"a chunk is longer than it says: {line[:40]!r}")
                self._state = _SIZE_LINE
            elif self._state == _SIZE_LINE:
                self._read_size(line)
            elif line:  # a trailer, which nobody reads
                self._trailer_bytes += len(line)
                if self._trailer_bytes > _MAX_TRAILER_BYTES:
                    raise BadAnswer(f"the trailer has more than {_MAX_TRAILER_BYTES} bytes")
            else:
                self._finish(data[at:])
                return

    def _read_size(self, line: bytes) -> None:
        found = _SIZE.match(line)
        if found is None:
            raise BadAnswer(f"a chunk's size is none: {line[:40]!r}")
        self._left = int(found[1], 16)
        self._state = _IN_CHUNK if self._left else _TRAILER

    def _keep(self, rest: bytes) -> None:
        limit = _MAX_TRAILER_BYTES if self._state == _TRAILER else _MAX_LINE_BYTES
        if len(rest) > limit:
            raise BadAnswer(f"a line between chunks has more than {limit} bytes")
        self._buffer = rest


_HEAD, _LENGTH, _UNTIL_END, _NO_BODY, _SIZE_LINE, _IN_CHUNK, _AFTER_CHUNK, _TRAILER = range(8)
