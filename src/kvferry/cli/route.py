"""`kvferry route`: the OpenAI-compatible router in front of prefill and decode workers."""

import argparse
import logging

from kvferry.cli.main import ExitCode
from kvferry.cli.support.parent_death import die_with_supervisor
from kvferry.cli.support.router_flags import add_router_flags, router_files, router_settings
from kvferry.router.app import Router
from kvferry.web.event_loop import freeze_garbage, run_event_loop
from kvferry.web.listen import Listener, announce, check_ready_file, serve_until_signal

__all__ = ["add_arguments", "run"]

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the workers, the address and the settings of the router."""
    parser.add_argument("--prefill", action="append", default=[], metavar="URL", help="a prefill worker; repeatable")
    parser.add_argument("--decode", action="append", default=[], metavar="URL", help="a decode worker; repeatable")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=8080, metavar="PORT", help="port to listen on; 0 takes a free one (default: 8080)"
    )
    parser.add_argument(
        "--etcd",
        metavar="URL",
        help="an etcd v3 that holds the addresses of workers, as "
        "`kvferry serve --etcd` puts them there; watched (default: none)",
    )
    parser.add_argument(
        "--ready-file",
        metavar="FILE",
        help="written as soon as requests are answered: JSON with pid and url (default: none)",
    )
    add_router_flags(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Routes until SIGINT, or until a drain has ended; SIGTERM begins a drain."""
    die_with_supervisor()
    check_ready_file(args.ready_file)
    router = Router(
        args.prefill,
        args.decode,
        router_settings(args),
        files=router_files(args),
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
        freeze_garbage()
        announce(args.ready_file, url=listener.url)
        await serve_until_signal(listener, router.draining)

    run_event_loop(main())
    return ExitCode.OK
