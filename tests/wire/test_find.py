"""Find and Found: golden bytes, bounds, and what a hostile peer may send. R39"""

import msgspec
import pytest

from kvferry.errors import MalformedMessage
from kvferry.wire.find import MAGIC, MAX_FIND_TOKENS, Find, Found, decode_find, decode_found, encode_find
from kvferry.wire.prompt_digest import pack_tokens

FIND = Find(to="i2", engine="p0", incarnation="i1", transfer="t", packed=pack_tokens([1, 258]), salt="s", more_than=1)
FIND_BYTES = (
    "4b5651018"
    "8a474797065a466696e64a2746fa26932a6656e67696e65a27030ab696e6361726e6174696f6ea26931a87472616e73666572a174a67061"
    "636b6564c4080100000002010000a473616c74a173a96d6f72655f7468616e01"
)
FOUND = Found(transfer="t", num_tokens=48)
FOUND_BYTES = "4b56510184a474797065a5666f756e64a87472616e73666572a174aa6e756d5f746f6b656e7330a6726561736f6ea0"


def test_the_bytes_on_the_wire_are_those_of_version_5() -> None:
    assert encode_find(FIND).hex() == FIND_BYTES
    assert encode_find(FOUND).hex() == FOUND_BYTES
    assert decode_find(bytes.fromhex(FIND_BYTES)) == FIND
    assert decode_found(bytes.fromhex(FOUND_BYTES)) == FOUND


def test_names_of_a_newer_release_are_skipped() -> None:
    body = msgspec.msgpack.decode(encode_find(FOUND)[len(MAGIC) :])
    assert decode_found(MAGIC + msgspec.msgpack.encode(body | {"later": [1]})) == FOUND


def changed(**fields: object) -> bytes:
    body = msgspec.msgpack.decode(encode_find(FIND)[len(MAGIC) :])
    return MAGIC + msgspec.msgpack.encode(body | fields)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"HTTP/1.1 400",
        b"KVF\x01" + encode_find(FIND)[len(MAGIC) :],
        MAGIC,
        MAGIC + b"\xc1",
        encode_find(FIND)[:-1],
        encode_find(FOUND),
        changed(packed=b""),
        changed(packed=b"12345"),
        changed(packed=bytes(4 * MAX_FIND_TOKENS + 4)),
        changed(packed=[1, 2]),
        changed(to=""),
        changed(to="x" * 257),
        changed(transfer="x" * 161),
        changed(transfer=b"\xff"),
        changed(engine=7),
        changed(salt="x" * 16385),
        changed(more_than=-1),
        changed(more_than=MAX_FIND_TOKENS + 1),
    ],
)
def test_a_malformed_question_is_refused_by_name(body: bytes) -> None:
    with pytest.raises(MalformedMessage, match=r"^find: "):
        decode_find(body)


@pytest.mark.parametrize("num_tokens", [-1, MAX_FIND_TOKENS + 1, 1.5, "1"])
def test_an_answer_out_of_range_is_refused(num_tokens: object) -> None:
    body = msgspec.msgpack.decode(encode_find(FOUND)[len(MAGIC) :])
    with pytest.raises(MalformedMessage, match=r"^find: .*num_tokens"):
        decode_found(MAGIC + msgspec.msgpack.encode(body | {"num_tokens": num_tokens}))


def test_a_long_reason_is_cut() -> None:
    assert len(decode_found(encode_find(Found.nothing("t", "x" * 9999))).reason) == 500
