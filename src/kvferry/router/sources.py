"""Which workers may have KV of a prompt that another worker is about to compute (R43).

They are given to that worker as `sources`, in `kv_transfer_params`. They are hints, from what workers report of their
caches and from the turns that they have served: a wrong one costs a question, and never an answer.
"""

from collections.abc import Sequence

from kvferry.router.fleet.prefixes import Prompt
from kvferry.router.fleet.worker import Worker
from kvferry.router.settings import Fetch

__all__ = ["MAX_SOURCES", "fetch_sources"]

MAX_SOURCES = 3
_ABILITY = "fetch"


def fetch_sources(prompt: Prompt, fetcher: Worker, workers: Sequence[Worker], fetch: Fetch) -> list[dict[str, object]]:
    """Returns up to MAX_SOURCES workers that are believed to hold at least a block more of the prompt than `fetcher`
    has, the one with most first, as `kv_transfer_params` names them."""
    if fetch is Fetch.NEVER or not fetcher.can(_ABILITY):
        return []
    own = prompt.num_cached(fetcher)
    found: list[tuple[int, Worker]] = []
    for worker in workers:
        if worker is fetcher or not worker.can(_ABILITY) or worker.unusable_reason is not None:
            continue
        if worker.mode is not fetcher.mode or (held := prompt.num_cached(worker)) < own + _block(worker):
            continue
        found.append((held, worker))
    found.sort(key=lambda one: -one[0])
    return [_source(worker, held) for held, worker in found[:MAX_SOURCES]]


def _block(worker: Worker) -> int:
    return max(1, worker.info.limits.block_tokens) if worker.info is not None else 1


def _source(worker: Worker, held: int) -> dict[str, object]:
    assert worker.info is not None, "a worker that can do something has said what it is"
    return {
        "engine_id": worker.info.engine,
        "incarnation": worker.info.incarnation,
        "host": worker.info.side_channel.host,
        "port": worker.info.side_channel.port,
        "num_tokens": held + _block(worker),  # the estimate may be a block too low
    }
