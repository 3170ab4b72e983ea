"""A process that has loaded torch once and becomes ranks by fork: four ranks cost one start, and a fifth almost none.

It has no thread and has run nothing when it forks, so there is nothing that a fork could break; CUDA and transports are
first touched in the ranks. It reaps them, tells how they ended, and ends with them when the engine's process is gone.

Spoken on a socket pair. To the launcher: `S` with a descriptor, the rank's control socket; `K` and a pid: kill it.
From it: a pid and -1: this rank runs; a pid and a status of waitpid: it has ended. A pid that it does not have is
ignored, so that no other process is ever killed.
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
    """The engine's side. Any thread; `start` is to be called by one at a time."""

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
        """It can start ranks."""
        return self._process.poll() is None and not self._gone

    def start(self, control: socket.socket) -> int:
        """Begin a rank at the other end of `control`, which the caller closes. Its pid. Blocks. Raises ConfigError."""
        with self._lock:
            with contextlib.suppress(OSError):
                socket.send_fds(self._socket, [_TO.pack(b"S", 0)], [control.fileno()])
            end_s = time.monotonic() + _START_S
            while (left_s := end_s - time.monotonic()) > 0 and not self._gone:
                told = self._receive(left_s)
                if told is not None and told[1] == _RUNS:
                    return told[0]
        raise ConfigError("a process for a rank was not started. Lower --tp and --pp, or look at the machine's limits.")

    def kill(self, pid: int) -> None:
        """SIGKILL to a rank, if it still runs. Never blocks."""
        with contextlib.suppress(OSError):
            self._socket.sendall(_TO.pack(b"K", pid))

    def wait(self, pid: int, timeout_s: float) -> int | None:
        """How a rank ended: its exit status, or minus the signal. None: it has not, or nobody knows."""
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
        """End the process, and every rank that it has. Idempotent."""
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


def serve(sock: socket.socket, become: Callable[[int], Any]) -> None:
    """The launcher's side. Returns when the engine is gone. `become`: in a fork, with the descriptor; never returns."""
    wakes, awake = os.pipe()
    os.set_blocking(awake, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(awake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ranks: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        selector.register(wakes, selectors.EVENT_READ)
        while True:
            keys = [key.fileobj for key, _ in selector.select()]
            if wakes in keys:
                with contextlib.suppress(BlockingIOError):
                    os.read(wakes, 4096)
                _reap(sock, ranks)
            if sock not in keys:
                continue
            body, descriptors, _, _ = socket.recv_fds(sock, _TO.size, 1, socket.MSG_WAITALL)
            if len(body) < _TO.size:
                break
            what, pid = _TO.unpack(body)
            if what == b"K" and pid in ranks:
                os.kill(pid, signal.SIGKILL)
            elif what == b"S" and descriptors:
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    sock.close()
                    become(descriptors[0])
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
