"""Progress on stderr: one line that redraws itself on a terminal, a few plain lines when piped."""

import sys
import time
from types import TracebackType

__all__ = ["Progress"]

REDRAW_S = 0.1
PLAIN_S = 5.0


class Progress:
    """`with Progress(...) as bar: bar.advance(num_bytes)`, once an item."""

    def __init__(self, title: str, *, total_bytes: int, num_items: int, silent: bool = False) -> None:
        self._title = title
        self._silent = silent
        self._total_bytes = max(1, total_bytes)
        self._num_items = num_items
        self._bytes = 0
        self._items = 0
        self._began_s = time.monotonic()
        self._drawn_s = self._began_s
        self._terminal = sys.stderr.isatty()

    def __enter__(self) -> "Progress":
        return self

    def advance(self, num_bytes: int) -> None:
        """One more item, of so many bytes, is done."""
        self._bytes += num_bytes
        self._items += 1
        now_s = time.monotonic()
        if now_s - self._drawn_s >= (REDRAW_S if self._terminal else PLAIN_S):
            self._drawn_s = now_s
            self._write(end="\r" if self._terminal else "\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._write(end="\n", tail=f", {time.monotonic() - self._began_s:.1f} s")
        elif self._terminal and not self._silent:
            sys.stderr.write("\n")

    def _write(self, *, end: str, tail: str = "") -> None:
        if self._silent:
            return
        percent = min(100, 100 * self._bytes // self._total_bytes)  # a rank reads some of it twice, some not at all
        sys.stderr.write(
            f"{self._title}: {percent:3d} % {self._bytes / 1e6:.0f}/{self._total_bytes / 1e6:.0f} MB, "
            f"{self._items}/{self._num_items} tensors{tail}{end}"
        )
        sys.stderr.flush()
