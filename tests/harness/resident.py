"""The resident memory of processes, sample by sample, and whether it has grown."""

import ctypes
import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["GivenBack", "Samples", "resident_mib"]

GROWN_MIB = 300.0
"""By how much a process of tests may grow before it is made to look for what it can give back."""


def resident_mib(pid: int, field_name: str = "VmRSS") -> float:
    """Returns the resident memory of a process, in MiB; 0 if it has ended. `field_name` names a part of it, such as
    RssShmem (proc_pid_status(5))."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field_name}:")), 0.0)


@dataclass(slots=True)
class Samples:
    """The resident memory of each process of a fleet after numbers of requests, in MiB."""

    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def take(self, num_requests: int, pids: Mapping[str, int]) -> dict[str, float]:
        """Adds a row, and returns it."""
        row = {name: round(resident_mib(pid), 1) for name, pid in pids.items()}
        self.rows.append((num_requests, row))
        return row

    def growth(self, after_requests: int) -> dict[str, float]:
        """Returns by how much each process has grown since the first sample after `after_requests`: 0.01 is 1 %.

        The last three samples count by their lowest, because a request that runs while a sample is taken has memory of
        its own, which is given back.
        """
        first = next((row for number, row in self.rows if number >= after_requests), None)
        if first is None:
            return {}
        last = [row for number, row in self.rows if number >= after_requests][-3:]
        return {name: min(row[name] for row in last) / mib - 1 for name, mib in first.items() if mib}

    def table(self) -> str:
        """Returns the samples as a table in Markdown."""
        names = list(self.rows[0][1])
        lines = [f"| requests | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
        lines += [f"| {number:,} | {' | '.join(f'{row[n]:.0f}' for n in names)} |" for number, row in self.rows]
        return "\n".join(lines)


class GivenBack:
    """Gives the memory of engines that tests have closed back to the system.

    A closed engine is part of reference cycles: its weights stay until the collector looks at its oldest objects, which
    it does rarely; and the C library keeps what was freed. Three engines with SmolLM2 were 3.9 GB in this way.
    """

    def __init__(self) -> None:
        self._after_mib = resident_mib(os.getpid())

    def after_a_test(self) -> None:
        """Collects if this process has grown by GROWN_MIB since the last time."""
        if resident_mib(os.getpid()) - self._after_mib > GROWN_MIB:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            self._after_mib = resident_mib(os.getpid())
