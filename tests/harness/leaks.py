"""What a test must not leave behind: threads, child processes, sockets, and shared memory.

`Held.now()` is a snapshot of what this process holds; `left_since` waits a moment for what is just ending, and then
names whatever is still there. Native threads of libraries (torch, UCX) are not Python's and are not counted.
"""

import gc
import multiprocessing
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.harness.until import until

__all__ = ["OWNED", "Held", "left_since"]

OWNED: set[int] = set()
"""Processes of a fleet that lives longer than one test, and that the fleet itself ends. A test may restart
them; at the end of the session none may be left."""
_STANDARD = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Helpers of the standard library: there is one per interpreter, and it ends with it."""
GRACE_S = 5.0
"""How long a thread or a process may take to end after its test."""


@dataclass(frozen=True, slots=True)
class Held:
    """A snapshot: each set names things of this process in words that a reader understands."""

    threads: frozenset[str]
    processes: Mapping[int, str]
    """By process id: what a process runs changes when it begins another program."""
    sockets: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> "Held":
        """Returns what this process holds at this moment."""
        return cls(
            frozenset(f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()),
            _children(),
            frozenset(f"socket {target} (descriptor {number})" for number, target in _descriptors("socket:")),
            frozenset(_shared_memory()),
        )

    def beyond(self, before: "Held", *, owned: bool = True) -> list[str]:
        """Returns what exists now and did not before. With `owned`, processes of OWNED do not count."""
        known = {*before.processes, *(OWNED if owned else ())}
        return sorted(
            (self.threads - before.threads)
            | {text for pid, text in self.processes.items() if pid not in known}
            | (self.sockets - before.sockets)
            | (self.shared_memory - before.shared_memory)
        )


def left_since(before: Held, grace_s: float = GRACE_S, *, owned: bool = True) -> list[str]:
    """Returns what a test has left behind, once what was ending has ended. With `owned`, also processes of OWNED."""
    if not Held.now().beyond(before, owned=owned):
        return []
    gc.collect()  # what only a reference cycle keeps alive is no leak
    try:
        until(lambda: not Held.now().beyond(before, owned=owned), "nothing is left", within_s=grace_s)
    except AssertionError:
        return Held.now().beyond(before, owned=owned)
    return []


def _children() -> dict[int, str]:
    # A fork server has started these, so they are not children of this process.
    found = {one.pid: f"process {one.pid} ({one.name})" for one in multiprocessing.active_children() if one.pid}
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue  # that thread has just ended
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100]
            except OSError:
                continue
            if not any(name in command for name in _STANDARD):
                found[int(pid)] = f"process {pid} ({command.strip() or 'ended, not waited for'})"
    return found


def _descriptors(kind: str) -> list[tuple[str, str]]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith(kind):
            found.append((number, target))
    return found


def _shared_memory() -> set[str]:
    """Returns the files in /dev/shm that this process has mapped or open."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if " /dev/shm/" in line}
    return {f"shared memory {name}" for name in mapped | {target for _, target in _descriptors("/dev/shm/")}}
