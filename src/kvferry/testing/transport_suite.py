"""What every transport must do. Subclass TransportSuite, say how an end is made, and pytest runs all of it.

class TestMine(TransportSuite):
    def make_end(self, name: PeerName, sizes: Sequence[int]) -> End:
        return LocalEnd(MyTransport(name), name, sizes)
"""

import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvferry.errors import PeerLost, TransferError
from kvferry.ids import PeerName
from kvferry.layout.blocks import Runs
from kvferry.layout.description import Region
from kvferry.testing.ends import End, LocalEnd
from kvferry.testing.transport_room import FAR, NEAR, SIZE, THIRD, Room, runs
from kvferry.transport.base import MAX_MESSAGE_BYTES, Operation, Polled, Received, Transport, WakeAddress

__all__ = ["LONG_S", "TransportSuite", "wait_after_wake", "wait_for_message", "wait_to_be_woken"]

READ, WRITE = Operation.READ, Operation.WRITE
LONG_S = 30.0
"""Far more than a test takes: a `wait` of this length that did not end early fails its test."""
_PAUSE = threading.Event()


class TransportSuite:
    """The conformance suite of kvferry.transport.base.Transport."""

    deadline_s = 20.0

    def make_end(self, name: PeerName, sizes: Sequence[int]) -> End:
        """A new end with registered memory of these sizes. Called once or more a test; the suite closes it."""
        raise NotImplementedError

    def make_bare(self) -> Transport:
        """A transport in this process that has registered nothing yet. The test closes it."""
        raise NotImplementedError

    @pytest.fixture
    def room(self) -> Iterator[Room]:
        room = Room(self.make_end, self.deadline_s)
        yield room
        for end in room.ends:
            end.close()

    # Bytes

    @pytest.mark.parametrize("operation", [READ, WRITE])
    def test_bytes_arrive_and_nothing_else_changes(self, room: Room, operation: Operation) -> None:
        near, far = room.pair()
        source, target = (far, near) if operation is READ else (near, far)
        kept, want = source.read(0), bytearray(target.read(0))
        want[300:400], want[5000:5001] = kept[100:200], kept[SIZE - 1 :]
        ticket = near.transport.post(FAR, operation, [runs([100, SIZE - 1], [300, 5000], [100, 1])])
        assert room.wait_completion(near, ticket).error is None
        assert target.read(0) == bytes(want)
        assert source.read(0) == kept

    @pytest.mark.parametrize("operation", [READ, WRITE])
    def test_thousands_of_scattered_runs(self, room: Room, operation: Operation) -> None:
        near, far = room.pair()
        source, target = (far, near) if operation is READ else (near, far)
        shuffled = np.random.default_rng(7).permutation(SIZE // 16) * 16
        piece = Runs(0, 0, np.arange(0, SIZE, 16), shuffled.astype(np.int64), np.full(SIZE // 16, 16))
        ticket = near.transport.post(FAR, operation, [piece])
        assert room.wait_completion(near, ticket).error is None
        moved = np.frombuffer(target.read(0), np.uint8).reshape(-1, 16)[shuffled // 16]
        assert moved.tobytes() == source.read(0)

    @pytest.mark.parametrize("operation", [READ, WRITE])
    def test_one_long_run(self, room: Room, operation: Operation) -> None:
        size = 8 << 20
        near, far = room.pair((size,))
        source, target = (far, near) if operation is READ else (near, far)
        ticket = near.transport.post(FAR, operation, [runs([0], [0], [size])])
        assert room.wait_completion(near, ticket).error is None
        assert target.read(0) == source.read(0)

    def test_pieces_between_several_regions_end_as_one(self, room: Room) -> None:
        near, far = room.pair((4096, 8192, 1024))
        pieces = [
            runs([0], [0], [1024], regions=(0, 2)),
            runs([4096, 0], [0, 2048], [2048, 100], regions=(1, 0)),
            runs([], [], [], regions=(0, 0)),
            runs([10], [20], [30], regions=(2, 1)),
        ]
        ticket = near.transport.post(FAR, READ, pieces, b"all of it")
        assert room.wait_completion(near, ticket).error is None
        assert near.read(2) == far.read(0, 0, 1024)
        assert near.read(0, 0, 2048) == far.read(1, 4096, 2048)
        assert near.read(0, 2048, 100) == far.read(1, 0, 100)
        assert near.read(1, 20, 30) == far.read(2, 10, 30)
        room.drive(lambda: bool(room.messages[FAR]))
        assert room.bodies(far) == [b"all of it"]

    def test_both_directions_and_many_transfers_at_once(self, room: Room) -> None:
        near, far = room.pair((SIZE, SIZE))
        tickets = [
            (end, end.transport.post(peer, operation, [runs([at], [at], [512], regions=(0, 1))]))
            for at in range(0, SIZE, 4096)
            for end, peer, operation in ((near, FAR, READ), (far, NEAR, READ))
        ]
        for end, ticket in tickets:
            assert room.wait_completion(end, ticket).error is None
        for at in range(0, SIZE, 4096):
            assert near.read(1, at, 512) == far.read(0, at, 512)
            assert far.read(1, at, 512) == near.read(0, at, 512)

    def test_two_peers_at_once(self, room: Room) -> None:
        near, far = room.pair()
        third = room.end(THIRD)
        third.fill(0, b"\x33" * SIZE)
        room.connect(near, third)
        tickets = [
            near.transport.post(FAR, READ, [runs([0], [0], [1000])], b"to far"),
            near.transport.post(THIRD, READ, [runs([0], [1000], [1000])], b"to third"),
        ]
        assert [room.wait_completion(near, ticket).error for ticket in tickets] == [None, None]
        assert near.read(0, 0, 2000) == far.read(0, 0, 1000) + b"\x33" * 1000
        room.drive(lambda: bool(room.messages[FAR] and room.messages[THIRD]))
        assert (room.bodies(far), room.bodies(third)) == ([b"to far"], [b"to third"])

    # Completions

    def test_a_ticket_is_its_own_and_completes_once_and_only_by_poll(self, room: Room) -> None:
        near, _ = room.pair()
        tickets = [near.transport.post(FAR, READ, [runs([0], [i], [1])]) for i in range(20)]
        assert len(set(tickets)) == 20
        assert room.completions[NEAR] == []
        for ticket in tickets:
            room.wait_completion(near, ticket)
        for _ in range(5):
            assert room.poll(near).completions == ()
        assert sorted(done.ticket for done in room.completions[NEAR]) == sorted(tickets)

    @pytest.mark.parametrize("operation", [READ, WRITE])
    def test_a_transfer_ends_although_the_peer_does_not_poll(self, room: Room, operation: Operation) -> None:
        # The peer's thread may be deep in a copy of its own, or in a forward pass.
        near, far = room.pair()
        ticket = near.transport.post(FAR, operation, [runs([0], [0], [SIZE])])
        assert room.wait_completion(near, ticket, near).error is None
        assert near.read(0) == far.read(0)

    def test_nothing_to_move_still_completes_and_tells(self, room: Room) -> None:
        near, far = room.pair()
        ticket = near.transport.post(FAR, READ, [], b"a full hit")
        assert room.wait_completion(near, ticket).error is None
        room.drive(lambda: bool(room.messages[FAR]))
        assert room.bodies(far) == [b"a full hit"]

    # Messages

    @pytest.mark.parametrize("operation", [READ, WRITE])
    def test_the_message_comes_after_the_last_byte(self, room: Room, operation: Operation) -> None:
        # R27
        near, far = room.pair((1 << 20,))
        for round_ in range(5):
            filling = bytes([round_ + 1]) * (1 << 20)
            (far if operation is READ else near).fill(0, filling)
            near.transport.post(FAR, operation, [runs([0], [0], [1 << 20])], b"done %d" % round_)
            heard = round_ + 1
            room.drive(lambda heard=heard: len(room.messages[FAR]) >= heard)  # type: ignore[misc]
            assert (near if operation is READ else far).read(0) == filling
        assert room.bodies(far) == [b"done %d" % round_ for round_ in range(5)]

    def test_messages_keep_their_order_and_their_bytes(self, room: Room) -> None:
        near, far = room.pair()
        random = np.random.default_rng(3)
        sent = [random.bytes(size) for size in (1, 0, 8, 9000, MAX_MESSAGE_BYTES, 8192, 40, 65000) * 25]
        sent[0] = b"\x00\xff\x00"
        for body in sent:
            near.transport.send(FAR, body)
        room.drive(lambda: len(room.messages[FAR]) == len(sent))
        assert room.bodies(far) == sent
        assert {message.peer for message in room.messages[FAR]} == {NEAR}

    def test_messages_both_ways(self, room: Room) -> None:
        near, far = room.pair()
        near.transport.send(FAR, b"ask")
        far.transport.send(NEAR, b"answer")
        room.drive(lambda: bool(room.messages[FAR] and room.messages[NEAR]))
        assert room.messages == {NEAR: [Received(FAR, b"answer")], FAR: [Received(NEAR, b"ask")]}

    def test_a_message_that_is_too_long_is_refused(self, room: Room) -> None:
        near, _ = room.pair()
        for attempt in (
            lambda: near.transport.send(FAR, bytes(MAX_MESSAGE_BYTES + 1)),
            lambda: near.transport.post(FAR, READ, [], bytes(MAX_MESSAGE_BYTES + 1)),
        ):
            with pytest.raises(TransferError, match=f"{MAX_MESSAGE_BYTES + 1} bytes"):
                attempt()

    def test_a_message_that_comes_before_we_know_its_sender_waits(self, room: Room) -> None:
        # R27: the peer heard of us first.
        near, far = room.end(NEAR), room.end(FAR)
        near.transport.connect(FAR, far.transport.metadata(), far.regions)
        near.transport.send(FAR, b"early")
        near.transport.send(FAR, b"second")
        for _ in range(20):
            assert room.poll(far).messages == ()
            _PAUSE.wait(0.001)
        far.transport.connect(NEAR, near.transport.metadata(), near.regions)
        near.transport.send(FAR, b"third")
        room.drive(lambda: len(room.messages[FAR]) == 3)
        assert room.bodies(far) == [b"early", b"second", b"third"]

    # Waiting

    @pytest.mark.parametrize("before", [True, False], ids=["sent-before", "sent-meanwhile"])
    def test_wait_ends_when_a_message_comes(self, room: Room, before: bool) -> None:
        near, far = room.pair()
        if before:
            near.transport.send(FAR, b"come")
            assert far.run(wait_for_message) < LONG_S / 3
            return
        took_s: list[float] = []
        waiter = threading.Thread(target=lambda: took_s.append(far.run(wait_for_message)))
        waiter.start()
        near.transport.send(FAR, b"come")
        waiter.join(LONG_S)
        assert took_s, "no message came"
        assert took_s[0] < LONG_S / 3

    @pytest.mark.parametrize("operation", [READ, WRITE])
    def test_wait_ends_when_a_transfer_ends(self, room: Room, operation: Operation) -> None:
        near, _ = room.pair()
        ticket = near.transport.post(FAR, operation, [runs([0], [0], [SIZE])])
        began_s = time.monotonic()
        while not any(done.ticket == ticket for done in room.poll(near).completions):
            near.transport.wait(LONG_S, look_every_s=LONG_S)
        assert time.monotonic() - began_s < LONG_S / 3

    def test_wait_ends_when_another_thread_wakes_it(self, room: Room) -> None:
        _, far = room.pair()
        assert far.run(wait_to_be_woken) < LONG_S / 3

    def test_a_wake_before_the_wait_ends_it_at_once(self, room: Room) -> None:
        near, far = room.pair()
        for end in (near, far):
            assert end.run(wait_after_wake) < LONG_S / 3

    def test_wait_ends_after_its_timeout(self, room: Room) -> None:
        near, far = room.pair()
        for end in (near, far):
            for timeout_s in (0.0, 0.0001, 0.02):
                end.transport.wait(timeout_s)
                end.transport.wait(timeout_s, look_every_s=LONG_S)
            assert room.poll(end) == Polled()

    def test_waking_a_transport_that_is_closed_does_nothing(self, room: Room) -> None:
        near, _ = room.pair()
        near.transport.wake()
        near.transport.close()
        near.transport.wake()

    def test_peers_can_wake_each_other_where_the_transport_says_how(self, room: Room) -> None:
        near, far = room.pair()
        for end, peer in ((near, far), (far, near)):
            address = end.transport.listen("127.0.0.1")
            if address is not None:
                peer.transport.set_wake_address(end.name, address)
        for number in range(3):
            near.transport.send(FAR, b"come %d" % number)
            assert far.run(wait_for_message) < LONG_S / 3
            far.transport.send(NEAR, b"go %d" % number)
            assert near.run(wait_for_message) < LONG_S / 3
        near.transport.set_wake_address(PeerName("nobody"), WakeAddress("127.0.0.1", 1, b"x"))

    # Refusals

    def test_an_unknown_peer_is_lost(self, room: Room) -> None:
        near, _ = room.pair()
        with pytest.raises(PeerLost, match="nobody"):
            near.transport.post(PeerName("nobody"), READ, [runs([0], [0], [1])])
        with pytest.raises(PeerLost, match="nobody"):
            near.transport.send(PeerName("nobody"), b"x")
        near.transport.disconnect(PeerName("nobody"))

    @pytest.mark.parametrize("operation", [READ, WRITE])
    @pytest.mark.parametrize(
        ("bad", "says"),
        [
            (runs([SIZE - 9], [0], [10]), "leaves region 0"),
            (runs([0], [SIZE], [1]), "leaves region 0"),
            (runs([-1], [0], [1]), "leaves region 0"),
            (runs([0], [-SIZE], [1]), "leaves region 0"),
            (runs([0], [0], [0]), "a run of 0 bytes"),
            (runs([0], [0], [-5]), "a run of -5 bytes"),
            (runs([2**63 - 1], [0], [2**63 - 1]), "leaves region 0"),
            (runs([0], [0], [2**63 - 1]), "leaves region 0"),
            (runs([0, 1, 0], [0, 0, 0], [1, SIZE, 1]), "run 1 "),
            (runs([0], [0], [1], regions=(1, 0)), "region 1 does not exist"),
            (runs([0], [0], [1], regions=(0, -1)), "region -1 does not exist"),
            (runs([0, 0], [0], [1]), "unequal length"),
        ],
    )
    def test_a_run_outside_its_region_is_refused(self, room: Room, operation: Operation, bad: Runs, says: str) -> None:
        near, far = room.pair()
        before = near.read(0), far.read(0)
        with pytest.raises(TransferError, match=says):
            near.transport.post(FAR, operation, [runs([0], [0], [64]), bad])
        for _ in range(5):
            assert room.poll(near) == Polled()
        assert (near.read(0), far.read(0)) == before
        good = near.transport.post(FAR, operation, [runs([0], [0], [64])])
        assert room.wait_completion(near, good).error is None

    def test_metadata_of_another_peer_is_refused_and_changes_nothing(self, room: Room) -> None:
        near, far = room.pair()
        third = room.end(THIRD)
        for liar, metadata in (
            (THIRD, far.transport.metadata()),
            (THIRD, b""),
            (THIRD, b"no transport says this"),
            (THIRD, third.transport.metadata()[:-9]),
        ):
            with pytest.raises(TransferError):
                near.transport.connect(liar, metadata, third.regions)
            with pytest.raises(PeerLost):
                near.transport.send(liar, b"x")
        ticket = near.transport.post(FAR, READ, [runs([0], [0], [100])])
        assert room.wait_completion(near, ticket).error is None
        room.connect(near, third)
        ticket = near.transport.post(THIRD, READ, [runs([0], [0], [100])])
        assert room.wait_completion(near, ticket).error is None

    def test_connecting_twice_is_refused(self, room: Room) -> None:
        near, far = room.pair()
        with pytest.raises(TransferError, match="connected already"):
            near.transport.connect(FAR, far.transport.metadata(), far.regions)
        ticket = near.transport.post(FAR, READ, [runs([0], [0], [100])])
        assert room.wait_completion(near, ticket).error is None

    def test_registering_twice_is_refused(self, room: Room) -> None:
        near = room.end(NEAR)
        with pytest.raises(TransferError):
            near.transport.register(near.regions, ())

    # Ends

    def test_disconnect_ends_what_was_posted_with_an_error_once(self, room: Room) -> None:
        near, far = room.pair((8 << 20,))
        tickets = [near.transport.post(FAR, READ, [runs([0], [0], [8 << 20])], b"never") for _ in range(3)]
        near.transport.disconnect(FAR)
        for ticket in tickets:
            assert "disconnected" in (room.wait_completion(near, ticket).error or "")
        with pytest.raises(PeerLost):
            near.transport.post(FAR, READ, [runs([0], [0], [1])])
        with pytest.raises(PeerLost):
            near.transport.send(FAR, b"x")
        near.transport.disconnect(FAR)
        for _ in range(20):
            room.poll(near)
            assert room.poll(far).messages == ()
        assert len(room.completions[NEAR]) == 3

    def test_a_peer_can_be_connected_again(self, room: Room) -> None:
        near, far = room.pair()
        for round_ in range(5):
            near.transport.disconnect(FAR)
            far.transport.disconnect(NEAR)
            room.connect(near, far)
            ticket = near.transport.post(FAR, READ, [runs([0], [round_], [100])], b"again %d" % round_)
            assert room.wait_completion(near, ticket).error is None
            heard = round_ + 1
            room.drive(lambda heard=heard: len(room.messages[FAR]) >= heard)  # type: ignore[misc]
        assert room.bodies(far) == [b"again %d" % round_ for round_ in range(5)]

    def test_disconnecting_one_peer_leaves_the_others(self, room: Room) -> None:
        near, far = room.pair()
        third = room.end(THIRD)
        room.connect(near, third)
        kept = near.transport.post(FAR, READ, [runs([0], [0], [100])])
        near.transport.disconnect(THIRD)
        assert room.wait_completion(near, kept).error is None
        again = near.transport.post(FAR, READ, [runs([0], [0], [100])])
        assert room.wait_completion(near, again).error is None
        assert near.read(0, 0, 100) == far.read(0, 0, 100)

    def test_a_peer_that_closes_is_lost_and_nothing_hangs(self, room: Room) -> None:
        near, far = room.pair()
        far.transport.close()
        errors: list[str] = []

        def noticed() -> bool:
            try:
                ticket = near.transport.post(FAR, READ, [runs([0], [0], [SIZE])])
            except (PeerLost, TransferError) as error:
                errors.append(str(error))
            else:
                errors.extend(filter(None, [room.wait_completion(near, ticket, near).error]))
            return bool(errors)

        room.drive(noticed, near)
        near.transport.disconnect(FAR)

    def test_close_is_idempotent_and_final(self, room: Room) -> None:
        near, _ = room.pair()
        near.transport.post(FAR, READ, [runs([0], [0], [SIZE])])
        near.transport.close()
        near.transport.close()
        assert near.transport.poll() == Polled()
        with pytest.raises((TransferError, PeerLost)):
            near.transport.post(FAR, READ, [runs([0], [0], [1])])
        with pytest.raises((TransferError, PeerLost)):
            near.transport.send(FAR, b"x")
        near.transport.disconnect(FAR)

    # Memory

    def test_owners_live_until_close(self, room: Room) -> None:
        near = room.end(NEAR)

        class Owner:
            pass

        owner = Owner()
        seen = weakref.ref(owner)
        transport = self.make_bare()
        memory = np.zeros(64, np.uint8)
        transport.register([Region(memory.ctypes.data, 64)], [owner])
        del owner
        assert seen() is not None, "the transport must hold the owners: freed memory gives wrong bytes, and no error"
        transport.close()
        assert seen() is None, "after close nothing may hold the owners"
        near.transport.close()

    def test_one_allocation_may_be_named_twice(self, room: Room) -> None:
        # R21
        transport = self.make_bare()
        memory = np.zeros(4096, np.uint8)
        region = Region(memory.ctypes.data, 4096)
        try:
            transport.register([region, region], [memory])
            assert transport.metadata()
        finally:
            transport.close()

    @pytest.mark.parametrize(("offset", "size"), [(0, 100), (4000, 4096), (100, 10)])
    def test_overlapping_regions_are_refused(self, room: Room, offset: int, size: int) -> None:
        transport = self.make_bare()
        memory = np.zeros(8192, np.uint8)
        regions = [Region(memory.ctypes.data, 4096), Region(memory.ctypes.data + offset, size)]
        try:
            with pytest.raises(TransferError, match="overlap"):
                transport.register(regions, [memory])
        finally:
            transport.close()

    def test_a_transport_without_memory_may_still_send(self, room: Room) -> None:
        near, far = room.end(NEAR, ()), room.end(FAR)
        room.connect(near, far)
        near.transport.send(FAR, b"hello")
        room.drive(lambda: bool(room.messages[FAR]))
        assert room.bodies(far) == [b"hello"]
        assert list(itertools.chain(*room.completions.values())) == []


# These run where the end is; each returns how long it waited.


def wait_for_message(end: LocalEnd) -> float:
    """Waits for one message, in sleeps that are far too long unless something ends them."""
    began_s = time.monotonic()
    while not end.transport.poll().messages:
        end.transport.wait(LONG_S)
    return time.monotonic() - began_s


def wait_to_be_woken(end: LocalEnd) -> float:
    """Waits while another thread calls `wake`."""
    woken = threading.Event()

    def wake() -> None:
        while not woken.wait(0.001):
            end.transport.wake()

    waker = threading.Thread(target=wake)
    began_s = time.monotonic()
    waker.start()
    end.transport.wait(LONG_S, look_every_s=LONG_S)
    woken.set()
    waker.join()
    return time.monotonic() - began_s


def wait_after_wake(end: LocalEnd) -> float:
    """Calls `wake`, and then waits."""
    began_s = time.monotonic()
    end.transport.wake()
    end.transport.wait(LONG_S, look_every_s=LONG_S)
    return time.monotonic() - began_s
