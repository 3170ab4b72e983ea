"""`python -m tests.docs_walk [--vllm DIR] [PAGE...]`: types every command of README and docs, and compares.

Each page is walked in a temporary directory of its own, with ports of its own. `kvferry serve`, `route` and `up` go on
in the background until the page ends. Workers on other machines, such as `http://p0:8100`, are started on this one for
the router that names them. A command must end with status 0, and show what the page shows after it: numbers with a
decimal point may differ, and "..." stands for anything. Of a `json` block after a command, its keys must be in the
output. A block that cannot be run says why in a comment before it: see tests/harness/doc_blocks.py. With `--vllm DIR`,
an environment with vLLM, it types the blocks that need vLLM, and only these.
"""

import argparse
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from kvferry.engines.mini.models.catalog import model_directory
from tests.harness.doc_blocks import PAGES, Block, Command, blocks_of, commands_of, kvferry_argv
from tests.harness.repository import ROOT
from tests.harness.until import until

MODEL = "byte-mtp"
"""The model that replaces MODEL: it is small, and ready within seconds."""
SERVERS = ("serve", "route", "up")
VLLM_MODEL = "smollm2"
"""The model that replaces MODEL for vLLM: its directory, as `kvferry serve` has converted it."""
READY_S = 300.0
VLLM_READY_S = 900.0
COMMAND_S = 600.0
_HOST = re.compile(r"http://([a-z]+\d?):(8\d{3})\b")
_PORT = re.compile(r"(?<=[ :])8\d{3}\b")
_DEFAULT_PORTS = {"serve": "8000", "route": "8080", "up": "8080"}


@dataclass
class Walk:
    """The walk of one page: its directory, its ports, the servers that it has started, and what was wrong."""

    directory: Path
    vllm: Path | None = None
    """The environment with vLLM; None: blocks that need vLLM are not run, and all others are."""
    variables: dict[str, str] = field(default_factory=dict)
    """What the page exports."""
    ports: dict[str, str] = field(default_factory=dict)
    servers: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    served: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    """The latest server at each port."""
    problems: list[str] = field(default_factory=list)
    last_output: str = ""
    num_run: int = 0

    def port(self, shown: str) -> str:
        """Returns the free port that replaces a port of the page."""
        if shown not in self.ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.ports[shown] = str(probe.getsockname()[1])
        return self.ports[shown]

    def typed(self, text: str) -> str:
        """Returns the command as it is typed here: with our model and ports, and without placeholders."""
        model = MODEL if self.vllm is None else str(model_directory(VLLM_MODEL))
        text = re.sub(r"\bMODEL\b", model, re.sub(r" \[[a-z ]+\]", "", text))
        text = re.sub(r"\b(prefill)\|decode\|both\b", "both", text)
        text = _HOST.sub(lambda found: f"http://127.0.0.1:{self.port(found[1] + found[2])}", text)
        return _PORT.sub(lambda found: self.port(found[0]), text)

    @property
    def python(self) -> str:
        """The Python that runs kvferry."""
        return sys.executable if self.vllm is None else str(self.vllm / "bin" / "python")

    def environment(self) -> dict[str, str]:
        """Returns the environment of the commands: that Python's programs come first, and this checkout's sources."""
        paths = [str(ROOT / "src"), str(ROOT / "models" / "src"), str(ROOT)]
        return {
            **os.environ,
            "PATH": f"{Path(self.python).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(paths),
            "TOKENIZERS_PARALLELISM": "false",
            **self.variables,
        }


@contextmanager
def walking(vllm: Path | None) -> Iterator[Walk]:
    """Yields a walk in an empty directory, and ends every server that it has started."""
    with tempfile.TemporaryDirectory(prefix="kvferry-docs-") as directory:
        walk = Walk(Path(directory), vllm)
        try:
            yield walk
        finally:
            end_servers(walk.servers)


def end_servers(servers: list["subprocess.Popen[bytes]"]) -> None:
    """Presses Ctrl-C in the terminal of each server, and waits until all of them have ended."""
    for server in servers:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGINT)
    for server in servers:
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def start_server(walk: Walk, text: str, argv: list[str]) -> None:
    """Starts a server and waits until it is ready. Raises AssertionError with its log.

    It replaces an earlier server at the same port: that one is another example of the page.
    """
    ready, log = walk.directory / f"ready-{len(walk.servers)}.json", walk.directory / f"log-{len(walk.servers)}.txt"
    flags = ["--ready-file", str(ready)]
    if "--port" not in argv:
        flags += ["--port", walk.port(_DEFAULT_PORTS[argv[0]])]
    port = argv[argv.index("--port") + 1] if "--port" in argv else flags[-1]
    if port in walk.served:
        end_servers([walk.served[port]])
    with log.open("wb") as output:
        process = subprocess.Popen(
            [walk.python, "-m", "kvferry", *argv, *flags],
            stdout=output, stderr=output, cwd=walk.directory, env=walk.environment(), start_new_session=True,
        )  # fmt: skip
    walk.servers.append(process)
    walk.served[port] = process
    until(lambda: ready.exists() or process.poll() is not None, f"{text!r} is ready", within_s=READY_S, every_s=0.1)
    assert ready.exists(), f"{text!r} ended with {process.returncode}: {log.read_text('utf-8', 'replace')[-600:]}"


