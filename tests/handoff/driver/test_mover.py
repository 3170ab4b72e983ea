"""The part of a hand-off that one post moves: groups of all tokens chunk by chunk, windows and states at the end."""

from kvferry.handoff.actions import Peer, Post, PostId
from kvferry.handoff.driver.links import Flow, Link
from kvferry.handoff.driver.mover import DirectMover, Moved, runs_of
from kvferry.ids import EngineId, Incarnation, PeerName, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.layout.builders import LayoutBuilder, StatePart, head_range
from kvferry.layout.description import CacheLayout, Rank
from kvferry.layout.pairing import pair
from kvferry.testing.ends import LocalEnd
from kvferry.transport.base import Completion, Operation
from kvferry.transport.memory import MemoryHub, MemoryTransport

FULL, WINDOW, STATE = 0, 1, 2
TOKEN_BYTES = 2 * 2 * 8 * 4
"""K and V of two heads of 8 floats."""
PEER = Peer(PeerName("p/p1/0"), EngineId("p"), Incarnation("p1"), 0)


def hybrid(block_tokens: int) -> CacheLayout:
    """One layer of each kind; region 0 belongs to the full one, 1 to the window, 2 to the state."""
    builder = LayoutBuilder(Rank())
    builder.full(block_tokens)
    builder.window(block_tokens, 8)
    builder.states()
    heads = head_range(2, 0, 1)
    for layer, group in (("layers.0.attn", FULL), ("layers.1.attn", WINDOW)):
        builder.attention(layer, group, heads=heads, head_dim=8, element_bytes=4, encoding="f32", num_blocks=32)
    part = StatePart("ssm", "f32", 4, (("head", 2, 0, 2), ("dim", 16, 0, 16)))
    builder.state("layers.2.mamba", STATE, [part], num_blocks=4)
    return builder.build()


def post(tokens: TokenRange, whole: TokenRange | None, operation: Operation = Operation.READ) -> Post:
    """20 tokens: the window holds [12, 20), the state is the one after token 20."""
    remote = (
        BlockTable(FULL, 0, (7, 3, 9, 1, 5)),
        BlockTable(WINDOW, 0, (11, 12, 13, 14, 15)),
        BlockTable(STATE, 20, (2,)),
    )
    local = (BlockTable(FULL, 0, (20, 21, 22, 23, 24)), BlockTable(WINDOW, 12, (25, 26)), BlockTable(STATE, 20, (1,)))
    return Post(PostId(1), PEER, operation, TransferId("t"), local, remote, tokens, whole, 1e9, 1e9)


def moved(*, tokens: TokenRange, whole: TokenRange | None) -> dict[int, int]:
    """Returns the numbers of bytes by destination region."""
    layout = hybrid(4)
    (edge,) = pair([layout], layout).edges
    total: dict[int, int] = {}
    for runs in runs_of(post(tokens, whole), Flow(edge)):
        total[runs.destination_region] = total.get(runs.destination_region, 0) + int(runs.length.sum())
    return total


def test_progress_moves_only_groups_that_keep_every_token() -> None:
    assert moved(tokens=TokenRange(0, 12), whole=None) == {0: 12 * TOKEN_BYTES}


def test_the_last_part_brings_the_rest_of_the_window_and_the_state() -> None:
    last = moved(tokens=TokenRange(12, 20), whole=TokenRange(0, 20))
    assert last.pop(0) == 8 * TOKEN_BYTES
    assert 0 < last.pop(1) <= 8 * TOKEN_BYTES
    assert last.pop(2) > 0
    assert not last


def test_the_last_part_brings_windows_and_states_even_without_a_new_token() -> None:
    last = moved(tokens=TokenRange(20, 20), whole=TokenRange(0, 20))
    assert 0 not in last
    assert last[1] > 0
    assert last[2] > 0


def test_only_the_last_part_reaches_to_the_end_of_its_last_block() -> None:
    # If the next part overtook it, it would write old bytes over new ones.
    assert moved(tokens=TokenRange(0, 10), whole=None) == {0: 10 * TOKEN_BYTES}
    assert moved(tokens=TokenRange(8, 18), whole=TokenRange(0, 20))[0] == 12 * TOKEN_BYTES


def test_a_unit_is_a_whole_number_of_blocks_on_both_sides() -> None:
    (edge,) = pair([hybrid(4)], hybrid(6)).edges
    assert Flow(edge).unit_tokens == 12
    assert Flow(edge).bytes_per_token == 2 * TOKEN_BYTES
    assert Flow(edge).fixed_bytes > 0


def test_a_wrong_table_of_a_peer_is_an_error_of_the_part() -> None:
    """R22: no block id of a peer is used to address memory unchecked."""
    hub = MemoryHub()
    layout = hybrid(4)
    (edge,) = pair([layout], layout).edges
    end = LocalEnd(MemoryTransport(PeerName("d/d1/0"), hub=hub), PeerName("d/d1/0"), (64,))
    mover = DirectMover(end.transport)
    bad = post(TokenRange(0, 4), None)
    bad = Post(
        bad.post,
        PEER,
        bad.operation,
        bad.transfer,
        bad.local,
        (BlockTable(FULL, 0, (32,)),),
        bad.tokens,
        None,
        1e9,
        1e9,
    )
    ended = mover.start(bad, Link(PEER.name, b"", layout.regions, Flow(edge), None))
    assert isinstance(ended, Moved)
    assert ended.error is not None
    assert "32" in ended.error
    assert mover.num_in_flight == 0
    end.close()


def test_a_lost_peer_differs_from_an_error() -> None:
    hub = MemoryHub()
    layout = hybrid(4)
    (edge,) = pair([layout], layout).edges
    end = LocalEnd(MemoryTransport(PeerName("d/d1/0"), hub=hub), PeerName("d/d1/0"), (64,))
    ended = DirectMover(end.transport).start(
        post(TokenRange(0, 4), None), Link(PEER.name, b"", layout.regions, Flow(edge), None)
    )
    assert ended is not None
    assert ended.lost
    assert DirectMover(end.transport).completed(Completion(7)) is None  # type: ignore[arg-type]
    end.close()
