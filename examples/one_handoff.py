"""One hand-off, message by message: the rank protocols of a prefill and a decode engine, face to face.

No engine, no memory, no socket and no clock: the protocol is given events, and returns actions. This program carries
the messages by hand, and prints each of them.

    python examples/one_handoff.py [pull|push]
"""

import sys
from collections.abc import Sequence

from kvferry import (
    BlockTable,
    EngineId,
    FerrySettings,
    Incarnation,
    RequestId,
    TokenRange,
    TransferId,
    TransferMode,
    TransferSettings,
)
from kvferry.handoff.actions import Peer, Post, Send
from kvferry.handoff.orders import Fetch, Offer, StepOrders
from kvferry.handoff.rank_protocol import RankProtocol
from kvferry.ids import PeerName, peer_name
from kvferry.wire.handoff_messages import Message

PREFILL, DECODE = (EngineId("prefill"), Incarnation("p1")), (EngineId("decode"), Incarnation("d1"))
TRANSFER = TransferId("t1")


class OneToOne:
    """What the machines ask of a driver about layouts: here, two equal caches whose bytes are not compared."""

    def owes(self, peer: Peer) -> bool:
        return True

    def unit_tokens(self, peer: Peer) -> int:
        return 16

    def write_s(self, peer: Peer, num_tokens: int) -> float:
        return 0.1

    def digest(self, transfer: TransferId, peer: Peer, tables: Sequence[BlockTable], tokens: TokenRange) -> bytes:
        return b""

    def check(
        self, transfer: TransferId, peer: Peer, tables: Sequence[BlockTable], tokens: TokenRange, digest: bytes
    ) -> int:
        return 0


def show(message: Message) -> str:
    """The message as it would be written: its fields, but for those that are empty."""
    fields = {name: getattr(message, name) for name in message.__struct_fields__ if name != "to"}
    return f"{type(message).__name__}({', '.join(f'{name}={value!r}' for name, value in fields.items() if value)})"


def main(mode: TransferMode = TransferMode.PULL) -> None:
    settings = FerrySettings(transfer=TransferSettings(mode=mode))
    ranks = {
        peer_name(engine, incarnation, 0): RankProtocol(settings, OneToOne(), OneToOne(), incarnation, num_ranks=1)
        for engine, incarnation in (PREFILL, DECODE)
    }
    prefill, decode = ranks.values()
    prefill.peer_accepted(*DECODE, num_ranks=1, now_s=0.0)  # as after a handshake
    decode.peer_accepted(*PREFILL, num_ranks=1, now_s=0.0)

    prompt = TokenRange(0, 48)
    offer = Offer(TRANSFER, RequestId("r1"), (BlockTable(0, 0, (4, 5, 6)),), prompt, final=True)
    fetch = Fetch(TRANSFER, RequestId("r1"), *PREFILL, mode, (BlockTable(0, 0, (8, 9, 10)),), prompt, deadline_s=60.0)
    print(f"the prefill engine offers {len(prompt)} tokens in blocks 4, 5, 6; the decode engine wants them in 8, 9, 10")
    prefill.orders(StepOrders(offer=(offer,)), 0.0)
    decode.orders(StepOrders(fetch=(fetch,)), 0.0)
    carry(ranks)

    for name, rank in ranks.items():
        report = rank.take_report()
        assert report is not None, "each of them has an end to report"
        for landed in report.landed:
            print(f"{name} reports to its scheduler: {landed.transfer} landed, {len(landed.arrived)} tokens")
        for transfer in report.released:
            print(f"{name} reports to its scheduler: the blocks of {transfer} are the engine's again")


def carry(ranks: dict[PeerName, RankProtocol]) -> None:
    """Carry out what the protocols ask for, until they ask for nothing more."""

    def deliver(sender: PeerName, peer: Peer, message: Message) -> None:
        print(f"{sender:12} -> {peer.name:12}  {show(message)}")
        ranks[peer.name].message(sender, message, 0.0)

    while actions := [(name, action) for name, rank in ranks.items() for action in rank.take_actions()]:
        for name, action in actions:
            if isinstance(action, Send):
                deliver(name, action.peer, action.message)
            elif isinstance(action, Post):
                local, remote = (list(tables[0].block_ids) for tables in (action.local, action.remote))
                verb = f"{action.operation.value}s {len(action.tokens)} tokens"
                print(f"{name:12} {verb}: its blocks {local}, the peer's {remote}")
                if action.message is not None:  # a write brings its message after the last byte
                    deliver(name, action.peer, action.message)
                ranks[name].completed(action.post, None, 0.0)
        for rank in ranks.values():
            rank.tick(0.0)


if __name__ == "__main__":
    main(TransferMode(sys.argv[1]) if len(sys.argv) > 1 else TransferMode.PULL)
