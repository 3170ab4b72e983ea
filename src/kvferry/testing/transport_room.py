"""What the transport conformance suite works with: two or three ends, and all that they have reported."""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.ids import PeerName
from kvferry.layout.blocks import Runs
from kvferry.testing.ends import End
from kvferry.transport.base import Completion, Polled, Received, Ticket

__all__ = ["LOCAL", "REMOTE", "SIZE", "THIRD", "Room", "runs"]

SIZE = 1 << 16
LOCAL, REMOTE, THIRD = PeerName("near/i1/0"), PeerName("far/i1/0"), PeerName("third/i1/0")
_PAUSE = threading.Event()


def runs(
    source: Sequence[int], destination: Sequence[int], length: Sequence[int], *, regions: tuple[int, int] = (0, 0)
) -> Runs:
    """Makes byte runs from lists."""
    as_array = [np.array(values, dtype=np.int64) for values in (source, destination, length)]
    return Runs(*regions, *as_array)


class Room:
    """The ends of one test, and every completion and message that they have polled."""

    def __init__(self, make_end: Callable[[PeerName, Sequence[int]], End], deadline_s: float) -> None:
        self._make_end = make_end
        self._deadline_s = deadline_s
        self.ends: list[End] = []
        self.completions: dict[PeerName, list[Completion]] = {}
        self.messages: dict[PeerName, list[Received]] = {}

    def end(self, name: PeerName, sizes: Sequence[int] = (SIZE,)) -> End:
        """Makes an end, which is closed when the test is over."""
        end = self._make_end(name, sizes)
        self.ends.append(end)
        self.completions[name], self.messages[name] = [], []
        return end

    def pair(self, sizes: Sequence[int] = (SIZE,)) -> tuple[End, End]:
        """Makes two connected ends, with different content in their memory."""
        local, remote = self.end(LOCAL, sizes), self.end(REMOTE, sizes)
        for seed, end in enumerate((local, remote)):
            for index, size in enumerate(sizes):
                end.fill(index, np.random.default_rng((seed, index)).bytes(size))
        self.connect(local, remote)
        return local, remote

    def connect(self, one: End, other: End) -> None:
        """Connects two ends, both ways."""
        one.transport.connect(other.name, other.transport.metadata(), other.regions)
        other.transport.connect(one.name, one.transport.metadata(), one.regions)

    def poll(self, end: End) -> Polled:
        """Polls once, and keeps what comes."""
        polled = end.transport.poll()
        self.completions[end.name].extend(polled.completions)
        self.messages[end.name].extend(polled.messages)
        return polled

    def drive(self, until: Callable[[], bool], *ends: End) -> None:
        """Polls these ends, or all, until the condition holds; fails at the deadline."""
        end_s = time.monotonic() + self._deadline_s
        while not until():
            assert time.monotonic() < end_s, f"not after {self._deadline_s} s: {self.completions} {self.messages}"
            for end in ends or self.ends:
                self.poll(end)
            _PAUSE.wait(0.0005)

    def wait_completion(self, end: End, ticket: Ticket, *driven: End) -> Completion:
        """Polls until this ticket has ended, and returns its completion."""
        found: list[Completion] = []

        def ended() -> bool:
            found[:] = [done for done in self.completions[end.name] if done.ticket == ticket]
            return bool(found)

        self.drive(ended, *driven)
        assert len(found) == 1, f"a ticket ends once: {found}"
        return found[0]

    def bodies(self, end: End) -> list[bytes]:
        """Returns the bodies of all messages that this end has received."""
        return [message.body for message in self.messages[end.name]]
