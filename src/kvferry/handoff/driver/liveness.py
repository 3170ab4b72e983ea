"""Which peers have been heard of lately, and which are gone for good. No I/O; time is an argument.

A peer that died in silence, with an id that nobody will use again, would be kept for ever: no hand-off with it fails,
because there is none. So whoever was silent for a quarter of the time is asked for a sign of life; a peer that knows us
answers at once. One that was asked three times, and has said nothing for the quarter after that, is gone. Questions are
counted, not only seconds: a process that was stopped for an hour asks first, as everybody else.
"""

from collections.abc import Callable

from kvferry.ids import PeerName

__all__ = ["GONE_AFTER_S", "Liveness"]

GONE_AFTER_S = 60.0
"""A peer of which nothing was heard for so long (or two leases, if that is longer) is forgotten, within 1/4 of that."""
_MAX_QUESTIONS = 3


class Liveness:
    """One a driver. `ask(name)` sends the question."""

    def __init__(self, gone_after_s: float, ask: Callable[[PeerName], None]) -> None:
        self._every_s = gone_after_s / (_MAX_QUESTIONS + 1)
        self._ask = ask
        self._heard: set[PeerName] = set()
        self._questions: dict[PeerName, int] = {}
        self.next_s = float("inf")
        """When `tick` has something to do."""

    def __len__(self) -> int:
        return len(self._questions)

    def meet(self, name: PeerName, now_s: float) -> None:
        """A peer was introduced: ask it at once, which also sets up the wire between us."""
        if not self._questions:
            self.next_s = now_s + self._every_s
        self._questions[name] = 0
        self._heard.add(name)
        self._ask(name)

    def heard(self, name: PeerName) -> None:
        """Some message of it has come. Cheap: called for every message."""
        self._heard.add(name)

    def forget(self, name: PeerName) -> None:
        """It is not ours any more."""
        self._questions.pop(name, None)
        self._heard.discard(name)
        if not self._questions:
            self.next_s = float("inf")

    def tick(self, now_s: float) -> list[PeerName]:
        """Ask who was silent; returns who is gone."""
        heard, self._heard = self._heard, set()
        gone = []
        for name, questions in self._questions.items():
            if name in heard:
                self._questions[name] = 0
            elif questions == _MAX_QUESTIONS:
                gone.append(name)
            else:
                self._questions[name] = questions + 1
                self._ask(name)
        self.next_s = now_s + self._every_s if self._questions else float("inf")
        return gone
