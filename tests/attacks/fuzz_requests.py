"""Fuzzed requests on a whole fleet: bodies valid by type, with values at random, also extreme ones.

    python -m tests.attacks.fuzz_requests --requests 10000 --mode pull --seed 1

Two prefill and two decode workers that speculate, and a router. Bodies are made from the table of request fields, one
from each seed, and go through the router, or straight to a worker. No engine may die; every answer is whole, with an
account that adds up, or an error of the client's with its name; afterwards the fleet is healthy, no block is lost, and
known prompts get the answers that they got before. What fails is shrunk, and printed as a curl command.
"""

import argparse
import asyncio
import json
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.engines.mini.models.catalog import model_directory
from kvferry.engines.mini.server.request_fields import Done, Field, fields_of
from tests.harness.client import complete, get
from tests.harness.fleet import Fleet
from tests.harness.request_values import BASES, KINDS

__all__ = ["FLAGS", "Result", "fuzz", "fuzz_fleet", "make_model"]

FLAGS = (
    "--dtype", "float32", "--num-blocks", "400", "--threads", "1", "--lease-ttl", "5", "--lease-renew-every", "1",
    "--quarantine", "1", "--transfer-deadline", "20", "--max-model-len", "640",
    "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}',
)  # fmt: skip
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
)
KNOWN = ("def add(a, b):\n    return a + ", "import os\nimport sys\nimport ", "x = [1, 2, 3, " * 6)
TIMEOUT_S = 120.0
_MOST_LEFT = 8
CLIENT_CODES = {
    "out_of_range", "unsupported", "invalid_type", "invalid_json", "missing_field", "model_not_found", None,
    "context_length_exceeded", "body_too_large",
}  # fmt: skip
STRINGS = ("", "a", "\x00", "\U0001f600", "é" * 40, "\u202e", "x" * 3000, "<|endoftext|>", "{{ 7 * 7 }}", "\n\n", " ")
NUMBERS = (
    0,
    -1,
    1,
    2,
    16,
    255,
    256,
    2**31 - 1,
    2**31,
    2**63 - 1,
    2**63,
    10**20,
    -(10**20),
    0.0,
    -0.0,
    1e-300,
    0.5,
    1e308,
)


@dataclass
class Result:
    """What came of the requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    answer_tokens: int = 0
    handed_over: int = 0

    def lines(self) -> list[str]:
        """The figures, for people."""
        counts = ", ".join(f"{name} {count}" for name, count in self.statuses.most_common())
        return [counts, f"answer tokens {self.answer_tokens}, prompt tokens handed over {self.handed_over}"]


@dataclass(frozen=True)
class Case:
    """One request."""

    seed: str
    url: str
    endpoint: str
    body: dict[str, Any]
    straight: bool
    """Whether it goes to a worker: the router drops a client's `kv_transfer_params`."""

    def curl(self) -> str:
        """The request as a command."""
        data = json.dumps(self.body)
        return f"curl -sS {self.url}/v1/{self.endpoint} -d {shlex.quote(data)}   # {self.seed}"


