"""What each pair of a prefill and a decode worker has done together, and whether it is left alone for a while.

A pair fails when a hand-off that was asked of it did not land: decode says that it recomputed the prompt. That is no
failure of either worker, both may pair with others.
"""

import time
from dataclasses import dataclass, field

from kvferry.router.fleet.breakers import Breaker
from kvferry.router.fleet.compatibility import why_not, why_not_modes
from kvferry.router.fleet.worker import Worker
from kvferry.router.settings import RouterSettings
from kvferry.web.records import WorkerInfo

__all__ = ["Pair", "Pairs"]


@dataclass(slots=True)
class Pair:
    """One pair's numbers since the router began to know both."""

    breaker: Breaker
    landed: int = 0
    failed: int = 0
    handed_over_tokens: int = 0
    last_why: str = ""
    incarnations: tuple[str, str] = ("", "")
    judged: tuple[WorkerInfo, WorkerInfo] | None = None
    """The records on which `why_not` rests: it is asked for every request, and they change once a second."""
    why_not: str | None = None
    open: int = 0
    """Hand-offs in flight: decode has not begun to answer."""


@dataclass(slots=True)
class Pairs:
    """Of one router."""

    settings: RouterSettings
    _known: dict[tuple[str, str], Pair] = field(default_factory=dict)

    def of(self, prefill: Worker, decode: Worker) -> Pair:
        """This pair. A restart of either closes its breaker."""
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

    def why_not(self, prefill: Worker, decode: Worker) -> str | None:
        """Why what they say of themselves does not fit; None: it does."""
        if prefill.info is None or decode.info is None:
            return "one of them has not answered yet"
        if prefill.info.engine == decode.info.engine:
            return f"both are the engine {prefill.info.engine!r}: it has nobody to hand its cache to"
        pair = self.of(prefill, decode)
        if pair.judged is None or pair.judged[0] is not prefill.info or pair.judged[1] is not decode.info:
            pair.judged, pair.why_not = (prefill.info, decode.info), why_not(prefill.info, decode.info)
        if pair.why_not is None and prefill.info.mode is None:
            return why_not_modes(prefill.name, prefill.mode, decode.name, decode.mode)
        return pair.why_not

    def why_not_now(self, prefill: Worker, decode: Worker) -> str | None:
        """Its breaker is open; None: it is not."""
        pair, now_s = self.of(prefill, decode), time.monotonic()
        if pair.breaker.permits(now_s):
            return None
        return f"{prefill.name} to {decode.name} is left alone: {pair.breaker.why(now_s)}"

    def forget(self, worker: Worker) -> None:
        """It has left the fleet."""
        for key in [key for key in self._known if worker.url in key]:
            del self._known[key]


def _incarnation(worker: Worker) -> str:
    return worker.info.incarnation if worker.info is not None else ""
