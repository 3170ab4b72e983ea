"""Two embedded engines in one process: one computes the prompt, the other writes the answer.

    python examples/two_engines.py [MODEL] [--transport memory|nixl] [--mode pull|push]

MODEL is a directory of a Hugging Face checkpoint, or a model that kvferry brings along (smollm2, byte-mtp).
"""

import argparse
import time
from dataclasses import replace

from kvferry import FerrySettings, HandoffParams, RequestId, Role, TransferMode, TransferSettings
from kvferry.engines.mini.api import GenerateRequest, Output, SamplingParams
from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.worker import Worker, WorkerSettings, build_worker

PROMPT = "Once upon a time there was a ferry that carried caches across a river. One day"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--transport", default="memory")
    parser.add_argument("--mode", type=TransferMode, default=TransferMode.PULL)
    args = parser.parse_args()

    ferry = FerrySettings(transfer=TransferSettings(mode=args.mode, transport=args.transport))
    # The two need not be alike: here their blocks differ.
    prefill = build_worker(worker_settings(args.model, ferry, Role.PREFILL, block_tokens=16))
    try:
        decode = build_worker(worker_settings(args.model, ferry, Role.DECODE, block_tokens=32))
        try:
            hand_over(prefill, decode, args.mode)
        finally:
            decode.close()
    finally:
        prefill.close()


def worker_settings(model: str, ferry: FerrySettings, role: Role, *, block_tokens: int) -> WorkerSettings:
    engine = EngineSettings(model=model, block_tokens=block_tokens, cache_bytes=64 << 20)
    return WorkerSettings(engine=engine, ferry=ferry, role=role, engine_id=role.value)


def hand_over(prefill: Worker, decode: Worker, mode: TransferMode) -> None:
    """Do what a router does: send the prompt to prefill, then the request with prefill's parameters to decode."""
    prompt = tuple(prefill.engine.tokenizer.encode(PROMPT))
    request = GenerateRequest(
        request_id=RequestId("r1"), prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=24, temperature=0.0)
    )
    to_prefill = HandoffParams(do_remote_decode=True, transfer_id="t1")
    prefill.engine.add(replace(request, handoff=to_prefill, sampling=replace(request.sampling, max_tokens=1)))
    if mode is TransferMode.PULL:
        to_decode = step_until_end(prefill.engine)[-1].handoff
    else:  # decode is waiting while prefill computes, so it is given prefill's address
        identity = prefill.identity
        to_decode = HandoffParams(
            do_remote_prefill=True, transfer_id="t1", transfer_mode=mode, remote_engine_id=identity.engine,
            remote_host=identity.host, remote_port=identity.port,
        )  # fmt: skip
    decode.engine.add(replace(request, handoff=to_decode))
    outputs = step_until_end(decode.engine, prefill.engine)

    print(PROMPT + "".join(output.text for output in outputs))
    account = next(output.account for output in outputs if output.account is not None)
    print(f"of {len(prompt)} prompt tokens: {account.handed_over} handed over, {account.cached} cached, "
          f"{account.recomputed} recomputed {account.reason}")  # fmt: skip
    if (timing := outputs[-1].timing) is not None:
        print(f"{timing.num_bytes} bytes in {timing.num_runs} runs, {1000 * timing.transfer_s:.1f} ms; "
              f"{timing.verified_cells} cells compared")  # fmt: skip
    while prefill.engine.has_work() or decode.engine.has_work():  # until prefill has its blocks back
        prefill.engine.step()
        decode.engine.step()
        time.sleep(0.001)  # the transport's threads are to run


def step_until_end(engine: Engine, other: Engine | None = None) -> list[Output]:
    """Step until the request has ended on `engine`. Servers give each engine a thread of its own."""
    outputs: list[Output] = []
    while not outputs or outputs[-1].finish_reason is None:
        if other is not None:
            other.step()
        outputs += engine.step()
        time.sleep(0.0003)  # the transport's threads are to run
    return outputs


if __name__ == "__main__":
    main()
