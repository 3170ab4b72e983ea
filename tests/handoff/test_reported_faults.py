"""Kinds of fault that users of other systems have reported, with one small test each.

Each runs twice: with the mechanism that prevents the fault, and with that mechanism switched off, where it must fail.
"""

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.handoff.actions import MachineLimits
from kvferry.handoff.decode.receive import Receive, Source
from kvferry.handoff.rank_protocol import RankProtocol
from kvferry.settings import TransferMode
from kvferry.testing.simulator import mutants
from kvferry.wire.handoff_messages import Confirm, Renew, RenewAck
from tests.harness.handoff_pair import DEADLINE_S, QUARANTINE_S, STANDSTILL_S, TTL_S, Pair

PULL, PUSH = TransferMode.PULL, TransferMode.PUSH
Prepare = Callable[[RankProtocol], None]
Body = Callable[[Prepare], None]


def unchanged(core: RankProtocol) -> None:
    """Changes nothing."""


def twice(off: Prepare) -> Callable[[Body], Any]:
    """The test must pass, and must fail when `off` has been applied to every RankProtocol."""

    def decorate(body: Body) -> Any:
        @pytest.mark.parametrize("mechanism", ["on", "off"])
        def test(mechanism: str) -> None:
            if mechanism == "on":
                body(unchanged)
            else:
                with pytest.raises(AssertionError):
                    body(off)

        test.__doc__ = body.__doc__
        return test

    return decorate


def deaf_to_silence(core: RankProtocol) -> None:
    """A silent peer is not noticed."""
    original = core.decode._watch

    def watch(receive: Receive, now_s: float) -> float:
        for source in receive.sources.values():
            source.alive_at_s = now_s
        return original(receive, now_s)

    core.decode._watch = watch  # type: ignore[method-assign]


@twice(off=deaf_to_silence)
def test_prefill_dies_after_decode_registered(prepare: Prepare) -> None:
    """R27, R29: a lease without renewal ends; the blocks come back after the quarantine, not before."""
    pair = Pair(PUSH, prepare=prepare)
    pair.want("t")
    pair.deliver()
    pair.prefill.clear()
    pair.step(TTL_S + 0.5)
    (decode,) = pair.decode
    assert [failed.reason for failed in decode.report.failed] == ["prefill rank 0 gave no sign of life for 10 s"]
    assert not decode.report.released, "a write may still be in flight"
    assert decode.core.decode.quarantined_blocks == 4
    pair.step(STANDSTILL_S)
    assert decode.report.released == {"t"}
    assert decode.core.idle


@twice(off=mutants.abort_releases_at_once)
def test_decode_aborts_after_it_registered_and_its_blocks_are_wanted(prepare: Prepare) -> None:
    """R28: the blocks are not reused while prefill writes to them."""
    pair = Pair(PUSH, prepare=prepare)
    pair.want("t")
    pair.deliver()
    pair.offer("t")
    (prefill,), (decode,) = pair.prefill, pair.decode
    assert len(prefill.posts) == 1
    pair.cancel("t")
    pair.deliver()
    assert not decode.report.released
    pair.finish(prefill)
    pair.deliver()
    assert decode.report.released == {"t"}
    assert not decode.report.landed
    assert not decode.report.failed
    assert prefill.report.released == {"t"}


def lease_without_end(core: RankProtocol) -> None:
    """A holder never lets a lease end."""
    core.prefill._heartbeats.held_s = lambda sent_s, ttl_s: sent_s + 1e6  # type: ignore[method-assign]


@twice(off=lease_without_end)
def test_a_write_deferred_past_the_lease_is_not_started(prepare: Prepare) -> None:
    """R28: what became ready after the lease ended is not written; the last start leaves time for the write."""
    pair = Pair(PUSH, prepare=prepare)
    pair.want("t")
    pair.deliver()
    (prefill,) = pair.prefill
    pair.offer("t", 2, final=False)
    (post,) = prefill.posts
    assert post.not_after_s <= pair.now_s + TTL_S - prefill.queries.seconds
    prefill.posts.clear()
    pair.step(TTL_S - 0.05, only=lambda message: not isinstance(message, Renew | RenewAck))
    pair.offer("t", 4)
    assert not prefill.posts, "a write that ends after the lease was started"


