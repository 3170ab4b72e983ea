"""Runs steps on ranks that each have a process of their own.

Life of the processes:  start() starts them -> each sends Loaded -> connect() starts their worker halves -> steps
                        -> close(), or one of them dies: then the others are killed, and every call raises RanksLost.

An engine cannot work without one of its ranks, so they live and die together; to start them again, make another
ProcessExecutor. Threads: the engine's thread calls the methods of Executor; one thread here reads the ranks' messages.
What the worker halves need (send, drain, stats) may be called from any thread.
"""

import contextlib
import logging
import os
import pickle
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from kvferry.connector.base import PeerGone, StepOrders, StepReport
from kvferry.engines.mini.models.progress import Progress, show_progress
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
from kvferry.engines.mini.ranks.executor import ConnectorStart, OnPeerLost, StepOutcome
from kvferry.engines.mini.ranks.launcher import Launcher
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.speculation.draft_records import DraftInput, DraftOutput
from kvferry.engines.mini.step import StepInput
from kvferry.errors import ConfigError, FerryError, RankRaised, RanksLost, UnknownModel
from kvferry.layout.description import CacheLayout
from kvferry.stats import HandoffStats

__all__ = ["ProcessExecutor"]

logger = logging.getLogger(__name__)

_CLOSE_S = 20.0
"""How long a rank may take to close, which includes its worker half's goodbyes to peers. Then it is killed."""
_KILLED_S = 5.0
_SIBLING_S = 0.5
"""How long to wait for the end of another rank whose death may be what a rank has raised for."""
_CONNECT_S = 120.0
_OPERATOR_ERRORS: dict[str, type[FerryError]] = {"ConfigError": ConfigError, "UnknownModel": UnknownModel}


class _RankHandle:
    """What the engine's process knows of one rank."""

    def __init__(self, index: int, pid: int, channel: Channel) -> None:
        self.index = index
        self.pid = pid
        self.channel = channel
        self.loaded: Loaded | None = None
        self.connected: Connected | None = None
        self.stats = HandoffStats()
        self.drained_at = -1
        """The last step whose orders the rank had received when it reported that it is drained; -1: not drained."""


