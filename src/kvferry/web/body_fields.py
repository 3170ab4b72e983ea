"""Finds the fields of a JSON object while its bytes arrive, without decoding them.

A decoder holds the interpreter for as long as it takes: half a second for 30 MB of token ids, in which no other request
gets a byte. This scanner stops after each piece, so the event loop serves others in between. It keeps one copy of the
body, and every field is a view of it. The copy is in memory that is mapped for the largest body and used as bytes come:
a buffer that grows would be moved now and then, which takes 19 ms for 31 MB.

It checks what separates fields: keys, colons, commas, and that strings and brackets are closed. What is inside a
string, an array or an object is checked by whoever decodes the field.
"""

import asyncio
import mmap
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec
from aiohttp import StreamReader, web

from kvferry.errors import Overloaded
from kvferry.web.api_errors import ApiError
from kvferry.web.json_body import decode_body

__all__ = [
    "BODIES_HELD",
    "SMALL_BYTES",
    "BodyRoom",
    "Counts",
    "Fields",
    "Scanner",
    "fields_of",
    "join_fields",
    "read_fields",
]

Parts = deque[bytes | memoryview]
"""A body to be sent. Who sends it takes the parts out, so that nothing keeps them while the answer comes."""
BODIES_HELD = 16
"""A server holds the bytes of this many bodies of the largest size at once."""

SMALL_BYTES = 64 << 10
"""A body up to this size is split by the decoder at once, which takes 0.2 ms at most."""

PIECE_BYTES = 32 << 10
"""The most that is scanned before the event loop serves others."""
MAX_PARTS = 1 << 17
"""The most strings and brackets in one body. Each costs the scanner about a microsecond."""
_MAX_DEPTH = 500
_MAX_KEY_BYTES = 1024
_JOIN_BYTES = 16 << 10

_SPACE = re.compile(rb"[ \t\n\r]*+")
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_PLAIN = re.compile(rb'[^"\[\]{}]*+')
_WORD = re.compile(rb'[^ \t\n\r,}\]"\[{:]*+')
_SCALAR = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_QUOTE, _COMMA, _COLON, _BACKSLASH, _OPEN, _CLOSE = b'",:\\{}'
_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")


class _At(Enum):
    """What the scanner reads next."""

    START = "the opening brace"
    FIRST_KEY = "a key or the closing brace"
    KEY = "a key"
    COLON = "a colon"
    VALUE = "a value"
    STRING = "the rest of a string"
    NESTED = "the rest of an array or object"
    WORD = "the rest of a number or word"
    AFTER = "a comma or the closing brace"
    END = "the end of the body"


class BodyRoom:
    """Bounds the bytes of all bodies that a server holds at once. Bodies of up to SMALL_BYTES do not count."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.held_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Counts more bytes. Raises Overloaded if that is too much; nothing is counted then."""
        if self.held_bytes + num_bytes > self._max_bytes:
            raise Overloaded(
                f"the bodies of open requests have {self.held_bytes} bytes, and at most {self._max_bytes} are held at "
                "once: try again later, or start the server with a larger --max-body-bytes, of which it holds "
                f"{BODIES_HELD}"
            )
        self.held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Counts bytes no longer."""
        self.held_bytes -= num_bytes


class Fields:
    """The fields of one body, in the order in which they came. Of two fields of one name the later one counts."""

    def __init__(self, raw: bytes | memoryview, values: dict[str, memoryview], counts: dict[str, "Counts"]) -> None:
        self.raw = memoryview(raw)
        """The whole body."""
        self.values = values
        """Each field's value, as the bytes that came."""
        self.counts = counts
        """What the scanner counted in each array and object. Nothing for a body of up to SMALL_BYTES."""
        self._on_release: Callable[[], None] | None = None

    def count_in(self, room: BodyRoom, num_bytes: int) -> None:
        """Lets `release` give these bytes back."""
        self._on_release = lambda: room.give_back(num_bytes)

    def release(self) -> None:
        """Forgets the body. Idempotent."""
        on_release, self._on_release = self._on_release, None
        self.raw, self.values = memoryview(b""), {}
        if on_release is not None:
            on_release()


