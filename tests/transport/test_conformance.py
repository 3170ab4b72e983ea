"""Both transports, and NIXL between two processes, satisfy the contract of the port. R12, R21, R27."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from kvferry.ids import PeerName
from kvferry.testing.ends import End, LocalEnd, ProcessEnd
from kvferry.testing.transport_room import LOCAL, REMOTE, THIRD
from kvferry.testing.transport_suite import TransportSuite
from kvferry.transport.base import Transport
from kvferry.transport.memory import MemoryHub, MemoryTransport
from kvferry.transport.registry import make_transport
from tests.harness.forked import fork_context


class TestMemory(TransportSuite):
    @pytest.fixture(autouse=True)
    def _hub(self) -> None:
        self.hub = MemoryHub()

    def make_end(self, name: PeerName, sizes: Sequence[int]) -> End:
        return LocalEnd(MemoryTransport(name, hub=self.hub), name, sizes)

    def make_bare(self) -> Transport:
        return MemoryTransport(PeerName("bare"), hub=self.hub)


@pytest.mark.process
class TestNixlInOneProcess(TransportSuite):
    def make_end(self, name: PeerName, sizes: Sequence[int]) -> End:
        return LocalEnd(make_transport("nixl", name), name, sizes)

    def make_bare(self) -> Transport:
        return make_transport("nixl", PeerName("bare"))


@pytest.mark.process
class TestNixlBetweenProcesses(TransportSuite):
    """The remote ends run in processes, which are kept between tests and get new transports and memory each time."""

    processes: ClassVar[dict[PeerName, ProcessEnd]]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _processes(cls) -> Iterator[None]:
        # Before the first test, so that no test starts a process that outlives it.
        cls.processes = {name: ProcessEnd("nixl", name, (64,), context=fork_context()) for name in (REMOTE, THIRD)}
        yield
        for end in cls.processes.values():
            end.close()

    def make_end(self, name: PeerName, sizes: Sequence[int]) -> End:
        if name == LOCAL:
            return LocalEnd(make_transport("nixl", name), name, sizes)
        self.processes[name].renew(name, sizes)
        return Kept(self.processes[name])

    def make_bare(self) -> Transport:
        return make_transport("nixl", PeerName("bare"))


class Kept:
    """A ProcessEnd whose process outlives the test."""

    def __init__(self, end: ProcessEnd) -> None:
        self._end = end
        self.name = end.name
        self.transport = end.transport
        self.regions = end.regions
        self.fill = end.fill
        self.read = end.read
        self.run = end.run

    def close(self) -> None:
        self.transport.close()
