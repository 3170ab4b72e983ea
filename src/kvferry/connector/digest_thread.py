"""A thread that hashes long prompts while the engine computes them, so that prefill's answer does not wait for it."""

import threading
from queue import SimpleQueue

from kvferry.wire.prompt_digest import TOKEN_BYTES, Prompt

__all__ = ["DigestThread"]

_LEAST_BYTES = 2048 * TOKEN_BYTES
"""Hashing a shorter prompt takes hardly longer than waking the thread."""


class DigestThread:
    """Computes the digests of prompts ahead of their use. It is only faster with it: whoever needs a digest that is not
    there computes it. The thread begins with the first long prompt."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Prompt | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, prompt: Prompt) -> None:
        """Takes a prompt whose digest will be needed soon. Does not block. Call it on one thread."""
        if len(prompt.packed) < _LEAST_BYTES:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvferry-digests", daemon=True)
            self._thread.start()
        self._queue.put(prompt)

    def _run(self) -> None:
        while (prompt := self._queue.get()) is not None:
            prompt.digest  # noqa: B018  # the prompt keeps it

    def close(self) -> None:
        """Ends the thread. Idempotent; nothing may be submitted afterwards."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
