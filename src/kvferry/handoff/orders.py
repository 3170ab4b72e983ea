"""The two records in which a scheduler half and its worker halves meet, once per step.

Scheduler to workers: StepOrders. Workers to scheduler: StepReport. Neither holds an address, a tensor or a socket.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.handshake.peer_table import PeerAccepted, PeerGone
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.settings import TransferMode
from kvferry.wire.prompt_digest import Prompt, StatedPrompt

__all__ = [
    "Cancel",
    "Failed",
    "Fetch",
    "KeepAlive",
    "Landed",
    "Offer",
    "PeerAccepted",
    "PeerGone",
    "StepOrders",
    "StepReport",
    "Withdraw",
    "merged",
]


@dataclass(frozen=True, slots=True)
class Offer:
    """Prefill: these blocks hold these tokens of a request that will be decoded elsewhere.

    It is repeated under the same transfer id as more is computed; `ready` only grows, and tables only get longer. From
    the first Offer on, the blocks are the connector's until `released` names the transfer.
    """

    transfer: TransferId
    request: RequestId
    tables: tuple[BlockTable, ...]
    ready: TokenRange
    """Tokens whose KV is computed and stored."""
    final: bool
    """Nothing more will be computed: `ready` is the exact range of the hand-off."""
    note: bytes = b""
    """Opaque bytes, at most 4 KiB, delivered to decode with the final message (Landed.note)."""
    prompt: Prompt | None = None
    """The whole prompt, to its last token, also while less of it is ready (R51). None: not known."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Prefill: the request ended early (abort, failure). The peer gets a message; blocks come back by `released`."""

    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Decode: the request still waits in our queue; keep the prefill side's grant alive.

    It lasts until a Fetch or a Cancel names the transfer, and at most `transfer.deadline_s` after the last KeepAlive
    for it.
    """

    transfer: TransferId
    engine: EngineId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Fetch:
    """Decode: fetch these tokens into these blocks.

    The blocks are the connector's until the transfer is landed, or released after a failure or a cancel.
    """

    transfer: TransferId
    request: RequestId
    engine: EngineId
    incarnation: Incarnation
    mode: TransferMode
    tables: tuple[BlockTable, ...]
    wanted: TokenRange
    """What decode does not have yet: from its own prefix hits to the end of the hand-off. It may be empty (a full hit):
    then prefill gets its blocks back at once."""
    deadline_s: float
    """The number of seconds from now after which it fails, whatever it waits for."""
    prompt: StatedPrompt | None = None
    """What prefill learns of the prompt, so that it hands over nothing of another one (R51). None: not known."""
    expected_tokens: int | None = None
    """How many tokens prefill hands over of a prompt of this length: all that can be compared with a peer that does not
    compare prompts."""
    answered: bool = False
    """Pull: prefill has answered its request, so it knows this transfer unless that has ended there."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Decode: the request is gone (abort, preemption). Its blocks come back by `released`, not before."""

    transfer: TransferId
    engine: EngineId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class StepOrders:
    """What the scheduler half orders of every worker half, once per step."""

    accepted: tuple[PeerAccepted, ...] = ()
    offer: tuple[Offer, ...] = ()
    withdraw: tuple[Withdraw, ...] = ()
    keep_alive: tuple[KeepAlive, ...] = ()
    fetch: tuple[Fetch, ...] = ()
    cancel: tuple[Cancel, ...] = ()
    gone: tuple[PeerGone, ...] = ()
    """These are carried out before `accepted`."""

    def __bool__(self) -> bool:
        return bool(
            self.accepted or self.offer or self.withdraw or self.keep_alive or self.fetch or self.cancel or self.gone
        )


@dataclass(frozen=True, slots=True)
class Landed:
    """Decode: every wanted byte is here and valid; the blocks are the engine's again."""

    transfer: TransferId
    request: RequestId
    arrived: TokenRange
    num_bytes: int
    num_runs: int
    transfer_s: float
    """The seconds from the fetch order to the last byte."""
    verified_cells: int = 0
    """How many cells of KV were compared with prefill's by digest."""
    note: bytes = b""
    """Offer.note as the peer sent it: hostile until decoded. Empty if `difference` is not."""
    grant_s: float = 0.0
    """The seconds from the fetch order until every prefill rank had granted (pull), or held our grant (push)."""
    difference: str = ""
    """How prefill's prompt differs from ours, with the remedy; "" if it is the same. If it differs, `arrived` is at
    most what they have in common, and the first token that prefill chose is not for our prompt (R51)."""
    source: str = ""
    """The engine that held it, if it was fetched; "" after a hand-off. The scheduler half fills it in."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Decode: the hand-off ended without its bytes. Reported once. Its blocks come back by `released`."""

    transfer: TransferId
    request: RequestId
    reason: str
    arrived: TokenRange
    """What did arrive whole and valid, from `wanted.start` on; it may be empty."""
    source: str = ""
    """As in Landed."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one worker half reports to the scheduler half, once per step. Each end is reported exactly once (I4)."""

    landed: tuple[Landed, ...] = ()
    failed: tuple[Failed, ...] = ()
    released: frozenset[TransferId] = frozenset()
    """No peer will touch the blocks of these transfers any more: prefill's after confirmation or the end of the lease,
    decode's after a failure or cancel."""
    taken: frozenset[TransferId] = frozenset()
    """Prefill: those of `released` that every decode rank confirmed. The others ended by withdrawal or lease."""

    def __bool__(self) -> bool:
        return bool(self.landed or self.failed or self.released)


def merged(reports: Sequence[StepReport]) -> StepReport:
    """Joins several reports of one rank into one."""
    if len(reports) == 1:
        return reports[0]
    return StepReport(
        landed=tuple(one for report in reports for one in report.landed),
        failed=tuple(one for report in reports for one in report.failed),
        released=frozenset().union(*(report.released for report in reports)),
        taken=frozenset().union(*(report.taken for report in reports)),
    )
