"""The launcher: a process that loads torch once and forks ranks, so several ranks cost little more than one.

It has no threads and has computed nothing when it forks, so there is nothing that a fork could break; only the ranks
use CUDA and transports. It reaps the ranks, reports how they ended, and ends them and itself when the engine's process
is gone.

The engine and the launcher talk over a socket pair. To the launcher: `S` with a descriptor (the rank's control socket)
starts a rank; `K` with a pid kills it. From the launcher: a pid and -1 say that this rank runs; a pid and a status of
waitpid say that it has ended. A pid that is not one of its ranks is ignored, so no other process is ever killed.
"""

import contextlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from kvferry.errors import ConfigError

__all__ = ["Launcher", "serve"]

_TO = struct.Struct("<cq")
_FROM = struct.Struct("<qq")
_RUNS = -1
_START_S = 120.0


class Launcher:
    """The engine's side of the launcher. Any thread may use it; only one at a time may call `start`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._lock = threading.Lock()
        self._ended: dict[int, int] = {}
        self._gone = False
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "kvferry.engines.mini.ranks.rank_process", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            except OSError as error:
                ours.close()
                raise ConfigError(f"no process can be started for the ranks: {error}. Lower --tp and --pp.") from error

    @property
    def running(self) -> bool:
        """Whether the launcher can start ranks."""
        return self._process.poll() is None and not self._gone

    def start(self, control: socket.socket) -> int:
        """Starts a rank with the socket `control`, which the caller closes. Returns its pid.

        Blocks. Raises ConfigError.
        """
        with self._lock:
            with contextlib.suppress(OSError):
                socket.send_fds(self._socket, [_TO.pack(b"S", 0)], [control.fileno()])
            end_s = time.monotonic() + _START_S
            while (left_s := end_s - time.monotonic()) > 0 and not self._gone:
                event = self._receive(left_s)
                if event is not None and event[1] == _RUNS:
                    return event[0]
        raise ConfigError("a process for a rank did not start. Lower --tp and --pp, or raise the machine's limits.")

    def kill(self, pid: int) -> None:
        """Sends SIGKILL to a rank, if it still runs. Never blocks."""
        with contextlib.suppress(OSError):
            self._socket.sendall(_TO.pack(b"K", pid))

    def wait(self, pid: int, timeout_s: float) -> int | None:
        """Returns a rank's exit status, or minus the signal that ended it; None if it has not ended, or is unknown."""
        end_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if pid in self._ended:
                    return os.waitstatus_to_exitcode(self._ended[pid])
                left_s = end_s - time.monotonic()
                if left_s <= 0 or self._gone:
                    return None
                self._receive(min(left_s, 0.05))

    def close(self) -> None:
        """Ends the launcher and all its ranks. Idempotent."""
        self._socket.close()
        self._gone = True
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self, timeout_s: float) -> tuple[int, int] | None:
        try:
            self._socket.settimeout(max(0.001, timeout_s))
            body = self._socket.recv(_FROM.size, socket.MSG_WAITALL)
        except TimeoutError:
            return None
        except OSError:
            body = b""
        if len(body) < _FROM.size:
            self._gone = True
            return None
        pid, status = _FROM.unpack(body)
        if status != _RUNS:
            self._ended[pid] = status
        return pid, status


def serve(sock: socket.socket, run_rank: Callable[[int], Any]) -> None:
    """The launcher's side. Returns when the engine is gone.

    `run_rank` is called in each fork, with the descriptor of the control socket, and never returns.
    """
    signal_pipe, write_end = os.pipe()
    os.set_blocking(write_end, False)
    os.set_blocking(signal_pipe, False)
    signal.set_wakeup_fd(write_end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ranks: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        selector.register(signal_pipe, selectors.EVENT_READ)
        while True:
            keys = [key.fileobj for key, _ in selector.select()]
            if signal_pipe in keys:
                with contextlib.suppress(BlockingIOError):
                    os.read(signal_pipe, 4096)
                _reap(sock, ranks)
            if sock not in keys:
                continue
            body, descriptors, _, _ = socket.recv_fds(sock, _TO.size, 1, socket.MSG_WAITALL)
            if len(body) < _TO.size:
                break
            command, pid = _TO.unpack(body)
            if command == b"K" and pid in ranks:
                os.kill(pid, signal.SIGKILL)
            elif command == b"S" and descriptors:
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    sock.close()
                    run_rank(descriptors[0])
                os.close(descriptors[0])
                ranks.add(pid)
                sock.sendall(_FROM.pack(pid, _RUNS))
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    for pid in ranks:
        os.waitpid(pid, 0)


def _reap(sock: socket.socket, ranks: set[int]) -> None:
    for pid in list(ranks):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ranks.discard(pid)
            with contextlib.suppress(OSError):
                sock.sendall(_FROM.pack(pid, status))


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
