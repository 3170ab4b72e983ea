"""Kills a peer with SIGKILL at random moments: no client hangs, no token is wrong, and both servers go on.

    python -m tests.engines.vllm.kills --mode push --repeats 10

Each round: three clients send hand-offs without a pause, one server is killed (prefill and decode in turn), and every
request must end. Then the survivor must answer /health and an ordinary request, the killed one is started again under
its name and ports, and a hand-off must arrive. It prints one line per round, and exits with 1 if a round failed.
"""

import argparse
import json
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.engines.vllm.faults import handed_over, say
from tests.engines.vllm.servers import Lab, Pair, VllmServer, alone, poll_until
from tests.harness.vllm_client import serve_pair

__all__ = ["main"]

REQUEST_S = 40.0
_FLAGS: dict[str, Any] = {"flags": ("--no-enable-prefix-caching", "--num-gpu-blocks-override", "160")}
"""The servers have no prefix cache, so a server's answer alone is computed, whatever was handed to it before."""


def kill_round(lab: Lab, pair: Pair, mode: str, victim: str) -> dict[str, Any]:
    """One kill, and its results."""
    ways = ("pull",) if mode == "pull" else ("push-after", "push-first")
    stop = threading.Event()
    ended: list[tuple[list[int], Any]] = []

    def client(seed: int) -> None:
        turn = 0
        while not stop.is_set():
            prompt = [3 + (seed * 7919 + turn * 104729 + at * at * 31) % 490 for at in range(900)]
            way = ways[turn % len(ways)]
            served = serve_pair(
                pair.prefill, pair.decode, prompt, way=way, max_tokens=6, timeout_s=REQUEST_S, stream=False
            )
            ended.append((prompt, served))
            turn += 1
            if not (served.prefill.ok and served.decode.ok):
                stop.wait(0.1)

    clients = [threading.Thread(target=client, args=(lab.dice.randrange(1 << 20),)) for _ in range(3)]
    for one in clients:
        one.start()
    moment_s = lab.dice.uniform(0.2, 2.0)
    stop.wait(moment_s)
    dying, living = (pair.prefill, pair.decode) if victim == "prefill" else (pair.decode, pair.prefill)
    dying.kill()
    stop.wait(1.0)
    stop.set()
    for one in clients:
        one.join()
    verdicts: Counter[str] = Counter()
    for prompt, served in ended:
        verdicts[_judge(living, prompt, served)] += 1
    well = living.healthy()
    after = alone(living, lab.prompt(200), 2, timeout_s=20.0)
    freed_s = poll_until(lambda: living.metric("vllm:kv_cache_usage_perc") == 0.0, 40.0) if well else -1.0
    lab.restart(dying)
    return {
        "victim": victim,
        "moment_s": round(moment_s, 2),
        "requests": dict(verdicts),
        "longest_request_s": round(max(max(one.decode.total_s, one.prefill.total_s) for _, one in ended), 1),
        "survivor_health": well,
        "survivor_answers": after.ok,
        "survivor_blocks_back_s": round(freed_s, 1),
        "next_hand_off": _next(lab, pair, living, ways[-1]),
    }


def _judge(living: VllmServer, prompt: list[int], served: Any) -> str:
    answer = served.decode
    if answer.ok:
        reference = alone(living, prompt, len(answer.tokens))
        return "right" if reference.tokens == answer.tokens else "WRONG" if reference.ok else "not checked"
    hung = "timed out" in answer.error.lower() or "timed out" in served.prefill.error.lower()
    return "hung" if hung else "ended with an error"


def _next(lab: Lab, pair: Pair, reference: VllmServer, way: str) -> str:
    """Returns the first hand-off that arrives after the restart, of at most four."""
    for attempt in range(1, 5):
        prompt, before = lab.prompt(700), handed_over(pair.decode)
        served = serve_pair(pair.prefill, pair.decode, prompt, way=way, max_tokens=6, timeout_s=REQUEST_S, stream=False)
        if served.decode.ok and handed_over(pair.decode) > before:
            right = alone(reference, prompt, 6).tokens == served.decode.tokens
            return f"{'right' if right else 'WRONG'} at attempt {attempt}"
    return "NEVER"


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.vllm.kills", description="kill -9 at random moments")
    parser.add_argument("--connector", choices=("builtin", "kvferry"), default="kvferry")
    parser.add_argument("--mode", choices=("pull", "push"), default="pull")
    parser.add_argument("--policy", choices=("fail", "recompute"), default="recompute")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--vllm-python", help="the interpreter that has vLLM")
    args = parser.parse_args(argv)
    bad = 0
    with Lab(args.connector, args.vllm_python, policy=args.policy) as lab:
        pair = lab.pair(args.mode, _FLAGS, _FLAGS)
        for turn in range(args.repeats):
            seen = kill_round(lab, pair, args.mode, ("prefill", "decode")[turn % 2])
            requests = seen["requests"]
            good = seen["survivor_health"] and seen["survivor_answers"] and seen["survivor_blocks_back_s"] >= 0
            good = (
                good
                and seen["next_hand_off"].startswith("right")
                and not requests.get("WRONG")
                and not requests.get("hung")
            )
            bad += not good
            say(json.dumps({"connector": args.connector, "mode": args.mode, "well": good, **seen}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
