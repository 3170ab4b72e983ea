"""vLLM servers as child processes: starts them with a connector, waits with progress, and ends them without leftovers.

Life of a server: STARTING (start) -> READY (wait_ready: /health answers 200) -> ENDED (stop, or kill for a fault).
Every server has a session of its own, so that its engine and worker processes are found by id even after their parent
was killed. Knows nothing of vLLM but its command line and its HTTP.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from kvferry.errors import ConfigError, FerryError
from tests.harness.vllm_zygote import Forked, Zygote

__all__ = ["CONNECTORS", "SERVED_AS", "VllmServer", "VllmSpec", "base_environment", "free_port", "kv_transfer_config"]

CONNECTORS = ("none", "builtin", "kvferry")
SERVED_AS = "m"
"""The model's name in requests."""
KVFERRY_CLASS, KVFERRY_MODULE = "KVFerryConnector", "kvferry.engines.vllm.connector"
_BUILTIN = {"pull": "NixlConnector", "push": "NixlPushConnector"}
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
_POLL_S = 0.1
_PORTS = (12000, 32000)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSpec:
    """One server. `extra` goes into kv_connector_extra_config, `config` beside it, and `flags` on the command line."""

    name: str
    python: str
    model: Path
    connector: str
    role: str = "both"
    mode: str = "pull"
    tp: int = 1
    pp: int = 1
    dtype: str = "float32"
    block_tokens: int | None = None
    max_tokens: int = 2048
    kv_gib: int = 1
    eager: bool = True
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    policy: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> "VllmSpec":
        """Returns the same settings with other fields."""
        return replace(self, **changes)


def base_environment() -> dict[str, str]:
    """Returns our environment and what vLLM needs on a small machine; also for a zygote."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def free_port(count: int = 1) -> int:
    """Returns the first of `count` consecutive ports that are free now. Another process may still take them.

    Below the range from which the system gives ports to connections: a server binds its ports seconds later.
    """
    dice = random.Random()  # two test runs side by side must not draw the same ports
    for _ in range(200):
        port = dice.randrange(*_PORTS)
        if all(_is_free(one) for one in range(port, port + count)):
            return port
    raise FerryError(f"no {count} consecutive ports are free in {_PORTS}. End what listens on them")


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def kv_transfer_config(spec: VllmSpec, side_port: int = 0) -> dict[str, Any] | None:
    """Returns the value of --kv-transfer-config, or None without a connector. `port` is for kvferry's side channel."""
    if spec.connector not in CONNECTORS:
        raise ConfigError(f"connector {spec.connector!r} is none of {CONNECTORS}. Name one of them")
    if spec.connector == "none":
        return None
    config: dict[str, Any] = {
        "kv_role": _ROLES[spec.role],
        "engine_id": spec.name,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": dict(spec.extra),
    }
    if spec.policy is not None:
        config["kv_load_failure_policy"] = spec.policy
    if spec.connector == "builtin":
        config["kv_connector"] = _BUILTIN[spec.mode]
    else:
        config["kv_connector"] = KVFERRY_CLASS
        config["kv_connector_module_path"] = KVFERRY_MODULE
        config["kv_connector_extra_config"] = {"mode": spec.mode, "side_channel.port": side_port, **spec.extra}
    return config | dict(spec.config)


