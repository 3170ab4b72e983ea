"""Defaults for UCX and NIXL, as environment variables that are set only if the operator has not set them.

UCX reads its environment once, when the first agent of a process is made.
"""

import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

__all__ = ["may_read_other_processes", "prepare_environment"]

logger = logging.getLogger(__name__)

_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_STATUS = Path("/proc/self/status")
_CAP_SYS_PTRACE = 1 << 19


def prepare_environment(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Sets what is unset, and returns what was set. Logs it once, at INFO, if there is anything."""
    wanted = {
        # Each error that NIXL prints also reaches us as an exception or a status, and is logged by us with its context.
        "NIXL_LOG_LEVEL": "FATAL",
        # Not stdout, UCX's default: results go there.
        "UCX_LOG_FILE": "stderr",
    }
    if "UCX_TLS" not in environment and not may_read_other_processes():
        # CMA looks usable (a process may read itself) and then fails at the first transfer.
        wanted["UCX_TLS"] = "^cma"
    chosen = {name: value for name, value in wanted.items() if name not in environment}
    environment.update(chosen)
    if chosen:
        logger.info("UCX defaults %s", " ".join(f"{name}={value}" for name, value in chosen.items()))
    return chosen


def may_read_other_processes(ptrace_scope: Path = _PTRACE_SCOPE, status: Path = _STATUS) -> bool:
    """Returns whether the kernel lets a process copy from another of the same user (cross-memory attach)."""
    try:
        if int(ptrace_scope.read_text()) == 0:
            return True
    except FileNotFoundError:
        return True  # no Yama
    except (OSError, ValueError):
        return False
    try:
        for line in status.read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) & _CAP_SYS_PTRACE)
    except (OSError, ValueError):
        return False
    return False
