"""Ends of a transport with memory of their own: in this process, or in one that is started for it.

Used by the conformance suite, by `kvferry doctor` and by `kvferry bench transfer`.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.errors import FerryError, TransferError
from kvferry.ids import PeerName
from kvferry.layout.blocks import Runs
from kvferry.layout.description import Region
from kvferry.transport.base import LOOK_EVERY_S, Operation, Polled, Ticket, Transport, WakeAddress
from kvferry.transport.registry import make_transport

__all__ = ["End", "LocalEnd", "ProcessEnd"]

Buffer = npt.NDArray[np.uint8]
Result = TypeVar("Result")
_PR_SET_PDEATHSIG = 1


class End(Protocol):
    """A transport with registered memory: one buffer per region."""

    name: PeerName
    transport: Transport
    regions: tuple[Region, ...]

    def fill(self, region: int, data: bytes, offset: int = 0) -> None:
        """Write into the memory of this end."""
        ...

    def read(self, region: int, offset: int = 0, num_bytes: int | None = None) -> bytes:
        """Read the memory of this end."""
        ...

    def run(self, function: Callable[..., Result], *args: object) -> Result:
        """Call function(end, *args) where the memory is; `end` is a LocalEnd."""
        ...

    def close(self) -> None:
        """Close the transport, and end the process if there is one. Idempotent."""
        ...


class LocalEnd:
    """An end in this process."""

    def __init__(self, transport: Transport, name: PeerName, sizes: Sequence[int]) -> None:
        self.name = name
        self.transport = transport
        self.buffers: list[Buffer] = [np.zeros(size, dtype=np.uint8) for size in sizes]
        self.regions = tuple(Region(buffer.ctypes.data, buffer.nbytes) for buffer in self.buffers)
        transport.register(self.regions, self.buffers)

    def fill(self, region: int, data: bytes, offset: int = 0) -> None:
        """Implements End.fill."""
        self.buffers[region][offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)

    def read(self, region: int, offset: int = 0, num_bytes: int | None = None) -> bytes:
        """Implements End.read."""
        stop = None if num_bytes is None else offset + num_bytes
        return self.buffers[region][offset:stop].tobytes()

    def run(self, function: Callable[..., Result], *args: object) -> Result:
        """Implements End.run."""
        return function(self, *args)

    def close(self) -> None:
        """Implements End.close."""
        self.transport.close()


class ProcessEnd:
    """An end in a process of its own. `transport` forwards each call; `run` calls a function there.

    The process ends with this one, however this one ends. A call that gets no answer within `timeout_s` raises
    TransferError, and the process is killed. `wait=False`: return at once, so that several can start side by side.
    """

    def __init__(
        self,
        transport: str,
        name: PeerName,
        sizes: Sequence[int],
        *,
        options: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
        wait: bool = True,
        context: SpawnContext | ForkServerContext | None = None,
    ) -> None:
        """`context`: how the process starts; by default as an interpreter of its own ("spawn")."""
        self.name = name
        self.timeout_s = timeout_s
        context = context or multiprocessing.get_context("spawn")
        self._pipe, their_end = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_serve, args=(their_end, transport, name, tuple(sizes), dict(options or {}), dict(environment or {}))
        )
        self.process.daemon = True
        self.process.start()
        their_end.close()
        self.transport: Transport = _Forwarded(self, transport)
        self.regions: tuple[Region, ...] = ()
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the process has registered its memory. Needed once, after `wait=False`, before anything else."""
        try:
            self.regions = self._answer("start")
        except BaseException:
            self.kill()
            raise

    def renew(self, name: PeerName, sizes: Sequence[int]) -> None:
        """Close the transport and make another, with new memory, in the same process: faster than a new process."""
        self._send(("renew", (name, tuple(sizes))))
        self.name = name
        self.regions = self._answer("renew")

    def fill(self, region: int, data: bytes, offset: int = 0) -> None:
        """Implements End.fill."""
        self.run(_fill, region, data, offset)

    def read(self, region: int, offset: int = 0, num_bytes: int | None = None) -> bytes:
        """Implements End.read."""
        return self.run(_read, region, offset, num_bytes)

    def run(self, function: Callable[..., Result], *args: object) -> Result:
        """Call function(end, *args) in the process, where `end` is its LocalEnd, and return the result."""
        self.start(function, *args)
        result: Result = self._answer(function.__name__)
        return result

    def start(self, function: Callable[..., object], *args: object) -> None:
        """Like `run`, but does not wait: fetch the result with `wait_result` before the next call."""
        self._send((function, args))

    def wait_result(self) -> Any:
        """Return the result of what `start` started."""
        return self._answer("the call")

    def kill(self) -> None:
        """End the process without warning, as a crash would."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()

    def close(self) -> None:
        """Implements End.close."""
        if self.process.is_alive():
            with contextlib.suppress(FerryError, OSError):
                self._pipe.send(None)
            self.process.join(min(self.timeout_s, 10.0))
        self.kill()
        self._pipe.close()

    def _send(self, order: tuple[object, tuple[object, ...]]) -> None:
        try:
            self._pipe.send(order)
        except OSError as error:
            raise TransferError(f"the process of {self.name!r} is gone: {error}") from error

    def _answer(self, asked: str) -> Any:
        try:
            if not self._pipe.poll(self.timeout_s):
                self.kill()
                raise TransferError(
                    f"the process of {self.name!r} did not answer {asked!r} within {self.timeout_s:.1f} s"
                )
            failed, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.process.join(5.0)
            raise TransferError(
                f"the process of {self.name!r} ended during {asked!r} with exit code {self.process.exitcode}"
            ) from error
        if failed:
            raise value
        return value


class _Forwarded:
    """The Transport of a ProcessEnd: forwards each call to the process."""

    def __init__(self, end: ProcessEnd, name: str) -> None:
        self._end = end
        self.name = name

    def register(self, regions: Sequence[Region], owners: Sequence[object]) -> None:
        self._end.run(_call, "register", tuple(regions), ())

    def metadata(self) -> bytes:
        return self._end.run(_call, "metadata")  # type: ignore[no-any-return]  # as Transport says

    def connect(self, peer: PeerName, metadata: bytes, regions: Sequence[Region]) -> None:
        self._end.run(_call, "connect", peer, metadata, tuple(regions))

    def disconnect(self, peer: PeerName) -> None:
        self._end.run(_call, "disconnect", peer)

    def post(self, peer: PeerName, operation: Operation, runs: Sequence[Runs], message: bytes = b"") -> Ticket:
        return self._end.run(_call, "post", peer, operation, tuple(runs), message)  # type: ignore[no-any-return]

    def send(self, peer: PeerName, message: bytes) -> None:
        self._end.run(_call, "send", peer, message)

    def poll(self) -> Polled:
        return self._end.run(_call, "poll")  # type: ignore[no-any-return]  # as Transport says

    def wait(self, timeout_s: float, *, look_every_s: float = LOOK_EVERY_S) -> None:
        self._end.run(_wait, timeout_s, look_every_s)

    def wake(self) -> None:
        self._end.run(_call, "wake")

    def listen(self, host: str) -> WakeAddress | None:
        return self._end.run(_call, "listen", host)  # type: ignore[no-any-return]  # as Transport says

    def set_wake_address(self, peer: PeerName, address: WakeAddress) -> None:
        self._end.run(_call, "set_wake_address", peer, address)

    def close(self) -> None:
        self._end.run(_call, "close")


def _call(end: LocalEnd, method: str, *args: object) -> Any:
    return getattr(end.transport, method)(*args)


def _wait(end: LocalEnd, timeout_s: float, look_every_s: float) -> None:
    end.transport.wait(timeout_s, look_every_s=look_every_s)


def _fill(end: LocalEnd, region: int, data: bytes, offset: int) -> None:
    end.fill(region, data, offset)


def _read(end: LocalEnd, region: int, offset: int, num_bytes: int | None) -> bytes:
    return end.read(region, offset, num_bytes)


def _serve(
    pipe: Connection,
    transport: str,
    name: PeerName,
    sizes: tuple[int, ...],
    options: dict[str, object],
    environment: dict[str, str],
) -> None:
    """Runs the started process from its start to its end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes us
    os.environ.update(environment)
    end: LocalEnd | None = None
    try:
        end = LocalEnd(make_transport(transport, name, **options), name, sizes)
        pipe.send((False, end.regions))
        while (order := pipe.recv()) is not None:
            function, args = order
            try:
                if function == "renew":
                    end.close()
                    name, sizes = args
                    end = LocalEnd(make_transport(transport, name, **options), name, sizes)
                    answer: tuple[bool, object] = (False, end.regions)
                else:
                    answer = (False, function(end, *args))
            except FerryError as error:
                answer = (True, error)
            pipe.send(answer)
    except FerryError as error:
        pipe.send((True, error))
    except (EOFError, BrokenPipeError):
        return  # the parent has gone
    finally:
        if end is not None:
            end.close()
