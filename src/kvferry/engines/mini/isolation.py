"""Finds the request that makes a step raise, so that it alone ends and the engine lives.

sampling   `choose_tokens` chooses for the whole batch; if that raises, for each request apart, from the same logits.
the model, or a drafter that keeps KV
           The requests of the failed step start again, and the scheduler runs each of them alone until it is past the
           place (`Scheduler.suspect`). One that makes a step raise in which it is alone is the cause.
a drafter that reads the text
           The request goes on without drafts (see drafting.py).
everything else that belongs to one request (its text, its hand-off)
           It ends.

Before a request is blamed, `probe` computes one token that belongs to none. If that raises too, the engine is broken.
"""

from collections.abc import Callable, Sequence

import torch

from kvferry.connector.base import StepOrders
from kvferry.engines.mini.api import Failure, SamplingParams, failure_text
from kvferry.engines.mini.compute.sampling import SampledToken, SamplingRow, sample_tokens
from kvferry.engines.mini.drafting import Speculation
from kvferry.engines.mini.ranks.executor import Executor
from kvferry.engines.mini.scheduling.batch import ScheduledChunk
from kvferry.engines.mini.scheduling.block_manager import BlockManager
from kvferry.engines.mini.scheduling.cache_groups import Groups
from kvferry.engines.mini.scheduling.request import Request, State
from kvferry.engines.mini.speculation.rejection import verify
from kvferry.engines.mini.step import ChunkInput, StepInput
from kvferry.errors import RankRaised, RanksLost
from kvferry.layout.blocks import BlockTable
from kvferry.layout.description import CacheKind

__all__ = ["Broken", "after_loss", "choose_tokens", "probe"]

Broken = tuple[Request, Exception]
"""A request that cannot go on, and what was raised for it."""

_PROBE_KEY = "kvferry probe"


def choose_tokens(
    chunks: Sequence[ScheduledChunk],
    logits: torch.Tensor,
    row_of: Callable[[Request], SamplingRow],
    speculation: Speculation | None,
) -> tuple[dict[Request, list[SampledToken]], list[Broken]]:
    """Returns the new tokens of each request that gets any (the accepted drafts, and one more), and broken requests."""
    ready, spans, at = [], [], 0
    for chunk in chunks:
        if chunk.num_logits and chunk.request.state is not State.FINISHED:  # else it was aborted
            ready.append(chunk)
            spans.append(range(at, at + chunk.num_logits))
        at += chunk.num_logits
    if not ready:
        return {}, []
    wanted = [i for span in spans for i in span]
    try:
        chosen = _choose(ready, logits if len(wanted) == at else logits[wanted], row_of, speculation)
    except Exception as error:  # noqa: BLE001  # whatever sampling raises belongs to one of the requests
        if len(ready) == 1:
            return {}, [(ready[0].request, error)]
    else:
        return {chunk.request: tokens for chunk, tokens in zip(ready, chosen, strict=True)}, []
    found: dict[Request, list[SampledToken]] = {}
    broken: list[Broken] = []
    for chunk, span in zip(ready, spans, strict=True):
        try:
            found[chunk.request] = _choose([chunk], logits[list(span)], row_of, speculation)[0]
        except Exception as error:  # noqa: BLE001  # as above
            broken.append((chunk.request, error))
    return found, broken


def _choose(
    ready: Sequence[ScheduledChunk],
    logits: torch.Tensor,
    row_of: Callable[[Request], SamplingRow],
    speculation: Speculation | None,
) -> list[list[SampledToken]]:
    rows = [row_of(chunk.request) for chunk in ready]
    if all(not chunk.drafts for chunk in ready):
        return [[one] for one in sample_tokens(logits, rows)]
    assert speculation is not None, "only speculation makes drafts"
    return verify(logits, rows, [chunk.drafts for chunk in ready], speculation.draft_probs(ready))


def probe(executor: Executor, blocks: BlockManager, groups: Groups) -> None:
    """Computes one token in blocks of its own, and samples. Raises what that raises. Nothing may be in flight.

    Does nothing if no block is free: then it is not known whether the engine works.
    """
    counts = groups.admission(groups.nothing(), 1, None)
    if not blocks.fits((), sum(counts)):
        return
    tables, taken = [], []
    for group, (spec, count) in enumerate(zip(groups.specs, counts, strict=True)):
        fresh = blocks.allocate(count)
        taken += fresh
        # The table of a state says how many tokens it is after; blocks of tokens begin at the first one.
        assert spec.kind is not CacheKind.STATE or count == 1, "a request has one block of states"
        tables.append(BlockTable(group, 0, tuple(fresh)))
    try:
        chunk = ChunkInput((0,), 0, 1, tuple(tables), 1, key=_PROBE_KEY)
        executor.submit(StepInput((chunk,), clear=tuple(taken)), StepOrders())
        logits = executor.collect().logits
        assert logits is not None, "logits were asked for"
        sample_tokens(logits, [SamplingRow(SamplingParams(), 0, (0,), (), frozenset())])
    finally:
        blocks.free(taken)
    executor.submit(StepInput(forget=(_PROBE_KEY,)), StepOrders())


def after_loss(
    requests: Sequence[Request], chunks: Sequence[ScheduledChunk], error: RanksLost
) -> list[tuple[Request, str, Failure]]:
    """Returns the requests that end because the ranks are lost, with a message for the client and whose fault it is.

    If a rank was killed, every request ends. If one has raised in a step, only a request that the step computed alone
    ends, because it is the cause; all others start again on new ranks, and those of the step run alone. `chunks`: all
    that was being computed.
    """
    computed = {chunk.request: chunk.stop + 1 for chunk in chunks if chunk.request.state is not State.FINISHED}
    if not isinstance(error, RankRaised) or not chunks:
        text = f"a process of this engine has died: {error}. Send the request again."
        return [(one, text, Failure.ENGINE_CRASHED if one in computed else Failure.ENGINE_DEAD) for one in requests]
    ended = [one for one in requests if len(chunks) == 1 and one in computed]
    for request in requests:
        if request not in ended:
            request.suspect_until = max(request.suspect_until, computed.get(request, 0))
            request.start_over()
    return [(one, failure_text(error), Failure.REQUEST_FAILED) for one in ended]
