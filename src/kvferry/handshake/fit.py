"""Do the layouts of two engines fit: every rank that wants KV covered by the ranks that have it, in both directions."""

from collections.abc import Sequence

from kvferry.errors import MalformedMessage
from kvferry.handshake.handshake import Fit
from kvferry.layout.description import CacheLayout
from kvferry.layout.pairing import pair
from kvferry.settings import Role
from kvferry.wire.hello import Hello
from kvferry.wire.layout_codec import decode_layout

__all__ = ["layouts_of", "make_fit"]


def layouts_of(hello: Hello) -> tuple[CacheLayout, ...]:
    """The checked layouts of all ranks. Raises MalformedMessage, also where the ranks are not in the order of index."""
    layouts = tuple(decode_layout(rank.layout) for rank in hello.ranks)
    for position, layout in enumerate(layouts):
        if layout.rank.index != position:
            raise MalformedMessage(
                f"rank {position} of {hello.engine!r} sends the layout of rank {layout.rank.index}: "
                "its ranks are not in order"
            )
    return layouts


def make_fit(local: Sequence[CacheLayout], role: Role) -> Fit:
    """The check that a handshake makes of a peer's payload: a pure function of both engines' layouts and roles.

    Both sides pair the same layouts in the same directions, so they agree. Nothing of the result is kept: whoever moves
    bytes pairs again for the ranks that it needs.
    """

    def fit(peer: Hello) -> None:
        remote = layouts_of(peer)
        if role is not Role.PREFILL and peer.role is not Role.DECODE:
            for layout in local:
                pair(remote, layout)
        if role is not Role.DECODE and peer.role is not Role.PREFILL:
            for layout in remote:
                pair(local, layout)

    return fit
