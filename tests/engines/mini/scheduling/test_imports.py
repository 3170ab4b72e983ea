"""The scheduler works with numbers only: importing it loads neither torch nor a server."""

import subprocess
import sys


def test_scheduling_loads_without_torch() -> None:
    code = (
        "import importlib, pkgutil, sys, kvferry.engines.mini.scheduling as room\n"
        "for module in pkgutil.iter_modules(room.__path__, room.__name__ + '.'): importlib.import_module(module.name)\n"
        "print([name for name in ('torch', 'aiohttp', 'zmq', 'nixl') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
