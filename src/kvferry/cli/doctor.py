"""`kvferry doctor`: moves real bytes between two processes, or, given URLs, checks a fleet.

Each step is a line. The first step that fails is named with its remedy, and the later ones are not tried. In any case
the command ends within --timeout seconds and leaves no process behind.
"""

import argparse
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import numpy as np

from kvferry.cli.main import ExitCode
from kvferry.errors import FerryError, PeerLost, TransferError
from kvferry.ids import PeerName
from kvferry.layout.blocks import Runs
from kvferry.settings import TransferSettings
from kvferry.testing.ends import End, LocalEnd, ProcessEnd
from kvferry.transport.base import Operation
from kvferry.transport.registry import TRANSPORTS, make_transport

__all__ = ["Doctor", "Step", "add_arguments", "run"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

PREFILL, DECODE = PeerName("doctor-prefill/1/0"), PeerName("doctor-decode/1/0")
NUM_BLOCKS = 256
_MIN_SHARED_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags. Without a URL this machine is checked, otherwise the workers there."""
    parser.add_argument("urls", nargs="*", metavar="URL", help="workers or routers to check (default: this machine)")
    parser.add_argument("--transport", default=TransferSettings().transport, choices=sorted(TRANSPORTS),
                        help=f"what moves the bytes (default: {TransferSettings().transport})")  # fmt: skip
    parser.add_argument("--megabytes", type=int, default=64, metavar="MIB", help="how much to move (default: 64)")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="give up then (default: 30)")
    parser.add_argument("--json", action="store_true", help="print one object per line: each step, then the verdict")


def run(args: argparse.Namespace) -> ExitCode:
    """Runs the steps and prints each as it ends."""
    if args.urls:
        from kvferry.cli.support.fleet_matrix import run_fleet

        return ExitCode(run_fleet(args.urls, args.json))
    logging.getLogger("kvferry").setLevel(max(logging.WARNING, logging.getLogger().level) if not _verbose() else 0)
    doctor = Doctor(args.transport, max(1, args.megabytes) << 20, args.timeout)
    steps = []
    for step in doctor.steps():
        steps.append(step)
        print(json.dumps(step.as_dict()) if args.json else step.line(), flush=True)
    failed = next((step for step in steps if not step.ok), None)
    code = failed.code if failed else ExitCode.OK
    if args.json:
        verdict = {"ok": failed is None, "transport": args.transport, "failed": failed.name if failed else None}
        print(json.dumps({**verdict, "exit": int(code), "gbps": doctor.gbps}), flush=True)
    elif failed is None:
        print("all well")
    if failed is not None:
        print(f"kvferry doctor: {failed.name}: {failed.detail}. {failed.remedy}", file=sys.stderr)
    return code


def _verbose() -> bool:
    return logging.getLogger().level <= logging.DEBUG


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step."""

    name: str
    ok: bool
    detail: str
    seconds: float
    code: ExitCode = ExitCode.OK
    remedy: str = ""

    def line(self) -> str:
        """Returns a line for people."""
        return f"  {'ok  ' if self.ok else 'FAIL'}  {self.name:44}  {self.detail}"

    def as_dict(self) -> dict[str, object]:
        """Returns the object for --json."""
        row: dict[str, object] = {"step": self.name, "ok": self.ok, "detail": self.detail}
        row["seconds"] = round(self.seconds, 4)
        if not self.ok:
            row["remedy"] = self.remedy
        return row


@dataclass(frozen=True, slots=True)
class _Planned:
    name: str
    action: Callable[[], str]
    code: ExitCode
    remedy: str


class Doctor:
    """The steps, in their order. `make_end` makes an end of the transfer; tests give one that makes broken ends."""

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
        self._make_end = make_end if make_end is not None else self._make_real_end
        self._ends: list[End] = []

    def steps(self) -> Iterator[Step]:
        """Runs each step when it is asked for, up to the first that fails. Then closes both ends."""
        try:
            for planned in self._planned():
                step = self._try(planned)
                yield step
                if not step.ok:
                    return
        finally:
            for end in self._ends:
                end.close()

    def _planned(self) -> list[_Planned]:
        tcp = "Set UCX_TLS=tcp and run again; if that works, set it in the environment of every worker."
        if os.environ.get("UCX_TLS", "").startswith("tcp"):
            tcp = "Set UCX_LOG_LEVEL=info and run again: UCX then says which device it uses."
        size = f"{self.num_bytes >> 20} MiB in {NUM_BLOCKS} blocks"
        return [
            _Planned("transport", self._find_transport, ExitCode.ERROR, "pip install 'kvferry[nixl]'."),
            _Planned(
                "shared memory",
                self._check_shared_memory,
                ExitCode.ERROR,
                "Give the container more (docker run --shm-size=1g), or set UCX_TLS=tcp.",
            ),
            _Planned("two processes, memory registered", self._start, ExitCode.ERROR, tcp),
            _Planned("metadata exchanged, connected", self._connect, ExitCode.UNREACHABLE, tcp),
            _Planned(f"READ {size}, bytes compared", lambda: self._move(Operation.READ), ExitCode.BAD_TRANSFER, tcp),
            _Planned(f"WRITE {size}, bytes compared", lambda: self._move(Operation.WRITE), ExitCode.BAD_TRANSFER, tcp),
            _Planned("messages both ways", self._talk, ExitCode.BAD_TRANSFER, tcp),
            _Planned("a peer that dies is noticed", self._kill_a_peer, ExitCode.BAD_TRANSFER, tcp),
        ]

    def _try(self, planned: _Planned) -> Step:
        started_s = time.monotonic()
        try:
            detail = planned.action()
        except (FerryError, OSError) as error:
            logger.debug("step failed", exc_info=True)
            seconds = time.monotonic() - started_s
            return Step(planned.name, False, str(error).rstrip("."), seconds, planned.code, planned.remedy)
        return Step(planned.name, True, detail, time.monotonic() - started_s)

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
    raise TransferError(f"the {operation.value} has not ended after {timeout_s - 1:.1f} s")


def _send(end: LocalEnd, peer: PeerName, body: bytes) -> None:
    end.transport.send(peer, body)


def _receive(end: LocalEnd, peer: PeerName, body: bytes, timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s - 1
    while time.monotonic() < end_s:
        if any(message.peer == peer and message.body == body for message in end.transport.poll().messages):
            return
        time.sleep(0.0001)
    raise TransferError(f"no message from {peer!r} after {timeout_s - 1:.1f} s")


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
