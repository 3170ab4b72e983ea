"""Starts the routers of `benchmarks.router`, each as a process of its own, and reads their processor time."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvferry.cli.support.parent_death import SUPERVISOR_VARIABLE
from kvferry.errors import FerryError

__all__ = ["RIVALS", "ROUTERS", "Running", "cpu_s", "install_rivals", "running", "start_fleet"]

RIVALS = ("vllm-router==0.1.17", "smg==1.13.0")
_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds benchmarks/: the processes run elsewhere and are to import it."""
_START_S = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Router:
    """One router that can be measured."""

    name: str
    mode: str
    """The transfer mode of its fleet."""
    argv: Callable[[Path, str, str, int], list[str]]
    """Makes its command line from the folder of the rivals, prefill's address, decode's address, and its own port."""
    rival: bool = False


def _kvferry(_: Path, prefill: str, decode: str, port: int) -> list[str]:
    return [
        sys.executable, "-m", "kvferry", "route", "--prefill", prefill, "--decode", decode, "--port", str(port),
        # A benchmark fills the machine, so a slow answer to a health check means nothing here.
        "--health-timeout", "60", "--connect-timeout", "30", "--hung-after", "0",
    ]  # fmt: skip


def _plain(_: Path, prefill: str, decode: str, port: int) -> list[str]:
    module = "benchmarks.router.plain"
    return [sys.executable, "-m", module, "--prefill", prefill, "--decode", decode, "--port", str(port)]


def _vllm_router(rivals: Path, prefill: str, decode: str, port: int) -> list[str]:
    return [
        str(rivals / "bin" / "vllm-router"), "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode,
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(_free_port()), "--log-level", "error",
        "--policy", "round_robin",
    ]  # fmt: skip


def _smg(rivals: Path, prefill: str, decode: str, port: int) -> list[str]:
    return [
        str(rivals / "bin" / "smg"), "launch", "--backend", "vllm", "--pd-disaggregation", "--prefill", prefill,
        "--decode", decode, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(_free_port()),
        "--log-level", "error", "--policy", "round_robin",
    ]  # fmt: skip


ROUTERS = (
    Router("kvferry", "pull", _kvferry),
    Router("kvferry", "push", _kvferry),
    Router("plain", "pull", _plain),
    Router("vllm-router", "pull", _vllm_router, rival=True),
    Router("smg", "pull", _smg, rival=True),
)


@dataclass(slots=True)
class Running:
    """A router that is running."""

    router: Router
    pid: int
    port: int


def install_rivals(folder: Path) -> None:
    """Installs the rivals in a virtual environment of their own. Raises FerryError with the message of pip."""
    wanted = "\n".join(RIVALS)
    stamp = folder / "installed.txt"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"benchmarks.router: installing {' '.join(RIVALS)} into {folder} ...", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, *RIVALS], capture_output=True, text=True, check=False)
    if done.returncode:
        raise FerryError(
            f"the rivals cannot be installed: {done.stderr.strip()[-400:]}. Do without them: --routers kvferry,plain"
        )
    stamp.write_text(wanted)


@contextmanager
def running(router: Router, rivals: Path, ports: dict[str, int]) -> Iterator[Running]:
    """Starts a router in front of this fleet, on a port of its own, and ends it with the context. Raises FerryError."""
    port = _free_port()
    prefill, decode = (f"http://127.0.0.1:{ports[f'{router.mode}_{role}']}" for role in ("prefill", "decode"))
    argv = router.argv(rivals, prefill, decode, port)
    with (
        tempfile.TemporaryDirectory() as scratch,
        _process(argv, Path(scratch), needs_ready_file=router.name == "plain") as process,
    ):
        _wait(lambda: _listens(port), process, router.name, Path(scratch))
        yield Running(router, process.pid, port)


@contextmanager
def start_fleet() -> Iterator[tuple[int, dict[str, int]]]:
    """Starts the scripted workers; gives their process id, and their ports as `pull_prefill` and so on."""
    with tempfile.TemporaryDirectory() as scratch:
        argv = [sys.executable, "-m", "benchmarks.router.fleet"]
        with _process(argv, Path(scratch), needs_ready_file=True) as process:
            ready = Path(scratch) / "ready.json"
            _wait(ready.exists, process, "the scripted workers", Path(scratch))
            yield process.pid, msgspec.json.decode(ready.read_bytes())["ports"]


@contextmanager
def _process(argv: list[str], scratch: Path, *, needs_ready_file: bool) -> Iterator["subprocess.Popen[bytes]"]:
    more = ["--ready-file", str(scratch / "ready.json")] if needs_ready_file else []
    environment = {
        **os.environ, SUPERVISOR_VARIABLE: str(os.getpid()), "KVFERRY_LOG": "ERROR", "RUST_LOG": "error",
        "NO_PROXY": "*", "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
    }  # fmt: skip
    with (scratch / "log").open("wb") as log:
        process = subprocess.Popen(
            [*argv, *more], stdout=log, stderr=log, env=environment, cwd=scratch, start_new_session=True
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads a session, so only its own processes are in the group
            process.wait()


def _wait(ready: Callable[[], bool], process: "subprocess.Popen[bytes]", name: str, scratch: Path) -> None:
    ends_s = time.monotonic() + _START_S
    while not ready():
        if process.poll() is not None or time.monotonic() > ends_s:
            log = (scratch / "log").read_text("utf-8", "replace").strip()[-400:]
            how = "does not answer" if process.returncode is None else f"ended with status {process.returncode}"
            raise FerryError(f"{name} {how}; the end of its log: {log!r}. Leave it out with --routers")
        time.sleep(0.05)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_s(pid: int) -> float:
    """Returns the processor time of a process and its descendants. The kernel counts in units of 10 ms."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                words = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(words[1])
                ticks[int(folder.name)] = int(words[11]) + int(words[12])
    wanted = {pid}
    grown = True
    while grown:
        more = {one for one, parent in parents.items() if parent in wanted} - wanted
        wanted |= more
        grown = bool(more)
    return sum(ticks.get(one, 0) for one in wanted) / _TICKS
