"""A mover that chooses for each part: run by run from cache to cache, or through staging memory of ours.

Staging is one-sided: the side that posts packs or unpacks in its own registered memory, and the peer need not know of
it. The cost model decides; `kvferry bench calibrate` measures what it rests on.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.clock import Clock, MonotonicClock
from kvferry.errors import MalformedMessage
from kvferry.handoff.actions import Post, PostId
from kvferry.handoff.driver.links import Flow, Link
from kvferry.handoff.driver.mover import DirectMover, Moved, runs_of
from kvferry.layout.packing import StagedPlan
from kvferry.transport.base import Completion, Operation, Transport
from kvferry.transport.staging.chunks import chunk_plans
from kvferry.transport.staging.cost import CostModel, Route, choose
from kvferry.transport.staging.packer import Memory
from kvferry.transport.staging.stager import StagedDone, StagedId, Stager
from kvferry.transport.staging.staging_pool import StagingPool
from kvferry.wire.handoff_messages import encode_message, with_size

__all__ = ["AdaptiveMover"]

logger = logging.getLogger(__name__)

_MIN_STAGED_BYTES = 128 << 10
"""A part of fewer bytes goes directly; costs are not compared."""
_FEW_TOKENS, _FEW_RUNS = 4096, 32
"""A part of at most this many tokens and runs goes directly: comparing costs would take longer than the runs do."""
_SAMPLE_CHUNKS = 2
"""The first chunk alone may be the odd tokens before the first whole block, and not typical."""


@dataclass(frozen=True, slots=True)
class _Staged:
    post: PostId
    not_after_s: float


class AdaptiveMover:
    """Direct or staged, by predicted time. Implements handoff.driver.mover.Mover.

    `staging_region`: the pool's index among the regions that were registered with the transport.
    """

    def __init__(
        self,
        transport: Transport,
        pool: StagingPool,
        staging_region: int,
        memory: Memory,
        costs: CostModel,
        clock: Clock | None = None,
    ) -> None:
        self._direct = DirectMover(transport)
        self._pool_bytes = pool.num_bytes
        self._stager = Stager(transport, pool, staging_region, memory)
        self._costs = costs
        self._clock = clock or MonotonicClock()
        self._staged: dict[StagedId, _Staged] = {}
        self.num_staged = 0
        """Parts that went through staging so far."""

    def start(self, post: Post, link: Link) -> Moved | None:
        """Implements Mover.start."""
        flow = link.outgoing if post.operation is Operation.WRITE else link.incoming
        num_bytes = 0 if flow is None else flow.bytes_per_token * len(post.tokens)
        if flow is None or num_bytes < _MIN_STAGED_BYTES:
            return self._direct.start(post, link)
        try:
            if len(post.tokens) <= _FEW_TOKENS:
                # Mostly one run per block: planned at once, which is quicker than comparing the two ways.
                runs = runs_of(post, flow)
                if sum(len(some) for some in runs) <= _FEW_RUNS:
                    return self._direct.start(post, link, runs)
            plans = self._plans(post, flow)
            first = tuple(itertools.islice(plans or (), _SAMPLE_CHUNKS))
        except MalformedMessage as error:
            return Moved(post.post, str(error))
        if plans is None or not first or choose(self._costs, post.operation, first, num_bytes).route is Route.DIRECT:
            return self._direct.start(post, link)
        message = b"" if post.message is None else encode_message(with_size(post.message, num_bytes, 0))
        staged = self._stager.start(link.name, post.operation, itertools.chain(first, plans), message)
        # The lease covers the whole part if it starts by not_after_s. A chunk that has not begun half-way from there to
        # the lease's end (we were stopped, or starved) might outlive it.
        self._staged[staged] = _Staged(post.post, (post.not_after_s + post.until_s) / 2)
        self.num_staged += 1
        return None

    def completed(self, completion: Completion) -> Moved | None:
        """Implements Mover.completed. How a staged part ended is returned by `poll`."""
        if self._stager.completed(completion):
            return None
        return self._direct.completed(completion)

    def poll(self) -> Sequence[Moved]:
        """Implements Mover.poll. May copy one chunk."""
        if not self._staged:
            return ()
        now_s = self._clock.now_s()
        for staged_id, staged in self._staged.items():
            if now_s > staged.not_after_s:
                self._stager.cancel(staged_id, "the lease would have ended before its last chunk")
        return [self._moved(done) for done in self._stager.poll()]

    @property
    def num_in_flight(self) -> int:
        """Implements Mover.num_in_flight."""
        return self._direct.num_in_flight + len(self._staged)

    def close(self) -> None:
        """Called before the transport's close: no copy runs after it."""
        self._stager.close()
        self._staged.clear()

    def _plans(self, post: Post, flow: Flow) -> Iterator[StagedPlan] | None:
        """Returns the chunks of one part; None if one exceeds the pool. Raises MalformedMessage for wrong tables."""
        writing = post.operation is Operation.WRITE
        source, destination = (post.local, post.remote) if writing else (post.remote, post.local)
        parts = []
        if flow.every_token is not None:
            parts.append(
                chunk_plans(flow.every_token, source, destination, post.tokens, chunk_bytes=self._stager.chunk_bytes)
            )
        if flow.at_the_end is not None and post.whole is not None:
            # Windows and states come in one plan each.
            ends = list(
                chunk_plans(flow.at_the_end, source, destination, post.whole, chunk_bytes=self._stager.chunk_bytes)
            )
            if any(plan.num_bytes > self._pool_bytes for plan in ends):
                return None
            parts.append(iter(ends))
        return itertools.chain.from_iterable(parts)

    def _moved(self, done: StagedDone) -> Moved:
        return Moved(self._staged.pop(done.id).post, done.error, done.num_bytes, done.num_runs, done.lost)
