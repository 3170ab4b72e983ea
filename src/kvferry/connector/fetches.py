"""Requests whose first tokens other engines may hold: which engine is asked, and what it has found (R40).

Life of a fetch:  the engine's own prefix hits are known -> the first source is met, then asked (Find)
                  -> it has found more than we have: from here on it is a hand-off like any other
                  -> or it has not, or the hand-off failed: the next source is asked
                  -> there is none: the request computes the rest itself.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from kvferry.connector.base import EngineIdentity, RequestView
from kvferry.connector.entries import DecodeHandoff
from kvferry.connector.peers import Asked, PeerBoard, PeerStatus, PeerView, PrefixBoard
from kvferry.handoff.orders import Cancel
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.settings import FailurePolicy, FetchSettings
from kvferry.wire.find import Find
from kvferry.wire.params import Source
from kvferry.wire.prompt_digest import TOKEN_BYTES, Prompt
from kvferry.wire.versions import FIND

__all__ = ["Fetches", "Granted", "Looking", "PrefixFetch"]


class Looking(Enum):
    """Nothing was granted."""

    WAIT = "a peer or an answer is waited for: look again in the next step"
    OVER = "no source is left"


@dataclass(frozen=True, slots=True)
class Granted:
    """A source has granted the tokens [0, num_tokens) under this transfer id."""

    transfer: TransferId
    engine: EngineId
    incarnation: Incarnation
    num_tokens: int


@dataclass(slots=True)
class PrefixFetch:
    """One request that may fetch."""

    sources: list[Source]
    """Those that are still to be asked; the first one is being asked, or has granted."""
    limit: int
    """The most tokens that are of use: the engine must compute at least one itself, to choose the next one."""
    prompt: Prompt
    asked: Asked | None = None
    reasons: list[str] = field(default_factory=list)
    """Why each source did not give what it might have had."""

    def next_source(self, reason: str) -> None:
        """Goes on to the next source."""
        self.reasons.append(f"{self.sources.pop(0).engine_id}: {reason}")
        self.asked = None

    def handoff(self, request: RequestId, granted: Granted) -> DecodeHandoff:
        """Returns the hand-off that the fetch is from now on. Its failure is no failure of the request."""
        return DecodeHandoff(
            request=request,
            transfer=granted.transfer,
            engine=granted.engine,
            incarnation=granted.incarnation,
            num_tokens=granted.num_tokens,
            prompt=self.prompt.stated(granted.num_tokens, links=False),
            expected_tokens=granted.num_tokens,
            policy=FailurePolicy.RECOMPUTE,
            fetched=True,
            answered=True,
            kept_alive=True,
        )

    @property
    def reason(self) -> str:
        """Why nothing was fetched; empty if no source failed."""
        return f"nothing was fetched from {'; '.join(self.reasons)}" if self.reasons else ""


class Fetches:
    """Asks sources. Called on the engine's thread; never blocks."""

    def __init__(
        self, identity: EngineIdentity, peers: PeerBoard, board: PrefixBoard | None, settings: FetchSettings
    ) -> None:
        self._identity = identity
        self._peers = peers
        self._board = board
        self._settings = settings
        self._abandoned: list[tuple[Asked, EngineId, Incarnation]] = []
        """Questions of requests that have ended: what is still granted for them is given back."""

    def __len__(self) -> int:
        return len(self._abandoned)

    def new(self, request: RequestView, handoff_tokens: Callable[[int], int]) -> PrefixFetch | None:
        """Return what there is to fetch for a request; None for one that has no other engine as source."""
        params = request.handoff
        sources = [one for one in (params and params.sources) or () if one.engine_id != self._identity.engine]
        if params is None or not sources or self._board is None:
            return None
        target = handoff_tokens(request.num_prompt_tokens) if params.do_remote_decode else request.num_prompt_tokens
        limit = min(target - 1, self._settings.max_tokens)
        if limit < 1:
            return None
        return PrefixFetch(sources, limit, request.prompt)

    def look(self, fetch: PrefixFetch, num_cached_tokens: int) -> Granted | Looking:
        """Return what was granted, or whether to look again in the next step.

        `num_cached_tokens` are here already: a source is of use only if it has more.
        """
        if self._board is not None:
            self._board.poll_finds()
        while fetch.sources:
            source = fetch.sources[0]
            view = self._view(source)
            if view.status is PeerStatus.ASKING:
                return Looking.WAIT
            if view.status is PeerStatus.REFUSED or view.incarnation is None:
                fetch.next_source(view.reason)
            elif view.protocol < FIND:
                fetch.next_source(f"it speaks protocol version {view.protocol}, and is asked from version {FIND} on")
            elif view.fetch_obstacle:
                fetch.next_source(view.fetch_obstacle)
            elif num_cached_tokens >= min(fetch.limit, source.num_tokens or fetch.limit):
                fetch.sources.pop(0)  # it is not believed to hold more
                fetch.asked = None
            elif fetch.asked is None:
                self._ask(fetch, source, view.incarnation, num_cached_tokens)
                return Looking.WAIT
            elif fetch.asked.found is None:
                return Looking.WAIT
            elif not fetch.asked.found.num_tokens:
                fetch.next_source(fetch.asked.found.reason or "it holds nothing of it")
            else:
                num_tokens = min(fetch.asked.found.num_tokens, fetch.limit)
                transfer = TransferId(fetch.asked.transfer)
                return Granted(transfer, EngineId(source.engine_id), view.incarnation, num_tokens)
        return Looking.OVER

    def abandon(self, fetch: PrefixFetch) -> None:
        """The request has ended, or wants nothing any more: give back what may yet be granted for it."""
        asked, fetch.asked = fetch.asked, None
        if asked is None or (asked.found is not None and not asked.found.num_tokens):
            return
        view = self._view(fetch.sources[0])
        if view.incarnation is not None:
            self._abandoned.append((asked, EngineId(fetch.sources[0].engine_id), view.incarnation))

    def take_cancels(self) -> list[Cancel]:
        """Return the orders that give back what was granted too late."""
        cancels, waiting = [], []
        for asked, engine, incarnation in self._abandoned:
            if asked.found is None:
                waiting.append((asked, engine, incarnation))
            elif asked.found.num_tokens:
                cancels.append(Cancel(TransferId(asked.transfer), engine, incarnation, "the request has ended"))
        self._abandoned = waiting
        if waiting and self._board is not None:
            self._board.poll_finds()
        return cancels

    def _view(self, source: Source) -> PeerView:
        incarnation = Incarnation(source.incarnation) if source.incarnation else None
        return self._peers.view(EngineId(source.engine_id), incarnation, source.host, source.port)

    def _ask(self, fetch: PrefixFetch, source: Source, incarnation: Incarnation, num_cached_tokens: int) -> None:
        assert self._board is not None, "without a board nothing is fetched"
        find = Find(
            to=incarnation,
            engine=self._identity.engine,
            incarnation=self._identity.incarnation,
            transfer=f"fetch-{secrets.token_hex(12)}",
            packed=fetch.prompt.packed[: fetch.limit * TOKEN_BYTES],
            salt=fetch.prompt.salt_text,
            more_than=num_cached_tokens,
        )
        fetch.asked = self._board.find(source.host, source.port, find)
