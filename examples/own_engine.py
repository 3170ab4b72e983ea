"""An engine of your own: all that any engine has to do to hand KV caches over, with numpy alone.

Its "model" stores whole numbers made from each token and its position, and the next token is a sum over the request's
whole cache: one wrong byte in the cache is a wrong token. Prefill and decode have blocks of different sizes.

    python examples/own_engine.py
"""

import time
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

import kvferry
from kvferry.layout.builders import block_major, head_range

LAYERS, HEADS, HEAD_DIM, NUM_BLOCKS, VOCAB = ("layers.0.attn", "layers.1.attn"), 4, 8, 64, 1000


@dataclass(eq=False)
class Request:
    """One request. The scheduler half reads the first four fields, and the prompt (kvferry.RequestView)."""

    request_id: kvferry.RequestId
    num_prompt_tokens: int
    handoff: kvferry.HandoffParams | None
    on_failure: kvferry.FailurePolicy | None
    tokens: list[int]
    max_tokens: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    params: kvferry.HandoffParams | None = None
    """On prefill, at the end: what the decode engine is to be given."""
    error: str = ""

    @property
    def tables(self) -> tuple[kvferry.BlockTable, ...]:
        return (kvferry.BlockTable(group=0, first_token=0, block_ids=tuple(self.blocks)),)

    @cached_property
    def prompt(self) -> kvferry.Prompt:
        return kvferry.Prompt.of(self.tokens[: self.num_prompt_tokens])  # their KV depends on nothing but the tokens

    @property
    def for_remote(self) -> bool:
        return self.handoff is not None and self.handoff.do_remote_decode


