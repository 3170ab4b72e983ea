"""Do the layouts of two engines fit: every rank that wants KV covered by the ranks that have it, in both directions."""

from collections.abc import Sequence

from kvferry.errors import IncompatiblePeer, MalformedMessage
from kvferry.handshake.exchange import Fit
from kvferry.layout.description import CacheKind, CacheLayout
from kvferry.layout.pairing import Pairing, pair
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
                _check_windows(pair(remote, layout))
        if role is not Role.DECODE and peer.role is not Role.PREFILL:
            for layout in remote:
                _check_windows(pair(local, layout))

    return fit


def _check_windows(pairing: Pairing) -> None:
    """Every token is kept by decode, and only a window of them by prefill: no prompt longer than the window could move.

    (A transfer would say so, each time.) Decode may know that only the window is needed: its group then names one.
    """
    for edge in pairing.edges:
        for part in edge.slices:
            source = edge.source.groups[edge.source.tensors[part.source_tensor].group]
            group = edge.destination.groups[edge.destination.tensors[part.destination_tensor].group]
            if source.kind is CacheKind.WINDOW and group.kind is CacheKind.FULL and group.window_tokens is None:
                raise IncompatiblePeer(
                    f"layer {part.layer!r} part {part.part!r}: decode keeps every token of it, and prefill the last "
                    f"{source.window_tokens} only; use the same cache allocator on both sides (hybrid on, or off)"
                )
