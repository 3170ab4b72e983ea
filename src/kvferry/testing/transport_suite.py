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
from kvferry.testing.transport_room import LOCAL, REMOTE, SIZE, THIRD, Room, runs
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
        local, remote = room.pair()
        source, target = (remote, local) if operation is READ else (local, remote)
        kept, want = source.read(0), bytearray(target.read(0))
        want[300:400], want[5000:5001] = kept[100:200], kept[SIZE - 1 :]
        ticket = local.transport.post(REMOTE, operation, [runs([100, SIZE - 1], [300, 5000], [100, 1])])
        assert room.wait_completion(local, ticket).error is None
        assert target.read(0) == bytes(want)
        assert source.read(0) == kept

    @pytest.mark.parametrize("operation", [READ, WRITE])
    def test_thousands_of_scattered_runs(self, room: Room, operation: Operation) -> None:
        local, remote = room.pair()
        source, target = (remote, local) if operation is READ else (local, remote)
        shuffled = np.random.default_rng(7).permutation(SIZE // 16) * 16
        piece = Runs(0, 0, np.arange(0, SIZE, 16), shuffled.astype(np.int64), np.full(SIZE // 16, 16))
        ticket = local.transport.post(REMOTE, operation, [piece])
        assert room.wait_completion(local, ticket).error is None
        moved = np.frombuffer(target.read(0), np.uint8).reshape(-1, 16)[shuffled // 16]
        assert moved.tobytes() == source.read(0)

    @pytest.mark.parametrize("operation", [READ, WRITE])
    def test_one_long_run(self, room: Room, operation: Operation) -> None:
        size = 8 << 20
        local, remote = room.pair((size,))
        source, target = (remote, local) if operation is READ else (local, remote)
        ticket = local.transport.post(REMOTE, operation, [runs([0], [0], [size])])
        assert room.wait_completion(local, ticket).error is None
        assert target.read(0) == source.read(0)

    def test_pieces_between_several_regions_end_as_one(self, room: Room) -> None:
        local, remote = room.pair((4096, 8192, 1024))
        pieces = [
            runs([0], [0], [1024], regions=(0, 2)),
            runs([4096, 0], [0, 2048], [2048, 100], regions=(1, 0)),
            runs([], [], [], regions=(0, 0)),
            runs([10], [20], [30], regions=(2, 1)),
        ]
        ticket = local.transport.post(REMOTE, READ, pieces, b"all of it")
        assert room.wait_completion(local, ticket).error is None
        assert local.read(2) == remote.read(0, 0, 1024)
        assert local.read(0, 0, 2048) == remote.read(1, 4096, 2048)
        assert local.read(0, 2048, 100) == remote.read(1, 0, 100)
        assert local.read(1, 20, 30) == remote.read(2, 10, 30)
        room.drive(lambda: bool(room.messages[REMOTE]))
        assert room.bodies(remote) == [b"all of it"]

    def test_both_directions_and_many_transfers_at_once(self, room: Room) -> None:
        local, remote = room.pair((SIZE, SIZE))
        tickets = [
            (end, end.transport.post(peer, operation, [runs([at], [at], [512], regions=(0, 1))]))
            for at in range(0, SIZE, 4096)
            for end, peer, operation in ((local, REMOTE, READ), (remote, LOCAL, READ))
        ]
        for end, ticket in tickets:
            assert room.wait_completion(end, ticket).error is None
        for at in range(0, SIZE, 4096):
            assert local.read(1, at, 512) == remote.read(0, at, 512)
            assert remote.read(1, at, 512) == local.read(0, at, 512)

    def test_two_peers_at_once(self, room: Room) -> None:
        local, remote = room.pair()
        third = room.end(THIRD)
        third.fill(0, b"\x33" * SIZE)
        room.connect(local, third)
        tickets = [
            local.transport.post(REMOTE, READ, [runs([0], [0], [1000])], b"to far"),
            local.transport.post(THIRD, READ, [runs([0], [1000], [1000])], b"to third"),
        ]
        assert [room.wait_completion(local, ticket).error for ticket in tickets] == [None, None]
        assert local.read(0, 0, 2000) == remote.read(0, 0, 1000) + b"\x33" * 1000
        room.drive(lambda: bool(room.messages[REMOTE] and room.messages[THIRD]))
        assert (room.bodies(remote), room.bodies(third)) == ([b"to far"], [b"to third"])

    # Completions

    def test_a_ticket_is_its_own_and_completes_once_and_only_by_poll(self, room: Room) -> None:
        local, _ = room.pair()
        tickets = [local.transport.post(REMOTE, READ, [runs([0], [i], [1])]) for i in range(20)]
        assert len(set(tickets)) == 20
        assert room.completions[LOCAL] == []
        for ticket in tickets:
            room.wait_completion(local, ticket)
        for _ in range(5):
            assert room.poll(local).completions == ()
        assert sorted(done.ticket for done in room.completions[LOCAL]) == sorted(tickets)

    @pytest.mark.parametrize("operation", [READ, WRITE])
    def test_a_transfer_ends_although_the_peer_does_not_poll(self, room: Room, operation: Operation) -> None:
        # The peer's thread may be deep in a copy of its own, or in a forward pass.
        local, remote = room.pair()
        ticket = local.transport.post(REMOTE, operation, [runs([0], [0], [SIZE])])
        assert room.wait_completion(local, ticket, local).error is None
        assert local.read(0) == remote.read(0)

    def test_nothing_to_move_still_completes_and_tells(self, room: Room) -> None:
        local, remote = room.pair()
        ticket = local.transport.post(REMOTE, READ, [], b"a full hit")
        assert room.wait_completion(local, ticket).error is None
        room.drive(lambda: bool(room.messages[REMOTE]))
        assert room.bodies(remote) == [b"a full hit"]

    # Messages

    @pytest.mark.parametrize("operation", [READ, WRITE])
    def test_the_message_comes_after_the_last_byte(self, room: Room, operation: Operation) -> None:
        # R27
        local, remote = room.pair((1 << 20,))
        for round_ in range(5):
            filling = bytes([round_ + 1]) * (1 << 20)
            (remote if operation is READ else local).fill(0, filling)
            local.transport.post(REMOTE, operation, [runs([0], [0], [1 << 20])], b"done %d" % round_)
            received = round_ + 1
            room.drive(lambda received=received: len(room.messages[REMOTE]) >= received)  # type: ignore[misc]
            assert (local if operation is READ else remote).read(0) == filling
        assert room.bodies(remote) == [b"done %d" % round_ for round_ in range(5)]

    def test_messages_keep_their_order_and_their_bytes(self, room: Room) -> None:
        local, remote = room.pair()
        random = np.random.default_rng(3)
        sent = [random.bytes(size) for size in (1, 0, 8, 9000, MAX_MESSAGE_BYTES, 8192, 40, 65000) * 25]
        sent[0] = b"\x00\xff\x00"
        for body in sent:
            local.transport.send(REMOTE, body)
        room.drive(lambda: len(room.messages[REMOTE]) == len(sent))
        assert room.bodies(remote) == sent
        assert {message.peer for message in room.messages[REMOTE]} == {LOCAL}

    def test_messages_both_ways(self, room: Room) -> None:
        local, remote = room.pair()
        local.transport.send(REMOTE, b"ask")
        remote.transport.send(LOCAL, b"answer")
        room.drive(lambda: bool(room.messages[REMOTE] and room.messages[LOCAL]))
        assert room.messages == {LOCAL: [Received(REMOTE, b"answer")], REMOTE: [Received(LOCAL, b"ask")]}

    def test_a_message_that_is_too_long_is_refused(self, room: Room) -> None:
        local, _ = room.pair()
        for attempt in (
            lambda: local.transport.send(REMOTE, bytes(MAX_MESSAGE_BYTES + 1)),
            lambda: local.transport.post(REMOTE, READ, [], bytes(MAX_MESSAGE_BYTES + 1)),
        ):
            with pytest.raises(TransferError, match=f"{MAX_MESSAGE_BYTES + 1} bytes"):
                attempt()

    def test_a_message_that_comes_before_we_know_its_sender_waits(self, room: Room) -> None:
        # R27: the peer knows us first.
        local, remote = room.end(LOCAL), room.end(REMOTE)
        local.transport.connect(REMOTE, remote.transport.metadata(), remote.regions)
        local.transport.send(REMOTE, b"early")
        local.transport.send(REMOTE, b"second")
        for _ in range(20):
            assert room.poll(remote).messages == ()
            _PAUSE.wait(0.001)
        remote.transport.connect(LOCAL, local.transport.metadata(), local.regions)
        local.transport.send(REMOTE, b"third")
        room.drive(lambda: len(room.messages[REMOTE]) == 3)
        assert room.bodies(remote) == [b"early", b"second", b"third"]

    # Waiting

    @pytest.mark.parametrize("before", [True, False], ids=["sent-before", "sent-meanwhile"])
    def test_wait_ends_when_a_message_comes(self, room: Room, before: bool) -> None:
        local, remote = room.pair()
        if before:
            local.transport.send(REMOTE, b"come")
            assert remote.run(wait_for_message) < LONG_S / 3
            return
        took_s: list[float] = []
        waiter = threading.Thread(target=lambda: took_s.append(remote.run(wait_for_message)))
        waiter.start()
        local.transport.send(REMOTE, b"come")
        waiter.join(LONG_S)
        assert took_s, "no message came"
        assert took_s[0] < LONG_S / 3

    @pytest.mark.parametrize("operation", [READ, WRITE])
    def test_wait_ends_when_a_transfer_ends(self, room: Room, operation: Operation) -> None:
        local, _ = room.pair()
        ticket = local.transport.post(REMOTE, operation, [runs([0], [0], [SIZE])])
        began_s = time.monotonic()
        while not any(done.ticket == ticket for done in room.poll(local).completions):
            local.transport.wait(LONG_S, look_every_s=LONG_S)
        assert time.monotonic() - began_s < LONG_S / 3

    def test_wait_ends_when_another_thread_wakes_it(self, room: Room) -> None:
        _, remote = room.pair()
        assert remote.run(wait_to_be_woken) < LONG_S / 3

    def test_a_wake_before_the_wait_ends_it_at_once(self, room: Room) -> None:
        local, remote = room.pair()
        for end in (local, remote):
            assert end.run(wait_after_wake) < LONG_S / 3

    def test_wait_ends_after_its_timeout(self, room: Room) -> None:
        local, remote = room.pair()
        for end in (local, remote):
            for timeout_s in (0.0, 0.0001, 0.02):
                end.transport.wait(timeout_s)
                end.transport.wait(timeout_s, look_every_s=LONG_S)
            assert room.poll(end) == Polled()

    def test_waking_a_transport_that_is_closed_does_nothing(self, room: Room) -> None:
        local, _ = room.pair()
        local.transport.wake()
        local.transport.close()
        local.transport.wake()

    def test_peers_can_wake_each_other_where_the_transport_says_how(self, room: Room) -> None:
        local, remote = room.pair()
        for end, peer in ((local, remote), (remote, local)):
            address = end.transport.listen("127.0.0.1")
            if address is not None:
                peer.transport.set_wake_address(end.name, address)
        for number in range(3):
            local.transport.send(REMOTE, b"come %d" % number)
            assert remote.run(wait_for_message) < LONG_S / 3
            remote.transport.send(LOCAL, b"go %d" % number)
            assert local.run(wait_for_message) < LONG_S / 3
        local.transport.set_wake_address(PeerName("nobody"), WakeAddress("127.0.0.1", 1, b"x"))

    # Refusals

    def test_an_unknown_peer_is_lost(self, room: Room) -> None:
        local, _ = room.pair()
        with pytest.raises(PeerLost, match="nobody"):
            local.transport.post(PeerName("nobody"), READ, [runs([0], [0], [1])])
        with pytest.raises(PeerLost, match="nobody"):
            local.transport.send(PeerName("nobody"), b"x")
        local.transport.disconnect(PeerName("nobody"))

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
        local, remote = room.pair()
        before = local.read(0), remote.read(0)
        with pytest.raises(TransferError, match=says):
            local.transport.post(REMOTE, operation, [runs([0], [0], [64]), bad])
        for _ in range(5):
            assert room.poll(local) == Polled()
        assert (local.read(0), remote.read(0)) == before
        good = local.transport.post(REMOTE, operation, [runs([0], [0], [64])])
        assert room.wait_completion(local, good).error is None

    def test_metadata_of_another_peer_is_refused_and_changes_nothing(self, room: Room) -> None:
        local, remote = room.pair()
        third = room.end(THIRD)
        for liar, metadata in (
            (THIRD, remote.transport.metadata()),
            (THIRD, b""),
            (THIRD, b"no transport says this"),
            (THIRD, third.transport.metadata()[:-9]),
        ):
            with pytest.raises(TransferError):
                local.transport.connect(liar, metadata, third.regions)
            with pytest.raises(PeerLost):
                local.transport.send(liar, b"x")
        ticket = local.transport.post(REMOTE, READ, [runs([0], [0], [100])])
        assert room.wait_completion(local, ticket).error is None
        room.connect(local, third)
        ticket = local.transport.post(THIRD, READ, [runs([0], [0], [100])])
        assert room.wait_completion(local, ticket).error is None

    def test_connecting_twice_is_refused(self, room: Room) -> None:
        local, remote = room.pair()
        with pytest.raises(TransferError, match="connected already"):
            local.transport.connect(REMOTE, remote.transport.metadata(), remote.regions)
        ticket = local.transport.post(REMOTE, READ, [runs([0], [0], [100])])
        assert room.wait_completion(local, ticket).error is None

    def test_registering_twice_is_refused(self, room: Room) -> None:
        local = room.end(LOCAL)
        with pytest.raises(TransferError):
            local.transport.register(local.regions, ())

    # Ends

    def test_disconnect_ends_what_was_posted_with_an_error_once(self, room: Room) -> None:
        local, remote = room.pair((8 << 20,))
        tickets = [local.transport.post(REMOTE, READ, [runs([0], [0], [8 << 20])], b"never") for _ in range(3)]
        local.transport.disconnect(REMOTE)
        for ticket in tickets:
            assert "disconnected" in (room.wait_completion(local, ticket).error or "")
        with pytest.raises(PeerLost):
            local.transport.post(REMOTE, READ, [runs([0], [0], [1])])
        with pytest.raises(PeerLost):
            local.transport.send(REMOTE, b"x")
        local.transport.disconnect(REMOTE)
        for _ in range(20):
            room.poll(local)
            assert room.poll(remote).messages == ()
        assert len(room.completions[LOCAL]) == 3

    def test_a_peer_can_be_connected_again(self, room: Room) -> None:
        local, remote = room.pair()
        for round_ in range(5):
            local.transport.disconnect(REMOTE)
            remote.transport.disconnect(LOCAL)
            room.connect(local, remote)
            ticket = local.transport.post(REMOTE, READ, [runs([0], [round_], [100])], b"again %d" % round_)
            assert room.wait_completion(local, ticket).error is None
            received = round_ + 1
            room.drive(lambda received=received: len(room.messages[REMOTE]) >= received)  # type: ignore[misc]
        assert room.bodies(remote) == [b"again %d" % round_ for round_ in range(5)]

    def test_disconnecting_one_peer_leaves_the_others(self, room: Room) -> None:
        local, remote = room.pair()
        third = room.end(THIRD)
        room.connect(local, third)
        kept = local.transport.post(REMOTE, READ, [runs([0], [0], [100])])
        local.transport.disconnect(THIRD)
        assert room.wait_completion(local, kept).error is None
        again = local.transport.post(REMOTE, READ, [runs([0], [0], [100])])
        assert room.wait_completion(local, again).error is None
        assert local.read(0, 0, 100) == remote.read(0, 0, 100)

    def test_a_peer_that_closes_is_lost_and_nothing_hangs(self, room: Room) -> None:
        local, remote = room.pair()
        remote.transport.close()
        errors: list[str] = []

        def noticed() -> bool:
            try:
                ticket = local.transport.post(REMOTE, READ, [runs([0], [0], [SIZE])])
            except (PeerLost, TransferError) as error:
                errors.append(str(error))
            else:
                errors.extend(filter(None, [room.wait_completion(local, ticket, local).error]))
            return bool(errors)

        room.drive(noticed, local)
        local.transport.disconnect(REMOTE)

    def test_close_is_idempotent_and_final(self, room: Room) -> None:
        local, _ = room.pair()
        local.transport.post(REMOTE, READ, [runs([0], [0], [SIZE])])
        local.transport.close()
        local.transport.close()
        assert local.transport.poll() == Polled()
        with pytest.raises((TransferError, PeerLost)):
            local.transport.post(REMOTE, READ, [runs([0], [0], [1])])
        with pytest.raises((TransferError, PeerLost)):
            local.transport.send(REMOTE, b"x")
        local.transport.disconnect(REMOTE)

    # Memory

    def test_owners_live_until_close(self, room: Room) -> None:
        local = room.end(LOCAL)

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
        local.transport.close()

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
        local, remote = room.end(LOCAL, ()), room.end(REMOTE)
        room.connect(local, remote)
        local.transport.send(REMOTE, b"hello")
        room.drive(lambda: bool(room.messages[REMOTE]))
        assert room.bodies(remote) == [b"hello"]
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