@twice(off=mutants.first_failed_rank_frees)
def test_one_rank_fails_while_its_sibling_still_writes(prepare: Prepare) -> None:
    """R26, R28: the failure is reported once, after the sibling, and the blocks wait for the sibling."""
    pair = Pair(PUSH, prefill_ranks=2, prepare=prepare)
    pair.want("t")
    pair.deliver()
    pair.offer("t")
    (decode,) = pair.decode
    pair.finish(pair.prefill[0], error="the wire broke")
    pair.deliver()
    assert not decode.report.failed
    assert not decode.report.released
    pair.finish(pair.prefill[1])
    pair.deliver()
    assert decode.report.released == {"t"}
    assert len(decode.report.failed) == 1
    assert not decode.report.landed


@twice(off=lambda core: setattr(core.decode._keep_alives, "keep", lambda *args: None))
def test_decode_queued_longer_than_the_lease(prepare: Prepare) -> None:
    """R25: heartbeats for a request that waits in decode's queue keep prefill's blocks."""
    pair = Pair(PULL, prepare=prepare)
    pair.offer("t")
    pair.hold("t")
    pair.step(4 * TTL_S)
    (prefill,), (decode,) = pair.prefill, pair.decode
    assert not prefill.report.released
    pair.want("t")
    pair.finish_all()
    assert [landed.arrived.stop for landed in decode.report.landed] == [4]
    assert prefill.report.taken == {"t"}


@twice(off=mutants.completion_overwrites)
def test_two_completions_in_one_poll(prepare: Prepare) -> None:
    """R26: a failed completion is not hidden by a successful one, in either order."""
    for first_error, second_error in (("broken", None), (None, "broken")):
        pair = Pair(PULL, prepare=prepare)
        pair.want("t")
        pair.offer("t", 2, final=False)
        pair.deliver()
        pair.offer("t", 4)
        pair.deliver()
        (decode,) = pair.decode
        first, second = decode.posts
        now_s = pair.now_s
        decode.core.completed(first.post, first_error, now_s)
        decode.core.completed(second.post, second_error, now_s)
        pair.act()
        pair.deliver()
        assert not decode.report.landed
        assert [failed.reason for failed in decode.report.failed] == ["a read failed: broken"]
        assert decode.report.released == {"t"}


@twice(off=lambda core: setattr(core.decode._outgoing, "confirm", lambda *args: None))
def test_a_full_prefix_hit_frees_prefill_at_once(prepare: Prepare) -> None:
    """R30: nothing is moved, and prefill does not wait for its lease."""
    for mode in (PULL, PUSH):
        pair = Pair(mode, prepare=prepare)
        pair.offer("t")
        pair.want("t", 4, 4)
        pair.deliver()
        assert [len(landed.arrived) for landed in pair.decode[0].report.landed] == [0]
        assert pair.prefill[0].report.taken == {"t"}


class _CountsAll(set[int]):
    """A set that counts duplicates."""

    def __init__(self) -> None:
        super().__init__()
        self.num_added = 0

    def add(self, element: int) -> None:
        self.num_added += 1
        super().add(element)

    def __contains__(self, element: object) -> bool:
        return False

    def __len__(self) -> int:
        return self.num_added


def counts_duplicates(core: RankProtocol) -> None:
    """Notifications are counted, even duplicates."""
    original = core.decode._outgoing.ask

    def ask(receive: Receive, source: Source, now_s: float) -> None:
        source.parts = _CountsAll()
        original(receive, source, now_s)

    core.decode._outgoing.ask = ask  # type: ignore[method-assign]


@twice(off=counts_duplicates)
def test_duplicate_late_and_unknown_notifications(prepare: Prepare) -> None:
    """R27: a notification counts once, for the hand-off that it names, while that one is open."""
    pair = Pair(PUSH, prepare=prepare)
    pair.want("t")
    pair.deliver()
    pair.offer("t", 2, final=False)
    pair.offer("t", 4)
    (prefill,), (decode,) = pair.prefill, pair.decode
    last = prefill.posts[1]
    assert last.message is not None
    assert last.message.parts == 2
    peer = next(peer for peer in prefill.core._peers.values())
    for _ in range(2):  # The last part comes twice, and before the first one.
        pair.hand(prefill.name, peer, last.message)
    assert not decode.report.landed, "it landed without its first part"
    pair.finish(prefill)
    pair.deliver()
    assert len(decode.report.landed) == 1
    for message in (last.message, Confirm(to=peer.incarnation, transfer="stranger", ranks=1)):
        pair.hand(prefill.name, peer, message)
    pair.finish(prefill)
    pair.deliver()
    assert len(decode.report.landed) == 1
    assert prefill.report.taken == {"t"}


