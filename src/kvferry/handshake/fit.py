"""Checks that the layouts of two engines fit: each rank that needs KV is covered by the ranks that have it."""

from collections.abc import Callable, Sequence

from kvferry.errors import IncompatiblePeer, MalformedMessage
from kvferry.handshake.exchange import Fit
from kvferry.layout.description import CacheKind, CacheLayout
from kvferry.layout.pairing import Pairing, pair
from kvferry.settings import Role
from kvferry.wire.hello import Hello
from kvferry.wire.layout_codec import decode_layout

__all__ = ["layouts_of", "make_fetch_obstacle", "make_fit"]


def layouts_of(hello: Hello) -> tuple[CacheLayout, ...]:
    """Returns the checked layouts of all ranks. Raises MalformedMessage, also if the ranks are not in order."""
    layouts = tuple(decode_layout(rank.layout) for rank in hello.ranks)
    for position, layout in enumerate(layouts):
        if layout.rank.index != position:
            raise MalformedMessage(
                f"rank {position} of {hello.engine!r} sends the layout of rank {layout.rank.index}: "
                "the ranks must be in the order of their index"
            )
    return layouts


def make_fit(local: Sequence[CacheLayout], role: Role) -> Fit:
    """Returns the check that a handshake makes of a peer's payload. It depends only on both sides' layouts and roles.

    Both sides pair the same layouts, in both directions that their roles allow, so they agree. The pairings are not
    kept: the worker halves pair again, for the ranks that they need.
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


def make_fetch_obstacle(local: Sequence[CacheLayout]) -> Callable[[Hello], str]:
    """Returns a function that says why this engine cannot fetch prefixes from a peer, whatever their roles; "" if it
    can. It raises nothing for a payload that `fit` has accepted."""

    def obstacle(peer: Hello) -> str:
        remote = layouts_of(peer)
        try:
            for layout in local:
                _check_windows(pair(remote, layout))
        except IncompatiblePeer as error:
            return str(error)
        return ""

    return obstacle


def _check_windows(pairing: Pairing) -> None:
    """Raises IncompatiblePeer if decode keeps every token of a layer, but prefill keeps only a window of them.

    No prompt longer than the window could be handed over; without this check every such transfer would fail. It is fine
    if decode's group has a window, too, as then only the window is needed.
    """
    for edge in pairing.edges:
        for part in edge.slices:
            source = edge.source.groups[edge.source.tensors[part.source_tensor].group]
            group = edge.destination.groups[edge.destination.tensors[part.destination_tensor].group]
            if source.kind is CacheKind.WINDOW and group.kind is CacheKind.FULL and group.window_tokens is None:
                raise IncompatiblePeer(
                    f"layer {part.layer!r} part {part.part!r}: decode keeps every token of it, but prefill keeps only "
                    f"the last {source.window_tokens}; use the same cache allocator on both sides (with vLLM: "
                    "--disable-hybrid-kv-cache-manager on both or on neither)"
                )
