"""A request's `kv_transfer_params` as a record; in push with the transfer id that both workers derive."""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.settings import TransferMode
from kvferry.wire.params import HandoffParams
from kvferry.wire.push_ids import ClientRequest, push_transfer_id

__all__ = ["read_handoff"]


def read_handoff(
    raw: Mapping[str, Any] | None, *, request_id: str, engine: str, mode: str | None
) -> HandoffParams | None:
    """Returns the parameters of a request, or None for an ordinary one. Raises RequestError with a wrong field's path.

    `request_id` is the request's X-Request-Id; `engine` and `mode` describe this worker.
    """
    if raw is None:
        return None
    params = HandoffParams.from_dict(raw)
    if mode != TransferMode.PUSH:
        return params
    transfer = push_transfer_id(params, engine, ClientRequest(request_id))
    return msgspec.structs.replace(
        params, transfer_id=transfer, transfer_mode=params.transfer_mode or TransferMode.PUSH
    )
