"""R51 on real processes: pairs of prompts with each other's hand-offs, and no wrong token, now or later.

    python -m tests.e2e.foreign_prompts [--pairs 1000] [--mode pull --mode push] [--older-decode] [--older-prefill]

A prefill worker, a decode worker with a prefix cache, and an engine alone, all of the embedded engine. JSON, an object
per mode; the exit status is 1 if a token was wrong, or a prefix cache was poisoned.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.harness.fleet import Fleet, Process
from tests.harness.foreign_prompts import Servers, Tally, pairs_of_prompts, swap_all
from tests.harness.vllm_models import make_model

__all__ = ["main", "peer_params", "run"]

FLAGS = ("--dtype", "float32", "--cache-gb", "0.05", "--threads", "1")
VOCAB = range(3, 500)


def peer_params(prefill: Process) -> dict[str, object]:
    """Returns the parameters by which a router names a prefill worker to decode, before prefill has answered."""
    answered = prefill.describe()
    return {
        "remote_engine_id": answered["engine"],
        "remote_incarnation": answered["incarnation"],
        "remote_host": answered["side_channel"]["host"],
        "remote_port": answered["side_channel"]["port"],
    }


def run(
    directory: Path,
    mode: str,
    count: int,
    *,
    prefill_flags: Sequence[str] = (),
    decode_flags: Sequence[str] = (),
    seed: int = 0,
    at_once: int = 8,
) -> Tally:
    """Starts three workers, asks all pairs, and returns what became of them."""
    model = make_model(directory / "model")
    with Fleet(directory / mode, *FLAGS, model=str(model), mode=mode) as fleet:
        prefill = fleet.worker("p", *prefill_flags, role="prefill")
        decode = fleet.worker("d", *decode_flags, role="decode")
        alone = fleet.worker("alone", "--no-prefix-caching", role="both")
        for worker in (prefill, decode, alone):
            worker.wait_ready()
        servers = Servers(prefill.url, decode.url, alone.url, mode, peer=peer_params(prefill))
        pairs = list(pairs_of_prompts(count, seed=seed, vocab=VOCAB))
        return swap_all(servers, pairs, at_once=at_once)


def main(argv: Sequence[str] | None = None) -> int:
    """The command above."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.foreign_prompts", description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--mode", action="append", choices=("pull", "push"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    good = True
    for mode in args.mode or ("pull", "push"):
        with tempfile.TemporaryDirectory() as scratch:
            tally = run(Path(scratch), mode, args.pairs, seed=args.seed)
        sys.stdout.write(json.dumps({"mode": mode, "pairs": args.pairs, **tally.to_json()}, indent=1) + "\n")
        good = good and tally.good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
