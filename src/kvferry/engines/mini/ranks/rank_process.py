"""One rank in a process of its own, forked by `python -m kvferry.engines.mini.ranks.rank_process FD` (see launcher.py).

Its life:  Start -> join the other ranks -> load -> Loaded -> (Connect -> Connected) -> steps, in order -> Close.

Threads: the main thread computes. The reader receives the engine's messages: it queues steps, and does everything else
at once, so that a new peer is known while a step runs. The worker half's driver thread sends its reports by itself, so
nothing polls. When the engine's process is gone, the control socket ends, and the reader ends this process, whatever
the main thread is waiting for.
"""

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
from dataclasses import replace
from typing import NoReturn

import torch

from kvferry.connector.base import PeerGone, StepReport
from kvferry.connector.worker import HandoffWorker, start_worker
from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.models.loading import load_model
from kvferry.engines.mini.models.parallel import Shard
from kvferry.engines.mini.models.progress import set_progress_display
from kvferry.engines.mini.ranks import comm
from kvferry.engines.mini.ranks.control import (
    Channel,
    Close,
    Connect,
    Connected,
    Draft,
    Drafted,
    Drain,
    GetStatus,
    Loaded,
    Orders,
    RankFailed,
    Start,
    Status,
    Step,
    StepDone,
)
from kvferry.engines.mini.ranks.executor import Rank
from kvferry.engines.mini.ranks.launcher import serve
from kvferry.engines.mini.ranks.sizing import groups_of, layers_of
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.speculation.load_drafter import find_drafter, load_drafter
from kvferry.errors import FerryError
from kvferry.ids import EngineId, Incarnation
from kvferry.stats import HandoffStats

__all__ = ["RankProcess", "device_of", "main", "run_rank"]

logger = logging.getLogger(__name__)

_ORPHANED = 3
_FAILED = 1