class Maker:
    """Makes bodies from a seed."""

    def __init__(self, seed: str) -> None:
        self._dice = random.Random(seed)

    def case(self, seed: str, urls: Sequence[str]) -> Case:
        """Returns a request. The first of `urls`, the router, gets most of them."""
        dice = self._dice
        endpoint = dice.choice(sorted(KINDS))
        fields = fields_of(KINDS[endpoint])
        body: dict[str, Any] = dict(BASES[endpoint])
        body["prompt" if endpoint == "completions" else "messages"] = (
            self._prompt() if endpoint == "completions" else self._messages()
        )
        body["max_tokens"] = dice.choice([1, 2, 5, 12, 24])
        wild = dice.random() < 0.3
        names = [name for name, (entry, _) in fields.items() if entry.does is Done.YES or dice.random() < 0.02]
        for name in dice.sample(names, min(len(names), dice.choice([0, 1, 2, 4, 8]))):
            if name not in ("prompt", "messages", "model", "n"):
                body[name] = self._value(name, fields[name][0], wild)
        if dice.random() < 0.4:
            body["stream"] = True
        if dice.random() < 0.25:
            body["n"] = dice.choice([1, 2, 3, 5]) if dice.random() < 0.9 else self._number(fields["n"][0], wild)
        if body.get("top_logprobs") is not None and dice.random() < 0.8:
            body["logprobs"] = True
        url = urls[0] if dice.random() < 0.85 else dice.choice(list(urls))
        return Case(seed, url, endpoint, body, url != urls[0])

    def _prompt(self) -> Any:
        dice = self._dice
        text = "".join(dice.choice("abcdef \n()=:") for _ in range(dice.choice([1, 7, 40, 150, 400])))
        ids = [dice.randint(0, 255) for _ in range(dice.choice([1, 3, 33, 200]))]
        if dice.random() < 0.1:
            ids[dice.randrange(len(ids))] = dice.choice([-1, 256, 300, 319, 320, 2**31, 2**63, 10**20])
        forms: list[Callable[[], Any]] = [
            lambda: text, lambda: text, lambda: dice.choice(KNOWN), lambda: ids, lambda: [text, "b"],
            lambda: [ids, ids],
            lambda: dice.choice(STRINGS), lambda: dice.choice([[], [[]], [""], [[], [1]], ["a", 1], [[1], "a"]]),
            lambda: "y" * dice.choice([600, 640, 700, 5000]),
        ]  # fmt: skip
        return dice.choices(forms, [6, 2, 2, 4, 2, 1, 1, 0.5, 0.5])[0]()

    def _messages(self) -> Any:
        dice = self._dice
        content: Any = dice.choice([*KNOWN, "Hello", *STRINGS, [{"type": "text", "text": "a"}], [], None])
        if dice.random() < 0.08:
            content = dice.choice([[{"type": "image_url"}], [{}], ["a"], [None], 7, {"a": 1}, [[]]])
        role = dice.choice(["user", "user", "system", "assistant", "tool", "", "x" * 50])
        messages = [{"role": role, "content": content}] * dice.choice([1, 1, 1, 2, 5])
        if dice.random() < 0.05:
            return dice.choice([[], [{}], [{"role": 7}], [{"role": "user", "content": "a", "tool_calls": [1]}]])
        return messages

    def _value(self, name: str, entry: Field, wild: bool) -> Any:
        dice = self._dice
        if entry.does is not Done.YES:
            return dice.choice([*entry.nothing, *entry.nothing, "x", 7, {"a": 1}])
        token = dice.choice([0, 1, 65, 255, 319, 320, 2**31, 10**20]) if wild else dice.randint(0, 255)
        special: dict[str, Callable[[], Any]] = {
            "stop": lambda: dice.choice(
                ["a", ["a", "b"], "\n", list("abc"), *STRINGS, [], [""], ["q"] * 64, ["q"] * 65]
            ),
            "stop_token_ids": lambda: [token] * dice.choice([0, 1, 3, 1024, 1025] if wild else [1, 3]),
            "logit_bias": lambda: {str(token): self._number(entry, wild), str(dice.randint(0, 255)): -100},
            "stream_options": lambda: {
                "include_usage": dice.random() < 0.7,
                "continuous_usage_stats": dice.random() < 0.5,
            },
            "response_format": lambda: {"type": dice.choice(["text", "text", "json_object", ""])},
            "kv_on_failure": lambda: dice.choice(["recompute", "fail"]),
            "kv_transfer_params": self._params,
            "tools": lambda: dice.choice([[], [{"type": "function", "function": {"name": "f"}}], [{}]]),
            "tool_choice": lambda: dice.choice(["auto", "none", "required", {"type": "function"}]),
        }
        if name in special:
            return special[name]()
        if entry.low is not None:
            return self._number(entry, wild)
        return dice.random() < 0.5

    def _number(self, entry: Field, wild: bool) -> Any:
        dice, low, high = self._dice, entry.low, entry.high
        assert low is not None, "a number has a range"
        assert high is not None, "a number has a range"
        whole = isinstance(low, int)
        if wild and dice.random() < 0.5:
            number = dice.choice([*NUMBERS, low, high, low - 1, high + 1])
            return int(number) if whole and abs(number) < 1e300 else number
        if dice.random() < 0.3:
            return dice.choice([low, high])
        return dice.randint(int(low), int(min(high, 30))) if whole else dice.uniform(low, min(high, 2.0))

    def _params(self) -> Any:
        dice = self._dice
        params: dict[str, Any] = {dice.choice(["do_remote_prefill", "do_remote_decode"]): True}
        values: dict[str, list[Any]] = {
            "transfer_id": ["t", "", "\x00", "x" * 5000, str(dice.random())],
            "transfer_mode": ["pull", "push"],
            "remote_engine_id": ["prefill-0", "no-peer", "", "\x00", "e" * 5000],
            "remote_incarnation": ["1", "", "i" * 5000],
            "remote_host": ["127.0.0.1", "", "\x00", "no such host", "256.1.1.1", "::1", "h" * 5000, "é"],
            "remote_port": [1, 0, -1, 65535, 65536, 2**31, 10**20],
            "remote_block_ids": [[[0]], [], [[-1]], [[10**20]]],
            "remote_num_tokens": [0, 1, -1, 100, 2**31, 10**20],
            "tp_size": [1, 0, -1, 10**20],
            "first_token": [0, 65, -1, 255, 320, 10**20],
            "first_logprob": [-0.5, 0.0, 1e308],
            "first_top_logprobs": [[[65, -0.5]], [[-1, 0.0]], [[10**20, 0.0]], []],
        }
        for name in dice.sample(sorted(values), dice.randint(0, len(values))):
            params[name] = dice.choice(values[name])
        return params


