"""What each pair of a prefill and a decode worker has done together, and whether it is left alone for a while.

A pair fails if a hand-off that was asked of it did not land: decode says that it recomputed the prompt. That is not a
failure of either worker: both may pair with others.
"""

import time
from dataclasses import dataclass, field

from kvferry.router.fleet.breakers import Breaker
from kvferry.router.fleet.compatibility import mismatch_reason, mode_mismatch
from kvferry.router.fleet.worker import Worker
from kvferry.router.settings import RouterSettings
from kvferry.web.records import WorkerInfo

__all__ = ["Pair", "Pairs"]


@dataclass(slots=True)
class Pair:
    """One pair's counters, since the router has known both workers."""

    breaker: Breaker
    landed: int = 0
    failed: int = 0
    unknown: int = 0
    """Answers that do not say whether their hand-off has landed: those of vLLM servers."""
    handed_over_tokens: int = 0
    last_reason: str = ""
    """The reason of the pair's last failure."""
    incarnations: tuple[str, str] = ("", "")
    judged: tuple[WorkerInfo, WorkerInfo] | None = None
    """The records from which `mismatch` was computed: it is needed for every request, and they change once a second."""
    mismatch: str | None = None
    open: int = 0
    """Hand-offs in flight: decode has not begun to answer."""

    def fail(self, now_s: float, reason: str) -> bool:
        """Counts a hand-off that did not land. Returns True if this has opened the pair's breaker."""
        self.failed += 1
        self.last_reason = reason
        return self.breaker.failed(now_s, reason)


@dataclass(slots=True)
class Pairs:
    """All pairs of one router."""

    settings: RouterSettings
    _known: dict[tuple[str, str], Pair] = field(default_factory=dict)

    def of(self, prefill: Worker, decode: Worker) -> Pair:
        """Returns the record of this pair. A restart of either worker closes the pair's breaker."""
        key = (prefill.url, decode.url)
        pair = self._known.get(key)
        if pair is None:
            settings = self.settings
            pair = self._known[key] = Pair(
                Breaker(settings.breaker_failures, settings.breaker_open_s, settings.breaker_longest_s)
            )
        now = (_incarnation(prefill), _incarnation(decode))
        if pair.incarnations != now:
            pair.incarnations = now
            pair.breaker.succeeded()
        return pair

    def mismatch_reason(self, prefill: Worker, decode: Worker) -> str | None:
        """Returns why the two workers do not fit by what they say about themselves, or None if they fit."""
        if prefill.info is None or decode.info is None:
            return "one of them has not answered yet"
        if prefill.info.engine == decode.info.engine:
            return f"both are the engine {prefill.info.engine!r}: an engine cannot hand its cache over to itself"
        pair = self.of(prefill, decode)
        if pair.judged is None or pair.judged[0] is not prefill.info or pair.judged[1] is not decode.info:
            pair.judged, pair.mismatch = (prefill.info, decode.info), mismatch_reason(prefill.info, decode.info)
        if pair.mismatch is None and prefill.info.mode is None:
            return mode_mismatch(prefill.name, prefill.mode, decode.name, decode.mode)
        return pair.mismatch

    def breaker_reason(self, prefill: Worker, decode: Worker) -> str | None:
        """Returns why the pair is left alone, or None if its breaker lets a request through."""
        pair, now_s = self.of(prefill, decode), time.monotonic()
        if pair.breaker.permits(now_s):
            return None
        return f"{prefill.name} to {decode.name} is left alone: {pair.breaker.explain(now_s)}"

    def forget(self, worker: Worker) -> None:
        """Forgets all pairs of a worker that has left the fleet."""
        for key in [key for key in self._known if worker.url in key]:
            del self._known[key]


def _incarnation(worker: Worker) -> str:
    return worker.info.incarnation if worker.info is not None else ""
