"""Fields are found while the bytes arrive, and are those that a JSON decoder finds."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.web.api_errors import ApiError
from kvferry.web.body_fields import MAX_PARTS, Fields, Scanner, join_fields
from tests.harness.hypothesis_profile import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(st.text(max_size=4), VALUES, max_size=4)


def scan(raw: bytes, size: int = 1 << 16) -> Fields:
    scanner = Scanner(1 << 20)
    feed(scanner, raw, size)
    return scanner.end()


def feed(scanner: Scanner, raw: bytes, size: int) -> None:
    for start in range(0, len(raw), size):
        scanner.feed(raw[start : start + size])


def joined(raw: bytes, size: int) -> bytes:
    return b"".join(join_fields(scan(raw, size).values))


@settings(max_examples=examples(200))
@given(body=BODIES, indent=st.sampled_from([None, 1]), ascii_only=st.booleans(), size=st.integers(1, 40))
def test_the_fields_are_those_of_a_decoder_wherever_the_bytes_are_cut(
    body: dict[str, Any], indent: int | None, ascii_only: bool, size: int
) -> None:
    raw = json.dumps(body, indent=indent, ensure_ascii=ascii_only).encode()
    found = scan(raw, size).values
    assert {name: json.loads(bytes(value)) for name, value in found.items()} == body
    assert list(found) == list(body)


@settings(max_examples=examples(200))
@given(
    body=BODIES,
    at=st.integers(0, 200),
    mark=st.sampled_from([b"", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"1"]),
)
def test_what_the_scanner_takes_and_a_decoder_refuses_is_still_refused_after_joining(
    body: dict[str, Any], at: int, mark: bytes
) -> None:
    raw = json.dumps(body).encode()
    at = min(at, len(raw))
    raw = raw[:at] + mark + raw[at + 1 :]
    try:
        expected = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        expected = None
    try:
        found = msgspec.json.decode(joined(raw, 1 << 16))
    except (ApiError, msgspec.DecodeError):
        assert not isinstance(expected, dict), "a well-formed body is refused"
    else:
        assert found == expected


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b'{"a"', b'{"a":', b'{"a":1', b'{"a":1,', b'{"a":1,}', b'{"a" 1}', b'{"a":1 "b":2}', b"{a:1}",
        b"{,}", b'{"a":nul}', b'{"a":01}', b'{"a":NaN}', b'{"a":1}}', b'{"a":[1}', b'{"a":"x', b'{"a":"x\\"}',
        b'{"a":}', b'{"a":1}x', b'{"' + b"k" * 2000 + b'":1',
    ],
)  # fmt: skip
def test_a_body_that_is_not_well_formed_is_400(raw: bytes) -> None:
    for size in (1, 1 << 16):
        with pytest.raises((ApiError, msgspec.DecodeError)) as raised:  # a decoder refuses what is inside a value
            msgspec.json.decode(joined(raw, size))
        if isinstance(raised.value, ApiError):
            assert (raised.value.status, raised.value.code) == (400, "invalid_json")


def test_a_body_that_is_no_object_is_400() -> None:
    with pytest.raises(ApiError, match="send one JSON object"):
        scan(b"[1]")


@pytest.mark.parametrize("raw", [b'{"a":' + b"[" * 5000, b'{"a":' + b'{"a":' * 5000])
def test_a_body_nested_too_deeply_is_400(raw: bytes) -> None:
    with pytest.raises(ApiError, match="nested too deeply"):
        scan(raw)


@pytest.mark.parametrize("part", [b'"x"', b"[]", b"{}"])
def test_a_body_of_too_many_parts_is_400_before_all_of_it_is_read(part: bytes) -> None:
    raw = b'{"a":[' + b",".join([part] * MAX_PARTS * 2) + b"]}"
    scanner = Scanner(1 << 20)
    with pytest.raises(ApiError, match="strings and brackets") as raised:
        feed(scanner, raw, 1 << 15)
    assert (raised.value.status, raised.value.code) == (400, "body_too_complex")
    assert scanner.size < len(raw)


def test_joining_copies_no_long_value() -> None:
    value = memoryview(b'"' + b"x" * 100_000 + b'"')
    parts = join_fields({"a": b"1", "prompt": value, "b": b"2"})
    assert list(parts)[1] is value
    assert b"".join(parts) == b'{"a":1,"prompt":' + bytes(value) + b',"b":2}'
    assert b"".join(join_fields({})) == b"{}"
