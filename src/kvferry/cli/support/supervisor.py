"""Child processes that are started, waited for, watched and ended together. Used by `up` and `demo`.

Life of a child: STARTING -> READY (it wrote its ready-file) -> ENDED (by itself: `wait_ended` returns it; or by us).
Whatever happens to the supervisor, no child outlives it: see parent_death.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from kvferry.cli.support.parent_death import SUPERVISOR_VARIABLE
from kvferry.errors import FerryError

__all__ = ["Child", "ChildEnded", "ChildSpec", "Supervisor"]

_POLL_S = 0.05
_TERM_S = 10.0
_TAIL_LINES = 20


class ChildEnded(FerryError):
    """A child process has ended by itself."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What is to be started: a name for logs, and the arguments of the kvferry command."""

    name: str
    argv: tuple[str, ...]
    drain_s: float | None = None
    """If it is given, the child is ended before all others: by SIGTERM, and it has this long to finish what is open."""


@dataclass(slots=True)
class Child:
    """A process that was started."""

    spec: ChildSpec
    process: asyncio.subprocess.Process
    ready_file: Path
    started_s: float
    ready: dict[str, Any] | None = None
    """What it wrote into its ready-file: pid, url and more."""
    ready_after_s: float = 0.0
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    pump: asyncio.Task[None] | None = None
    watch: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The address at which it answers; only once it is ready."""
        assert self.ready is not None, "only a ready child has an address"
        return str(self.ready["url"])

    def how_it_ended(self) -> str:
        """Returns one line: how the process ended, and the last line of its log."""
        code = self.process.returncode
        if code is None:
            return f"{self.spec.name} is running"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        lines = [line for line in self.tail if line.strip()]
        return f"{self.spec.name} (pid {self.process.pid}) {how}" + (f": {lines[-1]}" if lines else "")


class Supervisor:
    """Starts children and ends them. An asynchronous context: leaving it ends every child."""

    def __init__(self, on_line: Callable[[str, str], None], *, log_level: str | None = None) -> None:
        """`on_line(name, line)` gets every line that a child writes. `log_level`: of the children; None: their own."""
        self._on_line = on_line
        self._log_level = log_level
        self._directory = tempfile.TemporaryDirectory(prefix="kvferry-")
        self.children: list[Child] = []
        self._hurry = asyncio.Event()
        self._ended: asyncio.Queue[Child] = asyncio.Queue()

    async def __aenter__(self) -> "Supervisor":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(asyncio.ensure_future(self.stop()))

    async def start(self, spec: ChildSpec) -> Child:
        """Starts a process, in a session of its own, so that a Ctrl-C reaches only the supervisor."""
        ready_file = Path(self._directory.name) / f"{spec.name}-{len(self.children)}-{time.monotonic_ns()}.json"
        level = ("--log-level", self._log_level) if self._log_level is not None else ()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvferry", *spec.argv, *level, "--ready-file", str(ready_file),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, SUPERVISOR_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )  # fmt: skip
        child = Child(spec, process, ready_file, time.monotonic())
        child.pump = asyncio.create_task(self._pump(child))
        child.watch = asyncio.create_task(self._watch(child))
        self.children.append(child)
        return child

    async def wait_ready(self, children: Sequence[Child], timeout_s: float) -> None:
        """Waits until all are ready. Raises ChildEnded if one ends before that, FerryError after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while waiting := [child for child in children if child.ready is None]:
                    for child in waiting:
                        _check_ready(child)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            names = ", ".join(child.spec.name for child in children if child.ready is None)
            raise FerryError(
                f"{names} did not become ready in {timeout_s:g} s. Add -v to see its log, or raise --start-timeout"
            ) from error

    async def wait_ended(self) -> Child:
        """Waits for a child that has ended by itself, in the order in which they end; it leaves `children`."""
        return await self._ended.get()

    async def _watch(self, child: Child) -> None:
        await child.process.wait()
        if child.pump is not None:
            await child.pump
        if child in self.children:  # otherwise we are ending it
            self.children.remove(child)
            self._ended.put_nowait(child)

    def hurry(self) -> None:
        """Kills what has not ended yet: the second Ctrl-C."""
        self._hurry.set()

    async def stop(self) -> None:
        """Ends every child: by a signal, and by SIGKILL what is left after some seconds. Idempotent.

        Children that drain come first: what is open there needs the others.
        """
        children, self.children = self.children, []
        await self._drain([child for child in children if child.spec.drain_s is not None])
        for child in children:
            # TERM ends a child that is loading. One that is serving would drain first; INT tells it not to. A child
            # gets only one of them: a second signal could come when its handler is already gone, and would kill it.
            _signal(child, signal.SIGINT if child.ready_file.exists() else signal.SIGTERM)
        await self._wait_unless_hurried(children, _TERM_S)
        for child in children:
            _signal(child, signal.SIGKILL)
        await self._wait_all(children)
        await asyncio.gather(*(child.pump for child in children if child.pump is not None))
        self._directory.cleanup()

    async def _drain(self, children: Sequence[Child]) -> None:
        """Has these children drain, and kills what is left after their time."""
        for child in children:
            _signal(child, signal.SIGTERM)
        await self._wait_unless_hurried(
            children, _TERM_S + max((child.spec.drain_s or 0.0 for child in children), default=0.0)
        )
        for child in children:
            _signal(child, signal.SIGKILL)
        await self._wait_all(children)

    async def _wait_unless_hurried(self, children: Sequence[Child], timeout_s: float) -> None:
        """Waits until all have ended, for at most this long, and no longer once `hurry` was called."""
        waits: set[asyncio.Task[Any]] = {
            asyncio.create_task(self._wait_all(children)), asyncio.create_task(self._hurry.wait())
        }  # fmt: skip
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()

    @staticmethod
    async def _wait_all(children: Sequence[Child]) -> None:
        for child in children:
            await child.process.wait()

    async def _pump(self, child: Child) -> None:
        assert child.process.stdout is not None, "it was started with a pipe"
        while True:
            try:
                line = await child.process.stdout.readline()
            except ValueError:  # a line beyond the reader's limit: its rest comes as the next line
                continue
            if not line:
                return
            # A line of progress rewrites itself with \r: only its last state counts.
            text = line.decode("utf-8", "replace").rstrip("\n").rsplit("\r", 1)[-1]
            child.tail.append(text)
            self._on_line(child.spec.name, text)


def _check_ready(child: Child) -> None:
    """Reads the ready-file if it is there. Raises ChildEnded if the child has ended without one."""
    if child.ready_file.exists():
        child.ready = msgspec.json.decode(child.ready_file.read_bytes(), type=dict[str, Any])
        child.ready_after_s = time.monotonic() - child.started_s
    elif child.process.returncode is not None:
        raise ChildEnded(f"{child.how_it_ended().rstrip('.')}. It was not ready yet: mend that and start again")


def _signal(child: Child, number: signal.Signals) -> None:
    """Signals the child's whole process group: the child leads it, and may have started processes of its own."""
    if child.process.returncode is None or number is signal.SIGKILL:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, number)
