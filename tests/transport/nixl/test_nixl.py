"""What the conformance suite cannot test: NIXL's own errors, peers that die, and leftovers."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from kvferry.errors import ConfigError, FerryError, PeerLost, TransferError
from kvferry.ids import PeerName
from kvferry.testing.ends import LocalEnd, ProcessEnd
from kvferry.testing.transport_room import runs
from kvferry.transport.base import Completion, Operation
from kvferry.transport.nixl.nixl import NixlTransport
from kvferry.transport.nixl.nixl_errors import MEANING, bindings, mapped
from tests.harness.forked import fork_context
from tests.harness.until import until

pytestmark = pytest.mark.process

LOCAL, REMOTE = PeerName("near/i1/0"), PeerName("far/i1/0")
BIG = 64 << 20
TCP = {"UCX_TLS": "tcp,self"}


def test_every_exception_of_the_library_is_mapped() -> None:
    raised = {
        name for name, value in vars(bindings).items() if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert raised == set(MEANING)


@pytest.mark.parametrize("name", [*MEANING, "RuntimeError"])
def test_a_mapped_exception_becomes_ours(name: str) -> None:
    foreign = RuntimeError if name == "RuntimeError" else getattr(bindings, name)
    with pytest.raises(FerryError, match=r"^NIXL cannot do it: because$") as caught, mapped("do it"):
        raise foreign("because")
    assert type(caught.value) in (PeerLost, TransferError, ConfigError)


def test_an_exception_that_is_not_the_librarys_passes() -> None:
    with pytest.raises(KeyError), mapped("do it"):
        raise KeyError("ours")


def poll_until_completion(end: LocalEnd) -> Completion:
    found: Sequence[Completion] = until(lambda: end.transport.poll().completions)
    return found[0]


@pytest.fixture
def remote() -> Iterator[ProcessEnd]:
    end = ProcessEnd("nixl", REMOTE, (BIG,), context=fork_context())
    yield end
    end.close()


@pytest.fixture
def local(remote: ProcessEnd) -> Iterator[LocalEnd]:
    end = LocalEnd(NixlTransport(LOCAL, settle_s=0.2), LOCAL, (BIG,))
    end.transport.connect(REMOTE, remote.transport.metadata(), remote.regions)
    remote.transport.connect(LOCAL, end.transport.metadata(), end.regions)
    yield end
    end.close()


def test_a_peer_that_was_killed_is_lost_at_once(local: LocalEnd, remote: ProcessEnd) -> None:
    remote.kill()

    def is_lost() -> bool:
        try:
            local.transport.send(REMOTE, b"are you there?")
        except PeerLost:
            return True
        return False

    until(is_lost)
    with pytest.raises(PeerLost, match=REMOTE):
        local.transport.post(REMOTE, Operation.READ, [runs([0], [0], [100])])
    local.transport.disconnect(REMOTE)


def test_a_peer_killed_during_a_copy_ends_it_with_an_error(local: LocalEnd, remote: ProcessEnd) -> None:
    # Whenever the kill comes, the transfers end, and none of them with success after the peer is gone.
    stop = threading.Timer(0.05, remote.kill)
    stop.start()
    outcomes: list[str | None] = []
    end_s = time.monotonic() + 20
    while not outcomes or outcomes[-1] is None:
        assert time.monotonic() < end_s, "a killed peer must be noticed"
        try:
            local.transport.post(REMOTE, Operation.READ, [runs([0], [0], [BIG])])
        except (PeerLost, TransferError) as error:
            outcomes.append(str(error))
        else:
            outcomes.append(poll_until_completion(local).error)
    stop.join()


def post_read(end: LocalEnd, num_bytes: int) -> None:
    end.transport.post(REMOTE, Operation.READ, [runs([0], [0], [num_bytes])])


def drain(end: LocalEnd) -> list[str | None]:
    return [done.error for done in end.transport.poll().completions]


def disconnect(end: LocalEnd) -> None:
    end.transport.disconnect(REMOTE)


@pytest.fixture
def over_tcp() -> Iterator[tuple[ProcessEnd, ProcessEnd]]:
    """Makes a transport over TCP, which needs the peer's help for each byte, so a stopped peer stalls transfers."""
    local = ProcessEnd("nixl", LOCAL, (BIG,), options={"settle_s": 0.3}, environment=TCP, context=fork_context())
    remote = ProcessEnd("nixl", REMOTE, (BIG,), environment=TCP, context=fork_context())
    local.transport.connect(REMOTE, remote.transport.metadata(), remote.regions)
    remote.transport.connect(LOCAL, local.transport.metadata(), local.regions)
    local.run(post_read, 100)
    until(lambda: local.run(drain) == [None])
    yield local, remote
    local.close()
    remote.close()


