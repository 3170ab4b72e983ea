"""The `kv_transfer_params` of hand-offs: the ones that prefill returns, and the ones that the router makes for decode.

In pull mode decode gets the bytes that prefill returned. In push mode the router writes the parameters itself, before
prefill has answered.
"""

import secrets
from dataclasses import dataclass

import msgspec

from kvferry.errors import MalformedMessage
from kvferry.router.fleet.worker import Learned, Worker
from kvferry.settings import TransferMode

__all__ = [
    "PrefillOutcome", "ReturnedParams", "can_push", "identity_in", "new_transfer_id", "push_params", "read_params",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrefillOutcome:
    """The outcome of a request's prefill: a hand-off, or the reason why there is none."""

    prefill: Worker | None = None
    params: msgspec.Raw | None = None
    reason: str = ""
    local_prefill: bool = False
    """True if decode computes the prompt by choice."""


class ReturnedParams(msgspec.Struct, frozen=True):
    """The parameters that prefill returned, as far as the router reads them."""

    transfer_mode: TransferMode | None = None
    transfer_id: str | None = None
    remote_engine_id: str | None = None
    remote_incarnation: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    dcp_size: int | None = None
    first_token: int | None = None


def new_transfer_id() -> str:
    """Returns a new transfer id. Each dispatch to a prefill worker has its own."""
    return f"xfer-{secrets.token_hex(12)}"


def read_params(params: msgspec.Raw) -> ReturnedParams:
    """Decodes prefill's parameters. Raises MalformedMessage if they cannot be read."""
    try:
        return msgspec.json.decode(params, type=ReturnedParams)
    except msgspec.MsgspecError as error:
        raise MalformedMessage(f"kv_transfer_params that cannot be read: {error}") from error


def identity_in(params: ReturnedParams) -> Learned:
    """Returns what a worker's parameters say about the worker itself."""
    return Learned(
        mode=params.transfer_mode,
        engine=params.remote_engine_id or "",
        incarnation=params.remote_incarnation,
        host=params.remote_host or "",
        port=params.remote_port or 0,
        tp_size=params.tp_size or 1,
        pp_size=params.pp_size or 1,
        dcp_size=params.dcp_size or 1,
    )


def can_push(prefill: Worker, decode: Worker) -> bool:
    """True if a worker is in push mode and prefill's address is known, so that decode can register before prefill has
    answered."""
    if prefill.info is None or TransferMode.PUSH not in (prefill.mode, decode.mode):
        return False
    return bool(prefill.info.side_channel.port) or (prefill.learned is not None and prefill.learned.has_address)


def push_params(prefill: Worker, transfer_id: str, request_id: str, *, chat: bool) -> dict[str, object]:
    """Returns the parameters for decode in push mode, before prefill has answered.

    kvferry's own workers find the hand-off by its transfer id. Stock vLLM matches the ids that its servers derive from
    X-Request-Id, and its decode side reads the sizes without a default.
    """
    assert prefill.info is not None, "only workers that have answered are picked"
    common: dict[str, object] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_mode": TransferMode.PUSH,
        "transfer_id": transfer_id,
    }
    if prefill.info.kind != "vllm":
        return common | {
            "remote_engine_id": prefill.info.engine,
            "remote_incarnation": prefill.info.incarnation,
            "remote_host": prefill.info.side_channel.host,
            "remote_port": prefill.info.side_channel.port,
        }
    learned = prefill.learned
    assert learned is not None, "a vLLM worker is pushed to only after its address was learned"
    incarnation = {} if learned.incarnation is None else {"remote_incarnation": learned.incarnation}
    return (
        common
        | incarnation
        | {
            "remote_engine_id": learned.engine,
            "remote_host": learned.host,
            "remote_port": learned.port,
            "remote_request_id": f"chatcmpl-{request_id}" if chat else f"cmpl-{request_id}-0",
            "tp_size": learned.tp_size,
            "pp_size": learned.pp_size,
            "dcp_size": learned.dcp_size,
        }
    )
