"""`kvferry route`: the OpenAI-compatible router in front of prefill and decode workers."""

import argparse
import dataclasses
import logging
from enum import StrEnum

from kvferry.cli.main import ExitCode
from kvferry.cli.support.parent_death import die_with_supervisor
from kvferry.cli.support.worker_flags import field_docs
from kvferry.router.app import Router, RouterFiles
from kvferry.router.settings import RouterSettings
from kvferry.web.event_loop import run_event_loop
from kvferry.web.listen import Listener, announce, serve_until_signal

__all__ = ["add_arguments", "run"]


logger = logging.getLogger(__name__)

_FILES = {
    "fleet": "fleet-file",
    "api_keys": "api-key-file",
    "worker_key": "worker-key-file",
    "register_key": "register-key-file",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("--prefill", action="append", default=[], metavar="URL", help="a prefill worker; repeatable")
    parser.add_argument("--decode", action="append", default=[], metavar="URL", help="a decode worker; repeatable")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8080, help="its port; 0 takes a free one (default: 8080)")
    parser.add_argument("--etcd", metavar="URL", help="workers whose addresses are in etcd v3 there, as "
                        "`kvferry serve --etcd` puts them; watched")  # fmt: skip
    parser.add_argument("--otlp", metavar="URL",
                        help="send OpenTelemetry spans there, OTLP over HTTP, as in http://127.0.0.1:4318; needs "
                        "kvferry[otel]; OTEL_TRACES_SAMPLER and the other variables of its SDK apply")  # fmt: skip
    parser.add_argument("--ready-file", help="written when requests are answered: JSON with pid and url")
    files = field_docs(RouterFiles)
    for name, flag in _FILES.items():
        parser.add_argument(f"--{flag}", dest=f"file_{name}", metavar="FILE", help=files[name])
    docs = field_docs(RouterSettings)
    for field in dataclasses.fields(RouterSettings):
        kind = type(field.default)
        choices = list(kind) if issubclass(kind, StrEnum) else None
        shown = "N" if choices is None else None
        parser.add_argument(
            "--" + field.name.removesuffix("_s").replace("_", "-"),
            dest=field.name, type=kind, default=field.default, choices=choices, metavar=shown,
            help=f"{docs[field.name]} (default: {field.default})",
        )  # fmt: skip


def run(args: argparse.Namespace) -> ExitCode:
    """Route until SIGINT or SIGTERM."""
    die_with_supervisor()
    settings = RouterSettings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(RouterSettings)})
    files = RouterFiles(**{name: getattr(args, f"file_{name}") for name in _FILES})
    router = Router(
        args.prefill,
        args.decode,
        settings,
        files=files,
        open_registration=args.host in ("127.0.0.1", "::1", "localhost"),
        etcd=args.etcd,
    )
    if args.otlp:
        router.trace_to(args.otlp)
    listener = Listener(router.app, args.host, args.port)

    async def main() -> None:
        await listener.start()
        for worker in router.fleet.workers:
            if worker.unusable_reason is not None:
                logger.warning("worker not usable yet: %s", worker.unusable_reason)
        logger.info(
            "routing url=%s prefill=%d decode=%d", listener.url, len(router.fleet.prefill), len(router.fleet.decode)
        )
        announce(args.ready_file, url=listener.url)
        await serve_until_signal(listener)

    run_event_loop(main())
    return ExitCode.OK
