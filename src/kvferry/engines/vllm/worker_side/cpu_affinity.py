"""Chooses the cores on which a CPU worker's transfer threads run.

vLLM binds a CPU worker to its cores (VLLM_CPU_OMP_THREADS_BIND), and so binds the thread that starts the transfer
threads to one of them. On that core the model's thread waits for work with sched_yield, without a pause, and transfer
threads get no time, in the worst case for so long that a peer considers this engine dead. Therefore they may run on
every core that the engine's process may use.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["on_every_core"]

logger = logging.getLogger(__name__)


@contextmanager
def on_every_core() -> Iterator[None]:
    """Lets threads that are started inside the context run on every core of the process that started this one.

    Afterwards the calling thread is bound as before. Never raises: if cores cannot be chosen, nothing changes.
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
