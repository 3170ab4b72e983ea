"""The messages between the engine's process and its rank processes, over one socket pair per rank.

A frame is two lengths, a pickled record, and raw bytes (logits). Pickle is safe here because both ends are the same
program, started by one user, on a socket that has no name. Nothing that a peer sent travels this way undecoded.
"""

import contextlib
import pickle
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Any

from kvferry.connector.base import StepOrders, StepReport
from kvferry.engines.mini.ranks.executor import ConnectorStart
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.speculation.draft_records import DraftInput, DraftOutput
from kvferry.engines.mini.step import StepInput
from kvferry.layout.description import CacheLayout
from kvferry.stats import HandoffStats

__all__ = [
    "Channel",
    "Close",
    "Connect",
    "Connected",
    "Draft",
    "Drafted",
    "Drain",
    "GetStatus",
    "Loaded",
    "Orders",
    "RankFailed",
    "Start",
    "Status",
    "Step",
    "StepDone",
]

_HEAD = struct.Struct("<IQ")


# Engine to rank


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: which rank this is, and what it needs to load its part."""

    index: int
    settings: EngineSettings
    num_blocks: int
    store: str
    """The path of the file by which the ranks find each other, in a directory that only this user can read."""
    log_level: int


@dataclass(frozen=True, slots=True)
class Connect:
    """Start the worker half. `layouts` are those of all ranks, in order."""

    connector: ConnectorStart
    layouts: tuple[CacheLayout, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Compute this step after all earlier ones. Its orders are carried out when its turn comes."""

    number: int
    step: StepInput
    orders: StepOrders


@dataclass(frozen=True, slots=True)
class Draft:
    """Run the drafter (Executor.draft), in turn with the steps. For the ranks of the last stage."""

    order: DraftInput


@dataclass(frozen=True, slots=True)
class Orders:
    """Pass orders to the worker half at once, even during a step: peers that were accepted or are gone."""

    orders: StepOrders


@dataclass(frozen=True, slots=True)
class Drain:
    """Drain the worker half at once."""


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Send a Status at once."""


@dataclass(frozen=True, slots=True)
class Close:
    """End the worker half and the process in order. Steps that have not begun are dropped."""


# Rank to engine


@dataclass(frozen=True, slots=True)
class Loaded:
    """The weights are loaded, and the cache is allocated."""

    pid: int
    layout: CacheLayout


@dataclass(frozen=True, slots=True)
class Connected:
    """The worker half runs."""

    metadata: bytes
    """The metadata of the rank's transport, for the handshake."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step is computed. Sent by the first rank of the last stage.

    The frame's raw bytes are logits [rows, vocab_size] in float32; there are none if rows is 0.
    """

    number: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts of one Draft. Sent by the first rank of the last stage."""

    output: DraftOutput


@dataclass(frozen=True, slots=True)
class Status:
    """The state of the worker half: sent when a hand-off has ended, and in answer to GetStatus."""

    seen: int
    """The number of the last step whose orders the worker half has received."""
    report: StepReport
    stats: HandoffStats
    drained: bool


@dataclass(frozen=True, slots=True)
class RankFailed:
    """An error ends the rank; nothing follows this message."""

    kind: str
    """The name of the exception's class. ConfigError and UnknownModel are for the operator to mend."""
    text: str


class Channel:
    """One end of the socket pair. Any thread may `send`; one thread may `receive`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """The file descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, record: object, payload: memoryview | bytes = b"") -> None:
        """Sends a record and raw bytes. Blocks while the buffer is full, at most for the socket's timeout.

        Raises OSError if the other end is gone.
        """
        self.send_pickled(pickle.dumps(record, pickle.HIGHEST_PROTOCOL), payload)

    def send_pickled(self, body: bytes, payload: memoryview | bytes = b"") -> None:
        """Sends a record that was pickled once for several ranks. Blocks and raises as `send`."""
        with self._lock:
            self._socket.sendall(_HEAD.pack(len(body), len(payload)) + body)
            if len(payload):
                self._socket.sendall(payload)

    def receive(self) -> tuple[Any, bytearray]:
        """Receives one frame. Blocks. Raises EOFError or OSError if the other end is gone."""
        head = _HEAD.unpack(self._read(_HEAD.size))
        return pickle.loads(self._read(head[0])), self._read(head[1])

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while len(view):
            num_read = self._socket.recv_into(view)
            if not num_read:
                raise EOFError("the other end of the control channel is gone")
            view = view[num_read:]
        return data

    def hang_up(self) -> None:
        """Ends the connection for both ends, so that a blocked `receive` or `send` returns. Idempotent, any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes this end. Idempotent."""
        self._socket.close()