class ProcessExecutor:
    """Implements executor.Executor."""

    def __init__(self, settings: EngineSettings, *, num_blocks: int, launcher: Launcher | None = None) -> None:
        """`launcher` is one that outlives this executor; None: start one."""
        self._settings = settings
        self._given_launcher = launcher
        self._num_blocks = num_blocks
        self._ranks: list[_RankHandle] = []
        self._launcher: Launcher | None = None
        self._changed = threading.Condition()
        """Guards what the reader thread writes, and is notified of every message and of a loss."""
        self._outcomes: deque[StepOutcome] = deque()
        self._drafts: deque[DraftOutput] = deque()
        self._reports: deque[StepReport] = deque()
        self._lost: FerryError | None = None
        self._closing = False
        self._number = 0
        self._on_peer_lost: OnPeerLost | None = None
        self._report_callback: Callable[[], None] = lambda: None
        self._reader = threading.Thread(target=self._read, name="kvferry-ranks", daemon=True)

    # ---- from nothing to ready

    def start(self) -> None:
        """Starts every rank and waits until all have loaded. Blocks. Raises the error that kept one from loading.

        After an error nothing is left behind.
        """
        directory = tempfile.mkdtemp(prefix="kvferry-ranks-")
        try:
            self._launcher = self._given_launcher or Launcher()
            for index in range(self._settings.tp * self._settings.pp):
                self._start_rank(index, os.path.join(directory, "store"))
            self._reader.start()
            self._await(lambda: all(rank.loaded for rank in self._ranks), None, "loaded")
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)  # the ranks have joined, and need it no longer
        logger.info(
            "ranks loaded tp=%s pp=%s pids=%s", self._settings.tp, self._settings.pp, ",".join(map(str, self.pids))
        )

    def _start_rank(self, index: int, store: str) -> None:
        assert self._launcher is not None, "start() makes the launcher first"
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = self._launcher.start(theirs)
            except BaseException:
                ours.close()
                raise
        ours.settimeout(self._settings.rank_timeout_s)
        rank = _RankHandle(index, pid, Channel(ours))
        self._ranks.append(rank)
        level = logging.getLogger("kvferry").getEffectiveLevel()
        self._send(rank, Start(index, self._settings, self._num_blocks, store, level))

    def connect(self, connector: ConnectorStart, on_peer_lost: OnPeerLost) -> None:
        """Implements Executor. Raises as `start`."""
        self._on_peer_lost = on_peer_lost
        message = Connect(connector, self.layouts)
        for rank in self._ranks:
            self._send(rank, message)
        self._await(lambda: all(rank.connected for rank in self._ranks), _CONNECT_S, "connected")

    @property
    def layouts(self) -> tuple[CacheLayout, ...]:
        """Implements Executor."""
        return tuple(rank.loaded.layout for rank in self._ranks if rank.loaded is not None)

    @property
    def metadata(self) -> tuple[bytes, ...]:
        """Implements Executor."""
        return tuple(rank.connected.metadata for rank in self._ranks if rank.connected is not None)

    @property
    def pids(self) -> tuple[int, ...]:
        """Implements Executor."""
        return tuple(rank.pid for rank in self._ranks)

    # ---- Executor

    @property
    def num_blocks(self) -> int:
        """Implements Executor."""
        return self._num_blocks

    @property
    def depth(self) -> int:
        """Implements Executor."""
        return self._settings.pp

    def submit(self, step: StepInput, orders: StepOrders) -> None:
        """Implements Executor. Raises RanksLost."""
        self._number += 1
        body = pickle.dumps(Step(self._number, step, orders), pickle.HIGHEST_PROTOCOL)
        for rank in self._ranks:
            self._send(rank, None, body)

    def collect(self) -> StepOutcome:
        """Implements Executor. Raises RanksLost."""
        self._await_work(self._outcomes)
        return self._outcomes.popleft()

    def draft(self, order: DraftInput) -> DraftOutput:
        """Implements Executor. Raises RanksLost."""
        body = pickle.dumps(Draft(order), pickle.HIGHEST_PROTOCOL)
        for rank in self._ranks[-self._settings.tp :]:
            self._send(rank, None, body)
        self._await_work(self._drafts)
        return self._drafts.popleft()

    def _await_work(self, answers: "deque[StepOutcome] | deque[DraftOutput]") -> None:
        try:
            self._await(lambda: bool(answers), self._settings.rank_timeout_s, "computed a step")
        except TimeoutError as error:
            self._lose(f"no rank has computed a step in {self._settings.rank_timeout_s:g} s (rank_timeout_s)")
            raise self._loss() from error

    def reports(self) -> tuple[StepReport, ...]:
        """Implements Executor. Raises RanksLost."""
        if self._lost is not None:
            raise self._loss()
        return tuple(self._reports.popleft() for _ in range(len(self._reports)))

    @property
    def has_reports(self) -> bool:
        """Implements Executor."""
        return self._lost is not None or bool(self._reports)

    def on_report(self, callback: Callable[[], None]) -> None:
        """Implements Executor."""
        self._report_callback = callback

    def close(self) -> None:
        """Implements Executor. Blocks until the ranks have ended."""
        with self._changed:
            self._closing = True
        for rank in self._ranks:
            if self._lost is None and rank.loaded is not None:
                with contextlib.suppress(OSError):
                    rank.channel.send(Close())
            else:
                self._kill(rank)
        if self._launcher is not None:
            self._reap(self._launcher)
        if self._reader.is_alive() and threading.current_thread() is not self._reader:
            self._reader.join()  # every channel has ended
        for rank in self._ranks:
            rank.channel.close()
        if self._launcher is not None and self._given_launcher is None:
            self._launcher.close()

    def _reap(self, launcher: Launcher) -> None:
        end_s = time.monotonic() + _CLOSE_S
        for rank in self._ranks:
            if launcher.wait(rank.pid, max(0.0, end_s - time.monotonic())) is None:
                if launcher.running:
                    logger.warning(
                        "rank did not end, killing it rank=%s pid=%s after_s=%g", rank.index, rank.pid, _CLOSE_S
                    )
                self._kill(rank)
                launcher.wait(rank.pid, _KILLED_S)

    def _kill(self, rank: _RankHandle) -> None:
        """Kills a rank through the launcher. Without a launcher the rank ends because its control channel does."""
        if self._launcher is not None:
            self._launcher.kill(rank.pid)
        rank.channel.hang_up()

    def _end_status(self, rank: _RankHandle) -> str:
        """Returns how a rank that is ending has ended, for a message."""
        code = self._launcher.wait(rank.pid, _KILLED_S) if self._launcher is not None else None
        if code is None:
            return "has closed its control channel"
        return f"was killed by signal {-code}" if code < 0 else f"has ended with status {code}"

    # ---- all worker halves as one

    def send(self, orders: StepOrders) -> None:
        """Implements Executor."""
        self._send_all(Orders(orders))

    def drain(self) -> None:
        """Implements Executor."""
        self._send_all(Drain())

    @property
    def drained(self) -> bool:
        """Implements Executor. Based on the answers to the previous read, so read it until it is true."""
        drained = not self._reports and all(rank.drained_at == self._number for rank in self._ranks)
        if not drained:
            self._send_all(GetStatus())
        return drained

    def rank_stats(self) -> tuple[HandoffStats, ...]:
        """Implements Executor. Returns the last counters that each rank sent, and requests newer ones."""
        self._send_all(GetStatus())
        return tuple(rank.stats for rank in self._ranks)

    def _send_all(self, record: object) -> None:
        for rank in self._ranks:
            # A lost rank needs no message, and the next step reports the loss to the engine.
            with contextlib.suppress(FerryError):
                self._send(rank, record)

    # ---- inside

    def _send(self, rank: _RankHandle, record: object, body: bytes | None = None) -> None:
        if self._lost is not None:
            raise self._loss()
        try:
            rank.channel.send_pickled(body or pickle.dumps(record, pickle.HIGHEST_PROTOCOL))
        except OSError as error:
            self._lose(f"rank {rank.index} {'hangs' if isinstance(error, TimeoutError) else self._end_status(rank)}")
            raise self._loss() from error

    def _await(self, done: Callable[[], bool], timeout_s: float | None, achievement: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: done() or self._lost is not None, timeout_s):
                raise TimeoutError(f"the ranks have not all {achievement} in {timeout_s:g} s")
        if not done() and self._lost is not None:
            raise self._loss()

    def _loss(self) -> FerryError:
        assert self._lost is not None, "only called after ranks were lost"
        return type(self._lost)(str(self._lost))

    def _lose(self, reason: str, kind: type[FerryError] = RanksLost) -> None:
        """Ends all ranks, because one is gone or hangs and the others may wait for it. Any thread may call this."""
        with self._changed:
            if self._lost is not None or self._closing:
                return
            self._lost = kind(reason)
            self._changed.notify_all()
        if issubclass(kind, RanksLost):
            logger.error("ranks lost cause=%s pids=%s", reason, ",".join(map(str, self.pids)))
        for rank in self._ranks:
            self._kill(rank)
        self._report_callback()

    def _rank_failed(self, rank: _RankHandle, record: RankFailed) -> None:
        if record.kind in _OPERATOR_ERRORS:
            self._lose(record.text, _OPERATOR_ERRORS[record.kind])
            return
        killed = next((other for other in self._ranks if other is not rank and self._was_killed(other)), None)
        if killed is not None:  # what this rank has raised says only that it waited for the other one
            self._lose(f"rank {killed.index} {self._end_status(killed)}")
            return
        self._lose(f"rank {rank.index}: {record.kind}: {record.text}", RankRaised)

    def _was_killed(self, rank: _RankHandle) -> bool:
        code = self._launcher.wait(rank.pid, _SIBLING_S) if self._launcher is not None else None
        return code is not None and code < 0

    # ---- the reader's thread

    def _read(self) -> None:
        try:
            self._read_messages()
        except Exception as error:
            # Whoever waits for a message of a rank would wait for ever.
            logger.exception("the control channels of the ranks have failed")
            self._lose(f"a message of a rank cannot be read: {type(error).__name__}: {error}")

    def _read_messages(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.channel, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    rank = key.data
                    try:
                        record, payload = rank.channel.receive()
                    except (EOFError, OSError) as error:
                        selector.unregister(rank.channel)
                        hangs = isinstance(error, TimeoutError)
                        self._lose(f"rank {rank.index} {'hangs' if hangs else self._end_status(rank)}")
                        continue
                    self._on_message(rank, record, payload)

    def _on_message(self, rank: _RankHandle, record: Any, payload: bytearray) -> None:
        with self._changed:
            if isinstance(record, StepDone):
                logits = None
                if record.rows:
                    logits = torch.frombuffer(payload, dtype=torch.float32).view(record.rows, record.columns)
                self._outcomes.append(StepOutcome(logits))
            elif isinstance(record, Drafted):
                self._drafts.append(record.output)
            elif isinstance(record, Status):
                rank.stats = record.stats
                if record.report:
                    self._reports.append(record.report)
                rank.drained_at = record.seen if record.drained else -1
            elif isinstance(record, Loaded):
                rank.loaded = record
            elif isinstance(record, Connected):
                rank.connected = record
            self._changed.notify_all()
        if isinstance(record, RankFailed):
            self._rank_failed(rank, record)
        elif isinstance(record, Progress):
            show_progress(record)
        elif isinstance(record, PeerGone) and self._on_peer_lost is not None:
            self._on_peer_lost(record.engine, record.incarnation, record.reason)
        elif isinstance(record, Status) and record.report:
            self._report_callback()
