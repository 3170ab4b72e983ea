"""Fuzzed messages, each from a seed: random, mutated, truncated, oversized, of wrong types.

    python -m tests.attacks.fuzz --messages 1000000 --seed 1

Targets: the envelope, the payload after a good envelope, the reply to our own question, notifications between workers,
and a live listener. Whatever comes, the answer is an envelope (or MalformedMessage), and never another exception.
"""

import argparse
import json
import logging
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from kvferry.errors import IncompatiblePeer, MalformedMessage
from kvferry.handshake.exchange import LocalSide, ask
from kvferry.handshake.fit import make_fit
from kvferry.handshake.handshaker import Handshaker
from kvferry.ids import EngineId
from kvferry.layout.builders import block_major, head_range
from kvferry.layout.description import CacheLayout, Rank
from kvferry.settings import Role
from kvferry.sidechannel.listener import SideChannelServer
from kvferry.wire.envelope import decode_envelope, encode_envelope
from kvferry.wire.handoff_messages import (
    Claim,
    Confirm,
    Drop,
    Fail,
    Fragment,
    Ready,
    Register,
    Renew,
    RenewAck,
    Revoke,
    Stopped,
    WireTable,
    Wrote,
    decode_message,
    encode_message,
)
from kvferry.wire.hello import Hello, RankHello
from kvferry.wire.layout_codec import decode_layout, encode_layout
from kvferry.wire.versions import HISTORY
from tests.harness.handshake_examples import facts

__all__ = ["TARGETS", "engine", "run"]


def _layouts(tp: int) -> tuple[CacheLayout, ...]:
    return tuple(
        block_major(
            ["layers.0.attn", "layers.1.attn"],
            num_blocks=8,
            block_tokens=16,
            heads=head_range(8, rank, tp),
            head_dim=16,
            element_bytes=2,
            encoding="bf16",
            rank=Rank(index=rank, tp_rank=rank, tp_size=tp),
        )
        for rank in range(tp)
    )


def engine(name: str, role: Role, tp: int = 1) -> LocalSide:
    """One end of a handshake, with real layouts and the real pairing."""
    layouts = _layouts(tp)
    ranks = tuple(
        RankHello(layout=encode_layout(layout), transport="nixl", transport_metadata=b"m" * 64) for layout in layouts
    )
    hello = Hello(engine=name, incarnation="i1", role=role, ranks=ranks, capabilities=("a",), host="h", port=1)
    return LocalSide(facts=facts(role=role), hello=hello, fit=make_fit(layouts, role))


_LONGEST_BYTES = 1 << 18
"""Counts what the listener under test accepts."""