def stall(local: ProcessEnd, remote: ProcessEnd) -> None:
    assert remote.process.pid is not None
    os.kill(remote.process.pid, signal.SIGSTOP)
    local.run(post_read, BIG)
    for _ in range(20):
        assert local.run(drain) == []


def test_over_tcp_a_killed_peer_ends_the_transfer(over_tcp: tuple[ProcessEnd, ProcessEnd]) -> None:
    local, remote = over_tcp
    stall(local, remote)
    remote.kill()
    errors: list[str | None] = until(lambda: local.run(drain))
    assert len(errors) == 1
    assert "NIXL cannot finish" in (errors[0] or "")


def test_disconnecting_a_peer_that_hangs_ends_its_transfers(over_tcp: tuple[ProcessEnd, ProcessEnd]) -> None:
    local, remote = over_tcp
    stall(local, remote)
    local.run(disconnect)
    errors: list[str | None] = until(lambda: local.run(drain))
    assert errors == [f"peer {REMOTE!r} was disconnected"]
    remote.kill()


def census() -> tuple[set[str], int]:
    """Returns what this process holds: open files by kind, and its threads."""
    return set(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def resident_mib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def two_ends() -> tuple[LocalEnd, LocalEnd]:
    ends = [LocalEnd(NixlTransport(name), name, (1 << 16,)) for name in (LOCAL, REMOTE)]
    for one, other in (ends, ends[::-1]):
        one.transport.connect(other.name, other.transport.metadata(), other.regions)
    return ends[0], ends[1]


def test_close_leaves_no_thread_no_file_and_no_shared_memory() -> None:
    for end in two_ends():
        end.close()  # the library opens a few things once and keeps them
    shared, before = set(os.listdir("/dev/shm")), census()
    ends = two_ends()
    ends[0].transport.post(REMOTE, Operation.READ, [runs([0], [0], [100])])
    assert census()[1] > before[1], "the progress threads are what this test looks at"
    for end in ends:
        end.close()
    assert census() == before
    assert {name for name in os.listdir("/dev/shm") if "ucx" in name} <= shared


def test_ten_thousand_transfers_leave_nothing() -> None:
    local, remote = two_ends()
    piece = runs(list(range(0, 640, 64)), list(range(0, 640, 64)), [32] * 10)

    def transfers(count: int) -> None:
        for _ in range(count):
            local.transport.post(REMOTE, Operation.READ, [piece], b"done")
            poll_until_completion(local)
            remote.transport.poll()

    transfers(1000)
    before, resident_before = census(), resident_mib()
    transfers(10_000)
    assert census() == before
    # At most 20 bytes per transfer: a handle of ten descriptors would be more.
    assert resident_mib() - resident_before <= 4
    local.close()
    remote.close()


def test_peers_that_come_and_go_leave_nothing() -> None:
    # R24
    local = LocalEnd(NixlTransport(LOCAL), LOCAL, (1 << 16,))
    remote = ProcessEnd("nixl", REMOTE, (1 << 16,), context=fork_context())

    def visit(name: PeerName) -> None:
        remote.renew(name, (1 << 16,))
        local.transport.connect(name, remote.transport.metadata(), remote.regions)
        local.transport.post(name, Operation.READ, [runs([0], [0], [100])], b"hello")
        assert poll_until_completion(local).error is None
        local.transport.disconnect(name)

    for incarnation in range(3):
        visit(PeerName(f"far/warm{incarnation}/0"))
    before = len(census()[0])
    for incarnation in range(30):
        visit(PeerName(f"far/i{incarnation}/0"))
    until(lambda: len(census()[0]) <= before)
    local.close()
    remote.close()
