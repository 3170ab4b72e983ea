"""The embedded engine: takes requests and returns tokens, one step at a time.

One step, in order (see `Engine.step`):

1. The reports of the connector's worker halves are applied: landed requests run, failed ones start again, and blocks
   are released.
2. The scheduler plans which requests run, how many tokens of each are computed, and in which blocks.
3. The plan, and the connector's orders to its worker halves, go to the executor: one rank here, or many processes.
4. The logits of the oldest submitted step come back, and tokens are chosen for each request that needs one.
5. Progress, prefix cache and answers are updated, and finished requests end.
6. What prefill hands over is ordered from the worker halves.

With pipeline stages, 2 and 3 are repeated until every stage has work: that many steps, of different requests, are in
flight at once. The states of a request are at the top of scheduler.py. Not thread-safe: one thread calls everything.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvferry.clock import Clock, MonotonicClock
from kvferry.connector.base import Outcome, SchedulerHalf, StepOrders
from kvferry.engines.mini.api import Failure, FinishReason, GenerateRequest, Output, failure_text
from kvferry.engines.mini.compute.sampling import SampledToken, SamplingRow, as_sent, uniform
from kvferry.engines.mini.drafting import ComputedChunk, Speculation, step_input
from kvferry.engines.mini.isolation import Broken, after_loss, choose_tokens, probe
from kvferry.engines.mini.models.loading import OpenedModel
from kvferry.engines.mini.models.tokenizer import Detokenizer
from kvferry.engines.mini.ranks.build import build_executor
from kvferry.engines.mini.ranks.executor import Executor
from kvferry.engines.mini.scheduling.batch import ScheduledChunk, StepPlan
from kvferry.engines.mini.scheduling.block_manager import BlockManager
from kvferry.engines.mini.scheduling.counters import Counters, EngineStats
from kvferry.engines.mini.scheduling.guarded_connector import GuardedConnector
from kvferry.engines.mini.scheduling.handoff_results import HandoffResults
from kvferry.engines.mini.scheduling.output import Answer, Finish
from kvferry.engines.mini.scheduling.request import Request, State
from kvferry.engines.mini.scheduling.request_limits import Limits
from kvferry.engines.mini.scheduling.scheduler import Scheduler
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.speculation.acceptance import Acceptance
from kvferry.engines.mini.speculation.drafter_info import DrafterInfo
from kvferry.engines.mini.speculation.load_drafter import find_drafter
from kvferry.engines.mini.step import StepInput
from kvferry.errors import RanksLost, RequestError
from kvferry.ids import RequestId
from kvferry.wire.params import HandoffParams

__all__ = ["Engine", "EngineSettings", "EngineStats"]

logger = logging.getLogger(__name__)

Revive = Callable[[], tuple[Executor, SchedulerHalf | None]]


class Engine:
    """One model, one cache, one step loop."""

    def __init__(
        self,
        model: OpenedModel,
        executor: Executor,
        settings: EngineSettings,
        *,
        connector: SchedulerHalf | None = None,
        clock: Clock | None = None,
        revive: Revive | None = None,
    ) -> None:
        """`executor` has the worker halves of `connector`, and `close` closes it. `revive` returns a new executor and
        connector after ranks have died; None: `step` raises RanksLost."""
        self.model = model
        self.settings = settings
        self.tokenizer = model.tokenizer
        self.max_model_len = min(settings.max_model_len or model.config.max_positions, model.config.max_positions)
        self._revive = revive
        self._ranks_lost = False
        """Ranks have died, and new ones have not been started yet."""
        self._wake: Callable[[], None] = lambda: None
        self._in_flight: deque[StepPlan] = deque()
        """Plans that were submitted and not collected yet."""
        self._computing: Sequence[ScheduledChunk] = ()
        """The chunks of the step whose results are being waited for or applied."""
        self._clock = clock or MonotonicClock()
        self._eos = frozenset(model.config.eos_token_ids)
        if not self._eos and model.tokenizer.eos_token_id is not None:
            self._eos = frozenset((model.tokenizer.eos_token_id,))
        self._requests: dict[RequestId, Request] = {}
        self._number = 0
        self._blocks_to_clear: list[int] = []
        """Blocks to clear in the next step, besides those that the scheduler allocates."""
        self._ended: list[Output] = []
        self._counters = Counters()
        self._drafter: DrafterInfo | None = find_drafter(settings, model)
        self._use_ranks(executor, connector)

    @classmethod
    def load(cls, settings: EngineSettings, clock: Clock | None = None) -> "Engine":
        """Returns an engine without a connector. Loads the model and makes the cache, here or in rank processes."""
        model, executor = build_executor(settings)
        return cls(model, executor, settings, clock=clock)

    def _use_ranks(self, executor: Executor, connector: SchedulerHalf | None) -> None:
        """Takes these ranks into use, with an empty cache."""
        settings = self.settings
        self.executor = executor
        self._connector = None if connector is None else GuardedConnector(connector)
        drafter = self._drafter
        self._speculation: Speculation | None = None
        if drafter is not None:
            self._speculation = Speculation(drafter, executor, max_model_len=self.max_model_len, seed_of=self._seed)
        modules = drafter.speculative.num_modules if drafter else 0
        self.blocks = BlockManager(executor.num_blocks, prefix_caching=settings.prefix_caching)
        self.scheduler = Scheduler(
            self.blocks,
            executor.layouts[0].groups,
            block_tokens=settings.block_tokens,
            max_batch_tokens=settings.max_batch_tokens,
            max_running=settings.max_running,
            prefix_caching=settings.prefix_caching,
            lookahead=drafter.speculative.num_prefill_lookahead_tokens if drafter else 0,
            trailing_dependency=modules,
            slots_ahead=drafter.num_slots_ahead if drafter else 0,
            drafter_starts_cold=drafter is not None and drafter.starts_cold,
            overtake_s=settings.overtake_s,
            connector=self._connector,
        )
        self.limits = Limits(
            self.scheduler.groups,
            self.blocks,
            max_model_len=self.max_model_len,
            vocab_size=self.model.config.vocab_size,
        )
        """What this engine can never serve. Any thread may ask."""
        self._handoff_results = HandoffResults(
            self._requests, self.scheduler, self._clock, vocab_size=self.model.config.vocab_size
        )
        executor.on_report(self.wake)

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Calls `wake`, on another thread, whenever `has_work` becomes true without a call to this engine."""
        self._wake = wake

    def wake(self) -> None:
        """Lets whoever waits for work look again. Any thread may call it."""
        self._wake()

    # Requests come and go

    def add(self, spec: GenerateRequest) -> None:
        """Queues a request. Raises RequestError, or RequestTooLong if it can never be finished here.

        Blocks, after ranks have died, until new ones are ready.
        """
        if self._ranks_lost:
            self._restart_ranks()
        if spec.request_id in self._requests:
            raise RequestError(f"request_id={spec.request_id!r} is in use. Use another one.")
        try:
            self.limits.check(spec)
        except RequestError as error:
            self.decline(spec.handoff, str(error))
            raise
        for_remote = spec.handoff is not None and spec.handoff.do_remote_decode
        max_tokens = 1 if for_remote else spec.sampling.max_tokens
        answer = Answer(spec.sampling, Detokenizer(self.tokenizer, spec.prompt_token_ids), self._eos, max_tokens)
        request = Request(spec, answer, number=self._number, arrived_s=self._clock.now_s())
        self._number += 1
        self._requests[spec.request_id] = request
        try:
            if self._connector is not None:
                self._connector.on_new_request(request)
                if request.from_remote:
                    carried = self._connector.carried_first_token(request)
                    request.first_token = self._handoff_results.checked(carried, request)
            elif request.from_remote:
                request.handoff_over = True
                request.reason = "this engine has no connector"
            self.scheduler.enter(request)
        except BaseException:
            self._end(request, Finish(FinishReason.ERROR), aborted=True)
            raise

    def decline(self, handoff: HandoffParams | None, reason: str) -> None:
        """Says to the prefill engine that these parameters name that the request was refused, so that it frees its
        blocks. Does nothing for others."""
        if self._connector is not None and handoff is not None and handoff.do_remote_prefill:
            self._connector.decline(handoff, reason)

    @property
    def longest_request(self) -> int:
        """The most tokens of a prompt and its answer together: by the context, and by the cache, which never holds the
        last one."""
        return min(self.max_model_len, self.scheduler.groups.room_tokens() + 1)

    def abort(self, request_id: RequestId) -> None:
        """Ends a request at once; the next step returns its last output. Unknown and ended ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._ended.append(self._end(request, Finish(FinishReason.ABORT), aborted=True))

    def has_work(self) -> bool:
        """Returns whether `step` has anything to do."""
        return bool(self._requests or self._ended or self._ranks_lost or self.executor.has_reports) or (
            self._connector is not None and self._connector.has_pending_work()
        )

    def close(self) -> None:
        """Ends the ranks and their worker halves. The engine must not be stepped again."""
        self.executor.close()

    # The step

    def step(self) -> list[Output]:
        """Runs one step. With nothing to compute (hand-offs pending) it returns at once: wait about 1 ms then.

        When ranks have died, every request ends with an error, and the step after that blocks until new ranks are
        ready; without `revive`, RanksLost is raised and the engine cannot be used any more.
        """
        if self._ranks_lost:
            self._restart_ranks()
        outputs, self._ended = self._ended, []
        try:
            self._step(outputs)
        except RanksLost as error:
            if self._revive is None:
                raise
            self._lose_ranks(error, outputs)
        return outputs

    def _step(self, outputs: list[Output]) -> None:
        reports = self.executor.reports()
        if self._connector is not None:
            self._apply_handoffs(self._connector.update(reports), outputs)
        # A suspect's step is the only one in flight, so that a rank that raises shows the cause.
        depth = 1 if self.scheduler.has_suspects else self.executor.depth
        while len(self._in_flight) < depth and self._submit(outputs):
            pass
        if self._in_flight:
            self._collect(self._in_flight.popleft(), outputs)
        if self._connector is not None and self._connector.broken:
            broken, self._connector.broken = self._connector.broken, {}
            self._break([(self._requests[name], error) for name, error in broken.items()], outputs)
        if self._connector is not None and any(output.handoff is not None for output in outputs):
            # Not in the next step: the answer goes to the client before that, which takes the interpreter lock.
            self.executor.submit(StepInput(()), self._connector.build_orders())

    def _submit(self, outputs: list[Output]) -> bool:
        """Plans and submits a step. Returns False if there was nothing to compute."""
        depth, num_running = self.executor.depth, len(self.scheduler.running)
        # With several stages a step takes a part of the requests, so that there is a step for every stage.
        max_chunks = None if depth == 1 else max(1, -(-num_running // depth))
        plan = self.scheduler.schedule(self._clock.now_s(), max_chunks)
        # Before `submit`, which may compute at once.
        plan.record_stages(self.scheduler.waiting_for_kv.values(), self._clock.now_s())
        orders = self._connector.build_orders() if self._connector is not None else StepOrders()
        to_clear, self._blocks_to_clear = (*self._blocks_to_clear, *plan.changes.fresh), []
        if plan.chunks or to_clear or plan.changes.copies or orders:
            self.executor.submit(step_input(plan, to_clear, self._speculation), orders)
        if plan.chunks:
            self._in_flight.append(plan)
            for chunk in plan.chunks:
                chunk.request.in_flight = True
        outputs += [self._fail(request, reason, Failure.HANDOFF_FAILED) for request, reason in plan.refused]
        self._break(plan.broken, outputs)
        for request in plan.adopted:
            self._adopt(request, outputs)
        outputs += [self._end(request, Finish(FinishReason.LENGTH)) for request in plan.complete]
        return bool(plan.chunks)

    def _collect(self, plan: StepPlan, outputs: list[Output]) -> None:
        """Waits for the oldest submitted step and applies its results."""
        self._computing = plan.chunks
        try:
            logits = self.executor.collect().logits
        except RanksLost:
            raise
        except Exception as error:  # noqa: BLE001  # of the step: its requests run alone until the cause is found
            self._step_failed(plan.chunks, error, outputs)
            return
        self._counters.steps += 1
        for chunk in plan.chunks:
            chunk.request.in_flight = False
        chosen: dict[Request, list[SampledToken]] = {}
        if logits is not None:
            chosen, broken = choose_tokens(plan.chunks, logits, self._row, self._speculation)
            self._break(broken, outputs)
        alive = [chunk for chunk in plan.chunks if chunk.request.state is not State.FINISHED]
        computed = self._record_progress(alive, chosen)
        for chunk in alive:
            if chunk.request in chosen:
                self._try_append(chunk.request, chosen[chunk.request], outputs)
        open_ones = [chunk.request for chunk in alive if chunk.request.state is not State.FINISHED]
        left = [request for request in open_ones if request.num_deferred and request.num_uncomputed <= 0]
        outputs += [self._end(request, Finish(FinishReason.LENGTH)) for request in left]
        if self._speculation is not None:
            try:
                self._speculation.draft(computed)
            except RanksLost:
                raise
            except Exception as error:  # noqa: BLE001  # as above
                self._step_failed(alive, error, outputs)
        self._computing = ()

    @property
    def suspects(self) -> frozenset[RequestId]:
        """After `step` has raised: the requests that it was computing."""
        return frozenset(chunk.request.request_id for chunk in self._computing)

    # When a request makes a step fail (isolation.py says how the cause is found)

    def _step_failed(self, chunks: Sequence[ScheduledChunk], error: Exception, outputs: list[Output]) -> None:
        """Ends the request that a step computed alone, or lets each request of the step start again, to run alone."""
        open_ones = [chunk for chunk in chunks if chunk.request.state is not State.FINISHED]
        names = ",".join(chunk.request.request_id for chunk in chunks)
        logger.error("a step has failed requests=%s", names, exc_info=error)
        if len(chunks) == 1:
            self._break([(chunk.request, error) for chunk in open_ones], outputs)
            return
        for chunk in open_ones:
            # One token more than the step has computed: then it has also drafted, and verified its drafts, alone.
            self.scheduler.suspect(chunk.request, chunk.stop + 1)

    def _break(self, broken: Sequence[Broken], outputs: list[Output]) -> None:
        """Ends requests that raise whenever they are computed. Raises if the engine itself is broken."""
        if broken and not self._in_flight:
            probe(self.executor, self.blocks, self.scheduler.groups)
        for request, error in broken:
            logger.error("a request has failed request=%s", request.request_id, exc_info=error)
            request.state_tokens = -1  # the step may have overwritten the states
            outputs.append(self._fail(request, failure_text(error), Failure.REQUEST_FAILED))
            request.in_flight = False

    def _fail(self, request: Request, error: str, failure: Failure) -> Output:
        output = self._end(request, Finish(FinishReason.ERROR), aborted=True)
        return replace(output, error=error, failure=failure)

    def _try_append(self, request: Request, chosen: Sequence[SampledToken], outputs: list[Output]) -> None:
        try:
            outputs.append(self._append(request, chosen))
        except Exception as error:
            if request.state is State.FINISHED:
                raise  # it was being ended: not this request, but the books are broken
            self._break([(request, error)], outputs)

    def _row(self, request: Request) -> SamplingRow:
        answer = request.tokens[request.num_prompt_tokens :]
        return SamplingRow(request.sampling, self._seed(request), request.spec.prompt_token_ids, answer, self._eos)

    def _seed(self, request: Request) -> int:
        seed = request.sampling.seed
        return int(uniform(self.settings.seed, request.number) * 2**53) if seed is None else seed

    def _record_progress(
        self, chunks: Sequence[ScheduledChunk], chosen: dict[Request, list[SampledToken]]
    ) -> list[ComputedChunk]:
        """Records the progress of these chunks, whose KV is stored. Rejected drafts do not count."""
        counts = []
        for chunk in chunks:
            request = chunk.request
            request.sources.computed(chunk.start, chunk.stop)
            known = chunk.stop - len(chunk.drafts)
            counts.append(known + (len(chosen[request]) - 1 if chunk.drafts else 0))
            if counts[-1] < chunk.stop and self.scheduler.groups.has_state:
                # A token cannot be taken out of a state: restore the one before the step, and compute accepted drafts
                # again.
                self.scheduler.groups.restore_state(request)
                request.computed(chunk.start)
            else:
                request.computed(counts[-1])
            self.scheduler.remember(request)
            if self._connector is not None and request.for_remote:
                request.handoff_open = True
                self._connector.computed(request, request.tables, request.num_computed)
        if self._speculation is None:
            return []
        for chunk in chunks:
            if chunk.drafts:
                self._speculation.count(chunk, len(chosen[chunk.request]))
        return self._speculation.record(chunks, counts)

    def _append(self, request: Request, chosen: Sequence[SampledToken]) -> Output:
        first, finish = request.first_token, None
        for choice in chosen:
            if first is not None and request.spec.first_token_sent and len(request.tokens) == request.num_prompt_tokens:
                choice = as_sent(first, request.sampling)
            request.tokens.append(choice.token)
            request.chosen = choice.logprobs
            self._counters.answer_tokens += 1
            finish = request.answer.push(choice.token, choice.logprobs)
            if finish is not None:
                break
        if request.stages.first_token_s is None:
            request.stages = replace(request.stages, first_token_s=self._clock.now_s())
            request.sources.close()
        return self._end(request, finish) if finish is not None else self._output(request)

    def _output(self, request: Request, finish: Finish | None = None) -> Output:
        tokens, text, logprobs = request.answer.take()
        account = None
        if finish is not None or (tokens and not request.accounted):
            account, request.accounted = request.account, True
        return Output(
            request_id=request.request_id,
            token_ids=tokens,
            text=text,
            logprobs=logprobs,
            account=account,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop if finish else None,
            timing=request.timing if finish else None,
            stages=replace(request.stages, ended_s=self._clock.now_s()) if finish else None,
        )

    def _end(self, request: Request, finish: Finish, *, aborted: bool = False) -> Output:
        """Ends a request. Called once per request."""
        output = self._output(request, finish)
        self.scheduler.remove(request)
        request.state = State.FINISHED
        del self._requests[request.request_id]
        self._counters.ended(request, self.settings.block_tokens)
        if self._speculation is not None:
            self._speculation.ended(request)
        transfer, params, broken = None, None, None
        if self._connector is not None:
            transfer, params, broken = self._connector.end(request, finish, aborted=aborted)
        self.scheduler.give_up_blocks(request, transfer)
        logger.debug("request ended request=%s reason=%s stop=%r", request.request_id, finish.reason, finish.stop)
        if broken is not None:
            return replace(output, finish_reason=FinishReason.ERROR, error=failure_text(broken))
        return output if params is None else replace(output, handoff=params, prompt_hashes=request.prompt_hashes)

    # Hand-offs

    def _apply_handoffs(self, outcome: Outcome, outputs: list[Output]) -> None:
        """Applies the results of hand-offs since the last step."""
        follow_up = self._handoff_results.apply(outcome)
        self._blocks_to_clear += follow_up.blocks_to_clear
        self._break(follow_up.broken, outputs)
        for request in follow_up.adopt:
            self._adopt(request, outputs)
        outputs += [self._fail(request, reason, Failure.HANDOFF_FAILED) for request, reason in follow_up.fatal]

    def _adopt(self, request: Request, outputs: list[Output]) -> None:
        """Starts a request whose first token prefill has chosen: no prompt token is computed here."""
        first = request.first_token
        assert first is not None, "a request with nothing to compute has a first token"
        self._try_append(request, [as_sent(first, request.sampling)], outputs)
        if self._speculation is not None:
            self._speculation.adopted(request)

    # When ranks die

    def _lose_ranks(self, error: RanksLost, outputs: list[Output]) -> None:
        """Ends requests, or lets them start again: see `after_loss`. The next call starts new ranks."""
        chunks = [*self._computing, *(chunk for plan in self._in_flight for chunk in plan.chunks)]
        logger.error("ranks lost requests=%d computing=%d cause=%s", len(self._requests), len(chunks), error)
        for request, text, failure in after_loss(list(self._requests.values()), chunks, error):
            del self._requests[request.request_id]
            request.state = State.FINISHED
            self._counters.ended(request, self.settings.block_tokens)
            output = self._output(request, Finish(FinishReason.ERROR))
            outputs.append(replace(output, error=text, failure=failure))
        self._in_flight.clear()
        self._computing = ()
        self._blocks_to_clear = []
        self._ranks_lost = True
        self.executor.close()

    def _restart_ranks(self) -> None:
        assert self._revive is not None, "only an engine that can be revived is down"
        self._use_ranks(*self._revive())
        self._counters.revivals += 1
        for request in self._requests.values():
            if request.from_remote:  # its KV was for the ranks that are gone
                request.handoff_over = True
                request.reason = request.reason or "a rank of this engine has failed and was started again"
            self.scheduler.enqueue(request)
        if self._requests:
            probe(self.executor, self.blocks, self.scheduler.groups)
        self._ranks_lost = False

    # Introspection

    def stats(self) -> EngineStats:
        """Returns a snapshot of the counters and queues."""
        acceptance = self._speculation.acceptance if self._speculation is not None else Acceptance()
        return self._counters.stats(self.scheduler, num_ranks=len(self.executor.pids), acceptance=acceptance)

    def check(self) -> None:
        """Asserts that every block is accounted for. For tests and debugging."""
        if not self._ranks_lost:  # else the books are those of memory that is gone
            self.blocks.check([request.block_ids for request in self._requests.values()])
