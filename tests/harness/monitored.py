"""`python -m tests.harness.monitored serve ...`: kvferry's command with a LoopMonitor in its process.

When the process ends in order, it writes what held its event loop longest into the file that LOOP_FILE names. The loop
is asyncio's own: uvloop's callbacks cannot be measured.
"""

import atexit
import json
import os
import sys
from pathlib import Path

from kvferry.cli.main import main
from tests.harness.loop_monitor import LoopMonitor

__all__ = ["LOOP_FILE"]

LOOP_FILE = "KVFERRY_TEST_LOOP_FILE"
"""The environment variable with the path of the file."""


def _report(monitor: LoopMonitor, path: Path) -> None:
    path.write_text(json.dumps([[held.seconds, held.what] for held in monitor.longest]))


if __name__ == "__main__":
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # so that importing it fails
    atexit.register(_report, LoopMonitor().install(), Path(os.environ.pop(LOOP_FILE)))
    sys.exit(main())
