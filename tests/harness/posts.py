"""Posts that a test gives to a mover."""

from kvferry.handoff.actions import Peer, Post, PostId
from kvferry.handoff.driver.links import Flow, Link
from kvferry.ids import EngineId, Incarnation, PeerName, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.builders import block_major, head_range
from kvferry.layout.pairing import pair
from kvferry.transport.base import Operation
from tests.harness.handoff_engines import DIM, HEADS, LAYERS, Engine


def a_write(engine: Engine, *, not_after_s: float, until_s: float) -> tuple[Post, Link]:
    """Returns 256 blocks of 4 tokens of a one-rank engine, for a peer with blocks of 6: short runs."""
    layout = engine.layouts[0]
    peer = block_major(
        LAYERS,
        num_blocks=256,
        block_tokens=6,
        heads=head_range(HEADS, 0, 1),
        head_dim=DIM,
        element_bytes=4,
        encoding="f32",
        address=1 << 40,
    )
    flow = Flow(pair([layout], peer).edges[0])
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
    return post, Link(name=name, metadata=b"", regions=peer.regions, incoming=None, outgoing=flow)
