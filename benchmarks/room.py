"""`python -m benchmarks.room`: how long prompts wait when the cache is full, in steps of one embedded engine.

Loops of small requests keep most of the cache in use; a large prompt arrives that finds no room, and after it a few
very small ones that would. For each kind: the longest time from arrival to the first token, in steps and in seconds.
Steps do not depend on the machine.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.command import main
from kvferry.cli.main import ExitCode

__all__ = ["add_arguments", "measure", "run"]

KINDS = ("loop", "large", "tiny")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--model", default="byte-mtp", metavar="MODEL", help="model (default: byte-mtp)")
    parser.add_argument("--num-blocks", type=int, default=128, metavar="N", help="cache blocks (default: 128)")
    parser.add_argument(
        "--large", type=int, default=1900, metavar="N", help="tokens of the large prompt (default: 1900)"
    )
    parser.add_argument("--loops", type=int, default=4, metavar="N", help="loops of small requests (default: 4)")
    parser.add_argument("--small", type=int, default=200, metavar="N", help="prompt tokens of each (default: 200)")
    parser.add_argument("--answer", type=int, default=60, metavar="N", help="answer tokens of each (default: 60)")
    parser.add_argument("--steps", type=int, default=600, metavar="N", help="how long the loops go on (default: 600)")
    parser.add_argument(
        "--overtake", type=float, default=None, metavar="S", help="as for `kvferry serve` (default: as there)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per kind on stdout")


@dataclass
class _Wait:
    kind: str
    step: int
    at_s: float
    steps: int | None = None
    """From arrival to the first token; None while there is none."""
    seconds: float = 0.0


@dataclass
class _Run:
    engine: Any
    answer: int
    step: int = 0
    waits: dict[str, _Wait] = field(default_factory=dict)

    def ask(self, kind: str, num_prompt: int, num_answer: int) -> None:
        from kvferry.engines.mini.api import GenerateRequest, SamplingParams
        from kvferry.ids import RequestId

        number = len(self.waits)
        prompt = tuple(1 + (number * 7 + i * i) % 200 for i in range(num_prompt))
        sampling = SamplingParams(max_tokens=num_answer, temperature=0.0, ignore_eos=True)
        self.waits[str(number)] = _Wait(kind, self.step, time.monotonic())
        self.engine.add(GenerateRequest(request_id=RequestId(str(number)), prompt_token_ids=prompt, sampling=sampling))

    def go(self) -> list[str]:
        """Runs one step, and returns the kinds of the requests that ended."""
        ended = []
        for output in self.engine.step():
            wait = self.waits[output.request_id]
            if output.token_ids and wait.steps is None:
                wait.steps, wait.seconds = self.step - wait.step, time.monotonic() - wait.at_s
            if output.finish_reason is not None:
                ended.append(wait.kind)
        self.step += 1
        return ended


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one row per kind of request."""
    from kvferry.engines.mini.engine import Engine
    from kvferry.engines.mini.settings import EngineSettings

    changes = {} if args.overtake is None else {"overtake_s": args.overtake}
    engine = Engine.load(EngineSettings(model=args.model, num_blocks=args.num_blocks, prefix_caching=False, **changes))
    try:
        run = _Run(engine, args.answer)
        for i in range(args.loops):
            run.ask("loop", args.small, args.answer + i)
        while run.step < args.steps or engine.has_work():
            for kind in run.go():
                if kind == "loop" and run.step < args.steps:
                    run.ask("loop", args.small, args.answer)
            if run.step == args.answer // 2:
                run.ask("large", args.large, 8)
            elif run.step == args.answer // 2 + 1:
                for _ in range(5):
                    run.ask("tiny", 20, 8)
    finally:
        engine.close()
    return [_row(kind, [one for one in run.waits.values() if one.kind == kind]) for kind in KINDS]


def _row(kind: str, waits: list[_Wait]) -> dict[str, Any]:
    steps = [one.steps for one in waits if one.steps is not None]
    return {
        "kind": kind,
        "requests": len(waits),
        "longest_wait_steps": max(steps, default=None),
        "longest_wait_s": round(max((one.seconds for one in waits), default=0.0), 3),
    }


def run(args: argparse.Namespace) -> ExitCode:
    """Measures, and prints the rows."""
    for row in measure(args):
        if args.json:
            print(json.dumps(row))
        else:
            print(
                f"{row['kind']:<6} {row['requests']:>4} requests, longest wait for a first token: "
                f"{row['longest_wait_steps']} steps, {row['longest_wait_s']:.2f} s"
            )
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main("room", add_arguments, run, description=__doc__))
