"""Real processes for the tests: `kvferry serve` workers and a `kvferry route`, over real NIXL on loopback.

A fleet knows the pids that it started, ends exactly those, and proves that nothing of them is left: no process, no
shared memory, no block that is not free. The processes are forked from one that has imported torch: see forked.py.
"""

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.harness.client import get, metrics
from tests.harness.forked import Forked
from tests.harness.leaks import OWNED
from tests.harness.loop_monitor import Held, check_held
from tests.harness.monitored import LOOP_FILE
from tests.harness.until import until

__all__ = ["Fleet", "Process"]

START_S = 180.0
"""How long a process may take to be ready; a busy machine loads torch slowly."""
FREE_S = 15.0
"""How long it may take until every block is free again, after lease and quarantine."""


class Process:
    """One `kvferry` process. `restart` starts it again at the same address."""

    def __init__(self, name: str, argv: Sequence[str], directory: Path, *, monitored: bool = False) -> None:
        """`monitored`: see `check_loop`."""
        self.name = name
        self.argv = list(argv)
        self.log = directory / f"{name}.log"
        self._ready_file = directory / f"{name}.json"
        self._loop_file = directory / f"{name}.loop.json" if monitored else None
        self._process: Forked | None = None
        self.ready: dict[str, Any] = {}
        self.pids: list[int] = []
        self._shared: set[str] = set()
        self._members: set[int] = set()
        """The pids of its sessions: its own, and those of its ranks."""

    def start(self) -> None:
        """Starts the process; see `wait_ready`."""
        self._ready_file.unlink(missing_ok=True)
        self.ready = {}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        module = "kvferry"
        if self._loop_file is not None:
            module, environment[LOOP_FILE] = "tests.harness.monitored", str(self._loop_file)
        self._process = Forked(module, [*self.argv, "--ready-file", str(self._ready_file)], environment, self.log)
        self.pids.append(self._process.pid)
        OWNED.add(self._process.pid)

    def wait_ready(self) -> "Process":
        """Waits until the process answers requests."""

        def ready() -> bool:
            assert self.running, f"{self.name} ended before it was ready:\n{self.tail()}"
            return self._ready_file.exists()

        until(ready, f"{self.name} is ready", within_s=START_S)
        self.ready = json.loads(self._ready_file.read_bytes())
        port = self.argv.index("--port") + 1
        self.argv[port] = self.url.rsplit(":", 1)[1]
        return self

    @property
    def url(self) -> str:
        """The address at which it answers; a restart keeps it."""
        return str(self.ready["url"]) if self.ready else f"http://127.0.0.1:{self.argv[self.argv.index('--port') + 1]}"

    @property
    def pid(self) -> int:
        """The pid of the process that is running, or ran last."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """True if the process has not ended."""
        return self._process is not None and self._process.poll() is None

    def set_flag(self, flag: str, value: str) -> None:
        """Sets a flag for the next start."""
        if flag in self.argv:
            self.argv[self.argv.index(flag) + 1] = value
        else:
            self.argv += [flag, value]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to this process alone."""
        if self.running:
            self.note_shared_memory()
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it with SIGKILL, and waits until it has ended."""
        self.signal(signal.SIGKILL)
        self.wait_ended(10.0)

    def stop(self, within_s: float = 15.0) -> int:
        """Sends SIGTERM and returns the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait_ended(within_s)

    def wait_ended(self, within_s: float) -> int:
        """Waits until it has ended and returns its exit status; a negative one is the signal that ended it."""
        assert self._process is not None, f"{self.name} was not started"
        status = self._process.wait(within_s)
        assert status is not None, f"{self.name} has not ended in {within_s:g} s:\n{self.tail()}"
        return status

    def restart(self) -> "Process":
        """Starts a new incarnation at the same address."""
        if self.running:
            self.kill()
        self.start()
        return self.wait_ready()

    def tail(self, lines: int = 25) -> str:
        """Returns the end of its log."""
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])

    def logged(self, text: str) -> bool:
        """Returns whether its log contains this text."""
        return text in self.log.read_text("utf-8", "replace")

    def longest_holds(self) -> list[Held]:
        """Returns what held the event loop of a monitored process longest, longest first.

        A process that was killed has not recorded it: then it is that of the incarnation before it, if any.
        """
        if self._loop_file is None or not self._loop_file.exists():
            return []
        return [Held(seconds, what) for seconds, what in json.loads(self._loop_file.read_bytes())]

    def check_loop(self) -> None:
        """Fails if a callback held the event loop of a monitored process, which has ended, for too long."""
        check_held(self.longest_holds(), f"of {self.name}")

    # ---- what it holds

    def describe(self) -> dict[str, Any]:
        """Returns the answer of GET /v1/kvferry."""
        description: dict[str, Any] = get(self.url, "/v1/kvferry")
        return description

    def blocks_in_use(self) -> str:
        """Returns why not every block is free, or "" if all are. A process that does not answer counts as busy."""
        numbers = metrics(self.url)
        if not numbers:
            return "it does not answer"
        engine = {name.removeprefix("kvferry_engine_"): value for name, value in numbers.items()}
        busy = {
            name: engine[name]
            for name in ("running", "waiting", "waiting_for_kv", "held_blocks", "handoff_open_grants")
            if engine[name]
        }
        busy |= {"quarantined": engine["handoff_quarantined_blocks"]} if engine["handoff_quarantined_blocks"] else {}
        if engine["free_blocks"] != engine["blocks"]:
            busy["blocks_in_use"] = engine["blocks"] - engine["free_blocks"]
        return ", ".join(f"{name}={value:g}" for name, value in busy.items())

    def members(self) -> list[int]:
        """Returns the pids of the process and its children (ranks), its own first."""
        return [self.pid, *sorted(pid for pid in _session(self.pid) if pid != self.pid)]

    def note_shared_memory(self) -> None:
        """Records the shared memory of the process and its children, which must be gone after their end."""
        self._members.update(_session(self.pid))
        for pid in self._members:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    path = line.split(maxsplit=5)[-1]
                    if path.startswith("/dev/shm/"):
                        self._shared.add(path.removesuffix(" (deleted)"))

    def leftovers(self) -> list[str]:
        """Returns what ended processes have left behind: members of their sessions, and shared memory."""
        left = [f"process {pid} of {self.name}" for pid in self.pids for pid in _session(pid)]
        left += [f"{path} of {self.name}" for path in sorted(self._shared) if Path(path).exists()]
        for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[4]) in {*self.pids, *self._members}:
                left.append(f"System V segment {fields[1]} of {self.name}")
        return left


