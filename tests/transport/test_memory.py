"""The memory transport is strict, and fails when a test asks for it."""

import numpy as np
import pytest

from kvferry.errors import PeerLost, TransferError
from kvferry.ids import PeerName
from kvferry.layout.description import MemoryKind, Region
from kvferry.testing.ends import LocalEnd
from kvferry.testing.transport_room import runs
from kvferry.transport.base import Operation, Polled
from kvferry.transport.memory import POISON, MemoryHub, MemoryTransport

LOCAL, REMOTE = PeerName("local"), PeerName("remote")
READ, WRITE = Operation.READ, Operation.WRITE


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


@pytest.fixture
def pair(hub: MemoryHub) -> tuple[LocalEnd, LocalEnd]:
    local, remote = (LocalEnd(MemoryTransport(name, hub=hub), name, (1024,)) for name in (LOCAL, REMOTE))
    local.transport.connect(REMOTE, remote.transport.metadata(), remote.regions)
    remote.transport.connect(LOCAL, local.transport.metadata(), local.regions)
    remote.fill(0, bytes(range(256)) * 4)
    return local, remote


def test_the_destination_is_poison_until_completion(pair: tuple[LocalEnd, LocalEnd]) -> None:
    local, remote = pair
    local.transport.post(REMOTE, READ, [runs([0], [0], [100])])
    assert local.read(0, 0, 100) == bytes([POISON]) * 100
    local.transport.poll()
    assert local.read(0, 0, 100) == remote.read(0, 0, 100)


def test_a_source_that_is_reused_early_arrives_wrong(pair: tuple[LocalEnd, LocalEnd]) -> None:
    local, remote = pair
    local.fill(0, b"right")
    local.transport.post(REMOTE, WRITE, [runs([0], [0], [5])])
    local.fill(0, b"wrong")  # before the completion: a mistake of the caller, which must become visible
    local.transport.poll()
    assert remote.read(0, 0, 5) == b"wrong"


def test_the_kth_transfer_fails_half_copied_and_says_so(hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd]) -> None:
    local, remote = pair
    hub.faults.fail_after, hub.faults.fail_next = 1, 1
    for _ in range(3):
        local.transport.post(REMOTE, READ, [runs([0, 100], [0, 100], [50, 50])], b"done")
    assert [done.error for done in local.transport.poll().completions] == [None, "a fault was asked for", None]
    assert len(remote.transport.poll().messages) == 2, "no message follows a transfer that failed"


def test_a_failed_transfer_leaves_poison(hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd]) -> None:
    local, remote = pair
    hub.faults.fail_next = 1
    local.transport.post(REMOTE, READ, [runs([0, 100], [0, 100], [50, 50])])
    local.transport.poll()
    assert local.read(0, 0, 50) == remote.read(0, 0, 50)
    assert local.read(0, 100, 50) == bytes([POISON]) * 50


def test_held_transfers_end_when_they_are_released(hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd]) -> None:
    local, _ = pair
    hub.faults.hold = True
    local.transport.post(REMOTE, READ, [runs([0], [0], [100])])
    assert local.transport.poll() == local.transport.poll() == Polled()
    hub.faults.hold = False
    assert len(local.transport.poll().completions) == 1


def test_a_delay_counts_polls(hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd]) -> None:
    local, _ = pair
    hub.faults.delay_polls = 2
    local.transport.post(REMOTE, READ, [runs([0], [0], [100])])
    assert [len(local.transport.poll().completions) for _ in range(3)] == [0, 0, 1]


@pytest.mark.parametrize("lost", [LOCAL, REMOTE])
def test_a_lost_peer_ends_held_transfers_and_stays_lost(
    hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd], lost: PeerName
) -> None:
    local, remote = pair
    hub.faults.hold = True
    local.transport.post(REMOTE, READ, [runs([0], [0], [100])])
    local.transport.send(REMOTE, b"on its way")
    hub.lose(lost)
    if lost == REMOTE:
        assert [done.error for done in local.transport.poll().completions] == [f"peer {REMOTE!r} is gone"]
    with pytest.raises(PeerLost):
        local.transport.post(REMOTE, READ, [runs([0], [0], [100])])
    with pytest.raises(PeerLost):
        local.transport.send(REMOTE, b"x")
    if lost == REMOTE:
        assert remote.transport.poll().messages == ()


def test_messages_are_dropped_and_held_on_demand(hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd]) -> None:
    local, remote = pair
    hub.faults.drop_messages = 1
    hub.faults.hold_messages = True
    local.transport.send(REMOTE, b"lost")
    local.transport.send(REMOTE, b"late")
    assert remote.transport.poll().messages == ()
    hub.faults.hold_messages = False
    assert [message.body for message in remote.transport.poll().messages] == [b"late"]


def test_a_hook_can_lose_the_peer_at_the_moment_of_the_post(hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd]) -> None:
    local, _ = pair
    hub.faults.on_post = lambda _sender, to, _operation: hub.lose(to)
    with pytest.raises(PeerLost):
        local.transport.post(REMOTE, READ, [runs([0], [0], [100])])


def test_memory_that_a_peer_has_deregistered_is_not_touched(hub: MemoryHub, pair: tuple[LocalEnd, LocalEnd]) -> None:
    local, remote = pair
    hub.faults.hold = True
    local.transport.post(REMOTE, WRITE, [runs([0], [0], [100])])
    remote.transport.close()
    remote.fill(0, b"\x11" * 1024)
    assert local.transport.poll().completions[0].error == f"peer {REMOTE!r} is gone"
    assert remote.read(0) == b"\x11" * 1024


def test_regions_that_the_peer_did_not_register_are_refused(pair: tuple[LocalEnd, LocalEnd], hub: MemoryHub) -> None:
    _, remote = pair
    third = LocalEnd(MemoryTransport(PeerName("third"), hub=hub), PeerName("third"), (64,))
    with pytest.raises(TransferError, match="has not registered"):
        third.transport.connect(REMOTE, remote.transport.metadata(), [Region(remote.regions[0].address, 2048)])


def test_a_peer_on_another_hub_is_not_found(pair: tuple[LocalEnd, LocalEnd]) -> None:
    _, remote = pair
    elsewhere = LocalEnd(MemoryTransport(LOCAL, hub=MemoryHub()), LOCAL, (64,))
    with pytest.raises(PeerLost, match="not on this hub"):
        elsewhere.transport.connect(REMOTE, remote.transport.metadata(), remote.regions)


def test_device_memory_is_refused(hub: MemoryHub) -> None:
    memory = np.zeros(64, np.uint8)
    with pytest.raises(TransferError, match="DRAM only"):
        MemoryTransport(LOCAL, hub=hub).register([Region(memory.ctypes.data, 64, MemoryKind.VRAM)], [memory])


def test_early_messages_are_bounded(hub: MemoryHub) -> None:
    local, remote = (LocalEnd(MemoryTransport(name, hub=hub), name, (64,)) for name in (LOCAL, REMOTE))
    local.transport.connect(REMOTE, remote.transport.metadata(), remote.regions)
    for count in range(1500):
        local.transport.send(REMOTE, b"%d" % count)
    assert remote.transport.poll().messages == ()
    remote.transport.connect(LOCAL, local.transport.metadata(), local.regions)
    bodies = [message.body for message in remote.transport.poll().messages]
    assert bodies == [b"%d" % count for count in range(1500 - 1024, 1500)]
