"""The check of one machine: the wire between two processes, then a real hand-off between two processes."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from kvferry.cli.doctor.handoff_check import HandoffCheck
from kvferry.cli.doctor.prefill_end import PrefillEnd
from kvferry.cli.doctor.steps import Step
from kvferry.cli.doctor.tiny_engine import TOKEN_BYTES
from kvferry.cli.doctor.wire_check import WireCheck, tcp_remedy
from kvferry.cli.main import ExitCode
from kvferry.errors import FerryError, TransferError
from kvferry.settings import FerrySettings

__all__ = ["local_steps"]


def local_steps(
    settings: FerrySettings, *, num_bytes: int, timeout_s: float, rates: dict[str, float]
) -> Iterator[Step]:
    """Runs all steps, up to the first that fails. `rates` receives the GB/s that were seen, by what was done."""
    wire = WireCheck(settings.transfer.transport, num_bytes, timeout_s)
    ok = True
    for step in wire.steps():
        ok = step.ok
        yield step
    rates.update(wire.gbps)
    if not ok:
        return
    num_tokens = num_bytes // TOKEN_BYTES
    try:
        with _prefill_end(settings, num_tokens, timeout_s) as port:
            check = HandoffCheck(
                settings, settings.side_channel.host, port,
                num_tokens=num_tokens, timeout_s=timeout_s, transfer_remedy=tcp_remedy(),
            )  # fmt: skip
            yield from check.steps()
            rates.update(check.rates)
    except FerryError as error:
        yield Step("two engines start", False, str(error).rstrip("."), 0.0, ExitCode.ERROR, tcp_remedy())


@contextmanager
def _prefill_end(settings: FerrySettings, num_tokens: int, timeout_s: float) -> Iterator[int]:
    """A prefill end in a process of its own (in this one if the transport works within one process). Gives its port."""
    if settings.transfer.transport == "memory":
        end = PrefillEnd(settings, num_tokens=num_tokens)
        try:
            yield end.port
        finally:
            end.close()
        return
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, settings, num_tokens), daemon=True)
    process.start()
    theirs.close()
    try:
        if not pipe.poll(timeout_s):
            raise TransferError(f"the prefill end has not started within {timeout_s:g} s")
        try:
            started = pipe.recv()
        except EOFError as error:
            process.join(5.0)
            raise TransferError(f"the prefill end died at its start, exit code {process.exitcode}") from error
        if isinstance(started, str):
            raise TransferError(started)
        yield started
    finally:
        pipe.close()
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(pipe: Connection, settings: FerrySettings, num_tokens: int) -> None:
    """The prefill end's process: sends its port, or what went wrong, and ends when the other end of the pipe does."""
    try:
        end = PrefillEnd(settings, num_tokens=num_tokens)
    except FerryError as error:
        pipe.send(str(error))
        return
    try:
        pipe.send(end.port)
        pipe.poll(None)
    finally:
        end.close()
