"""A request that names a hand-off and is refused: the prefill engine is informed, and frees its blocks.

A 4xx is final for these parameters: whoever sent the request must change it, and ask prefill again. A 503 is not: the
same request may go to another decode worker, so the hand-off stays.
"""

import asyncio
from typing import Any, Protocol, runtime_checkable

import msgspec
from aiohttp import web

from kvferry.errors import FerryError
from kvferry.web.body_fields import Fields
from kvferry.wire.params import HandoffParams

__all__ = ["DeclinesHandoffs", "handoff_of", "remember_handoff"]

_RAW = web.RequestKey("kvferry_handoff", bytes)
_FIELD = "kv_transfer_params"
_MAX_BYTES = 1 << 20


@runtime_checkable
class DeclinesHandoffs(Protocol):
    """An engine with a connector."""

    def decline(self, handoff: HandoffParams | None, reason: str) -> None:
        """Frees the grant of the prefill engine that these parameters name. On the engine thread."""
        ...


def remember_handoff(request: web.Request, fields: Fields) -> None:
    """Keeps the parameters as they came, before anything else of the body is judged."""
    raw = fields.values.get(_FIELD)
    if raw is not None and len(raw) <= _MAX_BYTES:
        request[_RAW] = bytes(raw)


async def handoff_of(request: web.Request) -> HandoffParams | None:
    """Returns the hand-off that the request asked decode to take, whatever is wrong with it; None if there is none."""
    raw = request.get(_RAW)
    return None if raw is None else await asyncio.to_thread(_decoded, raw)


def _decoded(raw: bytes) -> HandoffParams | None:
    try:
        params = HandoffParams.from_dict(msgspec.json.decode(raw, type=dict[str, Any]))
    except (msgspec.MsgspecError, FerryError, RecursionError, UnicodeDecodeError):
        return None
    return params if params.do_remote_prefill else None
