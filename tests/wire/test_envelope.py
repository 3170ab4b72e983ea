"""The envelope, and what it refuses. R8."""

import msgspec
import pytest

from kvferry.errors import MalformedMessage
from kvferry.settings import Role
from kvferry.wire.envelope import MAGIC, Envelope, Kind, WireFact, decode_envelope, encode_envelope
from kvferry.wire.hello import MAX_RANKS, Hello, RankHello, decode_hello, encode_hello
from kvferry.wire.versions import HISTORY

GOOD: dict[str, object] = {
    "kind": "ask",
    "engine": "d0",
    "incarnation": "i1",
    "protocol_min": 1,
    "protocol_max": 2,
    "protocol": 2,
    "digest": b"x" * 32,
    "facts": [["kv.dtype", "must match", "bfloat16"], ["a", "bridged", [1, "x"]], ["b", "informative", None]],
    "payload": b"p",
    "reason": "",
}


def packed(**changes: object) -> bytes:
    return MAGIC + msgspec.msgpack.encode({**GOOD, **changes})


def test_round_trip() -> None:
    envelope = decode_envelope(packed())
    assert envelope.facts[1] == WireFact("a", "bridged", (1, "x"))
    assert decode_envelope(encode_envelope(envelope)) == envelope


def test_unknown_names_are_skipped() -> None:
    assert decode_envelope(packed(colour="blue")) == decode_envelope(packed())


def test_the_schema_is_frozen() -> None:  # R8
    """Never edit this: an envelope that only one release can read is useless."""
    assert Envelope.__struct_fields__ == tuple(GOOD)
    assert [str(kind) for kind in Kind] == ["ask", "accept", "again", "refuse", "busy"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not a kvferry handshake"),
        (b"GET / HTTP/1.1", "not a kvferry handshake: the message begins with b'GET / HT'"),
        (MAGIC, "handshake envelope: "),
        (MAGIC + b"\xff" * 64, "handshake envelope: "),
        (MAGIC + b"\x91" * 100_000, "handshake envelope: "),
        (packed()[:-1], "handshake envelope: "),
        (packed() + b"x", "handshake envelope: "),
        (packed(kind="scream"), r"kind"),
        (packed(engine=""), r"\$\.engine"),
        (packed(engine="x" * 257), r"\$\.engine"),
        (packed(engine=b"d0"), r"\$\.engine"),
        (packed(protocol_min=-1), r"\$\.protocol_min"),
        (packed(protocol_max=2**40), r"\$\.protocol_max"),
        (packed(protocol=1.5), r"\$\.protocol"),
        (packed(digest=b"x" * 33), r"\$\.digest"),
        (packed(facts=[["a", "bridged"]]), r"\$\.facts\[0\]"),
        (packed(facts=[["a", "bridged", {"deep": 1}]]), r"\$\.facts\[0\]\[2\]"),
        (packed(facts=[["a", "bridged", "x" * 4097]]), r"\$\.facts\[0\]\[2\]"),
        (packed(facts=[["a", "bridged", [[1]]]]), r"\$\.facts\[0\]\[2\]"),
        (packed(facts=[["", "bridged", 1]]), r"\$\.facts\[0\]\[0\]"),
        (packed(facts=[["a", "bridged", 1]] * 257), r"\$\.facts"),
        (packed(reason="x" * 20000), r"\$\.reason"),
    ],
)
def test_anything_else_is_malformed(body: bytes, message: str) -> None:  # R8 R20
    with pytest.raises(MalformedMessage, match=message):
        decode_envelope(body)


def hello(**changes: object) -> Hello:
    rank = RankHello(layout=b"l", transport="nixl", transport_metadata=b"m")
    base = Hello(engine="e", incarnation="i", role=Role.BOTH, ranks=(rank,))
    return msgspec.structs.replace(base, **changes)


@pytest.mark.parametrize("protocol", list(HISTORY))
@pytest.mark.parametrize("num_ranks", [0, MAX_RANKS + 1])
def test_payload_with_too_few_or_too_many_ranks(protocol: int, num_ranks: int) -> None:  # R20
    body = encode_hello(hello(), protocol)
    raw = msgspec.msgpack.decode(body)
    key = "ranks" if protocol == 1 else "shards"
    raw[key] = raw[key] * num_ranks
    with pytest.raises(MalformedMessage, match=f"{num_ranks} ranks; between 1 and {MAX_RANKS}"):
        decode_hello(msgspec.msgpack.encode(raw), protocol)


def test_payload_with_several_transports() -> None:
    raw = msgspec.msgpack.decode(encode_hello(hello(), 1))
    raw["ranks"].append({"layout": b"", "transport": "mooncake", "transport_metadata": b""})
    with pytest.raises(MalformedMessage, match="several transports"):
        decode_hello(msgspec.msgpack.encode(raw), 1)


@pytest.mark.parametrize("change", [{"port": 65536}, {"port": -1}, {"host": "h" * 300}, {"capabilities": ["c"] * 65}])
def test_payload_out_of_range(change: dict[str, object]) -> None:
    raw = msgspec.msgpack.decode(encode_hello(hello(), 2))
    with pytest.raises(MalformedMessage, match="handshake payload, version 2: "):
        decode_hello(msgspec.msgpack.encode({**raw, **change}), 2)
