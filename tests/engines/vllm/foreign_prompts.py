"""R51 with real vLLM: pairs of prompts with each other's hand-offs, and no wrong token, now or later.

    python -m tests.engines.vllm.foreign_prompts [--pairs 1000] [--mode pull --mode push] [--way vllm-to-vllm ...]

Two servers per way: vLLM to vLLM, the embedded engine to vLLM, and vLLM to the embedded engine. The reference is vLLM's
own answer under another cache salt. JSON, an object per way and mode; the exit status is 1 if a token was wrong, or a
prefix cache was poisoned.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.foreign_prompts import peer_params
from tests.engines.vllm.servers import READY_S, Lab
from tests.harness.fleet import Fleet
from tests.harness.foreign_prompts import Servers, Tally, pairs_of_prompts, swap_all
from tests.harness.vllm_servers import SERVED_AS, VllmServer

__all__ = ["WAYS", "main", "run"]

WAYS = ("vllm-to-vllm", "mini-to-vllm", "vllm-to-mini")
VOCAB = range(3, 500)
BLOCK_TOKENS = 32
FLAGS = ("--dtype", "float32", "--cache-gb", "0.05", "--threads", "1", "--served-model-name", SERVED_AS)
_SALT = {"cache_salt": "alone"}


def _peer(server: VllmServer) -> dict[str, object]:
    return {
        "remote_engine_id": server.spec.name,
        "remote_host": "127.0.0.1",
        "remote_port": server.side_port,
    }


@contextmanager
def _servers(lab: Lab, way: str, mode: str, scratch: Path) -> Iterator[Servers]:
    spec = {"block_tokens": BLOCK_TOKENS}
    if way == "vllm-to-vllm":
        pair = lab.pair(mode, spec, spec)
        yield Servers(pair.prefill.url, pair.decode.url, pair.decode.url, mode, SERVED_AS, _SALT, _peer(pair.prefill))
        return
    role = "decode" if way == "mini-to-vllm" else "prefill"
    server = lab.server(lab.spec(role, mode, **spec)).start()
    try:
        with Fleet(scratch, *FLAGS, model=str(lab.model()), mode=mode) as fleet:
            embedded = fleet.worker("mini", role="prefill" if role == "decode" else "decode").wait_ready()
            server.wait_ready(READY_S)
            if role == "decode":
                peer = peer_params(embedded)
                yield Servers(embedded.url, server.url, server.url, mode, SERVED_AS, _SALT, peer)
            else:
                yield Servers(server.url, embedded.url, server.url, mode, SERVED_AS, _SALT, _peer(server))
    finally:
        server.stop(grace_s=0)


def run(lab: Lab, way: str, mode: str, count: int, scratch: Path, *, seed: int = 0, at_once: int = 4) -> Tally:
    """Starts the two servers, asks all pairs, and returns what became of them."""
    with _servers(lab, way, mode, scratch) as servers:
        return swap_all(servers, list(pairs_of_prompts(count, seed=seed, vocab=VOCAB)), at_once=at_once)


def main(argv: Sequence[str] | None = None) -> int:
    """The command above."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.vllm.foreign_prompts", description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--mode", action="append", choices=("pull", "push"))
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    good = True
    with Lab("kvferry", policy="recompute") as lab:
        for way in args.way or WAYS:
            for mode in args.mode or ("pull", "push"):
                with tempfile.TemporaryDirectory() as scratch:
                    tally = run(lab, way, mode, args.pairs, Path(scratch), seed=args.seed)
                result = {"way": way, "mode": mode, "pairs": args.pairs, **tally.to_json()}
                sys.stdout.write(json.dumps(result, indent=1) + "\n")
                sys.stdout.flush()
                good = good and tally.good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