class VllmServer:
    """A server that was started. Leaving the context ends all its processes."""

    def __init__(self, spec: VllmSpec, tell: Callable[[str], None] | None = None, zygote: Zygote | None = None) -> None:
        """Starts nothing yet. `tell` receives progress. With a `zygote`, the server starts within seconds."""
        self._zygote = zygote
        self.spec = spec
        self.port = free_port()
        self.side_port = free_port(spec.tp * spec.pp)
        self.log_path = Path(tempfile.mkdtemp(prefix="kvferry-vllm-")) / f"{spec.name}.log"
        self.started_s = 0.0
        self.ready_after_s = 0.0
        self._begun_unix_s = time.time()
        self._tell = tell or (lambda text: print(f"  {text}", file=sys.stderr, flush=True))
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._shared: set[str] = set()

    @property
    def url(self) -> str:
        """The address at which it answers."""
        return f"http://127.0.0.1:{self.port}"

    def argv(self) -> list[str]:
        """The command line."""
        spec = self.spec
        argv = [spec.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(spec.model)]
        argv += ["--served-model-name", SERVED_AS, "--host", "127.0.0.1", "--port", str(self.port)]
        argv += ["--max-model-len", str(spec.max_tokens), "--dtype", spec.dtype]
        argv += ["--enforce-eager"] if spec.eager else []
        argv += ["--tensor-parallel-size", str(spec.tp), "--pipeline-parallel-size", str(spec.pp)]
        if spec.block_tokens is not None:
            argv += ["--block-size", str(spec.block_tokens)]
        config = kv_transfer_config(spec, self.side_port)
        if config is not None:
            argv += ["--kv-transfer-config", json.dumps(config)]
        return [*argv, *spec.flags]

    def environment(self) -> dict[str, str]:
        """The base, the side channel's address as both connectors read it, and the spec's own variables."""
        ours = {
            "VLLM_CPU_KVCACHE_SPACE": str(self.spec.kv_gib),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        }
        return {**base_environment(), **ours, **self.spec.env}

    def start(self) -> "VllmServer":
        """Starts the process, and returns at once."""
        if self._zygote is not None:
            # The interpreter and -m MODULE are what the zygote is already.
            self._process = self._zygote.fork(self.argv()[3:], self.environment(), self.log_path)
            self.started_s = time.monotonic()
            return self
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.argv(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment(),
                start_new_session=True,
            )  # fmt: skip
        self.started_s = time.monotonic()
        return self

    def wait_ready(self, timeout_s: float = 180.0) -> "VllmServer":
        """Blocks until /health answers 200. Raises FerryError with the end of the log if it ended or never answered."""
        assert self._process is not None, "start() comes first"
        reported_s = time.monotonic()
        while True:
            if self.healthy():
                self.ready_after_s = time.monotonic() - self.started_s
                self._note_shared_memory()
                self._tell(f"{self.spec.name}: ready after {self.ready_after_s:.0f} s")
                return self
            now_s = time.monotonic()
            if self._process.poll() is not None:
                raise FerryError(
                    f"vLLM {self.spec.name!r} ended at its start: {self.last_error()}. Log: {self.log_path}"
                )
            if now_s - self.started_s > timeout_s:
                raise FerryError(
                    f"vLLM {self.spec.name!r} was not ready after {timeout_s:.0f} s: {self.log_tail(1)!r}. "
                    f"Log: {self.log_path}. Give it more time, or memory"
                )
            if now_s - reported_s > 10.0:
                reported_s = now_s
                self._tell(f"{self.spec.name}: starting, {now_s - self.started_s:.0f} s: {self.log_tail(1)[:100]}")
            time.sleep(_POLL_S)

    def healthy(self, timeout_s: float = 2.0) -> bool:
        """Returns True if /health answers 200 now."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=timeout_s) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def get_text(self, path: str, timeout_s: float = 10.0) -> str:
        """Returns the body of a GET. Raises FerryError if there is none."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=timeout_s) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError) as error:
            raise FerryError(f"{self.url}{path} does not answer: {error}. See {self.log_path}") from error

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of a series over all labels that are not given, or 0.0 if it does not exist."""
        total = 0.0
        for line in self.get_text("/metrics").splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(f'{key}="{text}"' in series for key, text in labels.items()):
                total += float(value)
        return total

    # What it wrote

    def log(self) -> str:
        """Returns everything that it has written so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, num_lines: int) -> str:
        """Returns the last lines that are not empty."""
        return "\n".join([line for line in self.log().splitlines() if line.strip()][-num_lines:])

    def last_error(self) -> str:
        """Returns the last line that names an exception and is not about vLLM's own processes, else the last line."""
        lines = [line for line in self.log().splitlines() if line.strip()]
        named = [line for line in lines if re.search(r"\b\w+(Error|Exception|Interrupt)\b: \S", line)]
        causes = [line for line in named if "Engine core init" not in line and "Executor failed" not in line]
        last = (causes or named or lines or ["it wrote nothing"])[-1]
        return re.sub(r"^\([^)]*\) \w+ [\d-]+ [\d:]+ \[[^]]*\]\s*", "", last).strip()[:300]

    # Its processes

    def pids(self) -> list[int]:
        """Returns its living processes, the parent first: those of its session, which outlives the parent."""
        main = self._process.pid if self._process else -1
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) == main and fields[0] != "Z":
                        found.append(int(entry.name))
        return sorted(found, key=lambda pid: (pid != main, pid))

    def rss_mib(self) -> float:
        """Returns the memory that belongs to its processes alone, in MiB (PSS if the kernel reports it)."""
        total_kib = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total_kib += int(line.split()[1])
        return total_kib / 1024

    def cpu_s(self) -> float:
        """Returns the processor time of all its processes since they started, in seconds."""
        ticks = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def running(self) -> bool:
        """True while the process that was started is alive."""
        return self._process is not None and self._process.poll() is None

    def signal_all(self, number: signal.Signals) -> None:
        """Sends a signal to every process of this server, each by its id."""
        # Children first: one that sees its parent die would send goodbyes to its peers.
        for pid in reversed(self.pids()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kills all its processes at once with SIGKILL, so that they can report nothing to any peer."""
        self._note_shared_memory()
        self.signal_all(signal.SIGKILL)
        self._await_end(10.0)
        self._unlink_shared_memory()

    def stop(self, grace_s: float = 8.0, *, keep_log: bool = False) -> None:
        """Sends SIGTERM, then SIGKILL to what is left, and removes their shared memory. Never raises."""
        if not keep_log:
            shutil.rmtree(self.log_path.parent, ignore_errors=True)
        if self._process is None:
            return
        self._note_shared_memory()
        if self.running() and grace_s > 0:
            self._process.send_signal(signal.SIGTERM)
            self._await_end(grace_s)
        self.signal_all(signal.SIGKILL)
        self._await_end(10.0)
        self._unlink_shared_memory()

    def _await_end(self, timeout_s: float) -> None:
        if self._process is None:
            return
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None and not self.pids():
                return
            time.sleep(_POLL_S / 2)

    def _note_shared_memory(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    path = line.partition("/dev/shm/")[2]
                    if path and not path.endswith(" (deleted)"):
                        self._shared.add(path)

    def _unlink_shared_memory(self) -> None:
        """Removes the files in /dev/shm that killed processes had mapped, and that no other process has."""
        left = {name for name in self._shared if Path("/dev/shm", name).exists()}
        for path in Path("/dev/shm").glob("vllm_dist_*"):  # a server that died at its start was never looked at
            with contextlib.suppress(OSError):
                if path.stat().st_mtime >= self._begun_unix_s:
                    left.add(path.name)
        if left:
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit():
                    with contextlib.suppress(OSError):
                        maps = (entry / "maps").read_text()
                        left -= {name for name in left if f"/dev/shm/{name}" in maps}
        for name in left:
            Path("/dev/shm", name).unlink(missing_ok=True)

    def __enter__(self) -> "VllmServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop(keep_log=error is not None)
