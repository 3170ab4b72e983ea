"""What one decode rank sends to prefill ranks: messages, and the reads that it starts."""

from kvferry.handoff.actions import Action, Disconnect, Peer, PostId, Send
from kvferry.handoff.decode.messages import make_claim, make_confirm, make_drop, make_read, make_register, make_revoke
from kvferry.handoff.decode.receive import Receive, Source
from kvferry.handoff.leases import Heartbeats
from kvferry.handoff.parts import Part
from kvferry.ids import TransferId

__all__ = ["Outgoing"]


class Outgoing:
    """Leaves messages and reads in `actions`, and remembers which receive each open read belongs to."""

    def __init__(self, num_ranks: int, ttl_s: float, heartbeats: Heartbeats) -> None:
        """`ttl_s` is how long the grants last that we give to writers; `heartbeats` numbers our claims."""
        self._num_ranks = num_ranks
        self._ttl_s = ttl_s
        self._heartbeats = heartbeats
        self._reads: dict[PostId, tuple[Receive, Source]] = {}
        self._num_reads = 0
        self.actions: list[Action] = []

    @property
    def num_open_reads(self) -> int:
        """The number of reads that were started and have not ended."""
        return len(self._reads)

    def ask(self, receive: Receive, source: Source, now_s: float) -> None:
        """Sends the claim or the registration; called again while no answer comes."""
        source.asked_s = now_s
        fetch, peer = receive.fetch, source.peer
        if receive.pull:
            seq = self._heartbeats.note_sent(peer, fetch.transfer, now_s)
            self.actions.append(Send(peer, make_claim(fetch, peer, self._num_ranks, seq)))
        else:
            self.actions.append(Send(peer, make_register(fetch, peer, self._num_ranks, self._ttl_s)))

    def confirm(self, receive: Receive, peer: Peer) -> None:
        """Tells a prefill rank that its part is here, so that it may free its blocks."""
        self.actions.append(Send(peer, make_confirm(receive.fetch.transfer, peer, self._num_ranks)))

    def drop(self, transfer: TransferId, peer: Peer, reason: str) -> None:
        """Pull: tells a prefill rank that it will not be read any more."""
        self.actions.append(Send(peer, make_drop(transfer, peer, self._num_ranks, reason)))

    def revoke(self, receive: Receive, source: Source, now_s: float) -> None:
        """Push: asks a prefill rank to stop writing; called again while no answer comes."""
        source.asked_s = now_s
        revoke = make_revoke(receive.fetch.transfer, source.peer, self._num_ranks, receive.reason)
        self.actions.append(Send(source.peer, revoke))

    def disconnect(self, peer: Peer) -> None:
        """Gives up the connection to a prefill rank, and what is in flight on it."""
        self.actions.append(Disconnect(peer))

    def read(self, receive: Receive, source: Source, part: Part) -> None:
        """Pull: starts to read one part; `read_ended` returns what it belongs to."""
        self._num_reads += 1
        post = PostId(2 * self._num_reads + 1)
        source.in_flight[post] = part
        self._reads[post] = (receive, source)
        self.actions.append(make_read(receive.fetch, source, part, post))

    def read_ended(self, post: PostId) -> tuple[Receive, Source, Part] | None:
        """Forgets a read that has ended. Returns what it belonged to, or None if it is not one of ours."""
        if (found := self._reads.pop(post, None)) is None:
            return None
        receive, source = found
        return receive, source, source.in_flight.pop(post)
