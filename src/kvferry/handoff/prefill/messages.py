"""Builds what a prefill rank sends to decode ranks, and the posts by which it writes."""

from kvferry.handoff.actions import Peer, Post, PostId
from kvferry.handoff.parts import Part
from kvferry.handoff.prefill.grant import Consumer, Grant
from kvferry.transport.base import Operation
from kvferry.wire.handoff_messages import MAX_REASON_CHARS, Fail, Ready, Stopped, Wrote, to_wire

__all__ = ["make_fail", "make_ready", "make_stopped", "make_write", "make_wrote_nothing"]


def make_ready(grant: Grant, consumer: Consumer, ttl_s: float, digest: bytes) -> Ready:
    """Returns the message that grants (pull), and reports progress."""
    same_tokens, same_prompt = _agreed(consumer)
    return Ready(
        to=consumer.peer.incarnation,
        transfer=grant.transfer,
        tables=to_wire(grant.tables),
        start=grant.ready.start,
        stop=max(grant.ready.start, consumer.ready_stop(grant)),
        final=grant.final,
        ttl_s=ttl_s,
        ack=consumer.seq,
        digest=digest,
        note=_note(grant, consumer) if grant.final else b"",
        same_tokens=same_tokens,
        same_prompt=same_prompt,
    )


def _agreed(consumer: Consumer) -> tuple[int, bool]:
    """Returns what a grant says of the two prompts. A peer before protocol version 4 stated none, and reads nothing."""
    agreement = consumer.agreement
    return (-1, False) if agreement is None else (agreement.num_tokens, agreement.whole)


def _note(grant: Grant, consumer: Consumer) -> bytes:
    """Returns the note, which is for the whole prompt: it is not sent to a peer that asks for another one."""
    return grant.note if consumer.agreement is None or consumer.agreement.whole else b""


def make_fail(peer: Peer, transfer: str, reason: str, *, quiet: bool) -> Fail:
    """Returns the message that says why nothing is handed over. `quiet`: no write of ours is in flight."""
    return Fail(to=peer.incarnation, transfer=transfer, reason=reason[:MAX_REASON_CHARS], quiet=quiet)


def make_stopped(peer: Peer, transfer: str) -> Stopped:
    """Returns the message that gives a decode rank its blocks back (push)."""
    return Stopped(to=peer.incarnation, transfer=transfer)


def make_wrote_nothing(peer: Peer, transfer: str) -> Wrote:
    """Returns the message for a decode rank that needs no byte of ours (push)."""
    return Wrote(to=peer.incarnation, transfer=transfer, part=0, parts=1, owes=False)


def make_write(grant: Grant, consumer: Consumer, part: Part, post: PostId, write_s: float, digest: bytes) -> Post:
    """Returns the action that writes one part, with the message that follows its last byte."""
    same_tokens, same_prompt = _agreed(consumer)
    wrote = Wrote(
        to=consumer.peer.incarnation,
        transfer=grant.transfer,
        part=part.index,
        parts=consumer.cutter.num_parts if part.last else 0,
        start=grant.ready.start if part.last else part.tokens.start,
        stop=consumer.ready_stop(grant) if part.last else part.tokens.stop,
        digest=digest,
        note=_note(grant, consumer) if part.last else b"",
        same_tokens=same_tokens,
        same_prompt=same_prompt,
    )
    return Post(
        post=post,
        peer=consumer.peer,
        operation=Operation.WRITE,
        transfer=grant.transfer,
        local=grant.tables,
        remote=consumer.tables,
        tokens=part.tokens,
        whole=consumer.range(grant) if part.last else None,
        not_after_s=consumer.lease_s - write_s,
        until_s=consumer.lease_s,
        message=wrote,
    )
