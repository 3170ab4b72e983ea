"""Messages come out in the order in which they were sent, and a stranger cannot fill our memory."""

import random

from kvferry.ids import PeerName
from kvferry.transport import ordering
from kvferry.transport.ordering import Inbox, Outbox

PEER = PeerName("far/i1/0")


def test_any_arrival_order_comes_out_in_order() -> None:
    for seed in range(50):
        frames = [Outbox().frame(b"")]
        outbox = Outbox()
        frames = [outbox.frame(b"%d" % place) for place in range(40)]
        random.Random(seed).shuffle(frames)
        inbox = Inbox()
        inbox.admit(PEER)
        taken: list[bytes] = []
        for frame in frames:
            inbox.put(PEER, frame)
            taken.extend(body for _, body in inbox.take())
        assert taken == [b"%d" % place for place in range(40)], f"seed {seed}"


def test_a_gap_holds_back_what_follows() -> None:
    outbox, inbox = Outbox(), Inbox()
    inbox.admit(PEER)
    first, second, third = (outbox.frame(body) for body in (b"1", b"2", b"3"))
    inbox.put(PEER, third)
    inbox.put(PEER, first)
    assert inbox.take() == [(PEER, b"1")]
    inbox.put(PEER, second)
    assert inbox.take() == [(PEER, b"2"), (PEER, b"3")]


def test_a_message_that_comes_twice_is_delivered_once() -> None:
    outbox, inbox = Outbox(), Inbox()
    inbox.admit(PEER)
    frame, later = outbox.frame(b"once"), outbox.frame(b"next")
    for arrived in (frame, frame, later, later, frame):
        inbox.put(PEER, arrived)
    assert inbox.take() == [(PEER, b"once"), (PEER, b"next")]
    assert inbox.num_dropped == 3


def test_a_new_connection_starts_again_and_the_old_one_is_over() -> None:
    old, new, inbox = Outbox(), Outbox(), Inbox()
    inbox.admit(PEER)
    inbox.put(PEER, old.frame(b"old"))
    late = old.frame(b"late")
    inbox.put(PEER, new.frame(b"new"))
    inbox.put(PEER, late)
    assert inbox.take() == [(PEER, b"old"), (PEER, b"new")]
    assert inbox.num_dropped == 1


def test_a_frame_without_a_header_is_dropped() -> None:
    inbox = Inbox()
    inbox.admit(PEER)
    inbox.put(PEER, b"short")
    assert inbox.take() == []
    assert inbox.num_dropped == 1


def test_messages_far_ahead_are_not_kept() -> None:
    outbox, inbox = Outbox(), Inbox()
    inbox.admit(PEER)
    frames = [outbox.frame(b"x") for _ in range(ordering.MAX_AHEAD + 5)]
    for frame in frames[1:]:
        inbox.put(PEER, frame)
    assert inbox.num_dropped == 5


def test_a_forgotten_peer_leaves_nothing() -> None:
    outbox, inbox = Outbox(), Inbox()
    inbox.admit(PEER)
    inbox.put(PEER, outbox.frame(b"x"))
    inbox.forget(PEER)
    assert inbox.take() == []
    inbox.admit(PEER)
    assert inbox.take() == []


def test_strangers_are_bounded_in_number_and_in_bytes() -> None:
    inbox = Inbox()
    names = [PeerName(f"stranger{n}") for n in range(ordering.MAX_STRANGERS + 3)]
    for name in names:
        inbox.put(name, Outbox().frame(b"let me in"))
    for name in names:
        inbox.admit(name)
    assert [name for name, _ in inbox.take()] == names[3:]

    loud, outbox = PeerName("loud"), Outbox()
    for _ in range(ordering.MAX_HELD_BYTES // 60_000 + 2):
        inbox.put(loud, outbox.frame(bytes(60_000)))
    inbox.admit(loud)
    assert sum(len(body) for _, body in inbox.take()) < ordering.MAX_HELD_BYTES
