"""How a receive ends without its bytes: it fails, waits for all that may still touch its blocks, and is released.

A failure is reported after the survivors have ended (R26): when no read of ours is in flight, and no prefill rank that
can still say so may write. It does not wait for longer than stated in `fail`. The blocks come back later: when each
prefill rank has stopped, or its lease and the quarantine are over.
"""

from kvferry.handoff.decode.outgoing import Outgoing
from kvferry.handoff.decode.receive import Receive, Source
from kvferry.handoff.leases import Heartbeats
from kvferry.handoff.orders import Failed
from kvferry.handoff.transitions import RECEIVE, SOURCE, ReceiveEvent, ReceiveState, SourceEvent, SourceState
from kvferry.settings import LeaseSettings

__all__ = ["WindDown"]

_NEVER = float("inf")
_REPORT_WITHIN_S = 1.0
"""Push: a failure is reported at most this long after it happened. A writer that lives answers within milliseconds."""


class WindDown:
    """Fails receives, and reports each failure once, in `failed`.

    `whole_prefix` says that what arrived of a failed hand-off can be used as a prefix: all cache groups keep every
    token.
    """

    def __init__(self, lease: LeaseSettings, heartbeats: Heartbeats, outgoing: Outgoing, *, whole_prefix: bool) -> None:
        self._lease = lease
        self._heartbeats = heartbeats
        self._outgoing = outgoing
        self._whole_prefix = whole_prefix
        self.failed: list[Failed] = []
        self.num_expired = 0
        """How many writers were given up because their lease was over."""

    def fail(self, receive: Receive, reason: str, now_s: float) -> None:
        """Ends a receive without its bytes; only the first failure counts.

        Starts nothing new, and revokes what prefill may write. What is in flight is waited for, in `advance`.
        """
        if receive.state is not ReceiveState.OPEN:
            return
        RECEIVE.move(receive, ReceiveEvent.FAIL)
        receive.reason = reason
        receive.disconnect_s = now_s + self._lease.quarantine_s
        receive.report_s = min(self._patience_s(receive, now_s), max(receive.deadline_s, now_s))
        for source in receive.sources.values():
            source.todo.clear()
            if not receive.pull and source.state is not SourceState.DONE:
                self._outgoing.revoke(receive, source, now_s)
                if source.state is SourceState.WAITING:
                    SOURCE.move(source, SourceEvent.STOP)  # it never had a lease: it cannot have written

    def _patience_s(self, receive: Receive, now_s: float) -> float:
        """Returns when to wait no longer for survivors: reads end by a disconnect; writers answer, or may be dead."""
        if receive.pull:
            return receive.disconnect_s
        return now_s + min(_REPORT_WITHIN_S, self._lease.renew_every_s)

    def advance(self, receive: Receive, now_s: float) -> float:
        """Reports a failed receive, and moves it to RELEASED when every source is finished. Returns when to look
        again."""
        due_s = self._stop_sources(receive, now_s)
        if receive.state is ReceiveState.FAILING and (not receive.num_survivors or now_s >= receive.report_s):
            RECEIVE.move(receive, ReceiveEvent.REPORT)
            arrived = receive.what_arrived(whole_prefix=self._whole_prefix)
            self.failed.append(Failed(receive.fetch.transfer, receive.fetch.request, receive.reason, arrived))
        if all(source.finished for source in receive.sources.values()):
            RECEIVE.move(receive, ReceiveEvent.RELEASE)
            return _NEVER
        return min(due_s, receive.report_s) if receive.state is ReceiveState.FAILING else due_s

    def _stop_sources(self, receive: Receive, now_s: float) -> float:
        """Stops each source as far as it can be stopped now. Returns when to look again."""
        due_s = _NEVER
        for source in receive.sources.values():
            if source.in_flight:
                due_s = min(due_s, self._end_reads(receive, source, now_s))
            elif not source.finished:
                stop = self._stop_reading if receive.pull else self._stop_writer
                due_s = min(due_s, stop(receive, source, now_s))
        return due_s

    def _end_reads(self, receive: Receive, source: Source, now_s: float) -> float:
        """Pull: gives up the connection of reads that have been in flight for too long. Returns when to look again."""
        if now_s < receive.disconnect_s:
            return receive.disconnect_s
        if not source.disconnected:
            source.disconnected = True
            self._outgoing.disconnect(source.peer)
        return _NEVER

    def _stop_reading(self, receive: Receive, source: Source, now_s: float) -> float:
        """Pull: drops the claim on one source that we do not read any more. Returns when to look again."""
        if now_s < source.safe_s:
            return source.safe_s
        SOURCE.move(source, SourceEvent.STOP)
        transfer, peer = receive.fetch.transfer, source.peer
        self._outgoing.drop(transfer, peer, receive.reason)
        self._heartbeats.remove(peer, transfer)
        return _NEVER

    def _stop_writer(self, receive: Receive, source: Source, now_s: float) -> float:
        """Push: waits for one source to stop, and gives it up when its lease is over. Returns when to look again."""
        if not source.disconnected and now_s >= source.quiet_s(self._lease):
            source.give_up(now_s, self._lease)
            self.num_expired += 1
            self._outgoing.disconnect(source.peer)
        if now_s >= (ends_s := source.quiet_s(self._lease)):
            SOURCE.move(source, SourceEvent.STOP)
            return _NEVER
        if now_s >= source.asked_s + self._lease.renew_every_s:
            self._outgoing.revoke(receive, source, now_s)
        return min(ends_s, source.asked_s + self._lease.renew_every_s)