@dataclass(slots=True)
class Counts:
    """What is in one array or object."""

    elements: int = 0
    """How many of its elements are strings, arrays or objects."""
    commas: int = 0
    """The commas in it at any depth, outside of strings."""


class Scanner:
    """Scans one body of at most `max_bytes`. Every error is an ApiError (400)."""

    def __init__(self, max_bytes: int) -> None:
        self._raw = mmap.mmap(-1, max(1, max_bytes))
        self.size = 0
        """The number of bytes that have come."""
        self._at = 0
        self._next = _At.START
        self._key = ""
        self._begin = 0
        self._depth = 0
        self._num_parts = 0
        self._counts: dict[str, Counts] = {}
        self._counted = Counts()
        self._spans: dict[str, tuple[int, int]] = {}

    def feed(self, piece: bytes) -> None:
        """Takes the next bytes of the body."""
        self._raw[self.size : self.size + len(piece)] = piece
        self.size += len(piece)
        while self._at < self.size and self._step():
            pass
        if self._num_parts > MAX_PARTS:
            raise ApiError(
                400, f"the body has over {MAX_PARTS} strings and brackets: send fewer messages or fields",
                code="body_too_complex",
            )  # fmt: skip

    def end(self) -> Fields:
        """Returns the fields. Called after the last bytes."""
        if self._next is not _At.END:
            raise _bad_json(f"the body ends where {self._next.value} should follow")
        raw = memoryview(self._raw)[: self.size]
        values = {key: raw[begin:end] for key, (begin, end) in self._spans.items()}
        return Fields(raw, values, self._counts)

    def _step(self) -> bool:
        """Reads one part, as far as it has come. Returns False if more bytes are needed."""
        if self._next is _At.STRING:
            return self._string()
        if self._next is _At.NESTED:
            return self._nested()
        if self._next is _At.WORD:
            return self._word()
        self._at = self._end_of(_SPACE)
        if self._at == self.size:
            return False
        if self._next in (_At.FIRST_KEY, _At.KEY) and self._raw[self._at] == _QUOTE:
            return self._read_key()
        self._mark(self._raw[self._at])
        return True

    def _end_of(self, pattern: re.Pattern[bytes]) -> int:
        match = pattern.match(self._raw, self._at, self.size)
        assert match is not None, "each of these patterns also matches nothing"
        return match.end()

    def _string(self) -> bool:
        self._at = self._end_of(_IN_STRING)
        if self._at == self.size or self._raw[self._at] == _BACKSLASH:
            return False
        self._at += 1
        if self._depth:
            self._next = _At.NESTED
        else:
            self._take_value()
        return True

    def _nested(self) -> bool:
        begin = self._at
        self._at = self._end_of(_PLAIN)
        self._counted.commas += self._raw[begin : self._at].count(b",")
        if self._at == self.size:
            return False
        mark = self._raw[self._at]
        self._at += 1
        self._num_parts += 1
        self._counted.elements += self._depth == 1 and mark not in _CLOSING
        if mark == _QUOTE:
            self._next = _At.STRING
        elif mark in _OPENING:
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise ApiError(400, "the body is nested too deeply: send a flatter one", code="invalid_json")
        else:
            self._depth -= 1
            if not self._depth:
                self._take_value()
        return self._num_parts <= MAX_PARTS

    def _word(self) -> bool:
        self._at = self._end_of(_WORD)
        if self._at == self.size:
            return False
        if not _SCALAR.fullmatch(self._raw, self._begin, self._at):
            raise _bad_json(f"the value of {self._key[:40]!r} is no JSON value")
        self._take_value()
        return True

    def _read_key(self) -> bool:
        begin = self._at
        self._at += 1
        self._at = self._end_of(_IN_STRING)
        if self._at == self.size or self._raw[self._at] == _BACKSLASH:
            if self._at - begin > _MAX_KEY_BYTES:
                raise _bad_json(f"a key is longer than {_MAX_KEY_BYTES} bytes")
            self._at = begin
            return False
        self._at += 1
        try:
            self._key = msgspec.json.decode(self._raw[begin : self._at], type=str)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _bad_json(str(error)) from error
        self._num_parts += 1
        self._next = _At.COLON
        return self._num_parts <= MAX_PARTS

    def _mark(self, mark: int) -> None:
        """Reads one character between keys and values, or the first one of a value."""
        self._begin = self._at
        if self._next is _At.VALUE:
            self._counted = Counts()
            self._next, self._depth = _At.WORD, 0
            if mark == _QUOTE:
                self._next = _At.STRING
            elif mark in _OPENING:
                self._next, self._depth = _At.NESTED, 1
            else:
                return
        elif self._next is _At.START and mark == _OPEN:
            self._next = _At.FIRST_KEY
        elif self._next is _At.COLON and mark == _COLON:
            self._next = _At.VALUE
        elif self._next is _At.AFTER and mark == _COMMA:
            self._next = _At.KEY
        elif self._next in (_At.AFTER, _At.FIRST_KEY) and mark == _CLOSE:
            self._next = _At.END
        elif self._next is _At.START:
            raise ApiError(400, "the body is no JSON object: send one JSON object", code="invalid_type")
        else:
            raise _bad_json(f"{chr(mark)!r} at byte {self._at}, where {self._next.value} should follow")
        self._at += 1

    def _take_value(self) -> None:
        self._spans[self._key] = (self._begin, self._at)
        self._counts[self._key] = self._counted
        self._next = _At.AFTER


