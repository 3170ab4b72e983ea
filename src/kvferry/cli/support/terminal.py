"""What commands show while they work: plain lines when piped, colour and a spinner on a terminal."""

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

__all__ = ["Terminal"]

_COLOURS = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_NAMES = ("cyan", "yellow", "blue", "green")
_SPINNER = "|/-\\"


class Terminal:
    """Writes to one stream. Safe to call from any thread."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._fancy = self._stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._lock = threading.Lock()
        self._spinning = False
        self._names: dict[str, str] = {}

    def paint(self, text: str, colour: str) -> str:
        """In colour, where the stream shows colour."""
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self._fancy else text

    def line(self, text: str = "") -> None:
        """A line."""
        with self._lock:
            self._clear()
            print(text, file=self._stream, flush=True)

    def write(self, text: str) -> None:
        """Text as it comes, without a line's end."""
        with self._lock:
            self._clear()
            print(text, end="", file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """What is going on."""
        self.line(self.paint(f"kvferry: {text}", "dim"))

    def error(self, text: str) -> None:
        """What went wrong."""
        self.line(self.paint(f"kvferry: {text}", "red"))

    def step(self, what: str, detail: str, after_s: float) -> None:
        """Something is done."""
        self.line(f"  {self.paint('ok', 'green')}  {what:<18} {self.paint(f'{after_s:5.1f} s  {detail}', 'dim')}")

    def log_line(self, name: str, text: str) -> None:
        """A line of a child's log."""
        colour = self._names.setdefault(name, _NAMES[len(self._names) % len(_NAMES)])
        self.line(f"{self.paint(f'[{name}]', colour)} {text}")

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A spinner with the seconds, on a terminal; else a line."""
        if not self._fancy:
            self.line(f"  ..  {what}")
            yield
            return
        stop = threading.Event()
        spinner = threading.Thread(target=self._spin, args=(what, stop), daemon=True)
        spinner.start()
        try:
            yield
        finally:
            stop.set()
            spinner.join()

    def _spin(self, what: str, stop: threading.Event) -> None:
        began_s = time.monotonic()
        for mark in itertools.cycle(_SPINNER):
            with self._lock:
                self._spinning = True
                print(f"\r\x1b[2K  {mark}   {what} {time.monotonic() - began_s:5.1f} s", end="", file=self._stream,
                      flush=True)  # fmt: skip
            if stop.wait(0.1):
                break
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self._spinning:
            print("\r\x1b[2K", end="", file=self._stream)
            self._spinning = False
