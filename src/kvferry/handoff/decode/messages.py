"""Builds what a decode rank sends to prefill ranks, and the posts by which it reads."""

from kvferry.handoff.actions import Peer, Post, PostId
from kvferry.handoff.decode.receive import Source
from kvferry.handoff.orders import Fetch
from kvferry.handoff.parts import Part
from kvferry.ids import TransferId
from kvferry.layout.blocks import TokenRange
from kvferry.transport.base import Operation
from kvferry.wire.handoff_messages import MAX_REASON_CHARS, Claim, Confirm, Drop, Register, Revoke, to_wire
from kvferry.wire.prompt_digest import StatedPrompt
from kvferry.wire.versions import BINDING

__all__ = ["make_claim", "make_confirm", "make_drop", "make_read", "make_register", "make_revoke"]


def make_claim(fetch: Fetch, peer: Peer, num_ranks: int, seq: int) -> Claim:
    """Returns the message that asks to read (pull)."""
    return Claim(
        to=peer.incarnation,
        transfer=fetch.transfer,
        ranks=num_ranks,
        start=fetch.wanted.start,
        stop=fetch.wanted.stop,
        seq=seq,
        prompt=_prompt(fetch, peer),
    )


def _prompt(fetch: Fetch, peer: Peer) -> StatedPrompt | None:
    return fetch.prompt if peer.protocol >= BINDING else None


def make_register(fetch: Fetch, peer: Peer, num_ranks: int, ttl_s: float) -> Register:
    """Returns the message that lets a prefill rank write (push)."""
    return Register(
        to=peer.incarnation,
        transfer=fetch.transfer,
        ranks=num_ranks,
        start=fetch.wanted.start,
        stop=fetch.wanted.stop,
        tables=to_wire(fetch.tables),
        ttl_s=ttl_s,
        prompt=_prompt(fetch, peer),
    )


def make_confirm(transfer: TransferId, peer: Peer, num_ranks: int) -> Confirm:
    """Returns the message that gives a prefill rank its blocks back."""
    return Confirm(to=peer.incarnation, transfer=transfer, ranks=num_ranks)


def make_drop(transfer: TransferId, peer: Peer, num_ranks: int, reason: str) -> Drop:
    """Returns the message that ends a claim."""
    return Drop(to=peer.incarnation, transfer=transfer, ranks=num_ranks, reason=reason[:MAX_REASON_CHARS])


def make_revoke(transfer: TransferId, peer: Peer, num_ranks: int, reason: str) -> Revoke:
    """Returns the message that ends a registration."""
    return Revoke(to=peer.incarnation, transfer=transfer, ranks=num_ranks, reason=reason[:MAX_REASON_CHARS])


def make_read(fetch: Fetch, source: Source, part: Part, post: PostId) -> Post:
    """Returns the action that reads one part."""
    whole = TokenRange(fetch.wanted.start, min(fetch.wanted.stop, source.ready_stop))
    return Post(
        post=post,
        peer=source.peer,
        operation=Operation.READ,
        transfer=fetch.transfer,
        local=fetch.tables,
        remote=source.tables,
        tokens=part.tokens,
        whole=whole if part.last else None,
        not_after_s=source.lease_s,
        until_s=source.lease_s,
    )
