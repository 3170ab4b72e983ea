"""The leak check of tests/conftest.py names what a test leaves: a thread, a process, a socket, shared memory."""

import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory

from tests.harness.leaks import Held, left_since


def test_a_thread_that_goes_on_is_named() -> None:
    before, end = Held.now(), threading.Event()
    thread = threading.Thread(target=end.wait, name="lost-thread", daemon=True)
    thread.start()
    left = left_since(before, grace_s=0.05)
    end.set()
    thread.join()
    assert len(left) == 1
    assert "thread lost-thread" in left[0]
    assert left_since(before) == []


def test_a_process_that_goes_on_is_named() -> None:
    before = Held.now()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        left = left_since(before, grace_s=0.05)
        process.communicate(b"\n")
    assert len(left) == 1
    assert left[0].startswith(f"process {process.pid} (")


def test_a_process_that_was_not_waited_for_is_named() -> None:
    before = Held.now()
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read() == b""
    left = left_since(before, grace_s=0.2)
    process.stdout.close()
    process.wait()
    assert [one.split(" ")[:2] for one in left] == [["process", str(process.pid)]]


def test_a_socket_that_stays_open_is_named() -> None:
    before = Held.now()
    with socket.socket():
        left = left_since(before, grace_s=0.05)
    assert len(left) == 1
    assert left[0].startswith("socket ")


def test_shared_memory_that_stays_mapped_is_named() -> None:
    before = Held.now()
    with ExitStack() as cleanup:
        memory = SharedMemory(create=True, size=4096)
        cleanup.callback(memory.unlink)
        cleanup.callback(memory.close)
        left = left_since(before, grace_s=0.05)
    assert any(memory.name.lstrip("/") in one for one in left)


def test_nothing_left_is_nothing_named() -> None:
    before = Held.now()
    threading.Thread(target=lambda: None).start()
    assert left_since(before) == []
