"""kvferry carries the KV cache of a request from a prefill worker to a decode worker.

What an engine's author needs is here: `kvferry.EngineConnector`, `kvferry.start_worker` and the records that they take
and return (docs/reference/api.md). Each name is loaded when it is first used, so that importing this package loads no
torch, nixl, zmq, numpy or msgspec.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.connector.base import (
        EngineIdentity,
        Failed,
        Landed,
        Match,
        Outcome,
        RankRecord,
        RequestView,
        SchedulerHalf,
        StepOrders,
        StepReport,
        WorkerHalf,
    )
    from kvferry.connector.engine import EngineConnector
    from kvferry.connector.worker import start_worker
    from kvferry.errors import (
        ConfigError,
        FerryError,
        IncompatiblePeer,
        MalformedMessage,
        Overloaded,
        PeerError,
        PeerLost,
        RanksLost,
        RequestError,
        RequestTooLong,
        TransferError,
        UnknownModel,
    )
    from kvferry.handshake.engine_description import EngineDescription, SpeculationFacts
    from kvferry.ids import EngineId, Incarnation, RequestId, TransferId, new_incarnation
    from kvferry.layout.blocks import BlockTable, TokenRange
    from kvferry.settings import (
        FailurePolicy,
        FerrySettings,
        LeaseSettings,
        Role,
        SideChannelSettings,
        TransferMode,
        TransferSettings,
        Verify,
    )
    from kvferry.wire.first_token import FirstToken, decode_first_token, first_token_of
    from kvferry.wire.params import HandoffParams
    from kvferry.wire.prompt_digest import Prompt

__version__ = "0.1.0"

__all__ = [
    "BlockTable",
    "ConfigError",
    "EngineConnector",
    "EngineDescription",
    "EngineId",
    "EngineIdentity",
    "Failed",
    "FailurePolicy",
    "FerryError",
    "FerrySettings",
    "FirstToken",
    "HandoffParams",
    "Incarnation",
    "IncompatiblePeer",
    "Landed",
    "LeaseSettings",
    "MalformedMessage",
    "Match",
    "Outcome",
    "Overloaded",
    "PeerError",
    "PeerLost",
    "Prompt",
    "RankRecord",
    "RanksLost",
    "RequestError",
    "RequestId",
    "RequestTooLong",
    "RequestView",
    "Role",
    "SchedulerHalf",
    "SideChannelSettings",
    "SpeculationFacts",
    "StepOrders",
    "StepReport",
    "TokenRange",
    "TransferError",
    "TransferId",
    "TransferMode",
    "TransferSettings",
    "UnknownModel",
    "Verify",
    "WorkerHalf",
    "__version__",
    "decode_first_token",
    "first_token_of",
    "new_incarnation",
    "start_worker",
]

_HOMES = {
    "kvferry.connector.base": (
        "EngineIdentity Failed Landed Match Outcome RankRecord RequestView SchedulerHalf StepOrders StepReport "
        "WorkerHalf"
    ),
    "kvferry.connector.engine": "EngineConnector",
    "kvferry.connector.worker": "start_worker",
    "kvferry.errors": (
        "ConfigError FerryError IncompatiblePeer MalformedMessage Overloaded PeerError PeerLost RanksLost RequestError "
        "RequestTooLong TransferError UnknownModel"
    ),
    "kvferry.handshake.engine_description": "EngineDescription SpeculationFacts",
    "kvferry.ids": "EngineId Incarnation RequestId TransferId new_incarnation",
    "kvferry.layout.blocks": "BlockTable TokenRange",
    "kvferry.settings": (
        "FailurePolicy FerrySettings LeaseSettings Role SideChannelSettings TransferMode TransferSettings Verify"
    ),
    "kvferry.wire.first_token": "FirstToken decode_first_token first_token_of",
    "kvferry.wire.params": "HandoffParams",
    "kvferry.wire.prompt_digest": "Prompt",
}
"""The module that each public name is loaded from."""


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used (PEP 562)."""
    for home, names in _HOMES.items():
        if name in names.split():
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module 'kvferry' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
