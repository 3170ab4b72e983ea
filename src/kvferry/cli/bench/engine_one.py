"""Measures one engine with one dtype at several batch sizes: a line of JSON each. `bench engine` runs it as a script.

It stands alone, because another Python (one with vLLM) may have to run it: nothing of kvferry is imported at the top.
Prefill is the time of the whole prompts of a batch with one new token each; decode is the time that further tokens add.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable

__all__ = ["add_arguments", "main", "measure", "mini", "transformers", "vllm"]


Generate = Callable[[list[list[int]], int], None]
"""Answers all prompts greedily, with exactly this many tokens each."""


def mini(args: argparse.Namespace) -> tuple[Generate, str]:
    """Returns the embedded engine, and its version."""
    from kvferry import __version__
    from kvferry.engines.mini.api import GenerateRequest, SamplingParams
    from kvferry.engines.mini.engine import Engine, EngineSettings
    from kvferry.ids import RequestId

    need = (args.prompt_tokens + args.new_tokens + 16) * max(args.batches)
    settings = EngineSettings(
        model=args.model,
        dtype=args.dtype,
        threads=args.threads,
        num_blocks=need // 16 + 16,
        prefix_caching=False,
    )
    engine = Engine.load(settings)

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.add(GenerateRequest(request_id=RequestId(str(i)), prompt_token_ids=tuple(prompt), sampling=sampling))
        count = 0
        while engine.has_work():
            count += sum(len(output.token_ids) for output in engine.step())
        if count != len(prompts) * num_tokens:
            raise SystemExit(f"the engine gave {count} tokens instead of {len(prompts) * num_tokens}")

    return generate, __version__


def transformers(args: argparse.Namespace) -> tuple[Generate, str]:
    """Returns `generate` of transformers, with all prompts in one batch (they have equal lengths), and its version."""
    import torch
    from transformers import AutoModelForCausalLM, __version__

    torch.set_num_threads(args.threads)
    network = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    network.eval()

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )

    return generate, str(__version__)


def vllm(args: argparse.Namespace) -> tuple[Generate, str]:
    """Returns vLLM with its defaults, apart from threads, dtype and prefix caching; and its version."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams, __version__
    from vllm.inputs import TokensPrompt

    model = LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=args.prompt_tokens + args.new_tokens + 16,
        max_num_seqs=max(args.batches),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        enforce_eager=args.vllm_eager,
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        model.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False)

    return generate, str(__version__)


ENGINES = {"mini": mini, "transformers": transformers, "vllm": vllm}


def measure(generate: Generate, args: argparse.Namespace, batch: int) -> tuple[float, float]:
    """Returns tokens per second of prefill and of decode: the best of the repetitions."""
    rng = random.Random(batch)
    with open(os.path.join(args.model, "config.json"), encoding="utf-8") as file:
        vocab_size = json.load(file)["vocab_size"]
    prefill_s, decode_s = [], []
    for _ in range(args.repeats):
        prompts = [[rng.randrange(100, vocab_size) for _ in range(args.prompt_tokens)] for _ in range(batch)]
        times = []
        for num_tokens in (1, args.new_tokens):
            began_s = time.perf_counter()
            generate(prompts, num_tokens)
            times.append(time.perf_counter() - began_s)
        prefill_s.append(times[0])
        decode_s.append(times[1] - times[0])
    return batch * args.prompt_tokens / min(prefill_s), batch * (args.new_tokens - 1) / max(min(decode_s), 1e-9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `bench engine` passes on."""
    parser.add_argument("engine", choices=[*ENGINES])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--vllm-eager", action="store_true")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print must not mix with the results
    generate, version = ENGINES[args.engine](args)
    generate([[7] * args.prompt_tokens], 4)  # the first call is slower everywhere
    for batch in args.batches:
        prefill, decode = measure(generate, args, batch)
        result = {
            "engine": args.engine,
            "dtype": args.dtype,
            "batch": batch,
            "prefill_tok_s": round(prefill, 1),
            "decode_tok_s": round(decode, 1),
            "threads": args.threads,
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": args.new_tokens,
            "version": version,
        }
        print(json.dumps(result), file=out, flush=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
