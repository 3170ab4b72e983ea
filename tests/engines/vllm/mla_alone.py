"""vLLM alone, without a connector: does a decode step give the token of a prefill, with MLA on a CPU?

    .venv-vllm/bin/python -W ignore -m tests.engines.vllm.mla_alone

Three answers: the rope kernel against its formula; a model with `rope_type` default; the same with yarn. With vLLM
0.32.0 the first two differ: `ops.rotary_embedding` takes a query of [tokens, heads, size] for one of [tokens, size],
and turns the first `tokens` of its tokens x heads rows. What is turned then depends on how many tokens the step
computes: a chunk, a prefix hit, a resumed request, a hand-off and an ordinary decode step each say something else. The
yarn module is plain PyTorch, and right.
"""

import os
import random
import sys
import tempfile
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


def say(text: str) -> None:
    """Prints one line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def check_kernel(num_tokens: int, num_heads: int) -> bool:
    """Returns True if the CPU kernel rotates every head of a 3-dimensional query."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    angles = torch.arange(200)[:, None] / (10000 ** (torch.arange(0, 64, 2) / 64))
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    query, key = torch.randn(num_tokens, num_heads, 64), torch.randn(num_tokens, 1, 64)
    positions = torch.arange(50, 50 + num_tokens)
    cos, sin = (part[:, None] for part in cache[positions].chunk(2, -1))
    even, odd = query[..., 0::2], query[..., 1::2]
    wanted = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    ops.rotary_embedding(positions, query, key, 64, cache, False)
    return bool(torch.allclose(query, wanted, atol=1e-5))


def check_model(model: Path) -> tuple[int, int]:
    """Returns (decode steps that give the token of a prefill of the same tokens, all steps)."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(model), dtype="float32", enforce_eager=True, max_model_len=512, attention_backend="CPU_MLA", seed=0)
    dice, same, steps = random.Random(5), 0, 8

    def tokens_after(prompt: list[int], count: int) -> list[int]:
        asked = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        outputs = llm.generate({"prompt_token_ids": prompt}, asked, use_tqdm=False)
        return list(outputs[0].outputs[0].token_ids)

    for length in (20, 100, 300):
        prompt = dice.choices(range(3, 500), k=length)
        decoded = tokens_after(prompt, steps)
        for step in range(1, steps):
            same += tokens_after(prompt + decoded[:step], 1)[0] == decoded[step]
    return same, 3 * (steps - 1)


def main() -> int:
    """Returns exit status 1 if anything differs."""
    from tests.engines.vllm.models import make_kind

    kernel = [(tokens, heads, check_kernel(tokens, heads)) for tokens in (1, 20) for heads in (1, 4)]
    for tokens, heads, right in kernel:
        say(f"rope kernel, {tokens} tokens of {heads} heads: {'right' if right else 'WRONG'}")
    well = all(right for _, _, right in kernel)
    with tempfile.TemporaryDirectory() as scratch:
        for rope, kind in (("default", "mla-default-rope"), ("yarn", "mla")):
            model = make_kind(kind, Path(scratch) / kind)
            same, steps = check_model(model)
            say(f"MLA, rope {rope}: {same} of {steps} decode steps say what a prefill of the same tokens says")
            well = well and same == steps
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
