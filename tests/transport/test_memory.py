"""The memory transport is strict, and fails when it is told to."""

import numpy as np
import pytest

from kvferry.errors import PeerLost, TransferError
from kvferry.ids import PeerName
from kvferry.layout.description import MemoryKind, Region
from kvferry.testing.ends import LocalEnd
from kvferry.testing.transport_room import runs
from kvferry.transport.base import Operation, Polled
from kvferry.transport.memory import POISON, MemoryHub, MemoryTransport

NEAR, FAR = PeerName("near"), PeerName("far")
READ, WRITE = Operation.READ, Operation.WRITE


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


@pytest.fixture
def pair(hub: MemoryHub) -> tuple[LocalEnd, LocalEnd]:
    near, far = (LocalEnd(MemoryTransport(name, hub=hub), name, (1024,)) for name in (NEAR, FAR))
    near.transport.connect(FAR, far.transport.metadata(), far.regions)
    far.transport.connect(NEAR, near.transport.metadata(), near.regions)
    far.fill(0, bytes(range(256)) * 4)
    return near, far


def test_the_destination_is_poison_until_completion(pair: tuple[LocalEnd, LocalEnd]) -> None:
    near, far = pair
    near.transport.post(FAR, READ, [runs([0], [0], [100])])
    assert near.read(0, 0, 100) == bytes([POISON]) * 100
    near.transport.poll()
    assert near.read(0, 0, 100) == far.read(0, 0, 100)


def test_a_source_that_is_reused_early_arrives_wrong(pair: tuple[LocalEnd, LocalEnd]) -> None:
    near, far = pair
    near.fill(0, b"right")
    near.transport.post(FAR, WRITE, [runs([0], [0], [5])])
    near.fill(0, b"wrong")  # before the completion: a mistake of the caller, and it must show
    near.transport.poll()
    assert far.read(0, 0, 5) == b"wrong"


def test_the_kth_transfer_fails_half_copied_and_says_so(hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd]) -> None:
    near, far = pair
    hub.faults.fail_after, hub.faults.fail_next = 1, 1
    for _ in range(3):
        near.transport.post(FAR, READ, [runs([0, 100], [0, 100], [50, 50])], b"done")
    assert [done.error for done in near.transport.poll().completions] == [None, "a fault was asked for", None]
    assert len(far.transport.poll().messages) == 2, "no message follows a transfer that failed"


def test_a_failed_transfer_leaves_poison(hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd]) -> None:
    near, far = pair
    hub.faults.fail_next = 1
    near.transport.post(FAR, READ, [runs([0, 100], [0, 100], [50, 50])])
    near.transport.poll()
    assert near.read(0, 0, 50) == far.read(0, 0, 50)
    assert near.read(0, 100, 50) == bytes([POISON]) * 50


def test_held_transfers_end_when_they_are_let_go(hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd]) -> None:
    near, _ = pair
    hub.faults.hold = True
    near.transport.post(FAR, READ, [runs([0], [0], [100])])
    assert near.transport.poll() == near.transport.poll() == Polled()
    hub.faults.hold = False
    assert len(near.transport.poll().completions) == 1


def test_a_delay_counts_polls(hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd]) -> None:
    near, _ = pair
    hub.faults.delay_polls = 2
    near.transport.post(FAR, READ, [runs([0], [0], [100])])
    assert [len(near.transport.poll().completions) for _ in range(3)] == [0, 0, 1]


@pytest.mark.parametrize("lost", [NEAR, FAR])
def test_a_lost_peer_ends_held_transfers_and_is_lost_for_good(
    hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd], lost: PeerName
) -> None:
    near, far = pair
    hub.faults.hold = True
    near.transport.post(FAR, READ, [runs([0], [0], [100])])
    near.transport.send(FAR, b"on its way")
    hub.lose(lost)
    if lost == FAR:
        assert [done.error for done in near.transport.poll().completions] == [f"peer {FAR!r} is gone"]
    with pytest.raises(PeerLost):
        near.transport.post(FAR, READ, [runs([0], [0], [100])])
    with pytest.raises(PeerLost):
        near.transport.send(FAR, b"x")
    if lost == FAR:
        assert far.transport.poll().messages == ()


def test_messages_are_dropped_and_held_on_demand(hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd]) -> None:
    near, far = pair
    hub.faults.drop_messages = 1
    hub.faults.hold_messages = True
    near.transport.send(FAR, b"lost")
    near.transport.send(FAR, b"late")
    assert far.transport.poll().messages == ()
    hub.faults.hold_messages = False
    assert [message.body for message in far.transport.poll().messages] == [b"late"]


def test_a_hook_can_lose_the_peer_at_the_moment_of_the_post(hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd]) -> None:
    near, _ = pair
    hub.faults.on_post = lambda _sender, to, _operation: hub.lose(to)
    with pytest.raises(PeerLost):
        near.transport.post(FAR, READ, [runs([0], [0], [100])])


def test_memory_that_a_peer_let_go_of_is_not_touched(hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd]) -> None:
    near, far = pair
    hub.faults.hold = True
    near.transport.post(FAR, WRITE, [runs([0], [0], [100])])
    far.transport.close()
    far.fill(0, b"\x11" * 1024)
    assert near.transport.poll().completions[0].error == f"peer {FAR!r} is gone"
    assert far.read(0) == b"\x11" * 1024


def test_regions_that_the_peer_did_not_register_are_refused(pair: tuple[LocalEnd, LocalEnd], hub: MemoryHub) -> None:
    _, far = pair
    third = LocalEnd(MemoryTransport(PeerName("third"), hub=hub), PeerName("third"), (64,))
    with pytest.raises(TransferError, match="has not registered"):
        third.transport.connect(FAR, far.transport.metadata(), [Region(far.regions[0].address, 2048)])


def test_a_peer_on_another_hub_is_not_found(pair: tuple[LocalEnd, LocalEnd]) -> None:
    _, far = pair
    elsewhere = LocalEnd(MemoryTransport(NEAR, hub=MemoryHub()), NEAR, (64,))
    with pytest.raises(PeerLost, match="not on this hub"):
        elsewhere.transport.connect(FAR, far.transport.metadata(), far.regions)


def test_device_memory_is_refused(hub: MemoryHub) -> None:
    memory = np.zeros(64, np.uint8)
    with pytest.raises(TransferError, match="DRAM only"):
        MemoryTransport(NEAR, hub=hub).register([Region(memory.ctypes.data, 64, MemoryKind.VRAM)], [memory])


def test_early_messages_are_bounded(hub: MemoryHub) -> None:
    near, far = (LocalEnd(MemoryTransport(name, hub=hub), name, (64,)) for name in (NEAR, FAR))
    near.transport.connect(FAR, far.transport.metadata(), far.regions)
    for count in range(1500):
        near.transport.send(FAR, b"%d" % count)
    assert far.transport.poll().messages == ()
    far.transport.connect(NEAR, near.transport.metadata(), near.regions)
    bodies = [message.body for message in far.transport.poll().messages]
    assert bodies == [b"%d" % count for count in range(1500 - 1024, 1500)]