class OwnEngine:
    """A batch of requests, a pool of blocks, and the connector. One thread calls everything."""

    def __init__(self, name: str, role: kvferry.Role, settings: kvferry.FerrySettings, block_tokens: int = 16) -> None:
        self.block_tokens = block_tokens
        self.cache = np.zeros((NUM_BLOCKS, len(LAYERS), 2, HEADS, block_tokens, HEAD_DIM), np.float32)
        self.free = list(range(NUM_BLOCKS))
        self.held: dict[kvferry.TransferId, list[int]] = {}  # blocks that a peer may touch until `released`
        self.waiting: list[Request] = []
        self.loading: dict[kvferry.RequestId, Request] = {}  # a peer is filling their blocks
        self.running: list[Request] = []
        self.ended: list[Request] = []

        layout = block_major(
            LAYERS, num_blocks=NUM_BLOCKS, block_tokens=block_tokens, heads=head_range(HEADS, 0, 1), head_dim=HEAD_DIM,
            element_bytes=4, encoding="fp32", address=self.cache.ctypes.data,
        )  # fmt: skip
        description = kvferry.EngineDescription(
            engine="own", engine_version="1", role=role, mode=settings.transfer.mode, model_id="sums", dtype="float32",
            total_kv_heads=HEADS, head_size=HEAD_DIM, hidden_layers=len(LAYERS), attention_backend="numpy",
        )  # fmt: skip
        # Prefill leaves the prompt's last token to decode, which computes it to choose the first token of the answer.
        self.connector = kvferry.EngineConnector(
            description, settings, engine_id=name, handoff_tokens=lambda num_prompt_tokens: num_prompt_tokens - 1
        )
        self.worker = kvferry.start_worker(
            layout, [self.cache], engine=self.connector.engine_id, settings=settings, on_lost=self.connector.lost
        )
        self.half = self.connector.start([self.worker.record], self.worker.start_step)

    def add(self, request: Request) -> None:
        self.half.on_new_request(request)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        self._end(request, aborted=True)

    def has_work(self) -> bool:
        return bool(self.waiting or self.loading or self.running or self.held) or self.half.has_pending_work()

    def step(self) -> list[Request]:
        """One step; returns the requests that have ended. An idle engine steps too, while `has_work`."""
        self._settle(self.half.update([self.worker.end_step()]))
        for request in list(self.waiting):
            self._admit(request)
        for request in list(self.running):
            self._compute(request)
        self.worker.start_step(self.half.build_orders())  # after the step: what is offered has been stored
        ended, self.ended = self.ended, []
        return ended

    def _settle(self, outcome: kvferry.Outcome) -> None:
        """What became of hand-offs since the last step."""
        for landed in outcome.landed:
            if (request := self.loading.pop(landed.request, None)) is not None:
                request.num_computed = landed.arrived.stop
                self.running.append(request)
        for failed in (*outcome.failed, *outcome.fatal):
            if (request := self.loading.pop(failed.request, None)) is not None:
                self.held[failed.transfer], request.blocks = request.blocks, []  # a peer may still write to them
                if failed in outcome.fatal:
                    request.error = failed.reason
                    self._end(request, aborted=True)
                else:
                    self.waiting.append(request)  # to be computed here, in other blocks
        for transfer in outcome.released:
            self.free += self.held.pop(transfer, [])

    def _admit(self, request: Request) -> None:
        match = self.half.match(request, 0)
        num_blocks = -(-(request.num_prompt_tokens + request.max_tokens) // self.block_tokens)
        if match.error:
            request.error = match.error
            self._end(request, aborted=True)
        elif not match.wait and num_blocks <= len(self.free):  # else: again at the next step
            self.waiting.remove(request)
            request.blocks = [self.free.pop(0) for _ in range(num_blocks)]
            if match.num_tokens:
                self.loading[request.request_id] = request
                self.half.after_alloc(request, request.tables, 0)
            else:
                self.running.append(request)

    def _compute(self, request: Request) -> None:
        """Store the KV of every token that lacks it, then choose the next one."""
        stop = self.half.handoff_tokens(request.num_prompt_tokens) if request.for_remote else len(request.tokens)
        for position in range(request.num_computed, stop):
            block, slot = request.blocks[position // self.block_tokens], position % self.block_tokens
            numbers = np.random.default_rng([request.tokens[position], position])
            self.cache[block, :, :, :, slot] = numbers.integers(0, 99, (len(LAYERS), 2, HEADS, HEAD_DIM))
        request.num_computed = stop
        if request.for_remote:
            self.half.computed(request, request.tables, stop)
            self._end(request)
            return
        kv = self.cache[request.blocks].transpose(0, 4, 1, 2, 3, 5).reshape(-1, len(LAYERS) * 2 * HEADS * HEAD_DIM)
        request.tokens.append(int(kv[:stop].sum(dtype=np.int64)) % VOCAB)
        if len(request.tokens) == request.num_prompt_tokens + request.max_tokens:
            self._end(request)

    def _end(self, request: Request, *, aborted: bool = False) -> None:
        """Every request ends here, once, whatever it was doing."""
        self.waiting = [one for one in self.waiting if one is not request]
        self.running = [one for one in self.running if one is not request]
        self.loading.pop(request.request_id, None)
        transfer, request.params = self.half.request_finished(
            request, request.tables, request.num_computed, first_token=None, aborted=aborted
        )
        if transfer is None:
            self.free += request.blocks
        else:
            self.held[transfer] = request.blocks
        self.ended.append(request)

    def close(self) -> None:
        self.connector.close()
        self.worker.close()


def request_of(name: str, prompt: list[int], max_tokens: int, handoff: kvferry.HandoffParams | None = None) -> Request:
    return Request(kvferry.RequestId(name), len(prompt), handoff, None, list(prompt), max_tokens)


def run(request: Request, engine: OwnEngine, *others: OwnEngine) -> Request:
    """Step all engines until the request has ended on the first one."""
    engine.add(request)
    while request not in engine.step():
        for other in others:
            other.step()
        time.sleep(0.001)  # the driver threads are to run; a server would wait for `worker.has_report`
    return request


def main() -> None:
    settings = kvferry.FerrySettings(transfer=kvferry.TransferSettings(transport="memory", staging_bytes=0))
    prefill = OwnEngine("prefill", kvferry.Role.PREFILL, settings, block_tokens=16)
    decode = OwnEngine("decode", kvferry.Role.DECODE, settings, block_tokens=8)
    try:
        prompt = list(range(100, 150))
        alone = run(request_of("alone", prompt, 8), decode)
        to_decode = run(request_of("r1", prompt, 1, kvferry.HandoffParams(do_remote_decode=True)), prefill).params
        together = run(request_of("r1", prompt, 8, to_decode), decode, prefill)
        print("one engine alone   ", alone.tokens[len(prompt) :])
        print("prefill and decode ", together.tokens[len(prompt) :])
        assert together.tokens == alone.tokens
        while prefill.has_work() or decode.has_work():
            prefill.step(), decode.step()
            time.sleep(0.001)  # as in `run`
        print("blocks in use      ", 2 * NUM_BLOCKS - len(prefill.free) - len(decode.free))
    finally:
        decode.close()
        prefill.close()


if __name__ == "__main__":
    main()
