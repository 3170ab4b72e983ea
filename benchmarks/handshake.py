"""`python -m benchmarks.handshake`: what it costs one engine to shake hands with 1, 10, 100 and 1,000 others.

The peers are simulated: each is a whole other side in this process (facts, a payload with the layout of a rank of 32
layers, its own verdict and pairing). `ms_per_pair` is the work of both sides for one pair, without a socket, and
`cpu_ms_per_pair` is its processor time. `side_channel_ms_per_pair` is a question and its answer over the side channel
on loopback, with many under way at once. `bytes_per_peer` is what the engine keeps of each peer after its payload was
handed on: everything but its layout.
"""

import argparse
import gc
import json
import logging
import sys
import time
import tracemalloc
from dataclasses import dataclass, replace

from benchmarks.command import main
from kvferry.cli.main import ExitCode
from kvferry.cli.support.environment import environment
from kvferry.errors import FerryError
from kvferry.handshake.engine_description import EngineDescription
from kvferry.handshake.exchange import LocalSide, ask
from kvferry.handshake.facts import Facts
from kvferry.handshake.fit import make_fit
from kvferry.handshake.handshaker import Handshaker
from kvferry.layout.builders import block_major, head_range
from kvferry.layout.description import CacheLayout, Rank
from kvferry.settings import Role, SideChannelSettings, TransferMode
from kvferry.sidechannel.client import SideChannelClient
from kvferry.sidechannel.listener import SideChannelServer
from kvferry.wire.hello import Hello, RankHello
from kvferry.wire.layout_codec import encode_layout

__all__ = ["QUICK_ARGS", "add_arguments", "run"]

QUICK_ARGS = ("--peers", "1,10,100")
_NUM_LAYERS, _NUM_BLOCKS, _TP = 32, 4096, 1


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result."""

    peers: int
    ms_per_pair: float
    cpu_ms_per_pair: float
    side_channel_ms_per_pair: float
    bytes_per_peer: float
    message_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--peers", type=_numbers, default="1,10,100,1000", metavar="N,...",
                        help="numbers of peers, one line each (default: 1,10,100,1000)")  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print one object per number of peers, then the environment"
    )


def _numbers(text: str) -> list[int]:
    numbers = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of 1 or more, such as 1,10,100")
    return numbers


def run(args: argparse.Namespace) -> ExitCode:
    """Measures and prints."""
    logging.getLogger("kvferry").setLevel(logging.ERROR)
    for num_peers in args.peers:
        row = _measure(num_peers)
        if args.json:
            fields = {name: getattr(row, name) for name in Row.__slots__}
            print(json.dumps({"bench": "handshake", **fields}), flush=True)
        else:
            print(
                f"{row.peers:5d} peers: {row.ms_per_pair:7.3f} ms per pair ({row.cpu_ms_per_pair:.3f} of CPU), "
                f"{row.side_channel_ms_per_pair:7.3f} ms over the side channel, {row.bytes_per_peer:6.0f} bytes kept "
                f"per peer (its message: {row.message_bytes})",
                flush=True,
            )
    if args.json:
        print(json.dumps({"bench": "handshake", "environment": environment()}))
    return ExitCode.OK


def _measure(num_peers: int) -> Row:
    local = _side("decode", Role.DECODE)
    peers = [_side(f"prefill-{index}", Role.PREFILL) for index in range(num_peers)]
    _shake_hands(Handshaker(local, max_peers=num_peers), peers[:1])  # to warm up
    begin_s, cpu_begin_s = time.perf_counter(), time.process_time()
    _shake_hands(Handshaker(local, max_peers=num_peers), peers)
    ms_per_pair = 1000 * (time.perf_counter() - begin_s) / num_peers
    cpu_ms_per_pair = 1000 * (time.process_time() - cpu_begin_s) / num_peers
    return Row(
        num_peers,
        ms_per_pair,
        cpu_ms_per_pair,
        _over_side_channel(local, peers),
        _kept(local, peers),
        len(ask(peers[0])),
    )


def _shake_hands(handshaker: Handshaker, peers: list[LocalSide]) -> None:
    """Asks every peer, and has every peer answer from a handshaker of its own."""
    handshakers = {peer.engine: Handshaker(peer) for peer in peers}
    for peer in peers:
        handshaker.want(peer.engine, None, "127.0.0.1", 1, 0.0)
    for (engine, other), question in zip(handshakers.items(), handshaker.take_asks(), strict=True):
        handshaker.replied(question.token, other.answer(question.body, "127.0.0.1", 0.0), 0.0)
        other.take_accepted()
        assert handshaker.peers.get(engine).paired, "the simulated peers fit"
    handshaker.take_accepted()


def _kept(local: LocalSide, peers: list[LocalSide]) -> float:
    """Returns the bytes that a handshaker keeps for each peer after its payloads were handed on."""
    questions = [ask(peer) for peer in peers]
    handshaker = Handshaker(local, max_peers=len(peers))
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for question in questions:
        handshaker.answer(question, "127.0.0.1", 0.0)
        handshaker.take_accepted()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(handshaker.peers.snapshot()) == len(peers), "every peer is known"
    return (after - before) / len(peers)


def _over_side_channel(local: LocalSide, peers: list[LocalSide]) -> float:
    """Returns the milliseconds per question when all peers ask one listener, many at a time."""
    handshaker = Handshaker(local, max_peers=len(peers))
    settings = SideChannelSettings(max_handshakes_per_s=1e9, timeout_s=120.0)
    server = SideChannelServer(settings, lambda body, address: handshaker.answer(body, address, 0.0))
    client = SideChannelClient(settings)
    questions = [ask(peer) for peer in peers]
    num_answers = 0
    try:
        server.start()
        begin_s = time.perf_counter()
        for token, question in enumerate(questions):
            client.ask_nowait("127.0.0.1", server.port, question, token)
        while num_answers < len(peers):
            for _, reply in client.poll():
                if isinstance(reply, FerryError):
                    raise reply
                num_answers += 1
            client.wait(1.0)
        return 1000 * (time.perf_counter() - begin_s) / len(peers)
    finally:
        client.close()
        server.close()


def _layouts() -> tuple[CacheLayout, ...]:
    return tuple(
        block_major(
            [f"layers.{layer}.attn" for layer in range(_NUM_LAYERS)],
            num_blocks=_NUM_BLOCKS,
            block_tokens=16,
            heads=head_range(8, rank, _TP),
            head_dim=128,
            element_bytes=2,
            encoding="bf16",
            rank=Rank(index=rank, tp_rank=rank, tp_size=_TP),
        )
        for rank in range(_TP)
    )


_DESCRIPTION = EngineDescription(
    engine="bench",
    engine_version="1",
    role=Role.DECODE,
    mode=TransferMode.PULL,
    model_id="bench/model",
    fingerprint="kf1-bench",
    dtype="bfloat16",
    total_kv_heads=8,
    head_size=128,
    hidden_layers=_NUM_LAYERS,
    attention_backend="bench",
    block_tokens=(16,),
    tp=_TP,
)


def _side(name: str, role: Role) -> LocalSide:
    layouts = _layouts()
    ranks = tuple(
        RankHello(layout=encode_layout(layout), transport="memory", transport_metadata=bytes(256)) for layout in layouts
    )
    hello = Hello(engine=name, incarnation="1", role=role, ranks=ranks, host="127.0.0.1", port=1)
    return LocalSide(Facts.from_engine(replace(_DESCRIPTION, role=role)), hello, make_fit(layouts, role))


if __name__ == "__main__":
    sys.exit(main("handshake", add_arguments, run, description=__doc__))
