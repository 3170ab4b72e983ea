"""What prefill returns and decode is given through a router: `kv_transfer_params`, as a record.

The names in the JSON are those that existing routers read (R15); kvferry's own are beside them. A dict from outside is
turned into HandoffParams in the first function that sees it. The block ids are told for routers and logs only: decode
asks the prefill side itself for its blocks, so wrong ids in a relayed dict cannot lead to wrong tokens.
"""

import msgspec

from kvferry.errors import RequestError
from kvferry.settings import TransferMode

__all__ = ["HandoffParams"]


class HandoffParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """The parameters of one hand-off. Unknown fields are skipped."""

    do_remote_prefill: bool = False
    """To decode: the prompt was, or is being, computed by `remote_engine_id`."""
    do_remote_decode: bool = False
    """To prefill: compute the prompt only; somebody else decodes."""
    transfer_mode: TransferMode | None = None
    transfer_id: str | None = None
    """One a dispatch; made by the router or by prefill."""
    remote_engine_id: str | None = None
    remote_incarnation: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_block_ids: list[list[int]] | None = None
    """One list a cache group."""
    remote_block_first_tokens: list[int] | None = None
    """The absolute position of the first token of each list above."""
    remote_num_tokens: int | None = None
    """Prompt tokens whose KV prefill computed and offers: [0, n)."""
    tp_size: int | None = None
    pp_size: int | None = None
    first_token: int | None = None
    """The token that prefill sampled from the end of the prompt."""
    first_logprob: float | None = None
    first_top_logprobs: list[tuple[int, float]] | None = None
    """Its logprobs, if the request asked for them."""

    def to_dict(self) -> dict[str, object]:
        """As JSON-ready builtins."""
        result = msgspec.to_builtins(self)
        assert isinstance(result, dict), "a Struct becomes a dict"
        return result

    @classmethod
    def from_dict(cls, raw: object) -> "HandoffParams":
        """Check what came from outside. Raises RequestError with the path of the wrong field."""
        try:
            return msgspec.convert(raw, cls, strict=True)
        except msgspec.ValidationError as error:
            raise RequestError(f"kv_transfer_params: {error}") from error
