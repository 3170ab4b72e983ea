"""The transfer id of a push whose router names none: prefill and decode derive the same one from what both know.

A router for vLLM's own push connector sends both requests with one X-Request-Id, and gives decode prefill's address and
a `remote_request_id`: that X-Request-Id as it is (vllm-router, vLLM's proxies), or the id that a vLLM server makes of
it. The id derived here is "<prefill's engine>/<X-Request-Id>/<index of the prompt>" for all of these spellings, on both
endpoints, and for any number of choices. A router that names a `transfer_id` (kvferry's, llm-d's) needs none of this.
"""

import hashlib
import re
from dataclasses import dataclass

from kvferry.wire.handoff_messages import MAX_ID_CHARS
from kvferry.wire.params import HandoffParams

__all__ = ["ClientRequest", "push_transfer_id"]

_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
"""vLLM appends it to every id, unless VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set."""
_VLLM_ID = re.compile(r"(?:\d+_)?(?:chatcmpl-(?P<chat>.+)|cmpl-(?P<completion>.+)-(?P<prompt>\d+))", re.DOTALL)
"""An optional index of the choice, then the endpoint, the X-Request-Id, and the index of the prompt."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One prompt of a client's request."""

    request_id: str
    """The X-Request-Id."""
    prompt: int = 0
    """The index of the prompt within the request."""

    @classmethod
    def of_vllm(cls, vllm_id: str) -> "ClientRequest":
        """Reads the id that a vLLM server has given to a request, or to one choice of it. Any other id is taken as
        it is.
        """
        found = _VLLM_ID.fullmatch(_RANDOM_SUFFIX.sub("", vllm_id))
        if found is None:
            return cls(vllm_id)
        return cls(found["chat"] or found["completion"], int(found["prompt"] or 0))


def push_transfer_id(params: HandoffParams, engine: str, own: ClientRequest) -> str | None:
    """Returns the id of this request's hand-off, or None if the parameters do not say enough.

    `engine` is the engine that has received the request, `own` the request as this engine knows it.
    """
    if params.transfer_id:
        return params.transfer_id
    if params.do_remote_decode:
        return _joined(engine, own)
    remote = params.remote_request_id
    if not params.do_remote_prefill or params.remote_engine_id is None or remote is None:
        return None
    # If both requests carry one X-Request-Id, this request's own id says which of the prompts it is.
    named = own if remote == own.request_id else ClientRequest.of_vllm(remote)
    return _joined(params.remote_engine_id, own if named.request_id == own.request_id else named)


def _joined(engine: str, request: ClientRequest) -> str:
    name = f"{engine}/{request.request_id}/{request.prompt}"
    if len(name) <= MAX_ID_CHARS:
        return name
    return f"push-{hashlib.blake2b(name.encode(), digest_size=20).hexdigest()}"