def whole_units_only(core: RankProtocol) -> None:
    """Only whole blocks are moved, even at the end."""
    core.prefill._queries.unit = 16  # type: ignore[attr-defined]
    original = core.prefill._progress

    def progress(grant: Any, consumer: Any, now_s: float) -> None:
        was, grant.final = grant.final, False
        original(grant, consumer, now_s)
        grant.final = was

    core.prefill._progress = progress  # type: ignore[method-assign]


@twice(off=whole_units_only)
def test_a_prompt_shorter_than_a_block(prepare: Prepare) -> None:
    """R36: its only, partial block arrives."""
    for mode in (PULL, PUSH):
        pair = Pair(mode, prepare=prepare)
        for rank in (*pair.prefill, *pair.decode):
            rank.queries.unit = 16
        pair.want("t", 0, 3, blocks=(5,))
        pair.deliver()
        pair.offer("t", 3, blocks=(1,))
        pair.finish_all()
        assert [landed.arrived.stop for landed in pair.decode[0].report.landed] == [3]
        assert pair.prefill[0].report.taken == {"t"}


def refuses_the_unknown(core: RankProtocol) -> None:
    """A transfer that prefill does not know yet is refused."""
    core.prefill._limits = MachineLimits(max_open=0)


@twice(off=refuses_the_unknown)
def test_preemption_on_prefill_before_the_handoff(prepare: Prepare) -> None:
    """R17, R33: decode came first; prefill begins late and in other blocks, and only what is offered counts."""
    for mode in (PULL, PUSH):
        pair = Pair(mode, prepare=prepare)
        pair.want("t")
        pair.deliver()
        pair.step(2 * TTL_S)
        pair.offer("t", blocks=(9, 10, 11, 12))
        pair.finish_all()
        assert len(pair.decode[0].report.landed) == 1
        assert pair.prefill[0].report.taken == {"t"}


@twice(off=mutants.old_incarnation)
def test_a_peer_that_restarts_on_the_same_address(prepare: Prepare) -> None:
    """I6: what the old incarnation sent, and what was meant for it, changes nothing; new hand-offs work."""
    pair = Pair(PULL, prepare=prepare)
    pair.want("old")
    to_old = list(pair.wires)
    pair.deliver()
    pair.restart_prefill()
    (prefill,), (decode,) = pair.prefill, pair.decode
    assert [failed.transfer for failed in decode.report.failed] == ["old"]
    pair.wires.clear()
    for sender, peer, message in to_old:
        pair.hand(sender, peer, message)
    assert prefill.core.num_stale == 1
    assert not prefill.core.prefill._grants
    assert not pair.wires
    pair.want("new")
    pair.offer("new")
    pair.finish_all()
    assert [landed.transfer for landed in decode.report.landed] == ["new"]


def never_cuts(core: RankProtocol) -> None:
    """A transfer gets all the time that it takes."""
    original = core.decode._wind_down.fail

    def fail(receive: Receive, reason: str, now_s: float) -> None:
        original(receive, reason, now_s)
        receive.disconnect_s = float("inf")
        receive.report_s = float("inf")

    core.decode._wind_down.fail = fail  # type: ignore[method-assign]


@twice(off=never_cuts)
def test_a_transfer_that_never_ends(prepare: Prepare) -> None:
    """R29, I3: it fails at the deadline; then the connection is closed, which ends the read; then blocks are free."""
    pair = Pair(PULL, prepare=prepare)
    pair.want("t")
    pair.offer("t")
    pair.deliver()
    (prefill,), (decode,) = pair.prefill, pair.decode
    assert len(decode.posts) == 1
    pair.step(DEADLINE_S + QUARANTINE_S + 0.5)
    assert [failed.reason for failed in decode.report.failed] == ["it has not ended 60 s after it began"]
    assert not decode.report.released
    assert decode.disconnected == [prefill.name]
    pair.finish(decode, error="disconnected")
    assert not decode.report.released, "bytes of a read that was given up may still come"
    pair.step(QUARANTINE_S + 0.5)
    assert decode.report.released == {"t"}
    assert prefill.report.released == {"t"}
    assert not prefill.report.taken
