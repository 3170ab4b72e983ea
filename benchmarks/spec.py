"""`python -m benchmarks.spec`: what speculation gains alone, under prefill/decode, and there without the back-off.

It makes the table of the published repair (rule R35): with the back-off, acceptance at every position is that of one
engine alone; without it nearly all drafts are rejected, and the text is right all the same. The answers of the three
servings are compared, token by token, with those without speculation.
"""

import argparse
import json
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.command import main
from kvferry.cli.main import ExitCode
from kvferry.errors import ConfigError, FerryError
from kvferry.settings import TransferMode

if TYPE_CHECKING:
    from tests.harness.serving import Served

__all__ = ["QUICK_ARGS", "SERVINGS", "add_arguments", "measure", "run"]

QUICK_ARGS = ("--requests", "6", "--new-tokens", "48")
SERVINGS = ("standalone", "pd", "pd_unsafe")
UNSAFE = (
    "pd_unsafe is UNSAFE, and exists only here: the whole prompt is handed over with unverified drafts in the "
    "drafter's cache, so decode's drafter is ahead of the text by the back-off. It models the published fault: see "
    "docs/explanation/speculation.md"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--model",
        default="byte-mtp",
        metavar="MODEL",
        help="model, as for `kvferry serve` (default: byte-mtp, with 3 modules)",
    )
    parser.add_argument(
        "--method",
        nargs="+",
        default=["mtp"],
        metavar="METHOD",
        help="ngram, suffix, draft_model, eagle3 or mtp (default: mtp)",
    )
    parser.add_argument(
        "--draft", metavar="MODEL", help="model of the drafter, for draft_model and eagle3 (default: none)"
    )
    parser.add_argument("--num-tokens", type=int, default=3, metavar="K", help="drafts per step (default: 3)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="temperature of the answers (default: 0, greedy)"
    )
    parser.add_argument(
        "--draft-sample-method",
        default="greedy",
        metavar="HOW",
        help="greedy: drafts are the likeliest tokens; probabilistic: they are sampled (default: greedy)",
    )
    parser.add_argument(
        "--serving",
        nargs="+",
        choices=SERVINGS,
        default=list(SERVINGS),
        help="servings to measure (default: all three)",
    )
    parser.add_argument("--requests", type=int, default=16, metavar="N", help="requests served at once (default: 16)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=96, metavar="TOKENS", help="length of the shortest prompt (default: 96)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=96, metavar="TOKENS", help="length of an answer (default: 96)"
    )
    parser.add_argument(
        "--mode",
        type=TransferMode,
        default=TransferMode.PULL,
        choices=list(TransferMode),
        help="how KV crosses (default: pull)",
    )
    parser.add_argument(
        "--transport", default="memory", metavar="NAME", help="transport between the two engines (default: memory)"
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        metavar="DTYPE",
        help="dtype (default: float32, which gives the same tokens in any batch)",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of each engine (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one object per line")


def run(args: argparse.Namespace) -> ExitCode:
    """Measures each method in each serving. Fails if an answer differs from the one without speculation."""
    if args.requests < 1 or args.new_tokens < 2 or args.prompt_tokens < 1:
        raise ConfigError("--new-tokens must be 2 or more; --requests and --prompt-tokens must be 1 or more")
    if not args.json:
        print(f"{'serving':12}{'method':13}{'rate':>7}{'length':>8}{'tok/s':>8}{'ms/token':>10}  by position")
    right = True
    expected = None
    for method in args.method:
        for serving in args.serving:
            if serving == "pd_unsafe":
                print(UNSAFE, file=sys.stderr, flush=True)
            result, tokens = measure(args, method, serving)
            expected = expected or _plain(args)
            # Sampled drafts change the tokens but not their distribution, which test_rejection.py shows.
            right &= tokens == expected or (args.temperature > 0 and args.draft_sample_method == "probabilistic")
            _show(result, as_json=args.json)
    if not right:
        raise FerryError(
            "an answer differs from the one without speculation: this is a fault of kvferry. Please report it."
        )
    return ExitCode.OK


def measure(args: argparse.Namespace, method: str, serving: str) -> tuple[dict[str, Any], list[list[int]]]:
    """Returns one line of the table, and the answers."""
    from kvferry.engines.mini.speculation_settings import SpeculationSettings
    from tests.harness.serving import Alone, Pair, Serving

    spec = SpeculationSettings(
        method=method,
        num_speculative_tokens=args.num_tokens,
        model=args.draft if method in ("draft_model", "eagle3") else None,
        unsafe_without_backoff=serving == "pd_unsafe",
        draft_sample_method=args.draft_sample_method,
    )
    settings = replace(_engine(args), speculation=spec)
    engine: Serving
    if serving == "standalone":
        engine = Alone(settings)
    else:
        engine = Pair(settings, settings, mode=args.mode, transport=args.transport)
    try:
        # To warm up, with another prompt, so that nothing of the measured ones is in the prefix cache.
        engine.serve([replace(_requests(args, "w")[0], prompt_token_ids=tuple(range(8, 40)))])
        before, start_s = engine.engine.stats().acceptance, time.perf_counter()
        served: Sequence[Served] = engine.serve(_requests(args, "r"))
        took_s = time.perf_counter() - start_s
        acceptance = engine.engine.stats().acceptance.since(before)
    finally:
        engine.close()
    tok_s, tpot_ms = _speed(served, took_s)
    return {
        "serving": serving,
        "method": method,
        "num_tokens": args.num_tokens,
        "acceptance_rate": round(acceptance.rate, 4),
        "acceptance_length": round(acceptance.length, 3),
        "acceptance_by_position": [round(rate, 4) for rate in acceptance.by_position],
        "verifications": acceptance.num_verifications,
        "tok_s": tok_s,
        "tpot_ms": tpot_ms,
        "recomputed_tokens": sum(one.last.account.recomputed for one in served if one.last and one.last.account),
    }, [one.tokens for one in served]


def _plain(args: argparse.Namespace) -> list[list[int]]:
    """Returns the answers without speculation; writes their speed to stderr."""
    from tests.harness.serving import Alone

    engine = Alone(_engine(args))
    try:
        engine.serve([replace(_requests(args, "w")[0], prompt_token_ids=tuple(range(8, 40)))])
        start_s = time.perf_counter()
        served = engine.serve(_requests(args, "p"))
        tok_s, tpot_ms = _speed(served, time.perf_counter() - start_s)
    finally:
        engine.close()
    print(f"without speculation: {tok_s} tok/s, {tpot_ms} ms/token", file=sys.stderr, flush=True)
    return [one.tokens for one in served]


def _speed(served: "Sequence[Served]", took_s: float) -> tuple[float, float]:
    """Returns the tokens per second of all requests together, and the milliseconds per token of one."""
    gaps = [(one.times_s[-1] - one.times_s[0]) / (len(one.tokens) - 1) for one in served]
    return round(sum(len(one.tokens) for one in served) / took_s, 1), round(1e3 * sum(gaps) / len(gaps), 3)


def _engine(args: argparse.Namespace) -> Any:
    from kvferry.engines.mini.settings import EngineSettings

    return EngineSettings(
        model=args.model, dtype=args.dtype, threads=args.threads, cache_bytes=128 << 20, max_batch_tokens=512
    )


def _requests(args: argparse.Namespace, name: str) -> list[Any]:
    """Returns requests of growing length: pieces of the standard library, as tokens of the model."""
    from kvferry.engines.mini.api import GenerateRequest, SamplingParams
    from kvferry.engines.mini.models.catalog import model_directory
    from kvferry.engines.mini.models.tokenizer import Tokenizer
    from kvferry.ids import RequestId

    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text(encoding="utf-8")
    tokens = Tokenizer.from_directory(model_directory(args.model)).encode(text)
    step = max(1, (len(tokens) - args.prompt_tokens - args.requests) // args.requests)
    return [
        GenerateRequest(
            request_id=RequestId(f"{name}{i}"),
            prompt_token_ids=tuple(tokens[i * step : i * step + args.prompt_tokens + i]),
            sampling=SamplingParams(temperature=args.temperature, max_tokens=args.new_tokens, ignore_eos=True, seed=i),
        )
        for i in range(args.requests)
    ]


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result), flush=True)
        return
    rates = " ".join(f"{rate:.3f}" for rate in result["acceptance_by_position"])
    print(
        f"{result['serving']:12}{result['method']:13}{result['acceptance_rate']:>7.3f}"
        f"{result['acceptance_length']:>8.3f}{result['tok_s']:>8,.0f}{result['tpot_ms']:>10.2f}  {rates}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main("spec", add_arguments, run, description=__doc__))
