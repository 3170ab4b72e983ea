"""R51 with real vLLM: pairs of prompts with each other's hand-offs, and no wrong token, now or later.

    python -m tests.engines.vllm.foreign_prompts [--pairs 1000] [--bursts 0] [--mode pull --mode push] [--way NAME ...]

Two servers per way: vLLM to vLLM, the embedded engine to vLLM, and vLLM to the embedded engine. The reference is vLLM's
own answer under another cache salt. `--bursts` asks bursts of six prompts with a common beginning first, each with its
own hand-off. JSON, an object per way and mode; the exit status is 1 if a token was wrong, or a cache was poisoned.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.foreign_prompts import peer_params
from tests.engines.vllm.servers import READY_S, Lab, Pair
from tests.harness.fleet import Fleet
from tests.harness.foreign_prompts import (
    Servers,
    Tally,
    bursts_of_prompts,
    hand_over_all,
    pairs_of_prompts,
    swap_all,
)
from tests.harness.vllm_servers import SERVED_AS, VllmServer

__all__ = ["VOCAB", "WAYS", "main", "servers_of"]

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


def servers_of(pair: Pair, mode: str) -> Servers:
    """Returns where the two servers of a pair answer; the reference is decode's own answer under another salt."""
    return Servers(pair.prefill.url, pair.decode.url, pair.decode.url, mode, SERVED_AS, _SALT, _peer(pair.prefill))


@contextmanager
def _servers(lab: Lab, way: str, mode: str, scratch: Path) -> Iterator[Servers]:
    spec = {"block_tokens": BLOCK_TOKENS}
    if way == "vllm-to-vllm":
        yield servers_of(lab.pair(mode, spec, spec), mode)
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


def _report(way: str, mode: str, asked: str, count: int, tally: Tally) -> bool:
    if count:
        result = {"way": way, "mode": mode, asked: count, **tally.to_json()}
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
        sys.stdout.flush()
    return tally.good


def main(argv: Sequence[str] | None = None) -> int:
    """The command above."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.vllm.foreign_prompts", description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--bursts", type=int, default=0)
    parser.add_argument("--mode", action="append", choices=("pull", "push"))
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    good = True
    with Lab("kvferry", policy="recompute") as lab:
        for way in args.way or WAYS:
            for mode in args.mode or ("pull", "push"):
                with tempfile.TemporaryDirectory() as scratch, _servers(lab, way, mode, Path(scratch)) as servers:
                    bursts = list(bursts_of_prompts(args.bursts, seed=args.seed, vocab=VOCAB))
                    pairs = list(pairs_of_prompts(args.pairs, seed=args.seed, vocab=VOCAB))
                    handed_over = hand_over_all(servers, bursts, at_once=2)
                    good = _report(way, mode, "bursts", len(bursts), handed_over) and good
                    good = _report(way, mode, "pairs", len(pairs), swap_all(servers, pairs, at_once=4)) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
