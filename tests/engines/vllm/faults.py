"""What goes wrong, and how: each row is one case, run on real vLLM with either connector.

    python -m tests.engines.vllm.faults --connector kvferry --json > kvferry.jsonl
    python -m tests.engines.vllm.faults --connector builtin --json > builtin.jsonl
    python -m tests.engines.vllm.faults --render builtin.jsonl kvferry.jsonl     # the table of the docs

A case makes hand-offs that should not work, or hardly, and says what the client, the logs and /health saw. Then both
servers are asked for /health and for an ordinary answer, and whether their blocks came back. Nothing here expects
anything: the verdict is read from what happened, in the same words for both connectors.
"""

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from kvferry.errors import FerryError
from tests.engines.vllm.servers import Answer, Lab, Pair, VllmServer, alone, poll_until

__all__ = ["ROWS", "Seen", "main", "run_row"]

HANG_S = 30.0
"""How long a client waits. Every lease and deadline of the lab is shorter than half of it."""
BLOCKS_S = 25.0
"""How long blocks may take to come back after a case."""
_NOISE = re.compile(
    "SSM cache|tcmalloc|libiomp|ulimit|Triton|deprecat|usage stats|NUMA|\\bOMP_|tokenizer|Disabling|cudagraph|"
    "torch_dtype|pin_memory|prefix caching|Traceback|chat template|generation_config|sampling parameters|not optimized|"
    "ProcessPool|resource_tracker|unauthenticated|Add 1 |fork|API is experimental|sock.c",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Seen:
    """One row: what was observed."""

    row: str
    connector: str
    verdicts: list[str] = field(default_factory=list)
    """One verdict per hand-off of the case."""
    client: str = ""
    """The last error that the client got."""
    log: list[str] = field(default_factory=list)
    """What the servers' logs say about it: at most four warnings and errors."""
    health: str = ""
    next_request: str = ""
    blocks: str = ""
    seconds: float = 0.0


Case = Callable[[Lab], Iterator[tuple[Pair, str, str]]]
"""Yields (pair, verdict, the client's error) for each hand-off."""
ROWS: dict[str, tuple[str, Case]] = {}


def row(name: str, title: str) -> Callable[[Case], Case]:
    """Adds a case to the table."""

    def enter(case: Case) -> Case:
        ROWS[name] = (title, case)
        return case

    return enter


# One hand-off, and its verdict


def judge(
    pair: Pair, answer: Answer, prompt: Sequence[int], num_external: float, reference: Answer | None = None
) -> str:
    """Describes the outcome in a few words. The reference is prefill's answer alone, because its own cache is right."""
    if answer.status == 0:
        return "client gave up" if "timed out" in answer.error.lower() else f"connection lost ({answer.error[:60]})"
    if not answer.ok:
        return f"HTTP {answer.status}, error"
    if reference is None:
        reference = alone(pair.prefill, prompt, len(answer.tokens))
    if not reference.ok:
        return f"tokens not checked: {reference.error[:60]}"
    if reference.tokens != answer.tokens:
        return "WRONG TOKENS, HTTP 200"
    if num_external <= 0:
        return "right tokens, recomputed"
    return (
        "right tokens, handed over"
        if num_external >= len(prompt) - 1
        else f"right tokens, {num_external:.0f} handed over"
    )


def handed_over(server: VllmServer) -> float:
    """Returns the number of prompt tokens that came from another engine since the start."""
    try:
        return server.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    except FerryError:
        return 0.0


def hand_over(
    lab: Lab, pair: Pair, *, way: str = "pull", num_tokens: int = 600, prompt: list[int] | None = None,
    between: Callable[[Answer], dict[str, object]] | None = None, expected: int | None = None,
) -> tuple[Pair, str, str]:  # fmt: skip
    """Sends one request through the pair. `expected` is how many tokens have to come from outside, if not all."""
    from tests.engines.vllm.servers import serve_pair

    prompt = prompt or lab.prompt(num_tokens)
    before = handed_over(pair.decode)
    served = serve_pair(pair.prefill, pair.decode, prompt, way=way, max_tokens=8, timeout_s=HANG_S, stream=False,
                        between=between)  # fmt: skip
    answer = served.decode if served.prefill.ok or way == "push-first" else served.prefill
    came = handed_over(pair.decode) - before if answer.ok else 0.0
    if expected is not None and came >= expected:
        came = float(len(prompt))
    return pair, judge(pair, answer, prompt, came), answer.error


# Unequal block sizes


def _blocks(mode: str, prefill: int, decode: int) -> Case:
    def case(lab: Lab) -> Iterator[tuple[Pair, str, str]]:
        pair = lab.pair(mode, {"block_tokens": prefill}, {"block_tokens": decode})
        for way in ("pull",) if mode == "pull" else ("push-after", "push-first"):
            yield hand_over(lab, pair, way=way)
            yield hand_over(lab, pair, way=way)
            if not pair.decode.healthy():
                return

    return case


for _mode in ("pull", "push"):
    for _p, _d in ((64, 128), (128, 64)):
        row(f"{_mode}-blocks-{_p}-{_d}", f"{_mode}: P block {_p}, D block {_d}")(_blocks(_mode, _p, _d))


@row("pull-prefix-64-128", "pull: D has a part of the prompt cached; P block 64, D block 128")
def _prefix_unequal(lab: Lab) -> Iterator[tuple[Pair, str, str]]:
    yield from _prefix(lab, 64, 128)


@row("pull-prefix-128-64", "pull: D has a part of the prompt cached; P block 128, D block 64")
def _prefix_unequal_other(lab: Lab) -> Iterator[tuple[Pair, str, str]]:
    yield from _prefix(lab, 128, 64)


@row("pull-prefix", "pull: D has a part of the prompt cached; blocks of 128 on both")
def _prefix_equal(lab: Lab) -> Iterator[tuple[Pair, str, str]]:
    yield from _prefix(lab, 128, 128)


def _prefix(lab: Lab, prefill: int, decode: int) -> Iterator[tuple[Pair, str, str]]:
    pair = lab.pair("pull", {"block_tokens": prefill}, {"block_tokens": decode})
    common = lab.prompt(256)
    alone(pair.decode, common, 2)
    yield hand_over(lab, pair, prompt=common + lab.prompt(344), expected=343)


# Leases, and false parameters


_SMALL = {"flags": ("--num-gpu-blocks-override", "24")}


@row("pull-lease-ended", "pull: D comes after P's lease ended and the blocks were reused")
def _lease_ended(lab: Lab) -> Iterator[tuple[Pair, str, str]]:
    pair = lab.pair("pull", _SMALL, {})

    def too_late(prefilled: Answer) -> dict[str, object]:
        poll_until(lambda: pair.prefill.metric("vllm:kv_cache_usage_perc") == 0.0, 30.0)
        for _ in range(6):
            alone(pair.prefill, lab.prompt(1000), 2)
        return prefilled.params

    yield hand_over(lab, pair, between=too_late)


@row("pull-wrong-blocks", "pull: the parameters name wrong block ids")
def _wrong_blocks(lab: Lab) -> Iterator[tuple[Pair, str, str]]:
    pair = lab.pair("pull", _SMALL, {})
    for _ in range(4):
        alone(pair.prefill, lab.prompt(1000), 2)

    def lie(prefilled: Answer) -> dict[str, object]:
        ids = prefilled.params.get("remote_block_ids") or [[]]
        return prefilled.params | {"remote_block_ids": [[(one + 7) % 23 + 1 for one in group] for group in ids]}

    yield hand_over(lab, pair, between=lie)


@row("pull-unknown-peer", "pull: the parameters name an address at which no server listens")
def _unknown_peer(lab: Lab) -> Iterator[tuple[Pair, str, str]]:
    pair = lab.pair("pull", _SMALL, {})
    lie = {"remote_port": 1, "remote_engine_id": "nobody", "remote_incarnation": None}
    yield hand_over(lab, pair, between=lambda prefilled: prefilled.params | lie)


@row("pull-rubbish", "rubbish on P's and D's side channels, then a hand-off")
def _rubbish(lab: Lab) -> Iterator[tuple[Pair, str, str]]:
    from tests.engines.vllm.rubbish import throw_rubbish

    pair = lab.pair("pull", _SMALL, {})
    for server in pair.both:
        throw_rubbish(server.side_port)
    yield hand_over(lab, pair)
    yield hand_over(lab, pair)
    lab.forget_pair()


@row("pull-killed", "pull: P is killed between its answer and D's request")
def _killed(lab: Lab) -> Iterator[tuple[Pair, str, str]]:
    pair = lab.pair("pull", _SMALL, {})
    yield hand_over(lab, pair)

    def kill(prefilled: Answer) -> dict[str, object]:
        pair.prefill.kill()
        return prefilled.params

    prompt = lab.prompt(600)
    yield _with_late_reference(lab, pair, prompt, kill)
    lab.restart(pair.prefill)
    yield hand_over(lab, pair)


def _with_late_reference(
    lab: Lab, pair: Pair, prompt: list[int], between: Callable[[Answer], dict[str, object]]
) -> tuple[Pair, str, str]:
    from tests.engines.vllm.servers import serve_pair

    reference = alone(pair.prefill, prompt, 8)  # now, because prefill will be dead afterwards
    before = handed_over(pair.decode)
    served = serve_pair(pair.prefill, pair.decode, prompt, max_tokens=8, timeout_s=HANG_S, stream=False,
                        between=between)  # fmt: skip
    came = handed_over(pair.decode) - before if served.decode.ok else 0.0
    verdict = judge(pair, served.decode, prompt, came, reference)
    return pair, f"{verdict} after {served.decode.total_s:.0f} s", served.decode.error


# Push, with D waiting


def _decode_waits(lab: Lab, pair: Pair, *, request_id: str = "", kill: bool = False) -> tuple[Pair, str, str]:
    """Asks decode first; prefill never computes, and may be killed in the meantime."""
    import threading
    import uuid

    from tests.harness.vllm_client import ask, decode_first_params

    prompt = lab.prompt(600)
    reference = alone(pair.prefill, prompt, 8)
    identity = uuid.uuid4().hex
    params = decode_first_params(pair.prefill, identity, uuid.uuid4().hex)
    answers: list[Answer] = []
    before = handed_over(pair.decode)
    waiting = threading.Thread(target=lambda: answers.append(
        ask(pair.decode, prompt, max_tokens=8, params=params, request_id=identity, timeout_s=HANG_S)))  # fmt: skip
    waiting.start()
    poll_until(lambda: pair.decode.metric("vllm:kv_cache_usage_perc") > 0.0, 5.0, 0.05)
    if kill:
        pair.prefill.kill()
    waiting.join()
    came = handed_over(pair.decode) - before if answers[0].ok else 0.0
    verdict = judge(pair, answers[0], prompt, came, reference)
    return pair, f"{verdict} after {answers[0].total_s:.0f} s", answers[0].error


@row("push-never-prefills", "push, D first: P never computes the prompt")
def _never(lab: Lab) -> Iterator[tuple[Pair, str, str]]:
    pair = lab.pair("push", _SMALL, _SMALL)
    yield hand_over(lab, pair, way="push-first")
    yield _decode_waits(lab, pair)


@row("push-other-id", "push: the two requests carry different ids")
def _other_id(lab: Lab) -> Iterator[tuple[Pair, str, str]]:
    import uuid

    from tests.harness.vllm_client import ask, prefill_params

    pair = lab.pair("push", _SMALL, _SMALL)
    prompt = lab.prompt(600)
    first = ask(pair.prefill, prompt, max_tokens=1, params=prefill_params(uuid.uuid4().hex), timeout_s=HANG_S)
    before = handed_over(pair.decode)
    second = ask(pair.decode, prompt, max_tokens=8, params=first.params, timeout_s=HANG_S)
    verdict = judge(pair, second, prompt, handed_over(pair.decode) - before)
    yield pair, f"{verdict} after {second.total_s:.0f} s", second.error


@row("push-lease-ended", "push: P's lease ended before D registers")
def _push_lease(lab: Lab) -> Iterator[tuple[Pair, str, str]]:
    pair = lab.pair("push", _SMALL, _SMALL)

    def too_late(prefilled: Answer) -> dict[str, object]:
        poll_until(lambda: pair.prefill.metric("vllm:kv_cache_usage_perc") == 0.0, 30.0)
        return prefilled.params

    yield hand_over(lab, pair, way="push-after", between=too_late)


@row("push-killed", "push, D first: P is killed while D waits")
def _push_killed(lab: Lab) -> Iterator[tuple[Pair, str, str]]:
    pair = lab.pair("push", _SMALL, _SMALL)
    yield hand_over(lab, pair, way="push-first")
    yield _decode_waits(lab, pair, kill=True)
    lab.restart(pair.prefill)
    yield hand_over(lab, pair, way="push-first")


# Configurations that do not fit


def _misfit(mode: str, prefill: dict[str, Any], decode: dict[str, Any], decode_mode: str | None = None) -> Case:
    def case(lab: Lab) -> Iterator[tuple[Pair, str, str]]:
        pair = lab.pair(mode, prefill, decode | ({"mode": decode_mode} if decode_mode else {}))
        way = "pull" if mode == "pull" else "push-after"
        yield hand_over(lab, pair, way=way)
        yield hand_over(lab, pair, way=way)

    return case


_EAGLE = "eagle"
row("pull-dtype", "pull: P in float32, D in bfloat16")(_misfit("pull", {}, {"dtype": "bfloat16"}))
row("pull-hma", "pull, hybrid model: HMA on P, off on D")(
    _misfit("pull", {"kind": "gemma"}, {"kind": "gemma", "flags": ("--disable-hybrid-kv-cache-manager",)})
)
row("pull-push", "P pulls, D pushes")(_misfit("pull", {}, {}, "push"))
row("push-pull", "P pushes, D pulls")(_misfit("push", {}, {}, "pull"))
row("pull-eagle", "pull: a drafter (eagle) on D only")(_misfit("pull", {}, {"speculation": _EAGLE}))


# Latent caches. With the default rope a single vLLM server is wrong: tests/engines/vllm/mla_alone.py.

_CPU_MLA = {"flags": ("--attention-backend", "CPU_MLA"), "max_tokens": 1024}
_STATES = {"kind": "granite", "flags": ("--no-enable-prefix-caching",)}
for _kind, _title in (("mla", "yarn"), ("mla-default-rope", "default rope, where one server alone is wrong, too")):
    row(f"pull-{_kind}", f"pull: MLA, {_title}")(
        _misfit("pull", {"kind": _kind, **_CPU_MLA}, {"kind": _kind, **_CPU_MLA})
    )
row("push-states", "push: a Mamba-2 hybrid")(_misfit("push", _STATES, _STATES))


# Pipeline parallelism. An eager pipeline of this CPU build misses a buffer; the "eager" compile backend has it.

_TRACED = ("--compilation-config", '{"mode": "STOCK_TORCH_COMPILE", "backend": "eager"}')
_PP2 = {"pp": 2, "eager": False, "flags": _TRACED}
_NO_HMA = {"flags": ("--disable-hybrid-kv-cache-manager",)}
row("pull-pp2-p", "pull: two pipeline stages on P")(_misfit("pull", _PP2, {}))
row("pull-pp2-p-hma", "pull: two pipeline stages on P, hybrid model, HMA on")(
    _misfit("pull", {**_PP2, "kind": "gemma"}, {"kind": "gemma"})
)
row("pull-pp2-p-no-hma", "pull: two pipeline stages on P, hybrid model, HMA off")(
    _misfit(
        "pull",
        {**_PP2, "kind": "gemma", "flags": (*_TRACED, *_NO_HMA["flags"])},
        {"kind": "gemma", **_NO_HMA},
    )
)
row("pull-pp2-d", "pull: two pipeline stages on D")(_misfit("pull", {}, _PP2))
row("push-pp2-p", "push: two pipeline stages on P")(_misfit("push", _PP2, {}))
row("push-pp2-d", "push: two pipeline stages on D")(_misfit("push", {}, _PP2))


# Running a row


def problems_in_logs(pair: Pair) -> list[str]:
    """Returns the distinct warnings and errors of both servers in this case, prefill first, without time and pid."""
    found: dict[str, None] = {}
    for server, who in zip(pair.both, "PD", strict=True):
        for line in pair.new_log(server).splitlines():
            if not re.search(r"WARNING|ERROR|Error\b", line) or _NOISE.search(line) or 'File "' in line:
                continue
            text = re.sub(r"^\([^)]*\)\s*|(WARNING|ERROR|INFO) \d\d-\d\d [\d:]+ |\[\w+\.py:\d+\]\s*", "", line).strip()
            if len(text) > 12:
                found.setdefault(f"{who}: {text[:300]}")
    return list(found)


def run_row(lab: Lab, name: str) -> Seen:
    """Runs one case, then checks both servers."""
    seen = Seen(name, lab.connector)
    begun_s = time.monotonic()
    pair: Pair | None = None
    try:
        for where, verdict, client_error in ROWS[name][1](lab):
            pair = where
            seen.verdicts.append(verdict)
            seen.client = client_error or seen.client
    except FerryError as error:
        seen.verdicts.append("does not start" if pair is None else "the case ended")
        seen.client = str(error)
    if pair is not None:
        _look_after(pair, seen)
    seen.seconds = round(time.monotonic() - begun_s, 1)
    return seen


def _is_empty(server: VllmServer) -> bool:
    """Returns whether no block of the server's cache is in use."""
    return server.metric("vllm:kv_cache_usage_perc") == 0.0


def _look_after(pair: Pair, seen: Seen) -> None:
    lines = problems_in_logs(pair)
    causes = [one for one in lines if re.search(r"cause=|refused|\b\w+Error: ", one)]
    seen.log = list(dict.fromkeys([*causes[:3], *lines[:1], *lines[-1:]]))[:4]
    health, after, blocks = [], [], []
    for server, who in zip(pair.both, "PD", strict=True):
        well = server.healthy()
        health.append(f"{who} ok" if well else f"{who} DOWN")
        if not well:
            continue
        answer = alone(server, [3, 4, 5, 6, 7] * 4, 2, timeout_s=20.0)
        after.append(f"{who} ok" if answer.ok else f"{who} {answer.status or 'no answer'}")
        back_s = poll_until(partial(_is_empty, server), BLOCKS_S)
        blocks.append(f"{who} back" if back_s >= 0 else f"{who} KEPT")
    seen.health, seen.next_request, seen.blocks = ", ".join(health), ", ".join(after), ", ".join(blocks)


def _render(files: Sequence[Path]) -> str:
    """Returns the table of the docs: one line per case, one column per connector."""
    seen: dict[tuple[str, str], dict[str, object]] = {}
    for file in files:
        for line in file.read_text().splitlines():
            if line.startswith("{"):
                one = json.loads(line)
                seen[one["row"], one["connector"]] = one
    out = ["| case | built-in | kvferry |", "| --- | --- | --- |"]
    for name, (title, _) in ROWS.items():
        cells = [_cell(seen.get((name, connector))) for connector in ("builtin", "kvferry")]
        out.append(f"| {title} | {cells[0]} | {cells[1]} |")
    return "\n".join(out)


def _cell(one: dict[str, object] | None) -> str:
    if one is None:
        return "not run"
    verdicts = one["verdicts"]
    assert isinstance(verdicts, list), "a row has a list of verdicts"
    parts = list(dict.fromkeys(verdicts))
    text = "; then ".join(parts)
    if one["client"]:
        text += f'. Client: "{str(one["client"])[:160]}"'
    logs = one["log"]
    assert isinstance(logs, list), "a row has a list of log lines"
    if logs and ("error" in text or "WRONG" in text or "gave up" in text):
        cause = re.sub(r"[0-9a-f]{16,}|cmpl-\S+", "...", str(logs[0]))
        text += f". Log of {cause[:230]}"
    for key in ("health", "next_request", "blocks"):
        bad = [part for part in str(one[key]).split(", ") if part and not part.endswith((" ok", " back"))]
        if bad:
            text += f". {key.replace('_', ' ')}: **{', '.join(bad)}**"
    return text.replace("|", "\\|").replace("\n", " ")


def say(text: str, stream: TextIO = sys.stdout) -> None:
    """Prints a line, and flushes it."""
    stream.write(text + "\n")
    stream.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.engines.vllm.faults", description="the fault table of vLLM's connectors"
    )
    parser.add_argument("--connector", choices=("builtin", "kvferry"), default="kvferry")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), metavar="ROW", help="only these rows")
    parser.add_argument("--vllm-python", help="the interpreter that has vLLM")
    parser.add_argument("--policy", choices=("fail", "recompute"), help="kv_load_failure_policy; vLLM's own is fail")
    parser.add_argument(
        "--stock", action="store_true", help="the built-in connector with the stalls of a small machine"
    )
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--list", action="store_true", help="the rows")
    parser.add_argument("--render", nargs="+", type=Path, metavar="FILE", help="make the table of JSON lines")
    args = parser.parse_args(argv)
    if args.list:
        say("\n".join(f"{name:22} {title}" for name, (title, _) in ROWS.items()))
        return 0
    if args.render:
        say(_render(args.render))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends this process, and every server with it
    with Lab(args.connector, args.vllm_python, stock=args.stock, policy=args.policy) as lab:
        for name in args.only or ROWS:
            say(f"{name}: {ROWS[name][0]} ...", sys.stderr)
            seen = run_row(lab, name)
            say(json.dumps(asdict(seen)) if args.json else _text(seen))
    return 0


def _text(seen: Seen) -> str:
    lines = [f"{seen.row} [{seen.connector}] {'; '.join(seen.verdicts)}", f"  client: {seen.client}"]
    lines += [f"  log: {one}" for one in seen.log]
    lines.append(f"  {seen.health}; next request: {seen.next_request}; blocks: {seen.blocks} ({seen.seconds} s)")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
