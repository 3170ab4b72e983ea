"""The scheduler half of each transfer mode (R14), and the choice of one by the settings."""

from collections.abc import Callable

from kvferry.connector.base import EngineIdentity
from kvferry.connector.peers import PeerBoard, PrefixBoard
from kvferry.connector.scheduler import HandoffScheduler
from kvferry.settings import FerrySettings, TransferMode
from kvferry.wire.prompt_digest import Prompt

__all__ = ["PullScheduler", "PushScheduler", "make_scheduler"]


class PullScheduler(HandoffScheduler, mode=TransferMode.PULL):
    """Decode reads prefill's blocks."""


class PushScheduler(HandoffScheduler, mode=TransferMode.PUSH):
    """Prefill writes into decode's blocks."""


def make_scheduler(
    identity: EngineIdentity,
    peers: PeerBoard,
    settings: FerrySettings,
    handoff_tokens: Callable[[int], int] | None = None,
    *,
    hash_ahead: Callable[[Prompt], None] | None = None,
    prefixes: PrefixBoard | None = None,
) -> HandoffScheduler:
    """The scheduler half for the configured transfer mode."""
    kinds = {kind.mode: kind for kind in (PullScheduler, PushScheduler)}
    kind = kinds[settings.transfer.mode]
    return kind(identity, peers, settings, handoff_tokens, hash_ahead=hash_ahead, prefixes=prefixes)
