"""The bytes of every protocol version, kept for ever; ranges and their common version. R8, R9, R11."""

import pytest

from kvferry.errors import ConfigError, MalformedMessage
from kvferry.settings import Role
from kvferry.wire.envelope import Envelope, Kind, WireFact, decode_envelope, encode_envelope
from kvferry.wire.hello import Hello, RankHello, decode_hello, encode_hello
from kvferry.wire.versions import HISTORY, PROTOCOL_MAX, PROTOCOL_MIN, ProtocolRange, common_protocol

# Bytes that each version wrote. Never edit one: add a line, with a new version.
HELLO_V1 = (
    "84a6656e67696e65a26430ab696e6361726e6174696f6ea26937a4726f6c65a66465636f6465a572616e6b739283a66c"
    "61796f7574c4024c30a97472616e73706f7274a46e69786cb27472616e73706f72745f6d65746164617461c4024d3083"
    "a66c61796f7574c4024c31a97472616e73706f7274a46e69786cb27472616e73706f72745f6d65746164617461c4024d"
    "31"
)
HELLO_V2 = (
    "88a6656e67696e65a26430ab696e6361726e6174696f6ea26937a4726f6c65a66465636f6465a97472616e73706f7274"
    "a46e69786ca67368617264739292c4024c30c4024d3092c4024c31c4024d31ac6361706162696c697469657391a96b76"
    "5f646967657374a4686f7374a831302e302e302e31a4706f7274cd15e0"
)
ENVELOPE = (
    "4b5646018aa46b696e64a361736ba6656e67696e65a26430ab696e6361726e6174696f6ea26937ac70726f746f636f6c"
    "5f6d696e01ac70726f746f636f6c5f6d617801a870726f746f636f6c01a6646967657374c42000010203040506070809"
    "0a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa566616374739293a86b762e6474797065aa6d757374206d6174"
    "6368a862666c6f6174313693ab706172616c6c656c2e7470a76272696467656402a77061796c6f6164c49184a6656e67"
    "696e65a26430ab696e6361726e6174696f6ea26937a4726f6c65a66465636f6465a572616e6b739283a66c61796f7574"
    "c4024c30a97472616e73706f7274a46e69786cb27472616e73706f72745f6d65746164617461c4024d3083a66c61796f"
    "7574c4024c31a97472616e73706f7274a46e69786cb27472616e73706f72745f6d65746164617461c4024d31a6726561"
    "736f6ea0"
)

RANKS = tuple(RankHello(layout=b"L%d" % i, transport="nixl", transport_metadata=b"M%d" % i) for i in range(2))
V1 = Hello(engine="d0", incarnation="i7", role=Role.DECODE, ranks=RANKS)
V2 = Hello(
    engine="d0",
    incarnation="i7",
    role=Role.DECODE,
    ranks=RANKS,
    capabilities=("kv_digest",),
    host="10.0.0.1",
    port=5600,
)


def test_version_1_is_still_read_and_written() -> None:  # R9
    assert decode_hello(bytes.fromhex(HELLO_V1), 1) == V1
    assert encode_hello(V2, 1) == bytes.fromhex(HELLO_V1)  # it has no field for what is new


def test_version_2_is_read_and_written() -> None:  # R9
    assert decode_hello(bytes.fromhex(HELLO_V2), 2) == V2
    assert encode_hello(V2, 2) == bytes.fromhex(HELLO_V2)


def test_later_versions_have_the_payload_of_version_2() -> None:  # R9
    assert all(encode_hello(V2, version) == bytes.fromhex(HELLO_V2) for version in range(2, PROTOCOL_MAX + 1))


def test_the_versions_really_differ() -> None:  # R9
    with pytest.raises(MalformedMessage, match="handshake payload, version 1: "):
        decode_hello(bytes.fromhex(HELLO_V2), 1)
    with pytest.raises(MalformedMessage, match="handshake payload, version 2: "):
        decode_hello(bytes.fromhex(HELLO_V1), 2)


def test_the_envelope_never_changes() -> None:  # R8
    envelope = Envelope(
        kind=Kind.ASK,
        engine="d0",
        incarnation="i7",
        protocol_min=1,
        protocol_max=1,
        protocol=1,
        digest=bytes(range(32)),
        facts=(WireFact("kv.dtype", "must match", "bfloat16"), WireFact("parallel.tp", "bridged", 2)),
        payload=bytes.fromhex(HELLO_V1),
    )
    assert decode_envelope(bytes.fromhex(ENVELOPE)) == envelope
    assert encode_envelope(envelope) == bytes.fromhex(ENVELOPE)


def test_every_version_has_a_line_of_history() -> None:  # R9
    assert list(HISTORY) == list(range(PROTOCOL_MIN, PROTOCOL_MAX + 1))
    assert all("\n" not in line and len(line) > 20 for line in HISTORY.values())
    assert len(HISTORY) >= 2


@pytest.mark.parametrize(
    ("ours", "theirs", "common"),
    [
        (ProtocolRange(1, 2), (1, 2), 2),
        (ProtocolRange(1, 1), (1, 2), 1),
        (ProtocolRange(1, 2), (1, 1), 1),
        (ProtocolRange(2, 2), (1, 1), None),
        (ProtocolRange(1, 2), (3, 9), None),
        (ProtocolRange(1, 2), (2, 9), 2),
        (ProtocolRange(1, 2), (2, 1), None),
        (ProtocolRange(1, 2), (0, 0), None),
    ],
)
def test_the_highest_common_version_is_used(
    ours: ProtocolRange, theirs: tuple[int, int], common: int | None
) -> None:  # R11
    assert common_protocol(ours, *theirs) == common


@pytest.mark.parametrize(("oldest", "newest"), [(0, 1), (2, 1), (1, PROTOCOL_MAX + 1)])
def test_a_range_that_we_cannot_use_is_refused(oldest: int, newest: int) -> None:
    with pytest.raises(ConfigError, match=r"set --protocol-max \(side_channel\.protocol_max\)"):
        ProtocolRange(oldest, newest)
