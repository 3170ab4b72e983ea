"""What it costs that a hand-off is bound to its tokens (R51), of the control path of one hand-off.

    python -m benchmarks.binding [--rounds 200] [--tokens 512 2048 8000] [--mode pull]

Two engines' connectors in one process, over NIXL, with a cache so small that its bytes cost nothing: from the request's
arrival at prefill to its parameters, and from its arrival at decode to the landing. With and without the comparison of
prompts, in turns. JSON: medians in microseconds.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np

import kvferry
from kvferry.layout.builders import block_major, head_range
from kvferry.wire.prompt_digest import Agreement, Prompt

__all__ = ["main"]

BLOCK_TOKENS = 16
_BLANK = Prompt.of([0])


@dataclass(eq=False)
class Request:
    """A request as the scheduler half sees it."""

    request_id: kvferry.RequestId
    prompt_token_ids: Sequence[int]
    handoff: kvferry.HandoffParams | None
    salt: str = ""
    on_failure: kvferry.FailurePolicy | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.prompt_token_ids)


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
    """Hands one prompt over, and returns the seconds that both sides took together."""
    begun_s = time.perf_counter()
    sent = Request(kvferry.RequestId(name), prompt, kvferry.HandoffParams(do_remote_decode=True))
    prefill.half.on_new_request(sent)
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
    took_s = time.perf_counter() - begun_s
    assert outcome.landed, outcome
    decode.half.request_finished(asked, decode.tables, len(prompt), first_token=None, aborted=False)
    while prefill.half.has_pending_work():
        prefill.step()
    return took_s


def _measure(num_tokens: int, mode: kvferry.TransferMode, rounds: int) -> dict[str, float]:
    """Returns the medians for one length."""
    settings = kvferry.FerrySettings(transfer=kvferry.TransferSettings(mode=mode, staging_bytes=0))
    prefill, decode = (Side(role, settings, num_tokens) for role in (kvferry.Role.PREFILL, kvferry.Role.DECODE))
    prompt = [number * 7919 % 150_000 for number in range(num_tokens)]
    times: dict[bool, list[float]] = {True: [], False: []}
    try:
        for number in range(2 * rounds + 8):
            bound = number % 2 == 0
            off = (
                mock.patch.object(Prompt, "of", return_value=_BLANK),
                mock.patch.object(Prompt, "agreement", lambda self, stated: Agreement(stated.num_tokens, whole=True)),
            )
            if bound:
                took_s = _hand_over(prefill, decode, f"r{number}", prompt)
            else:
                with off[0], off[1]:
                    took_s = _hand_over(prefill, decode, f"r{number}", prompt)
            if number >= 8:
                times[bound].append(took_s)
    finally:
        decode.close()
        prefill.close()
    work = _work_us(prompt, links=mode is kvferry.TransferMode.PUSH)
    without_us = 1e6 * statistics.median(times[False])
    return {
        "tokens": num_tokens,
        "without_us": round(without_us, 1),
        "with_us": round(1e6 * statistics.median(times[True]), 1),
        "hashing_us": round(work, 1),
        "hashing_percent": round(100 * work / without_us, 2),
    }


def _work_us(prompt: Sequence[int], *, links: bool) -> float:
    """Returns the best time of all that is done for the comparison on both sides: less noisy than a difference."""
    best_s = float("inf")
    for _ in range(100):
        begun_s = time.perf_counter()
        ours = Prompt.of(prompt)
        assert ours.agreement(Prompt.of(prompt).stated(len(prompt), links=links)).whole
        best_s = min(best_s, time.perf_counter() - begun_s)
    return 1e6 * best_s


def main(argv: Sequence[str] | None = None) -> int:
    """The command above."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.binding", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8000])
    parser.add_argument("--mode", default="pull", choices=("pull", "push"))
    args = parser.parse_args(argv)
    rows = [_measure(tokens, kvferry.TransferMode(args.mode), args.rounds) for tokens in args.tokens]
    sys.stdout.write(json.dumps({"mode": args.mode, "rounds": args.rounds, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
