"""A vLLM request as the scheduler half sees it, and its `kv_transfer_params` as a record.

Routers that were made for vLLM's own connectors need no change: the parameters that they pass on are understood, and if
they name no transfer id (push with decode first), both sides derive the same one from prefill's engine and request id.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvferry.errors import RequestError
from kvferry.ids import RequestId
from kvferry.settings import FailurePolicy, TransferMode
from kvferry.wire.params import HandoffParams

__all__ = ["VllmRequest", "handoff_params"]

_SUFFIX_CHARS = 9
"""The length of the suffix that vLLM appends to a request id: `-` and 8 random characters."""


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """A request, as connector.base.RequestView wants it. `num_prompt_tokens` excludes the back-off (R32)."""

    request_id: RequestId
    num_prompt_tokens: int
    handoff: HandoffParams | None
    on_failure: FailurePolicy | None = None

    def without_handoff(self) -> "VllmRequest":
        """Returns the same request without a hand-off."""
        return replace(self, handoff=None)


def handoff_params(raw: Any, *, engine_id: str, request_id: str, mode: TransferMode) -> HandoffParams | None:
    """Reads a request's parameters; None for an ordinary request. Raises RequestError with the path of a wrong
    field.
    """
    if not raw:
        return None
    if not isinstance(raw, Mapping):
        raise RequestError(f"kv_transfer_params: Expected `object`, got `{type(raw).__name__}`")
    # The block ids are for routers and logs. Other connectors write them in other shapes, and prefill is asked anyway.
    fields = {key: value for key, value in raw.items() if key not in ("remote_block_ids", "remote_block_first_tokens")}
    if fields.get("transfer_mode") is None:
        fields.pop("transfer_mode", None)
    params = HandoffParams.from_dict(fields)
    if params.transfer_id is None and mode is TransferMode.PUSH:
        transfer = _push_transfer(params, engine_id, request_id)
        params = msgspec.structs.replace(params, transfer_id=transfer)
    return params


def _push_transfer(params: HandoffParams, engine_id: str, request_id: str) -> str | None:
    if params.do_remote_decode:
        return f"{engine_id}/{request_id[:-_SUFFIX_CHARS] if _has_suffix(request_id) else request_id}"
    if params.remote_engine_id is not None and params.remote_request_id is not None:
        remote = params.remote_request_id
        return f"{params.remote_engine_id}/{remote[:-_SUFFIX_CHARS] if _has_suffix(remote) else remote}"
    return None


def _has_suffix(request_id: str) -> bool:
    """Whether an id ends as vLLM's internal ids do. A client's id that happens to look so is cut alike on both
    sides.
    """
    tail = request_id[-_SUFFIX_CHARS:]
    return len(tail) == _SUFFIX_CHARS and tail[0] == "-" and all(c in "0123456789abcdef" for c in tail[1:])
