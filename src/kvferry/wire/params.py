"""`kv_transfer_params` as a record: what prefill returns and decode receives through a router.

The names in the JSON are those that existing routers read (R15), and some of kvferry's own. The first function that
receives a dict from outside turns it into HandoffParams. The block ids are there for routers and logs only: decode asks
prefill itself for its blocks, so wrong ids in a relayed dict cannot lead to wrong tokens.
"""

from typing import Annotated

import msgspec

from kvferry.errors import RequestError
from kvferry.settings import TransferMode
from kvferry.wire.handoff_messages import MAX_ID_CHARS

__all__ = ["MAX_SOURCES", "HandoffParams", "Source"]

MAX_SOURCES = 8
"""The most engines that a request may fetch from."""

_Id = Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARS)]

_INT32 = (-(2**31), 2**31 - 1)
_BOUNDS = {
    "remote_port": (0, 65535),
    "remote_num_tokens": _INT32,
    "tp_size": _INT32,
    "pp_size": _INT32,
    "first_token": _INT32,
}
"""The range of each number: no router can lead a peer beyond what its tensors and sockets hold."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that may hold KV of the prompt's first tokens (R40). It is a hint: the engine is asked."""

    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    incarnation: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    num_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    """About how many tokens it holds; None if that is not known."""


class HandoffParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """The parameters of one hand-off. Unknown fields are skipped."""

    do_remote_prefill: bool = False
    """Tells decode that `remote_engine_id` has computed the prompt, or is computing it."""
    do_remote_decode: bool = False
    """Tells prefill to compute only the prompt, because another engine decodes."""
    transfer_mode: TransferMode | None = None
    transfer_id: _Id | None = None
    """One per dispatch, made by the router or by prefill."""
    remote_engine_id: str | None = None
    remote_incarnation: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_block_ids: list[list[int]] | None = None
    """One list per cache group."""
    remote_block_first_tokens: list[int] | None = None
    """The absolute position of the first token of each list above."""
    remote_num_tokens: int | None = None
    """The number n of prompt tokens whose KV prefill computed and offers: [0, n)."""
    remote_prompt_tokens: int | None = None
    """The length of the prompt that prefill computed, with what it leaves to decode."""
    remote_prompt_digest: str | None = None
    """The digest of that prompt (wire.prompt_digest), in hexadecimal. It is a hint: prefill compares the prompts itself
    before it hands anything over. Only for `first_token`, which is of no use to another prompt, is it all there is."""
    tp_size: int | None = None
    pp_size: int | None = None
    first_token: int | None = None
    """The first token of the answer, which prefill sampled at the end of the prompt."""
    first_logprob: float | None = None
    first_top_logprobs: list[tuple[int, float]] | None = None
    """The likeliest tokens at that position and their log probabilities, if the request asked for them."""
    sources: Annotated[list[Source], msgspec.Meta(max_length=MAX_SOURCES)] | None = None
    """Engines to fetch the prompt's first tokens from, the best one first, instead of computing them."""

    def to_dict(self) -> dict[str, object]:
        """Returns the parameters as a dict that is ready for JSON."""
        result = msgspec.to_builtins(self)
        assert isinstance(result, dict), "a Struct becomes a dict"
        if self.sources is None:
            del result["sources"]  # only a request has them
        return result

    @classmethod
    def from_dict(cls, raw: object) -> "HandoffParams":
        """Checks a dict from outside. Raises RequestError with the path of the wrong field."""
        try:
            params = msgspec.convert(raw, cls, strict=True)
        except msgspec.ValidationError as error:
            raise RequestError(f"kv_transfer_params: {error}") from error
        for name, (low, high) in _BOUNDS.items():
            value = getattr(params, name)
            if value is not None and not low <= value <= high:
                raise RequestError(f"kv_transfer_params: {name}={value!r} is out of range: {low} to {high} is possible")
        return params