async def _ask(session: aiohttp.ClientSession, case: Case) -> tuple[str, str, dict[str, int]]:
    """Returns the outcome as a word, a fault if there is one, and counts."""
    try:
        async with session.post(f"{case.url}/v1/{case.endpoint}", data=json.dumps(case.body)) as response:
            text = await response.text()
            status = response.status
    except (aiohttp.ClientError, TimeoutError) as error:
        return "broken", f"{type(error).__name__}: {error}", {}
    if status != 200:
        try:
            problem = json.loads(text)["error"]
        except (ValueError, KeyError):
            return str(status), f"{status} without an error body: {text[:200]}", {}
        word = f"{status} {problem.get('code')}"
        if status in (400, 404) and problem.get("code") in CLIENT_CODES and problem.get("message"):
            return word, "", {}
        if (status, problem.get("code")) == (503, "overloaded"):
            return word, "", {}
        if (status, problem.get("code")) == (500, "handoff_failed") and case.body.get("kv_on_failure") == "fail":
            return word, "", {}
        return word, f"{status}: {text[:500]}", {}
    try:
        return "200", *_check_answer(case.body, text, straight=case.straight)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return "200", f"the answer cannot be read: {type(error).__name__}: {error}: {text[:300]}", {}


def _check_answer(body: dict[str, Any], text: str, *, straight: bool) -> tuple[str, dict[str, int]]:
    if not body.get("stream"):
        last = json.loads(text)
        ended = {choice["index"]: choice["finish_reason"] for choice in last["choices"]}
        usage, served = last["usage"], last["kvferry"]
    else:
        lines = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
        if lines[-1] != "[DONE]":
            return f"the stream ends with {lines[-1][:500]}", {}
        events = [json.loads(line) for line in lines[:-1]]
        ended = {c["index"]: c["finish_reason"] for event in events for c in event["choices"] if c["finish_reason"]}
        usage, served = events[-1].get("usage"), events[-1]["kvferry"]
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt)
    # Prefill makes one choice, and may leave the last tokens of the prompt to decode.
    for_remote = straight and bool((body.get("kv_transfer_params") or {}).get("do_remote_decode"))
    num_choices = 1 if for_remote else (body.get("n") or 1) * (len(prompt) if several and prompt is not None else 1)
    if sorted(ended) != list(range(num_choices)) or not all(ended.values()):
        return f"{num_choices} choices were asked for, and these ended: {ended}", {}
    counts = [served[name] for name in ("handed_over", "cached", "recomputed")]
    missing = 0 if usage is None else usage["prompt_tokens"] - sum(counts)
    if min(counts) < 0 or not 0 <= missing <= (_MOST_LEFT if for_remote else 0):
        return f"the account does not add up: {served}, {usage}", {}
    return "", {"handed_over": counts[0], "tokens": usage["completion_tokens"] if usage is not None else 0}


