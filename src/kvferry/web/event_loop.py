"""The event loop that workers and the router run on: uvloop if it is installed, else the standard library's."""

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["freeze_garbage", "run_event_loop"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def run_event_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs `main` in a new event loop, as `asyncio.run` does, and returns its result."""
    factory = _uvloop_factory()
    logger.debug("event loop name=%s", "asyncio" if factory is None else "uvloop")
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def freeze_garbage() -> None:
    """Takes all objects of this process out of the garbage collector's sight. Called once it is ready to serve.

    What was loaded until then, such as the 200,000 objects of torch, stays for ever. Each full collection would go
    through all of it, and hold every thread for a tenth of a second.
    """
    gc.collect()
    gc.freeze()


def _uvloop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
