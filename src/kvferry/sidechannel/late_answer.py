"""An answer that the listener's thread cannot give at once, because only the engine's thread knows it."""

import threading
from collections.abc import Callable

__all__ = ["LateAnswer"]


class LateAnswer:
    """Returned by a handler in place of an answer; `give` supplies that later. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._body: bytes | None = None
        self._send: Callable[[bytes], None] | None = None

    def give(self, body: bytes) -> None:
        """Sends the answer. Only the first call counts. Never blocks."""
        with self._lock:
            if self._body is not None:
                return
            self._body, send = body, self._send
        if send is not None:
            send(body)

    def then(self, send: Callable[[bytes], None]) -> None:
        """Calls `send` with the answer: at once if it was given already. Called once, by the listener."""
        with self._lock:
            self._send, body = send, self._body
        if body is not None:
            send(body)
