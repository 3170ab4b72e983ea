"""What the engine's process and its rank processes tell each other, over one socket pair a rank.

A frame is two lengths, a pickled record, and raw bytes (logits). Pickle is for our own children only: both ends are one
program, started by one user, on a socket that has no name. Nothing that a peer sent comes this way undecoded.
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
    "Ask",
    "Channel",
    "Close",
    "Connect",
    "Connected",
    "Draft",
    "Drafted",
    "Drain",
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
    """The first message: who the rank is, and all that it needs to load its part."""

    index: int
    settings: EngineSettings
    num_blocks: int
    store: str
    """A file in a directory that only this user can read: where the ranks find each other."""
    log_level: int


@dataclass(frozen=True, slots=True)
class Connect:
    """Start the worker half. `layouts`: of all ranks, in order."""

    connector: ConnectorStart
    layouts: tuple[CacheLayout, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Compute, after all steps before it. Orders that come with a step are carried out when its turn comes."""

    number: int
    step: StepInput
    orders: StepOrders


@dataclass(frozen=True, slots=True)
class Draft:
    """To the ranks of the last stage: see Executor.draft. In its turn among the steps."""

    order: DraftInput


@dataclass(frozen=True, slots=True)
class Orders:
    """For the worker half at once, also while a step is computed: peers that come and go."""

    orders: StepOrders


@dataclass(frozen=True, slots=True)
class Drain:
    """See HandoffWorker.drain. At once."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Answer with a Status, at once."""


@dataclass(frozen=True, slots=True)
class Close:
    """End the worker half and the process, in good order. Steps that were not begun are dropped."""


# Rank to engine


@dataclass(frozen=True, slots=True)
class Loaded:
    """The weights are there, and the cache."""

    pid: int
    layout: CacheLayout


@dataclass(frozen=True, slots=True)
class Connected:
    """The worker half runs."""

    metadata: bytes
    """Of its transport, for the handshake."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """From the first rank of the last stage. Behind it, raw: logits [rows, vocab_size] in float32, unless rows is 0."""

    number: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """From the first rank of the last stage."""

    output: DraftOutput


@dataclass(frozen=True, slots=True)
class Status:
    """How the worker half stands: sent when anything has ended, and when asked."""

    seen: int
    """Number of the last step whose orders were passed on."""
    report: StepReport
    stats: HandoffStats
    drained: bool


@dataclass(frozen=True, slots=True)
class RankFailed:
    """The rank ends after this."""

    kind: str
    """`ConfigError` and `UnknownModel` are the operator's; any other name is that of an exception."""
    text: str


class Channel:
    """One end. `send` from any thread; `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, record: object, payload: memoryview | bytes = b"") -> None:
        """Blocks while the other end's buffer is full, at most the socket's timeout. Raises OSError if it is gone."""
        self.send_pickled(pickle.dumps(record, pickle.HIGHEST_PROTOCOL), payload)

    def send_pickled(self, body: bytes, payload: memoryview | bytes = b"") -> None:
        """A record that goes to several ranks is pickled once."""
        with self._lock:
            self._socket.sendall(_HEAD.pack(len(body), len(payload)) + body)
            if len(payload):
                self._socket.sendall(payload)

    def receive(self) -> tuple[Any, bytearray]:
        """Blocks for a whole frame. Raises EOFError or OSError if the other end is gone."""
        head = _HEAD.unpack(self._read(_HEAD.size))
        return pickle.loads(self._read(head[0])), self._read(head[1])

    def _read(self, count: int) -> bytearray:
        found = bytearray(count)
        view = memoryview(found)
        while len(view):
            got = self._socket.recv_into(view)
            if not got:
                raise EOFError("the other end of the control channel is gone")
            view = view[got:]
        return found

    def hang_up(self) -> None:
        """Both ends see the end of it; what waits in `receive` or `send` returns. Idempotent, any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()