class Mutator:
    """Makes malformed bytes out of good ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def damaged(self, good: bytes) -> bytes:
        """Returns random, flipped, cut, spliced, repeated or oversized bytes."""
        draw = self.random
        kind = draw.randrange(9)
        if kind == 0:
            return draw.randbytes(draw.randrange(200))
        if kind == 1:
            return good[: draw.randrange(len(good) + 1)]
        if kind == 2:
            return good[: draw.randrange(len(good) + 1)] + draw.randbytes(draw.randrange(1, 64))
        if kind == 3:
            return good + draw.randbytes(draw.randrange(1, 64))
        if kind == 4 and draw.randrange(100) == 0:
            return good + bytes(draw.randrange(1 << 20))
        if kind == 5:
            return self.structure(good)
        bad = bytearray(good)
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(bad))
            if kind == 6:
                bad[at] ^= 1 << draw.randrange(8)
            elif kind == 7:
                bad[at] = draw.choice((0x00, 0x7F, 0x80, 0xC0, 0xC1, 0xC6, 0xDB, 0xDD, 0xDF, 0xFF))
            else:
                del bad[at : at + draw.randrange(1, 9)]
                bad += b"\x00"
        return bytes(bad)

    def structure(self, good: bytes) -> bytes:
        """Returns msgpack with a wrong value somewhere inside, also within the layouts of payloads."""
        skip = 4 if good[:3] == b"KVF" else 0
        try:
            tree = msgspec.msgpack.decode(good[skip:])
        except msgspec.MsgspecError:
            return good[::-1]
        return good[:skip] + msgspec.msgpack.encode(self._change(tree))

    def _change(self, tree: object, depth: int = 0) -> object:
        draw = self.random
        if depth > 12 or draw.randrange(6) == 0:
            return self._value(tree)
        if isinstance(tree, dict) and tree:
            key = draw.choice(list(tree))
            if draw.randrange(12) == 0:
                return {other: value for other, value in tree.items() if other != key}
            return {**tree, key: self._change(tree[key], depth + 1)}
        if isinstance(tree, list) and tree:
            at = draw.randrange(len(tree))
            if draw.randrange(12) == 0:
                return tree + tree if draw.randrange(2) else tree[:at]
            return [*tree[:at], self._change(tree[at], depth + 1), *tree[at + 1 :]]
        if isinstance(tree, bytes) and len(tree) > 40:
            return self.structure(tree)
        return self._value(tree)

    def _value(self, old: object) -> object:
        draw = self.random
        if isinstance(old, int) and not isinstance(old, bool) and draw.randrange(3):
            return draw.choice((0, 1, -1, old + 1, old - 1, old * 2, 2**31, 2**63 - 1, -(2**63), 2**64 - 1))
        return draw.choice(
            (None, True, 0, -1, 2**64 - 1, 1.5, float("nan"), "", "x", "x" * 5000, b"", b"\xff", [], [[]], {}, {"a": 1})
        )


Target = Callable[[bytes], str]


def _envelope_target(mutator: Mutator) -> tuple[Sequence[bytes], Target]:
    handshaker = Handshaker(engine("p0", Role.PREFILL, tp=2), max_peers=64)
    good = [ask(engine("d0", Role.DECODE), protocol) for protocol in HISTORY]

    def answer(bad: bytes) -> str:
        kind = str(decode_envelope(handshaker.answer(bad, "fuzz", 0.0)).kind)
        handshaker.take_accepted()
        handshaker.take_gone()
        return kind

    return good, answer


def _payload_target(mutator: Mutator) -> tuple[Sequence[bytes], Target]:
    handshaker = Handshaker(engine("p0", Role.PREFILL, tp=2), max_peers=64)
    asked = {protocol: decode_envelope(ask(engine("d0", Role.DECODE), protocol)) for protocol in HISTORY}
    # A range of one version makes the handshaker decode the payload in it.
    asked = {protocol: msgspec.structs.replace(envelope, protocol_max=protocol) for protocol, envelope in asked.items()}

    def answer(bad: bytes) -> str:
        envelope = asked[mutator.random.choice(list(HISTORY))]
        body = encode_envelope(msgspec.structs.replace(envelope, payload=bad))
        kind = str(decode_envelope(handshaker.answer(body, "fuzz", 0.0)).kind)
        handshaker.take_accepted()
        handshaker.take_gone()
        return kind

    return [envelope.payload for envelope in asked.values()], answer


def _reply_target(mutator: Mutator) -> tuple[Sequence[bytes], Target]:
    p, d = Handshaker(engine("p0", Role.PREFILL)), Handshaker(engine("d0", Role.DECODE, tp=2))
    good = [p.answer(ask(d.local, protocol), "x", 0.0) for protocol in HISTORY]
    now_s = [0.0]

    def answer(bad: bytes) -> str:
        now_s[0] += 100.0
        d.peers.forget(EngineId("p0"))
        d.want(EngineId("p0"), None, "127.0.0.1", 1, now_s[0])
        for asked in d.take_asks():
            d.replied(asked.token, bad, now_s[0])
        d.take_asks()
        d.close()
        d.take_accepted()
        d.take_gone()
        return str(d.peers.get(EngineId("p0")).state)

    return good, answer


def _notification_target(mutator: Mutator) -> tuple[Sequence[bytes], Target]:
    ends: dict[str, Any] = {"to": "i1", "transfer": "t1"}
    tables = (WireTable(0, 0, (1, 2, 3)), WireTable(1, 512, (9,)))
    good = [
        encode_message(message)
        for message in (
            Claim(**ends, ranks=2, start=0, stop=48, seq=7),
            Register(**ends, ranks=2, start=0, stop=48, tables=tables, ttl_s=30.0),
            Confirm(**ends, ranks=2),
            Drop(**ends, ranks=2, reason="gone"),
            Revoke(**ends, ranks=2, reason="gone"),
            Ready(**ends, tables=tables, start=0, stop=48, final=True, ttl_s=30.0, ack=7, digest=b"d" * 64, note=b"n"),
            Wrote(**ends, part=1, parts=2, start=0, stop=48, num_bytes=4096, num_runs=3, digest=b"d" * 64),
            Fail(**ends, reason="gone", quiet=True),
            Stopped(**ends),
            Renew(to="i1", seq=7, from_decode=True, transfers=("t1", "t2")),
            RenewAck(to="i1", seq=7, to_decode=True, ended=("t2",)),
            Fragment(to="i1", index=0, count=2, body=b"half"),
        )
    ]

    def answer(bad: bytes) -> str:
        try:
            decode_message(bad)
        except MalformedMessage:
            return "malformed"
        return "decoded"

    return good, answer


def _layout_target(mutator: Mutator) -> tuple[Sequence[bytes], Target]:
    good = [encode_layout(layout) for layout in _layouts(2)]

    def answer(bad: bytes) -> str:
        try:
            decode_layout(bad)
        except (MalformedMessage, IncompatiblePeer):
            return "malformed"
        return "decoded"

    return good, answer


TARGETS: dict[str, Callable[[Mutator], tuple[Sequence[bytes], Target]]] = {
    "envelope": _envelope_target,
    "payload": _payload_target,
    "reply": _reply_target,
    "notification": _notification_target,
    "layout": _layout_target,
}


def run(target: str, num_messages: int, seed: int) -> dict[str, object]:
    """Sends messages to one target. Returns what came of them, and how long the slowest took."""
    mutator = Mutator(seed)
    good, answer = TARGETS[target](mutator)
    outcomes: Counter[str] = Counter()
    slowest_s = 0.0
    for _ in range(num_messages):
        bad = mutator.damaged(mutator.random.choice(good))
        begin_s = time.perf_counter()
        outcomes[answer(bad)] += 1
        slowest_s = max(slowest_s, time.perf_counter() - begin_s)
    return {"target": target, "messages": num_messages, "seed": seed, "slowest_ms": 1000 * slowest_s, **outcomes}


def run_listener(server: SideChannelServer, num_messages: int, seed: int) -> dict[str, object]:
    """Does the same to a live listener: frames of every number and size over ZeroMQ, and sometimes TCP garbage."""
    mutator = Mutator(seed)
    draw = mutator.random
    good = [ask(engine("d0", Role.DECODE), protocol) for protocol in HISTORY]
    num_replies = num_tcp = 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.sndhwm = 64
        dealer.connect(f"tcp://127.0.0.1:{server.port}")
        for index in range(num_messages):
            if index % 2000 == 1999:
                num_tcp += 1
                with socket.create_connection(("127.0.0.1", server.port)) as plain:
                    plain.sendall(draw.randbytes(draw.randrange(1, 500)))
            bad = mutator.damaged(draw.choice(good))
            frames = [b"token"[: draw.randrange(6)], bad]
            if draw.randrange(20) == 0:
                frames = [bad] * draw.randrange(1, 8)
            if len(bad) > _LONGEST_BYTES:
                # A separate connection, because the listener ends it: other messages must not be lost with it.
                with context.socket(zmq.DEALER) as other:
                    other.linger = 0
                    other.connect(f"tcp://127.0.0.1:{server.port}")
                    other.send_multipart(frames)
                    other.poll(20)
                continue
            dealer.send_multipart(frames)
            while dealer.poll(0):
                dealer.recv_multipart()
                num_replies += 1
        while dealer.poll(500):
            dealer.recv_multipart()
            num_replies += 1
    return {"target": "listener", "messages": num_messages, "seed": seed, "replies": num_replies, "tcp": num_tcp}


def main() -> int:
    """Prints one JSON object per target."""
    from tests.harness.sidechannels import answering, asking, listening, settings, shake

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    each = args.messages // (len(TARGETS) + 1)
    for target in TARGETS:
        begin_s = time.perf_counter()
        result = run(target, each, args.seed)
        sys.stdout.write(json.dumps({**result, "seconds": round(time.perf_counter() - begin_s, 1)}) + "\n")
        sys.stdout.flush()
    handshaker = Handshaker(engine("p0", Role.PREFILL, tp=2), max_peers=64)
    given = settings(max_handshakes_per_s=1e9, max_message_bytes=_LONGEST_BYTES)
    begin_s = time.perf_counter()
    with listening(answering(handshaker), given) as server, asking() as client:
        result = run_listener(server, args.messages - each * len(TARGETS), args.seed)
        good = shake(Handshaker(engine("good", Role.DECODE)), client, "p0", server.port)
        stats = msgspec.to_builtins(server.stats())
    result |= {"good_peer_afterwards": str(good), "seconds": round(time.perf_counter() - begin_s, 1), **stats}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