class RankProcess:
    """The state of the process after Start."""

    def __init__(self, channel: Channel, start: Start) -> None:
        settings = start.settings
        self._channel = channel
        self._start = start
        tp = settings.tp
        self._shard = Shard(start.index % tp, tp, start.index // tp, settings.pp)
        self._queue: queue.SimpleQueue[Step | Draft | Connect | Close] = queue.SimpleQueue()
        self._worker: HandoffWorker | None = None
        self._status_lock = threading.Lock()
        self._last_status: Status | None = None
        self._last_step = 0
        self._rank: Rank | None = None

    def run(self) -> None:
        """Loads, then carries out the engine's messages until Close."""
        threading.Thread(target=self._read, name="kvferry-control", daemon=True).start()
        self._load()
        while not isinstance(message := self._queue.get(), Close):
            if isinstance(message, Connect):
                self._connect(message)
            elif isinstance(message, Draft):
                self._draft(message)
            else:
                self._compute(message)
        if self._worker is not None:
            self._worker.close()
        comm.leave()

    def _load(self) -> None:
        settings, shard = self._start.settings, self._shard
        _set_threads(settings)
        set_progress_display(self._channel.send)  # the engine's process has the display
        device = device_of(settings.device, shard.index)
        shard, through_cpu = comm.join(shard, self._start.store, device=device, timeout_s=settings.rank_timeout_s)
        model = load_model(_on(settings, device), shard)
        drafter = find_drafter(settings, model)
        groups = groups_of(model.config, model.kv, shard.pp_size, drafter)
        layers = layers_of(model.config, model.kv, shard, drafter)
        cache = KVCache.sized(layers, groups, settings, device, rank=shard.rank, num_blocks=self._start.num_blocks)
        stages = comm.Stages(
            shard, hidden=model.config.hidden, dtype=model.dtype, device=device, through_cpu=through_cpu
        )
        drafts = load_drafter(drafter, model, cache, shard)
        self._rank = Rank(model.network, cache, shard=shard, stages=stages, drafter=drafts)
        self._channel.send(Loaded(os.getpid(), cache.layout()))

    def _connect(self, message: Connect) -> None:
        assert self._rank is not None, "the engine connects ranks that have loaded"
        cache, connector = self._rank.cache, message.connector
        self._worker = start_worker(
            cache.layout(),
            (cache.data,),
            engine=connector.engine,
            incarnation=connector.incarnation,
            settings=connector.settings,
            num_ranks=self._shard.num_ranks,
            engine_layouts=message.layouts,
            on_lost=self._on_peer_lost,
            on_report=self._send_status,
        )
        self._rank.worker = self._worker
        self._channel.send(Connected(self._worker.record.transport_metadata))

    def _draft(self, message: Draft) -> None:
        assert self._rank is not None, "the engine sends drafts to ranks that have loaded"
        output = self._rank.draft(message.order)
        if self._shard.tp_rank == 0:
            self._channel.send(Drafted(output))

    def _compute(self, message: Step) -> None:
        assert self._rank is not None, "the engine sends steps to ranks that have loaded"
        logits = self._rank.execute(message.step, message.orders)
        self._last_step = message.number
        if message.step.chunks and self._shard.is_last and self._shard.tp_rank == 0:
            if logits is None:
                self._channel.send(StepDone(message.number, 0, 0))
            else:
                plain = logits.detach().to("cpu", torch.float32).contiguous()
                body = plain.numpy().data.cast("B")
                self._channel.send(StepDone(message.number, *plain.shape), body)

    # ---- the reader's thread

    def _read(self) -> None:
        try:
            while True:
                record, _ = self._channel.receive()
                self._on_message(record)
        except (EOFError, OSError):
            os._exit(_ORPHANED)  # the engine's process is gone, and the main thread may be waiting for anything
        except Exception:
            logger.exception("the control channel has failed; this rank ends")
            os._exit(_FAILED)

    def _on_message(self, record: object) -> None:
        worker = self._worker
        if isinstance(record, Step | Draft | Connect | Close):
            self._queue.put(record)
        elif isinstance(record, Orders) and worker is not None:
            worker.start_step(record.orders)
        elif isinstance(record, Drain) and worker is not None:
            worker.drain()
        elif isinstance(record, GetStatus):
            self._send_status(always=True)

    # ---- any thread

    def _send_status(self, *, always: bool = False) -> None:
        """Sends the state of the worker half if it has changed. The driver's thread calls this, too."""
        worker = self._worker
        if worker is None:
            if always:
                self._channel.send(Status(self._last_step, StepReport(), HandoffStats(), True))
            return
        with self._status_lock:
            report = worker.end_step()
            status = Status(self._last_step, report, worker.stats(), worker.drained)
            if always or report or self._last_status is None or status.stats != self._last_status.stats:
                self._last_status = status
                self._channel.send(status)

    def _on_peer_lost(self, engine: EngineId, incarnation: Incarnation, reason: str) -> None:
        self._channel.send(PeerGone(engine, incarnation, reason))


def device_of(name: str, index: int) -> torch.device:
    """Returns the device of a rank: `cuda` gives each rank its own device, any other name is the same for all."""
    if name == "cuda" and torch.cuda.device_count():
        return torch.device("cuda", index % torch.cuda.device_count())
    return torch.device(name)


def _on(settings: EngineSettings, device: torch.device) -> EngineSettings:
    return replace(settings, device=str(device))


def _set_threads(settings: EngineSettings) -> None:
    """Sets torch's threads: the setting, or else OMP_NUM_THREADS, or else this rank's part of the cores."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (settings.tp * settings.pp)))


def run_rank(descriptor: int) -> NoReturn:
    """Runs a rank to its end. `descriptor` is that of its control socket."""
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        start, _ = channel.receive()
    except (EOFError, OSError):
        os._exit(_ORPHANED)
    logging.basicConfig(
        level=start.log_level,
        format=f"%(asctime)s %(levelname).1s rank{start.index} %(name)s %(message)s",
        stream=sys.stderr,
    )
    code = 0
    try:
        RankProcess(channel, start).run()
    except Exception as error:
        code = _FAILED
        if not isinstance(error, FerryError):
            logger.exception("this rank has failed")
        with contextlib.suppress(OSError):
            channel.send(RankFailed(type(error).__name__, str(error)))
    logging.shutdown()
    # The interpreter's own shutdown is skipped: threads of torch, gloo and the transport may still be in their calls.
    os._exit(code)


def main(argv: list[str]) -> None:
    """Runs the launcher. `argv` holds the number of the inherited socket."""
    # Ctrl-C goes to every process of a terminal, but the engine alone decides when and how ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(socket.socket(fileno=int(argv[0])), run_rank)
    os._exit(0)  # there is nothing to clean up, and torch takes a second to shut down


if __name__ == "__main__":
    main(sys.argv[1:])
