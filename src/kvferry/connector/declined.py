"""Hand-offs that this engine was asked to take, of requests that it has refused: the peer's grant is freed at once.

A request may be refused before the engine has it: it is too long, or a value is out of range. Without a message the
prefill engine would keep its blocks for the whole lease. The peer may have to be met first, so a hand-off waits here
until the handshake has ended.
"""

import logging
from dataclasses import dataclass

from kvferry.connector.peers import PeerBoard, PeerStatus
from kvferry.handoff.orders import Cancel
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.settings import TransferMode
from kvferry.wire.params import HandoffParams

__all__ = ["DeclinedHandoffs", "missing_fields", "unusable_reason"]

logger = logging.getLogger(__name__)

_MAX_WAITING = 1024
"""The most that wait for a handshake; the oldest one is left to its lease if there are more."""


def missing_fields(params: HandoffParams) -> list[str]:
    """Return the names of what a hand-off must have and these parameters lack."""
    needed = ("transfer_id", "remote_engine_id", "remote_host", "remote_port")
    return [name for name in needed if getattr(params, name) is None]


def unusable_reason(params: HandoffParams, mode: TransferMode, mode_remedy: str) -> str:
    """Return why decode can do nothing with these parameters; "" if it can."""
    if missing := missing_fields(params):
        return f"kv_transfer_params lack {', '.join(missing)}"
    if params.transfer_mode is not None and params.transfer_mode is not mode:
        return f"prefill hands over by {params.transfer_mode.value}, this worker by {mode.value}: {mode_remedy}"
    return ""


@dataclass(frozen=True, slots=True)
class _Declined:
    params: HandoffParams
    reason: str


class DeclinedHandoffs:
    """Those whose peer is not known yet."""

    def __init__(self, peers: PeerBoard) -> None:
        self._peers = peers
        self._waiting: dict[TransferId, _Declined] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, params: HandoffParams, reason: str) -> None:
        """The request with these parameters was refused."""
        self._waiting[TransferId(str(params.transfer_id))] = _Declined(params, reason)
        if len(self._waiting) > _MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def take_cancels(self) -> list[Cancel]:
        """Return the orders for those whose peer is known now. One whose peer is refused is left to its lease."""
        cancels = []
        for transfer, declined in list(self._waiting.items()):
            params = declined.params
            engine = EngineId(str(params.remote_engine_id))
            incarnation = Incarnation(params.remote_incarnation) if params.remote_incarnation else None
            try:
                view = self._peers.view(engine, incarnation, str(params.remote_host), int(params.remote_port or 0))
            except Exception:
                logger.exception("a peer cannot be asked peer=%s transfer=%s", engine, transfer)
                del self._waiting[transfer]  # it is left to its lease, too
                continue
            if view.status is PeerStatus.ASKING:
                continue
            del self._waiting[transfer]
            if view.status is PeerStatus.ACCEPTED:
                assert view.incarnation is not None, "an accepted peer has an incarnation"
                cancels.append(Cancel(transfer, engine, view.incarnation, declined.reason))
        return cancels
