"""A process that has imported vLLM once, and becomes servers by fork: three seconds instead of three imports.

A vLLM server is three processes (API server, engine core, worker), and each of them imports vLLM: 30 s of one core. A
zygote imports it once; every server, and every process of one, is forked from it. What runs afterwards is the same.
Runs under vLLM's interpreter, with the standard library beside it: `python -m tests.harness.vllm_zygote`. A line of
JSON on stdin ({"argv", "env", "log"}) starts a server; the answer is a line with its process id.
"""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvferry.errors import FerryError

__all__ = ["PATCH_VARIABLE", "Forked", "Zygote", "main"]

PATCH_VARIABLE = "KVFERRY_BENCH_PATCH"
"""The function of vllm_peer that a forked server calls before anything else."""
_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor",
            "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama")  # fmt: skip


class Forked:
    """A server that a zygote started, with the part of Popen's interface that is needed here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """Returns None while it lives. Only the zygote knows its status, so an end is always 1."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return 1
        return 1 if state == "Z" else None

    def send_signal(self, number: int) -> None:
        """Sends a signal to it by its id, if it is alive."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Zygote:
    """A zygote that runs under `python`. `close` ends it; the servers that it forked live on."""

    def __init__(self, python: str, env: Mapping[str, str]) -> None:
        """Starts it and returns at once; the first `fork` waits for the imports."""
        argv = [python, "-W", "ignore", "-m", "tests.harness.vllm_zygote"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(env), text=True)

    def fork(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Forked:
        """Returns a new server after it was forked. Raises FerryError if the zygote has ended."""
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        try:
            self._process.stdin.write(json.dumps({"argv": list(argv), "env": dict(env), "log": str(log)}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError as error:
            raise FerryError(f"the process that had imported vLLM is gone: {error}. Run again without it") from error
        if not line:
            raise FerryError(
                "the process that should import vLLM ended: see its message above. Is it that interpreter?"
            )
        return Forked(int(line))

    def close(self) -> None:
        """Ends it by closing its stdin."""
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        with contextlib.suppress(OSError):  # what it has not read yet is of no use now
            self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def main() -> NoReturn:
    """Runs in vLLM's interpreter: imports vLLM, then forks a server for each line."""
    import importlib

    answers = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints during its import is no answer
    begun_s = time.monotonic()
    for name in _MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"  {name} cannot be imported early: {error}", file=sys.stderr, flush=True)
    _fork_workers()
    gc.collect()
    gc.freeze()
    print(f"  vLLM is imported ({time.monotonic() - begun_s:.0f} s)", file=sys.stderr, flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended servers leave no zombie
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            os.close(answers)
            _become(order)
        os.write(answers, f"{pid}\n".encode())
    sys.stderr.flush()
    os._exit(0)  # skips the interpreter's shutdown, in which libraries would complain about leaks


def _fork_workers() -> None:
    """Makes vLLM's CPU platform fork instead of `spawn`; nothing here is broken by a fork."""
    import multiprocessing

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm.") and "get_mp_context" in vars(module):
            vars(module)["get_mp_context"] = lambda: multiprocessing.get_context("fork")


def _end_with_parent() -> None:
    """Ends all servers when the zygote's stdin ends, as when the caller was killed."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _become(order: dict[str, Any]) -> None:
    """Never returns: this process becomes a server in its own session."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        _end_with_parent()
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for target in (1, 2):
            os.dup2(log, target)
        os.dup2(null, 0)
        os.environ.clear()
        os.environ.update(order["env"])
        patch = order["env"].get(PATCH_VARIABLE)
        if patch:
            from tests.harness import vllm_peer

            getattr(vllm_peer, patch)()
        sys.argv = ["api_server.py", *order["argv"]]
        from vllm.entrypoints.launchers.api_server.entry import main as serve

        serve()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0) if isinstance(end.code, int | None) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        raise
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
