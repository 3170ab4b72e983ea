"""The check of the wire finds what is wrong, names the step and the remedy, ends in time and leaves no process."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence

import pytest

from kvferry.cli.doctor.steps import Step
from kvferry.cli.doctor.wire_check import NUM_BLOCKS, WireCheck
from kvferry.cli.main import ExitCode
from kvferry.ids import PeerName
from kvferry.testing.ends import End, LocalEnd, ProcessEnd
from kvferry.transport.base import Completion, Polled
from kvferry.transport.memory import MemoryHub, MemoryTransport

NUM_BYTES = NUM_BLOCKS * 64


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


class Corrupting(MemoryTransport):
    """A transport that reports success although it changed one byte."""

    buffers: Sequence[object] = ()

    def poll(self) -> Polled:
        polled = super().poll()
        if polled.completions:
            end = self.end
            end.buffers[0][64 * 5 + 1] ^= 0xFF
        return polled

    end: LocalEnd


class Refusing(MemoryTransport):
    """A transport that ends every transfer with an error."""

    def poll(self) -> Polled:
        polled = super().poll()
        return Polled(
            tuple(Completion(done.ticket, "the link is down") for done in polled.completions), polled.messages
        )


def steps_with(transport: type[MemoryTransport], hub: MemoryHub, timeout_s: float = 20.0) -> list[Step]:
    def make_end(name: PeerName, sizes: Sequence[int], _timeout_s: float) -> End:
        made = transport(name, hub=hub)
        end = LocalEnd(made, name, sizes)
        if isinstance(made, Corrupting):
            made.end = end
        return end

    return list(WireCheck("memory", NUM_BYTES, timeout_s, make_end).steps())


def test_all_steps_pass_on_a_sound_transport() -> None:
    steps = steps_with(MemoryTransport, MemoryHub())
    assert [step.ok for step in steps] == [True] * 8
    assert "after" in steps[-1].detail


def test_wrong_bytes_are_found_and_the_block_is_named() -> None:
    last = steps_with(Corrupting, MemoryHub())[-1]
    assert (last.ok, last.code) == (False, ExitCode.BAD_TRANSFER)
    assert last.name.startswith("READ")
    assert "bytes differ in 1 of 256 blocks; block " in last.detail
    assert "UCX_TLS=tcp" in last.remedy


def test_a_failing_transfer_is_reported_with_its_reason() -> None:
    last = steps_with(Refusing, MemoryHub())[-1]
    assert (last.code, last.detail) == (ExitCode.BAD_TRANSFER, "the link is down")


def test_a_transfer_that_never_ends_is_given_up() -> None:
    hub = MemoryHub()
    hub.faults.hold = True
    last = steps_with(MemoryTransport, hub, timeout_s=1.5)[-1]
    assert last.code == ExitCode.BAD_TRANSFER
    assert "the read has not ended after" in last.detail


def test_lost_messages_are_detected() -> None:
    hub = MemoryHub()
    hub.faults.hold_messages = True
    last = steps_with(MemoryTransport, hub, timeout_s=1.5)[-1]
    assert (last.name, last.code) == ("messages both ways", ExitCode.BAD_TRANSFER)


@pytest.mark.process
def test_a_process_that_hangs_is_ended_in_time() -> None:
    def make_end(name: PeerName, sizes: Sequence[int], timeout_s: float) -> End:
        end = ProcessEnd("memory", name, sizes, timeout_s=timeout_s, wait=False)
        assert end.process.pid is not None
        os.kill(end.process.pid, signal.SIGSTOP)
        return end

    started_s = time.monotonic()
    last = list(WireCheck("memory", NUM_BYTES, 1.0, make_end).steps())[-1]
    assert (last.ok, last.code) == (False, ExitCode.ERROR)
    assert "did not answer 'start'" in last.detail
    assert time.monotonic() - started_s < 30


@pytest.mark.process
def test_a_process_that_dies_is_reported_with_its_signal() -> None:
    def make_end(name: PeerName, sizes: Sequence[int], timeout_s: float) -> End:
        end = ProcessEnd("memory", name, sizes, timeout_s=timeout_s, wait=False)
        end.process.kill()
        return end

    last = list(WireCheck("memory", NUM_BYTES, 20.0, make_end).steps())[-1]
    assert last.detail.endswith("ended during 'start' with exit code -9")


def test_too_little_shared_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        f_bavail, f_frsize = 16, 1 << 20

    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr(os, "statvfs", lambda _path: Small())
    last = steps_with(MemoryTransport, MemoryHub())[-1]
    assert (last.name, last.code) == ("shared memory", ExitCode.ERROR)
    assert "--shm-size" in last.remedy


@pytest.mark.parametrize(("timeout_s", "is_late"), [(0.0, True), (60.0, False)])
def test_a_check_that_had_too_little_time_says_so_before_it_blames_the_transport(
    timeout_s: float, is_late: bool
) -> None:
    failed = steps_with(Refusing, MemoryHub(), timeout_s)[-1]
    assert not failed.ok
    assert failed.remedy.startswith(f"The time of --timeout {timeout_s:g} is up") is is_late
    assert "UCX_" in failed.remedy
