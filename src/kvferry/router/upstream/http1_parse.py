"""Parses a worker's HTTP/1.1 answer from its bytes, without I/O. llhttp (httptools) does the parsing; this module adds
limits on sizes.

Bytes after the end of an answer are an error of the connection, never the beginning of the next answer.
"""

from httptools import HttpParserError, HttpResponseParser

from kvferry.errors import PeerError

__all__ = ["BadAnswer", "ResponseParser"]

_MAX_HEAD_BYTES = 64 << 10
_MAX_FRAMING_BYTES = 16 << 10
"""The limit on chunk sizes with their extensions, and on trailers, between two parts of a body."""


class BadAnswer(PeerError):
    """The answer is not HTTP/1.1, or exceeds a limit."""


class ResponseParser:
    """Parses one answer. It is fed until `complete`; the reader takes `parts`."""

    __slots__ = ("_headed", "_parser", "_trailer_bytes", "_unseen", "complete", "headers", "keep_alive", "parts",
                 "size", "status")  # fmt: skip

    def __init__(self) -> None:
        self.status = 0
        """The HTTP status; 0 until the head is complete."""
        self.headers: dict[str, str] = {}
        """The headers, with names in lower case. The values of a repeated header are joined by a comma."""
        self.parts: list[bytes] = []
        """The parts of the body as they arrived, without chunk framing."""
        self.size = 0
        """The number of bytes of the body so far."""
        self.complete = False
        self.keep_alive = False
        """True if the connection can be used again once the answer is complete."""
        self._parser = HttpResponseParser(self)
        self._headed = False
        self._unseen = 0
        """The number of bytes that were fed since the last head or part of a body."""
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> None:
        """Parses more bytes. Raises BadAnswer, after which the connection cannot be used any more."""
        if self.complete:
            raise BadAnswer(f"{len(data)} bytes came after the end of the answer")
        self._unseen += len(data)
        try:
            self._parser.feed_data(data)
        except BadAnswer:
            raise
        except HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, BadAnswer):
                raise cause from None
            raise BadAnswer(f"it is not HTTP/1.1: {error}") from error
        limit = _MAX_FRAMING_BYTES if self._headed else _MAX_HEAD_BYTES
        if self._unseen > limit and not self.complete:
            what = "a line between chunks" if self._headed else "the head"
            raise BadAnswer(f"{what} has more than {limit} bytes")

    def feed_end(self) -> None:
        """Notes that the worker has closed the connection. Raises BadAnswer if the answer is not complete."""
        if self._headed and not self._framed:
            self.complete = True
        if not self.complete:
            where = "in the middle of its body" if self._headed else "before its head was complete"
            raise BadAnswer(f"the connection was closed {where}")

    @property
    def _framed(self) -> bool:
        return "transfer-encoding" in self.headers or "content-length" in self.headers

    # ---- called by llhttp ----

    def on_message_begin(self) -> None:
        if self.complete:
            raise BadAnswer("bytes came after the end of the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("ascii", "replace").lower(), value.strip(b" \t").decode("utf-8", "replace")
        if self._headed:  # a trailer, which is ignored
            self._trailer_bytes += len(name) + len(value)
            if self._trailer_bytes > _MAX_FRAMING_BYTES:
                raise BadAnswer(f"the trailer has more than {_MAX_FRAMING_BYTES} bytes")
        else:
            self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status == 101:
            raise BadAnswer("it switches protocols, which was not asked for")
        if status < 200:
            self.headers = {}
            return  # an interim answer: the real one follows
        coding = self.headers.get("transfer-encoding")
        if coding is not None and (coding.lower() != "chunked" or self._parser.get_http_version() != "1.1"):
            raise BadAnswer(f"transfer-encoding={coding!r} is not supported")
        self.status, self._headed, self._unseen = status, True, 0
        # Without a length the answer ends with the connection.
        self.keep_alive = self._parser.should_keep_alive() and (self._framed or status in (204, 304))

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)
        self.size += len(body)
        self._unseen = 0

    def on_message_complete(self) -> None:
        if self._headed:
            self.complete = True
