"""Whether the transport moves bytes and messages between two processes of this machine, and notices a dead one."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import numpy as np

from kvferry.cli.doctor.steps import Planned, Step, tried
from kvferry.cli.main import ExitCode
from kvferry.errors import PeerLost, TransferError
from kvferry.ids import PeerName
from kvferry.layout.blocks import Runs
from kvferry.testing.ends import End, LocalEnd, ProcessEnd
from kvferry.transport.base import Operation
from kvferry.transport.registry import make_transport

__all__ = ["NUM_BLOCKS", "WireCheck", "tcp_remedy"]

Result = TypeVar("Result")

PREFILL, DECODE = PeerName("doctor-prefill/1/0"), PeerName("doctor-decode/1/0")
NUM_BLOCKS = 256
_MIN_SHARED_BYTES = 64 << 20
_LATE_S = 3.0
"""A step that fails this short before the end of the whole check may only have had too little time."""


def tcp_remedy() -> str:
    """Returns what to try if NIXL's transfers fail on this machine."""
    if os.environ.get("UCX_TLS", "").startswith("tcp"):
        return "Set UCX_LOG_LEVEL=info and run again: UCX then says which device it uses."
    return "Set UCX_TLS=tcp and run again; if that works, set it in the environment of every worker."


class WireCheck:
    """The steps of the wire, in their order. `make_end` makes an end of the transfer; tests make broken ones."""

    def __init__(
        self,
        transport: str,
        num_bytes: int,
        timeout_s: float,
        make_end: Callable[[PeerName, Sequence[int], float], End] | None = None,
    ) -> None:
        self.transport = transport
        self.num_bytes = num_bytes - num_bytes % NUM_BLOCKS
        self.gbps: dict[str, float] = {}
        self._end_s = time.monotonic() + timeout_s
        self._more_time = f"The time of --timeout {timeout_s:g} is up: give a busy machine more."
        self._make_end = make_end if make_end is not None else self._make_real_end
        self._ends: list[End] = []

    def steps(self) -> Iterator[Step]:
        """Runs each step when it is asked for, up to the first that fails. Then closes both ends."""
        try:
            for step in tried(self._planned()):
                late = not step.ok and time.monotonic() > self._end_s - _LATE_S
                yield replace(step, remedy=f"{self._more_time} {step.remedy}") if late else step
        finally:
            for end in self._ends:
                end.close()

    def _planned(self) -> list[Planned]:
        tcp = tcp_remedy()
        size = f"{self.num_bytes >> 20} MiB in {NUM_BLOCKS} blocks"
        return [
            Planned("transport", self._find_transport, ExitCode.ERROR, "pip install 'kvferry[nixl]'."),
            Planned(
                "shared memory",
                self._check_shared_memory,
                ExitCode.ERROR,
                "Give the container more (docker run --shm-size=1g), or set UCX_TLS=tcp.",
            ),
            Planned("two processes, memory registered", self._start, ExitCode.ERROR, tcp),
            Planned("metadata exchanged, connected", self._connect, ExitCode.UNREACHABLE, tcp),
            Planned(f"READ {size}, bytes compared", lambda: self._move(Operation.READ), ExitCode.BAD_TRANSFER, tcp),
            Planned(f"WRITE {size}, bytes compared", lambda: self._move(Operation.WRITE), ExitCode.BAD_TRANSFER, tcp),
            Planned("messages both ways", self._talk, ExitCode.BAD_TRANSFER, tcp),
            Planned("a peer that dies is noticed", self._kill_a_peer, ExitCode.BAD_TRANSFER, tcp),
        ]

    def _remaining_s(self) -> float:
        remaining_s = self._end_s - time.monotonic()
        if remaining_s <= 0:
            raise TransferError("the time is up (--timeout)")
        return remaining_s

    def _run(self, end: End, function: Callable[..., Result], *args: object) -> Result:
        if isinstance(end, ProcessEnd):
            end.timeout_s = self._remaining_s()
        return end.run(function, *args)

    def _make_real_end(self, name: PeerName, sizes: Sequence[int], timeout_s: float) -> End:
        if self.transport == "memory":
            return LocalEnd(make_transport("memory", name), name, sizes)
        return ProcessEnd(self.transport, name, sizes, timeout_s=timeout_s, wait=False)

    def _find_transport(self) -> str:
        make_transport(self.transport, PeerName("doctor-finds-it"))
        try:
            return f"{self.transport} {version(self.transport)}"
        except PackageNotFoundError:
            return f"{self.transport}, part of kvferry"

    def _check_shared_memory(self) -> str:
        try:
            found = os.statvfs("/dev/shm")
        except OSError:
            return "none: slower transports will be used"
        free = found.f_bavail * found.f_frsize
        if free < _MIN_SHARED_BYTES and "UCX_TLS" not in os.environ:
            raise TransferError(f"/dev/shm has {free >> 20} MiB free, and {_MIN_SHARED_BYTES >> 20} MiB are needed")
        return f"{free >> 20} MiB free"

    def _start(self) -> str:
        for name in (PREFILL, DECODE):
            self._ends.append(self._make_end(name, (self.num_bytes,), self._remaining_s()))
        for end in self._ends:
            if isinstance(end, ProcessEnd):  # the two start side by side
                end.timeout_s = self._remaining_s()
                end.wait_ready()
        if self.transport == "memory":
            return "one process only, as this transport works within one process"
        return f"{self.num_bytes >> 20} MiB each"

    def _connect(self) -> str:
        prefill, decode = self._ends
        for end, other in ((prefill, decode), (decode, prefill)):
            metadata = self._run(other, _metadata)
            self._run(end, _connect, other.name, metadata, other.regions)
        return "both ways"

    def _move(self, operation: Operation) -> str:
        prefill, decode = self._ends
        # Decode reads prefill's blocks; prefill writes into decode's: the two directions of pull and push.
        active, peer = (decode, prefill) if operation is Operation.READ else (prefill, decode)
        for seed, end in ((3 if operation is Operation.READ else 4, prefill), (17, decode)):
            self._run(end, _fill, seed)
        order = np.random.default_rng(5).permutation(NUM_BLOCKS)
        seconds = self._run(active, _transfer, peer.name, operation, order, self._remaining_s())
        want, got = self._run(prefill, _digests), self._run(decode, _digests)
        wrong = [block for block in range(NUM_BLOCKS) if want[block][0] != got[order[block]][0]]
        if wrong:
            at = wrong[0]
            raise TransferError(
                f"bytes differ in {len(wrong)} of {NUM_BLOCKS} blocks; block {at} begins {want[at][1]} at prefill and"
                f" {got[order[at]][1]} at decode"
            )
        self.gbps[operation.value] = round(self.num_bytes / seconds / 1e9, 3)
        return f"{self.gbps[operation.value]:.2f} GB/s"

    def _talk(self) -> str:
        for end, other in (self._ends, self._ends[::-1]):
            self._run(end, _send, other.name, b"how are you?")
            self._run(other, _receive, end.name, b"how are you?", self._remaining_s())
        return "received"

    def _kill_a_peer(self) -> str:
        prefill, decode = self._ends
        if not isinstance(prefill, ProcessEnd):
            prefill.close()
        else:
            prefill.kill()
        seconds = self._run(decode, _notice, PREFILL, min(10.0, self._remaining_s()))
        return f"after {seconds:.3f} s"


