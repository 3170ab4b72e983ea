"""The parameters of hand-offs, as far as the router makes or reads them (R15, R16)."""

import secrets

import msgspec

from kvferry.errors import MalformedMessage
from kvferry.router.fleet.worker import Learned, Worker
from kvferry.settings import TransferMode

__all__ = ["Told", "can_push", "learned_from", "new_transfer_id", "push_params", "told_in"]


class Told(msgspec.Struct, frozen=True):
    """What prefill's parameters say, as far as the router reads them."""

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
    """One a dispatch."""
    return f"xfer-{secrets.token_hex(12)}"


def told_in(params: msgspec.Raw) -> Told:
    """Raises MalformedMessage for what cannot be read."""
    try:
        return msgspec.json.decode(params, type=Told)
    except msgspec.MsgspecError as error:
        raise MalformedMessage(f"kv_transfer_params that cannot be read: {error}") from error


def learned_from(told: Told) -> Learned:
    """What a worker says of itself in its parameters."""
    return Learned(
        mode=told.transfer_mode,
        engine=told.remote_engine_id or "",
        incarnation=told.remote_incarnation,
        host=told.remote_host or "",
        port=told.remote_port or 0,
        tp_size=told.tp_size or 1,
        pp_size=told.pp_size or 1,
        dcp_size=told.dcp_size or 1,
    )


def can_push(prefill: Worker, decode: Worker) -> bool:
    """Both are in push mode, and decode can be told where prefill is before prefill has answered."""
    if prefill.info is None or TransferMode.PUSH not in (prefill.mode, decode.mode):
        return False
    return bool(prefill.info.side_channel.port) or (prefill.learned is not None and prefill.learned.has_address)


def push_params(prefill: Worker, transfer_id: str, request_id: str, *, chat: bool) -> dict[str, object]:
    """What decode is told in push mode, before prefill has answered.

    To our own workers the transfer id says which hand-off it is. Stock vLLM matches the ids that its servers make of
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
    assert learned is not None, "a vLLM worker is pushed to once its address is learned"
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
