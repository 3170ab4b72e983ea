"""Questions about KV that an engine holds (R39): those that it asks, and those that it is asked.

An engine asks on its own thread, by a Finder, without blocking. It is asked on the listener's thread: a question that
is allowed goes into a queue (Questions), from which the scheduler half takes it in the engine's next step.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvferry.clock import Clock
from kvferry.connector.peers import Asked, Question
from kvferry.errors import FerryError, MalformedMessage
from kvferry.ids import EngineId, Incarnation
from kvferry.settings import FetchSettings, SideChannelSettings
from kvferry.sidechannel.client import SideChannelClient
from kvferry.sidechannel.late_answer import LateAnswer
from kvferry.wire.find import Find, Found, decode_find, decode_found, encode_find

__all__ = ["Finder", "MayAsk", "Questions"]

logger = logging.getLogger(__name__)

MayAsk = Callable[[EngineId, Incarnation], bool | None]
"""Says whether a peer may ask: it was accepted. None: a handshake with it is under way. The peer may have accepted us
from our own question, and ask before we have read its answer."""
_NOT_ACCEPTED = "it has not accepted the engine that asks: shake hands first"


class Finder:
    """Asks other engines. Not thread-safe: the engine's thread calls everything. Never blocks."""

    def __init__(self, side_channel: SideChannelSettings, answer_s: float, *, clock: Clock) -> None:
        self._client = SideChannelClient(replace(side_channel, timeout_s=answer_s), clock=clock)
        self._open: dict[int, Asked] = {}
        self._token = 0

    def ask(self, host: str, port: int, find: Find) -> Asked:
        """Sends a question."""
        self._token += 1
        asked = self._open[self._token] = Asked(find.transfer)
        self._client.ask_nowait(host, port, encode_find(find), self._token)
        return asked

    def poll(self) -> None:
        """Takes the answers that have come."""
        if not self._open:
            return
        for token, reply in self._client.poll():
            asked = self._open.pop(token, None)
            if asked is not None:
                asked.found = _read(asked.transfer, reply)

    def close(self) -> None:
        """Gives up all open questions."""
        self._client.close()
        self._open.clear()


def _read(transfer: str, reply: bytes | FerryError) -> Found:
    if isinstance(reply, FerryError):
        return Found.nothing(transfer, f"it gave no answer: {reply}")
    try:
        found = decode_found(reply)
    except MalformedMessage as error:
        return Found.nothing(transfer, f"its answer cannot be read: {error}")
    if found.num_tokens and found.transfer != transfer:
        return Found.nothing(transfer, "it answered another question")
    return found


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A question that waits for the engine's next step (connector.peers.Question)."""

    find: Find
    late: LateAnswer
    on_answer: Callable[[], None]

    def answer(self, found: Found) -> None:
        """Answers it. Only the first call counts."""
        self.on_answer()
        self.late.give(encode_find(found))


class Questions:
    """The questions of other engines. `ask` is called on the listener's thread, all else on the engine's."""

    def __init__(self, settings: FetchSettings, on_question: Callable[[], None]) -> None:
        """`on_question` wakes the engine. It is called on the listener's thread, and must neither block nor raise."""
        self._settings = settings
        self._on_question = on_question
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._num_open: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, body: bytes, incarnation: Incarnation, may_ask: MayAsk) -> bytes | LateAnswer:
        """Answers a message that begins with find.MAGIC, or queues its question. Nothing that a peer sends makes it
        raise. `incarnation` is ours."""
        try:
            find = decode_find(body)
        except MalformedMessage as error:
            return encode_find(Found.nothing("-", str(error)))
        reason = ""
        if find.to != incarnation:
            reason = "it has restarted: what it held is gone"
        elif may_ask(EngineId(find.engine), Incarnation(find.incarnation)) is False:
            reason = _NOT_ACCEPTED
        with self._lock:
            if not reason and self._num_open[find.engine] >= self._settings.max_questions:
                reason = f"busy: {self._settings.max_questions} questions of this engine wait (fetch.max_questions)"
            if not reason:
                self._num_open[find.engine] += 1
                late = LateAnswer()
                self._waiting.append(_Waiting(find, late, lambda: self._closed(find.engine)))
        if reason:
            return encode_find(Found.nothing(find.transfer, reason))
        self._on_question()
        return late

    def take(self, max_bytes: int, may_ask: MayAsk) -> Sequence[Question]:
        """Returns the questions that wait longest, each of them once: one, and more as long as they have at most
        `max_bytes` of token ids together. A question waits for as long as it is not known whether its peer may ask."""
        taken: list[_Waiting] = []
        refused: list[_Waiting] = []
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            for question in waiting:
                allowed = may_ask(EngineId(question.find.engine), Incarnation(question.find.incarnation))
                if allowed is False:
                    refused.append(question)
                elif allowed is None or (taken and len(question.find.packed) > max_bytes):
                    self._waiting.append(question)
                else:
                    taken.append(question)
                    max_bytes -= len(question.find.packed)
        for question in refused:
            question.answer(Found.nothing(question.find.transfer, _NOT_ACCEPTED))
        return taken

    def refuse_all(self, reason: str) -> None:
        """Answers every question that waits: nothing is found."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for question in waiting:
            question.answer(Found.nothing(question.find.transfer, reason))

    def _closed(self, engine: str) -> None:
        with self._lock:
            self._num_open[engine] -= 1
            if self._num_open[engine] <= 0:
                del self._num_open[engine]