def start_vllm(walk: Walk, text: str) -> None:
    """Starts a vLLM server and waits until it is ready. Raises AssertionError with its log."""
    port = re.search(r"--port (\d+)", text)
    assert port is not None, f"{text!r} names no port"
    log = walk.directory / f"log-{len(walk.servers)}.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {text}"],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=walk.directory, env=walk.environment(),
            start_new_session=True,
        )  # fmt: skip
    walk.servers.append(process)
    walk.served[port[1]] = process

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return process.poll() is not None

    until(healthy, f"{text!r} is ready", within_s=VLLM_READY_S, every_s=1.0)
    assert process.poll() is None, (
        f"{text!r} ended with {process.returncode}: {log.read_text('utf-8', 'replace')[-900:]}"
    )


def start_workers(walk: Walk, argv: list[str]) -> None:
    """Starts the workers that a router names and that the page does not start itself."""
    for flag, url in pairwise(argv):
        port = url.rpartition(":")[2]
        if flag in ("--prefill", "--decode") and port not in walk.served:
            role = flag.removeprefix("--")
            start_server(walk, f"kvferry serve ({role} of {argv[0]})", ["serve", MODEL, "--role", role, "--port", port])


def run(walk: Walk, block: Block, command: Command) -> None:
    """Types one command, and records what is wrong."""
    text = walk.typed(command.text)
    if text.startswith(". "):
        return  # the environment is active already
    if text.startswith("export "):
        walk.variables |= dict(word.split("=", 1) for word in shlex.split(text, comments=True)[1:])
        return
    if text.startswith("make "):
        if text.split()[1] != "demo":
            return  # targets exist: tests/docs/test_code_blocks.py
        text = "kvferry demo"
    servers = [argv for argv in kvferry_argv(text) if argv and argv[0] in SERVERS and "--help" not in argv]
    walk.num_run += 1
    print(f"  {block.where}: {text.splitlines()[0]}", file=sys.stderr, flush=True)
    if servers or "vllm.entrypoints" in text:
        try:
            if not servers:
                start_vllm(walk, text)
                return
            if servers[0][0] == "route":
                start_workers(walk, servers[0])
            start_server(walk, text, servers[0])
        except AssertionError as error:
            walk.problems.append(f"{block.where}: {error}")
        return
    done = subprocess.run(
        ["bash", "-c", text], cwd=walk.directory, env=walk.environment(), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=COMMAND_S, check=False,
    )  # fmt: skip
    walk.last_output = done.stdout
    if done.returncode:
        walk.problems.append(f"{block.where}: {text!r} ended with {done.returncode}: {done.stderr[-600:]}")
        return
    missing = [line for line in command.output if line.strip() and not _shown(line, done.stdout)]
    if missing:
        walk.problems.append(f"{block.where}: {text!r} does not show {missing[0]!r}, but {done.stdout[:1500]!r}")


def _shown(line: str, output: str) -> bool:
    """Returns whether a line of the page is in the output, apart from what differs between runs."""

    def loose(part: str) -> str:
        words = [re.escape(word) for word in part.split()]
        return re.sub(r"\d+\\\.\d+", r"[\\d.,]+", r"\s+".join(words))

    pattern = r".*".join(loose(part) for part in line.split("..."))
    pattern = re.sub(r'":\d+', r'":\\d+', pattern)
    return re.search(pattern, output) is not None


def check_keys(walk: Walk, block: Block) -> None:
    """Records the keys of a `json` block that are missing in the output of the last command."""
    keys = [key for key in re.findall(r'"(\w+)":', block.text) if f'"{key}":' not in walk.last_output]
    if keys and walk.last_output:
        walk.problems.append(f"{block.where}: the last output has no {', '.join(keys)}: {walk.last_output[-600:]!r}")


def walk_page(page: Path, vllm: Path | None) -> Walk:
    """Types every command of a page; if `vllm` is an environment, those that need vLLM."""
    with walking(vllm) as walk:
        for block in blocks_of(page):
            if block.reason is not None:
                print(f"  {block.where}: not run: {block.reason}", file=sys.stderr)
            elif block.with_vllm != (vllm is not None):
                print(f"  {block.where}: not run with{'out' * (vllm is None)} vLLM", file=sys.stderr)
            elif block.language in ("console", "sh"):
                for command in commands_of(block):
                    run(walk, block, command)
            elif block.language == "json":
                check_keys(walk, block)
        return walk


def main() -> int:
    """Walks the pages, and returns 1 if anything differs from them."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs_walk", description=__doc__)
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="only these (default: README and docs)")
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="an environment with vLLM: type what needs it")
    args = parser.parse_args()
    vllm = args.vllm and args.vllm.absolute()
    problems, began_s, num_run = [], time.monotonic(), 0
    for page in [path.resolve() for path in args.pages] or PAGES:
        if any(b.language in ("console", "sh") and b.with_vllm == (vllm is not None) for b in blocks_of(page)):
            print(f"{page.relative_to(ROOT)}", file=sys.stderr, flush=True)
            walk = walk_page(page, vllm)
            problems += walk.problems
            num_run += walk.num_run
    for problem in problems:
        print(problem)
    print(f"{num_run} commands, {len(problems)} problems, {time.monotonic() - began_s:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