async def read_fields(request: web.Request, room: BodyRoom, *, pause_s: float = 0.0) -> Fields:
    """Reads the body of a request. Raises ApiError (400), Overloaded, or aiohttp's error for a body over the server's
    limit. The fields must be released.

    `pause_s`: how long the loop sleeps after each piece of a long body. An engine in the same process needs the
    interpreter for each of its many small calls, and gets it late from a loop that is busy.
    """
    limit, content = request.app._client_max_size, request.content  # aiohttp has no public name for the limit
    begin = b""
    while chunk := await content.readany():
        begin += chunk
        if len(begin) > limit:
            raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=len(begin))
        if len(begin) > SMALL_BYTES:
            return await _scan(begin, content, limit, room, pause_s)
    return fields_of(begin)


def fields_of(raw: bytes) -> Fields:
    """Returns the fields of a whole body, at once. Raises ApiError (400)."""
    if len(raw) > SMALL_BYTES:
        scanner = Scanner(len(raw))
        scanner.feed(raw)
        return scanner.end()
    fields = decode_body(raw, dict[str, msgspec.Raw])
    return Fields(raw, {name: memoryview(value) for name, value in fields.items()}, {})


async def _scan(chunk: bytes, content: StreamReader, limit: int, room: BodyRoom, pause_s: float) -> Fields:
    scanner, taken = Scanner(limit), 0
    try:
        while chunk:
            if scanner.size + len(chunk) > limit:
                raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=scanner.size + len(chunk))
            room.take(len(chunk))
            taken += len(chunk)
            for start in range(0, len(chunk), PIECE_BYTES):
                scanner.feed(chunk[start : start + PIECE_BYTES])
                await asyncio.sleep(pause_s)
            chunk = await content.readany()
        fields = scanner.end()
    except BaseException:
        room.give_back(taken)
        raise
    fields.count_in(room, taken)
    return fields


def join_fields(fields: Mapping[str, bytes | memoryview]) -> Parts:
    """Returns a JSON object of these fields, as parts to be sent one after another. No long value is copied."""
    parts: Parts = deque()
    small: list[bytes | memoryview] = []
    for begin, (name, value) in zip(_begins(), fields.items(), strict=False):
        small += (begin, msgspec.json.encode(name), b":")
        if len(value) <= _JOIN_BYTES:
            small.append(value)
        else:
            parts += (b"".join(small), value)
            small = []
    small.append(b"}" if fields else b"{}")
    parts.append(b"".join(small))
    return parts


def _begins() -> Iterable[bytes]:
    yield b"{"
    while True:
        yield b","


def _bad_json(reason: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {reason}. Send one JSON object, in UTF-8", code="invalid_json")
