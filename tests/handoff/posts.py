"""Posts to give to a mover by hand."""

from kvferry.handoff.actions import Peer, Post, PostId
from kvferry.handoff.links import Flow, Link
from kvferry.ids import EngineId, Incarnation, PeerName, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.pairing import pair
from kvferry.transport.base import Operation
from tests.handoff.engines import Engine


def a_write(engine: Engine, *, not_after_s: float, until_s: float) -> tuple[Post, Link]:
    """256 blocks of a one-rank engine, to a peer of the same layout."""
    layout = engine.layouts[0]
    flow = Flow(pair([layout], layout).edges[0])
    name = PeerName("d/1/0")
    tables = (BlockTable(0, 0, tuple(range(256))),)
    num_tokens = 256 * layout.groups[0].block_tokens
    post = Post(
        post=PostId(2),
        peer=Peer(name, EngineId("d"), Incarnation("1"), 0),
        operation=Operation.WRITE,
        transfer=TransferId("t"),
        local=tables,
        remote=tables,
        tokens=TokenRange(0, num_tokens),
        whole=None,
        not_after_s=not_after_s,
        until_s=until_s,
    )
    return post, Link(name=name, metadata=b"", regions=layout.regions, inward=None, outward=flow)
