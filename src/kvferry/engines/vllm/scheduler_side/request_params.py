"""A vLLM request as the scheduler half sees it, and its `kv_transfer_params` as a record.

Routers that were made for vLLM's own connectors need no change: the parameters that they pass on are understood, and if
they name no transfer id (push with decode first), both sides derive the same one (wire.push_ids).
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvferry.errors import RequestError
from kvferry.ids import RequestId
from kvferry.settings import FailurePolicy, TransferMode
from kvferry.wire.params import HandoffParams
from kvferry.wire.prompt_digest import Prompt
from kvferry.wire.push_ids import ClientRequest, push_transfer_id
from kvferry.wire.salt import make_salt

__all__ = ["VllmRequest", "handoff_params", "parent_of", "prompt_of"]

_CHOICE = re.compile(r"\d+_(?P<parent>(?:chatcmpl|cmpl)-.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """A request, as connector.base.RequestView wants it. `num_prompt_tokens` excludes the back-off (R32)."""

    request_id: RequestId
    num_prompt_tokens: int
    handoff: HandoffParams | None
    prompt: Prompt
    """All tokens, with those of the back-off."""
    on_failure: FailurePolicy | None = None

    def without_handoff(self) -> "VllmRequest":
        """Returns the same request without a hand-off."""
        return replace(self, handoff=None)


def prompt_of(request: Any) -> Prompt:
    """Returns a vLLM request's prompt; its length in zeros if it consists of embeddings, which count as salt."""
    tokens = request.prompt_token_ids
    return Prompt.of([0] * int(request.num_prompt_tokens) if tokens is None else tokens, _salt_of(request))


def _salt_of(request: Any) -> str:
    """Returns what the KV of a vLLM request depends on besides its tokens, as vLLM's own block hashes have it."""
    inputs: list[object] = [
        ("mm", feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features or ()
    ]
    if request.prompt_embeds is not None:
        body = request.prompt_embeds.detach().cpu().contiguous().flatten().numpy().tobytes()
        inputs.append(("embeds", hashlib.blake2b(body, digest_size=16).hexdigest()))
    adapter = None if request.lora_request is None else str(request.lora_request.lora_name)
    return make_salt(cache_salt=request.cache_salt, adapter=adapter, inputs=inputs)


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
    if mode is TransferMode.PUSH:
        transfer = push_transfer_id(params, engine_id, ClientRequest.of_vllm(request_id))
        params = msgspec.structs.replace(params, transfer_id=transfer)
    return params


def parent_of(request_id: str) -> str | None:
    """Returns the id that the choices of one prompt share, if this is one of several choices (`n` above 1)."""
    found = _CHOICE.fullmatch(request_id)
    return None if found is None else found["parent"]
