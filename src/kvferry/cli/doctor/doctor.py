"""`kvferry doctor`: moves real bytes and hands real KV over, between two processes or two machines; or checks a fleet.

Each step is a line. The first step that fails is named with its remedy, and the later ones are not tried. In any case
the command ends within about --timeout seconds, and no process of it remains.
"""

import argparse
import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator

from kvferry.cli.doctor.handoff_check import HandoffCheck
from kvferry.cli.doctor.local import local_steps
from kvferry.cli.doctor.prefill_end import MAX_TOKENS, PrefillEnd
from kvferry.cli.doctor.steps import Step
from kvferry.cli.doctor.tiny_engine import TOKEN_BYTES
from kvferry.cli.main import ExitCode
from kvferry.errors import ConfigError
from kvferry.settings import FerrySettings, SideChannelSettings, TransferSettings
from kvferry.transport.registry import TRANSPORTS

__all__ = ["add_arguments", "run"]

_MAX_MEGABYTES = MAX_TOKENS * TOKEN_BYTES >> 20
_BETWEEN_MACHINES = (
    "The side channels work and the transfer does not: NIXL needs a way of its own. Set UCX_NET_DEVICES to the network "
    "interface that reaches the other machine, on both, or UCX_TLS=tcp, and open the ports of UCX_TCP_PORT_RANGE."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags. Without a URL, --listen or --peer, this machine is checked."""
    default = TransferSettings().transport
    parser.add_argument("urls", nargs="*", metavar="URL", help="workers or routers to check (default: this machine)")
    parser.add_argument("--listen", type=int, metavar="PORT",
                        help="be the prefill end for a `kvferry doctor --peer` on another machine, until Ctrl-C; this "
                             "port and the next two are used (default: check this machine)")  # fmt: skip
    parser.add_argument("--peer", metavar="HOST:PORT",
                        help="hand KV over from the `kvferry doctor --listen` there to this machine "
                             "(default: check this machine)")  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS",
                        help="the address on which --listen listens, and which --peer's own engine gives to the other "
                             "side; any but loopback needs a key (default: 127.0.0.1)")  # fmt: skip
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="the key that both sides share, made by `kvferry key new FILE` (default: none)",
    )
    parser.add_argument("--transport", default=default, choices=sorted(TRANSPORTS),
                        help=f"what moves the bytes (default: {default})")  # fmt: skip
    parser.add_argument("--megabytes", type=int, default=64, metavar="MIB",
                        help=f"how much to move, up to {_MAX_MEGABYTES} (default: 64)")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="give up then (default: 30)")
    parser.add_argument("--json", action="store_true", help="print one object per line: each step, then the verdict")


def run(args: argparse.Namespace) -> ExitCode:
    """Runs the steps and prints each as it ends. Raises ConfigError for flags that do not go together."""
    if sum(map(bool, (args.urls, args.listen is not None, args.peer))) > 1:
        raise ConfigError("URLs, --listen and --peer are three different checks. Give one of them.")
    if args.urls:
        from kvferry.cli.support.fleet_matrix import run_fleet

        return ExitCode(run_fleet(args.urls, args.json))
    if not 1 <= args.megabytes <= _MAX_MEGABYTES:
        raise ConfigError(f"--megabytes {args.megabytes} must be between 1 and {_MAX_MEGABYTES}")
    quiet = logging.getLogger().level > logging.DEBUG
    logging.getLogger("kvferry").setLevel(max(logging.WARNING, logging.getLogger().level) if quiet else 0)
    settings = FerrySettings(
        transfer=TransferSettings(transport=args.transport),
        side_channel=SideChannelSettings(host=args.host, key_file=args.key_file),
    )
    if args.listen is not None:
        return _listen(settings, args)
    rates: dict[str, float] = {}
    if args.peer:
        host, port = _address(args.peer)
        check = HandoffCheck(
            settings, host, port,
            num_tokens=_num_tokens(args), timeout_s=args.timeout, transfer_remedy=_BETWEEN_MACHINES,
        )  # fmt: skip
        rates = check.rates
        return _report(check.steps(), rates, args)
    steps = local_steps(settings, num_bytes=args.megabytes << 20, timeout_s=args.timeout, rates=rates)
    return _report(steps, rates, args)


def _num_tokens(args: argparse.Namespace) -> int:
    return int(args.megabytes << 20) // TOKEN_BYTES


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--peer {text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _report(steps: Iterator[Step], rates: dict[str, float], args: argparse.Namespace) -> ExitCode:
    failed = None
    for step in steps:
        failed = None if step.ok else step
        print(json.dumps(step.as_dict()) if args.json else step.line(), flush=True)
    code = failed.code if failed else ExitCode.OK
    if args.json:
        verdict = {"ok": failed is None, "transport": args.transport, "failed": failed.name if failed else None}
        print(json.dumps({**verdict, "exit": int(code), "gbps": rates}), flush=True)
    elif failed is None:
        print("all well")
    if failed is not None:
        end = "" if failed.detail.endswith("?") else "."
        print(f"kvferry doctor: {failed.name}: {failed.detail}{end} {failed.remedy}", file=sys.stderr)
    return code


def _listen(settings: FerrySettings, args: argparse.Namespace) -> ExitCode:
    if not 1 <= args.listen <= 65533:
        raise ConfigError(f"--listen {args.listen} must be between 1 and 65533: the next two ports are used, too")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())

    def show(text: str) -> None:
        print(json.dumps({"event": text}) if args.json else f"  {text}", flush=True)

    end = PrefillEnd(settings, port=args.listen, num_tokens=_num_tokens(args), on_event=show)
    try:
        key = f" --key-file {args.key_file}" if args.key_file else ""
        show(f"listening; on the other machine: kvferry doctor --peer {args.host}:{end.port} --host ITS_ADDRESS{key}")
        while not ended.wait(0.5):
            pass
    finally:
        end.close()
    return ExitCode.OK
