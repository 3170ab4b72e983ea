"""On which cores a CPU worker's transfer threads run.

vLLM binds a CPU worker to its cores (VLLM_CPU_OMP_THREADS_BIND), and with that the thread that starts ours to one of
them: there the model's thread waits for work with sched_yield, without a pause, and ours get no time; at the worst for
so long that a peer takes this engine for dead. So they may run wherever the engine's process may.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["on_every_core"]

logger = logging.getLogger(__name__)


@contextmanager
def on_every_core() -> Iterator[None]:
    """Threads that are started inside, by us or by a library, may run on every core of the process that started this
    one. Afterwards the calling thread is bound as before. Never raises: where cores cannot be chosen, nothing changes.
    """
    try:
        bound = os.sched_getaffinity(0)
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()) | bound)
    except (AttributeError, OSError) as error:
        logger.info("transfer threads stay on the model's cores cause=%s", error)
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)