def _session(leader: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                yield int(entry.name)


class Fleet:
    """Workers and perhaps a router. Leaving the context ends all of them, and checks that nothing is left."""

    def __init__(self, directory: Path, *flags: str, model: str, mode: str = "pull", monitored: bool = False) -> None:
        """Adds `flags` to the command line of every worker. `monitored`: no event loop may be held for too long."""
        self._monitored = monitored
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.mode = mode
        self._model = model
        self._flags = flags
        self.workers: dict[str, Process] = {}
        self.routers: dict[str, Process] = {}

    def worker(self, name: str, *flags: str, role: str, model: str | None = None) -> Process:
        """Starts a worker; see `wait_ready`."""
        argv = ["serve", model or self._model, "--role", role, "--engine-id", name, "--port", "0",
                "--served-model-name", "model", "--transfer-mode", self.mode, *self._flags, *flags]  # fmt: skip
        process = self.workers[name] = Process(name, argv, self.directory, monitored=self._monitored)
        process.start()
        return process

    def route(
        self, *flags: str, prefill: Sequence[Process], decode: Sequence[Process], name: str = "router"
    ) -> Process:
        """Starts a router in front of workers that are ready, and waits until it is ready too."""
        argv = ["route", "--port", "0", "--health-every", "0.2", *flags]
        for role, processes in (("prefill", prefill), ("decode", decode)):
            for process in processes:
                argv += [f"--{role}", process.url]
        router = self.routers[name] = Process(name, argv, self.directory, monitored=self._monitored)
        router.start()
        return router.wait_ready()

    @property
    def processes(self) -> list[Process]:
        """All workers and routers of the fleet."""
        return [*self.workers.values(), *self.routers.values()]

    @property
    def url(self) -> str:
        """The address of the first router."""
        return next(iter(self.routers.values())).url

    def wait_blocks_free(self, within_s: float = FREE_S) -> None:
        """Waits until every block of every running worker is free."""

        def busy() -> dict[str, str]:
            return {w.name: why for w in self.workers.values() if w.running and (why := w.blocks_in_use())}

        try:
            until(lambda: not busy(), "every block is free", within_s=within_s)
        except AssertionError:
            raise AssertionError(f"after {within_s:g} s not every block is free: {busy()}\n{self.tails()}") from None

    def longest_holds(self) -> dict[str, list[str]]:
        """Returns what held the event loops of monitored processes that have ended longest, three of each."""
        return {process.name: [str(held) for held in process.longest_holds()[:3]] for process in self.processes}

    def tails(self) -> str:
        """Returns the last lines of all logs."""
        return "\n".join(f"--- {process.name}\n{process.tail()}" for process in self.processes)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.signal(signal.SIGCONT)
        try:
            if kind is None:
                self.wait_blocks_free()
        finally:
            self._end()
        if kind is None:
            left = [one for process in self.processes for one in process.leftovers()]
            assert not left, f"left behind: {left}"
            for process in self.processes:
                process.check_loop()

    def _end(self) -> None:
        for process in reversed(self.processes):
            process.signal(signal.SIGTERM)  # ends one that still loads
            process.signal(signal.SIGINT)  # one that serves need not drain: what had to be free is free
        slow = []
        for process in self.processes:
            try:
                process.wait_ended(15.0)
            except AssertionError as error:
                slow.append(str(error))
                process.kill()
        assert not slow, "\n".join(slow)


@contextlib.contextmanager
def pair(
    directory: Path,
    *flags: str,
    model: str,
    mode: str = "pull",
    route_flags: Sequence[str] = (),
) -> Iterator[Fleet]:
    """Yields a fleet with a prefill worker `p`, a decode worker `d` and a router."""
    with Fleet(directory, *flags, model=model, mode=mode) as fleet:
        both = [fleet.worker("p", role="prefill"), fleet.worker("d", role="decode")]
        for process in both:
            process.wait_ready()
        fleet.route(*route_flags, prefill=both[:1], decode=both[1:])
        yield fleet
