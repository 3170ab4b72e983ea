"""Removes what makes the *built-in* connector stall on two cores, for benchmarks; it never changes kvferry.

Three things make it stall on a small machine, and none of them says anything about how well it hands over:

1. NIXL's Python API starts a progress thread that never sleeps.
2. Its worker pins the process to the last core of each NUMA node.
3. vLLM's shared-memory broadcast (only with tensor or pipeline parallelism) spins on sched_yield.

`write_sitecustomize` makes a folder for PYTHONPATH whose sitecustomize calls `neutralise` in every process of a server.
This module imports nothing but the standard library: it is loaded at the start of every interpreter.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["neutralise", "neutralise_yield", "write_sitecustomize"]

PROGRESS_DELAY_US = 100
YIELD_S = 50e-6
_NIXL_APIS = ("nixl_cu12._api", "nixl_cu13._api")


def write_sitecustomize(directory: Path, function: str) -> Path:
    """Makes a folder whose sitecustomize.py calls `function` of this module. Returns the folder, for PYTHONPATH."""
    assert function in __all__, f"{function} is no function of this module"
    directory.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).parents[2]
    (directory / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(source)!r})\nfrom tests.harness.vllm_peer import {function}\n{function}()\n"
    )
    return directory


def neutralise() -> None:
    """Removes all three causes in this process."""
    neutralise_yield()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity = _stay
    for name in _NIXL_APIS:
        if name in sys.modules:
            _delay(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


def neutralise_yield() -> None:
    """Removes only the third, which belongs to vLLM and affects every connector."""
    if hasattr(os, "sched_yield"):
        os.sched_yield = _nap


def _nap() -> None:
    time.sleep(YIELD_S)


def _stay(_pid: int, _cores: Any) -> None:
    """Replaces sched_setaffinity, and does nothing."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finds NIXL's API through the other finders, and patches the loaded module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds NIXL's API only, and returns None for everything else."""
        if fullname not in _NIXL_APIS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Does what the real one does."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Does what the real one does, then gives agents a progress thread that sleeps."""
        self._inner.exec_module(module)
        _delay(module)


def _delay(module: ModuleType) -> None:
    names = vars(module)
    if "nixlBind" in names:
        names["nixlBind"] = _Bindings(names["nixlBind"])


class _Bindings:
    """NIXL's binding module, except that an agent's configuration gets a delay."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802 (their name)
        config.pthrDelay = PROGRESS_DELAY_US
        return self._inner.nixlAgent(name, config)