async def _shrunk(session: aiohttp.ClientSession, case: Case) -> Case:
    """Drops fields while the request goes on to fail."""
    for name in list(case.body):
        smaller = replace(case, body={k: v for k, v in case.body.items() if k != name})
        if (await _ask(session, smaller))[1]:
            case = smaller
    return case


async def fuzz(urls: Sequence[str], *, requests: int, seed: int, concurrency: int = 12, stop_after: int = 5) -> Result:
    """Sends requests to the router, the first of `urls`, and to workers. Ends early after some faults."""
    result, numbers = Result(), iter(range(requests))
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            if len(result.faults) >= stop_after:
                return
            name = f"seed {seed}-{number}"
            case = Maker(name).case(name, urls)
            word, fault, counts = await _ask(session, case)
            result.statuses[word] += 1
            result.answer_tokens += counts.get("tokens", 0)
            result.handed_over += counts.get("handed_over", 0)
            if fault:
                small = await _shrunk(session, case)
                result.faults.append(f"{word}: {fault}\n  {case.curl()[:3000]}\n  shrunk: {small.curl()[:1500]}")

    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(concurrency)))
    return result


def make_model(directory: Path, name: str = "byte-mtp") -> Path:
    """Returns a copy of a small model that can speculate, with a chat template that knows tools."""
    shutil.copytree(model_directory(name), directory)
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return directory


def fuzz_fleet(scratch: Path, *, model: str, mode: str, requests: int, seed: int) -> Result:
    """Fuzzes a fleet of its own, and checks it afterwards."""
    directory = make_model(scratch / "model", model)
    with Fleet(scratch / "fleet", *FLAGS, model=str(directory), mode=mode) as fleet:
        prefill = [fleet.worker(f"prefill-{i}", role="prefill") for i in range(2)]
        decode = [fleet.worker(f"decode-{i}", role="decode") for i in range(2)]
        for worker in (*prefill, *decode):
            worker.wait_ready()
        router = fleet.route(prefill=prefill, decode=decode)
        before = [complete(router.url, prompt, max_tokens=16).text for prompt in KNOWN]
        urls = [process.url for process in (router, *prefill, *decode)]
        pids = [process.pid for process in fleet.processes]
        result = asyncio.run(fuzz(urls, requests=requests, seed=seed))
        try:
            fleet.wait_blocks_free(60.0)
        except AssertionError as error:
            result.faults.append(str(error))
        for process in fleet.processes:
            health = get(process.url, "/health")
            if health.get("status") != "ok" or not process.running:
                result.faults.append(f"{process.name} is not healthy: {health}")
        if pids != [process.pid for process in fleet.processes]:
            result.faults.append("a process was restarted")
        after = [complete(router.url, prompt, max_tokens=16).text for prompt in KNOWN]
        if after != before or "" in before:
            result.faults.append(f"known prompts have other answers: {before} and {after}")
        for process in fleet.processes:
            for mark in ("a step has failed", "a request has failed", "the engine has failed", "internal error"):
                if process.logged(mark):
                    result.faults.append(f"{process.name} logged {mark!r}:\n{process.tail(30)}")
    return result


def main() -> int:
    """Runs the fuzzer, and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="how many (default: 10000)")
    parser.add_argument("--mode", choices=("pull", "push"), default="pull")
    parser.add_argument("--model", default="byte-mtp", help="byte-mtp, byte-mtp-window or byte-mtp-hybrid")
    parser.add_argument("--seed", type=int, default=None, help="repeats a run (default: a new one)")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvferry-fuzz-") as scratch:
        result = fuzz_fleet(Path(scratch), model=args.model, mode=args.mode, requests=args.requests, seed=seed)
    took_s = time.monotonic() - began_s
    lines = [f"{args.requests} requests, {args.mode}, {args.model}, seed {seed}, {took_s:.0f} s", *result.lines()]
    print("\n".join([*lines, *result.faults, f"{len(result.faults)} faults"]))  # noqa: T201  # a program of its own
    return 0 if not result.faults else 1


if __name__ == "__main__":
    sys.exit(main())
