"""What it costs that a hand-off is bound to its tokens (R51), of the control path of one hand-off.

    python -m benchmarks.binding [--rounds 200] [--tokens 512 2048 8000] [--mode pull] [--json]

The control path: two engines' connectors in one process, over NIXL, with a cache so small that its bytes cost nothing.
It is counted from the request's arrival at prefill to its parameters, without a millisecond in which a model would
compute the prompt, and from its arrival at decode to the landing; with and without the comparison of prompts, in turns.
Other work on the machine makes the path longer and the share smaller, so the fastest tenth counts, not the median. No
router, no HTTP, no tokenizer and no model is part of it, all of which take longer.

Times are in microseconds. `percent` is what a hand-off waits for: what decode hashes and states, and what prefill
does at the arrival and for its answer. Prefill hashes a long prompt meanwhile (`hashing_us`), on a thread.
`percent_with_packing` adds the packing of the token ids on both sides: the embedded engine packs them for its prefix
cache anyway, vLLM's plug-in for this alone. In push, decode registers while prefill computes, and waits for none of it.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from unittest import mock

import numpy as np

import kvferry
from kvferry.connector.digest_thread import DigestThread
from kvferry.connector.entries import is_for
from kvferry.layout.builders import block_major, head_range
from kvferry.wire.prompt_digest import Agreement, Prompt, pack_tokens

__all__ = ["main"]

BLOCK_TOKENS = 16
_BLANK = Prompt.of([0])


@dataclass(eq=False)
class Request:
    """A request as the scheduler half sees it."""

    request_id: kvferry.RequestId
    tokens: Sequence[int]
    handoff: kvferry.HandoffParams | None
    on_failure: kvferry.FailurePolicy | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.tokens)

    @cached_property
    def prompt(self) -> Prompt:
        """The prompt, packed."""
        return Prompt.of(self.tokens)


class Side:
    """One engine: a connector, a worker half, and one byte per token."""

    def __init__(self, role: kvferry.Role, settings: kvferry.FerrySettings, num_tokens: int) -> None:
        num_blocks = num_tokens // BLOCK_TOKENS + 1
        cache = np.zeros((num_blocks, 2 * BLOCK_TOKENS), np.uint8)
        layout = block_major(
            ("layers.0.attn",), num_blocks=num_blocks, block_tokens=BLOCK_TOKENS, heads=head_range(1, 0, 1),
            head_dim=1, element_bytes=1, encoding="u8", address=cache.ctypes.data,
        )  # fmt: skip
        description = kvferry.EngineDescription(
            engine="bench", engine_version="1", role=role, mode=settings.transfer.mode, model_id="bytes",
            dtype="uint8", total_kv_heads=1, head_size=1, hidden_layers=1, attention_backend="none",
        )  # fmt: skip
        self.connector = kvferry.EngineConnector(description, settings, engine_id=role.value)
        self.worker = kvferry.start_worker(
            layout, [cache], engine=self.connector.engine_id, settings=settings, on_lost=self.connector.lost
        )
        self.half = self.connector.start([self.worker.record], self.worker.start_step)
        self.tables = (kvferry.BlockTable(0, 0, tuple(range(num_blocks))),)

    def step(self) -> kvferry.Outcome:
        """Gives orders to the worker half, and takes its report."""
        self.worker.start_step(self.half.build_orders())
        return self.half.update([self.worker.end_step()])

    def close(self) -> None:
        """Ends the engine."""
        self.connector.close()
        self.worker.close()


def _hand_over(prefill: Side, decode: Side, name: str, prompt: Sequence[int]) -> float:
    """Hands one prompt over, and returns the seconds that both sides took together. Infinity: decode gave up, because
    this machine stood still for a second."""
    begun_s = time.perf_counter()
    sent = Request(kvferry.RequestId(name), prompt, kvferry.HandoffParams(do_remote_decode=True))
    prefill.half.on_new_request(sent)
    arrived_s = time.perf_counter() - begun_s
    time.sleep(0.001)  # the model computes the prompt
    begun_s = time.perf_counter() - arrived_s
    _, params = prefill.half.request_finished(sent, prefill.tables, len(prompt), first_token=None, aborted=False)
    prefill.step()
    asked = Request(kvferry.RequestId(name), prompt, params)
    decode.half.on_new_request(asked)
    while decode.half.match(asked, 0).wait:
        time.sleep(0.0005)  # the side channel thread is to run; the handshake is not measured twice
    decode.half.after_alloc(asked, decode.tables, 0)
    outcome = decode.step()
    while not (outcome.landed or outcome.failed):
        time.sleep(0)  # the driver threads are to run
        outcome = decode.step()
    took_s = time.perf_counter() - begun_s if outcome.landed else float("inf")
    decode.half.request_finished(asked, decode.tables, len(prompt), first_token=None, aborted=False)
    while prefill.half.has_pending_work():
        prefill.step()
    return took_s


def _measure(num_tokens: int, mode: kvferry.TransferMode, rounds: int) -> dict[str, float]:
    """Returns the medians for one length."""
    settings = kvferry.FerrySettings(transfer=kvferry.TransferSettings(mode=mode, staging_bytes=0))
    prefill, decode = (Side(role, settings, num_tokens) for role in (kvferry.Role.PREFILL, kvferry.Role.DECODE))
    tokens = tuple(number * 7919 % 150_000 for number in range(num_tokens))
    times: dict[bool, list[float]] = {True: [], False: []}
    try:
        for number in range(2 * rounds + 8):
            bound = number % 2 == 0
            off = (
                mock.patch.object(Prompt, "of", return_value=_BLANK),
                mock.patch.object(Prompt, "agreement", lambda self, stated: Agreement(stated.num_tokens, whole=True)),
            )
            if bound:
                took_s = _hand_over(prefill, decode, f"r{number}", tokens)
            else:
                with off[0], off[1]:
                    took_s = _hand_over(prefill, decode, f"r{number}", tokens)
            if number >= 8:
                times[bound].append(took_s)
    finally:
        decode.close()
        prefill.close()
    without_us = _fast_us(times[False])
    work = _work_us(tokens, push=mode is kvferry.TransferMode.PUSH)
    waited_for_us = work["prefill_us"] + work["decode_us"]
    return {
        "tokens": num_tokens,
        "control_path_us": round(without_us, 1),
        "with_binding_us": round(_fast_us(times[True]), 1),
        "median_us": round(1e6 * statistics.median(times[False]), 1),
        **{name: round(value, 1) for name, value in work.items()},
        "percent": round(100 * waited_for_us / without_us, 2),
        "percent_with_packing": round(100 * (waited_for_us + 2 * work["packing_us"]) / without_us, 2),
    }


def _fast_us(times_s: Sequence[float]) -> float:
    """Returns the time below which a tenth of these are: about what a machine needs that does nothing else."""
    return 1e6 * sorted(times_s)[len(times_s) // 10]


def _best_us(work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    """Returns the best of many times: less noisy than the difference of two medians of the whole path."""
    best_s = float("inf")
    for _ in range(300):
        prepare()
        begun_s = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - begun_s)
    return 1e6 * best_s


def _work_us(tokens: Sequence[int], *, push: bool) -> dict[str, float]:
    """Returns what either side of a hand-off waits for, what packing takes, and what prefill hashes meanwhile."""
    packed = pack_tokens(tokens)
    given = kvferry.HandoffParams(remote_prompt_tokens=len(tokens), remote_prompt_digest=Prompt(packed).digest.hex())
    decodes = Prompt(packed).stated(links=push)
    ahead, ours = DigestThread(), Prompt(packed)

    def decode() -> None:
        prompt = Prompt(packed)
        assert push or is_for(given, prompt)
        prompt.stated(links=push)

    def arrives() -> None:
        nonlocal ours
        ours = Prompt(packed)
        ahead.submit(ours)

    def answers() -> None:
        assert ours.digest.hex()
        assert ours.agreement(decodes).whole

    def computed() -> None:
        arrives()
        time.sleep(0.001)  # the model computes the prompt

    try:
        arrive_us = _best_us(arrives, prepare=lambda: time.sleep(0.0005))
        answer_us = _best_us(answers, prepare=computed)
    finally:
        ahead.close()
    return {
        "decode_us": _best_us(decode),
        "prefill_us": arrive_us + answer_us,
        "packing_us": _best_us(lambda: pack_tokens(tokens)),
        "hashing_us": _best_us(lambda: Prompt(packed).digest),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command above."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.binding", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8000])
    parser.add_argument("--mode", default="pull", choices=("pull", "push"))
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    args = parser.parse_args(argv)
    rows = [_measure(tokens, kvferry.TransferMode(args.mode), args.rounds) for tokens in args.tokens]
    if args.json:
        sys.stdout.write(json.dumps({"mode": args.mode, "rounds": args.rounds, "rows": rows}, indent=1) + "\n")
    else:
        for line in (list(rows[0]), *([str(value) for value in row.values()] for row in rows)):
            cells = (f"{text:>{len(name)}}" for name, text in zip(rows[0], line, strict=True))
            sys.stdout.write("  ".join(cells) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