def _metadata(end: LocalEnd) -> bytes:
    return end.transport.metadata()


def _connect(end: LocalEnd, peer: PeerName, metadata: bytes, regions: Sequence[object]) -> None:
    end.transport.connect(peer, metadata, regions)  # type: ignore[arg-type]  # what `regions` of an End are


def _fill(end: LocalEnd, seed: int) -> None:
    buffer = end.buffers[0]
    block = np.frombuffer(np.random.default_rng(seed).bytes(len(buffer) // NUM_BLOCKS), np.uint8)
    buffer.reshape(NUM_BLOCKS, -1)[:] = block
    buffer.reshape(NUM_BLOCKS, -1)[:, 0] = np.arange(NUM_BLOCKS) % 256  # no two blocks alike


def _digests(end: LocalEnd) -> list[tuple[bytes, str]]:
    blocks = end.buffers[0].reshape(NUM_BLOCKS, -1)
    return [(hashlib.blake2b(block.data, digest_size=16).digest(), block[:4].tobytes().hex(" ")) for block in blocks]


def _transfer(end: LocalEnd, peer: PeerName, operation: Operation, order: Sequence[int], timeout_s: float) -> float:
    block_bytes = len(end.buffers[0]) // NUM_BLOCKS
    source = np.arange(NUM_BLOCKS, dtype=np.int64) * block_bytes
    destination = np.asarray(order, dtype=np.int64) * block_bytes
    started_s = time.monotonic()
    pieces = [Runs(0, 0, source, destination, np.full(NUM_BLOCKS, block_bytes, np.int64))]
    ticket = end.transport.post(peer, operation, pieces, b"done")
    while time.monotonic() - started_s < timeout_s - 1:
        for done in end.transport.poll().completions:
            if done.ticket == ticket:
                if done.error is not None:
                    raise TransferError(done.error)
                return time.monotonic() - started_s
        time.sleep(0.0001)
    raise TransferError(f"the {operation.value} has not ended after {max(0.0, timeout_s - 1):.1f} s")


def _send(end: LocalEnd, peer: PeerName, body: bytes) -> None:
    end.transport.send(peer, body)


def _receive(end: LocalEnd, peer: PeerName, body: bytes, timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s - 1
    while time.monotonic() < end_s:
        if any(message.peer == peer and message.body == body for message in end.transport.poll().messages):
            return
        time.sleep(0.0001)
    raise TransferError(f"no message from {peer!r} after {max(0.0, timeout_s - 1):.1f} s")


def _notice(end: LocalEnd, peer: PeerName, timeout_s: float) -> float:
    started_s = time.monotonic()
    while time.monotonic() - started_s < timeout_s:
        try:
            end.transport.send(peer, b"still there?")
        except PeerLost:
            return time.monotonic() - started_s
        end.transport.poll()
        time.sleep(0.001)
    raise TransferError(f"a peer that was killed is still considered alive after {timeout_s:.1f} s")
