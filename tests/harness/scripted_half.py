"""A scheduler half with a scripted board of peers, and requests of the shape that it reads."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.connector.base import EngineIdentity
from kvferry.connector.by_mode import make_scheduler
from kvferry.connector.peers import PeerStatus, PeerView
from kvferry.connector.scheduler import HandoffScheduler
from kvferry.handoff.orders import Landed
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.settings import FailurePolicy, FerrySettings, OlderPeers, TransferMode, TransferSettings
from kvferry.wire.params import HandoffParams
from kvferry.wire.prompt_digest import Prompt

TABLES = (BlockTable(group=0, first_token=0, block_ids=(4, 5)),)
T = TransferId("t-1")
R = RequestId("r-1")


@dataclass
class Request:
    request_id: RequestId = R
    num_prompt_tokens: int = 32
    handoff: HandoffParams | None = None
    on_failure: FailurePolicy | None = None
    salt: str = ""
    tokens: tuple[int, ...] = tuple(range(100, 200))

    @property
    def prompt(self) -> Prompt:
        return Prompt.of(self.tokens[: self.num_prompt_tokens], self.salt)


@dataclass
class Board:
    answer: PeerView = field(
        default_factory=lambda: PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("first-start"))
    )
    asked: list[tuple[str, str, int]] = field(default_factory=list)

    def view(self, engine: EngineId, incarnation: Incarnation | None, host: str, port: int) -> PeerView:
        self.asked.append((engine, host, port))
        return self.answer


def make(
    board: Board | None = None,
    *,
    policy: FailurePolicy = FailurePolicy.RECOMPUTE,
    tp_size: int = 1,
    mode: TransferMode = TransferMode.PULL,
    older_peers: OlderPeers = OlderPeers.COUNT,
    hash_ahead: Callable[[Prompt], None] | None = None,
) -> HandoffScheduler:
    identity = EngineIdentity(EngineId("me"), Incarnation("1"), "127.0.0.1", 5600, tp_size=tp_size)
    settings = FerrySettings(transfer=TransferSettings(on_failure=policy, mode=mode, older_peers=older_peers))
    return make_scheduler(identity, board or Board(), settings, hash_ahead=hash_ahead)


def decode_request(**changes: object) -> Request:
    params: dict[str, object] = {
        "do_remote_prefill": True,
        "transfer_mode": "pull",
        "transfer_id": T,
        "remote_engine_id": "p0",
        "remote_incarnation": "first-start",
        "remote_host": "127.0.0.1",
        "remote_port": 5601,
        "remote_num_tokens": 32,
        **changes,
    }
    return Request(handoff=HandoffParams.from_dict({k: v for k, v in params.items() if v is not None}))


def landed(stop: int = 32, note: bytes = b"") -> Landed:
    return Landed(T, RequestId("r-1"), TokenRange(16, stop), 1000, 3, 0.5, 7, note)


def started(half: HandoffScheduler, request: Request, num_cached: int = 16) -> None:
    half.on_new_request(request)
    assert half.match(request, num_cached).num_tokens == 32 - num_cached
    half.after_alloc(request, TABLES, num_cached)
    assert len(half.build_orders().fetch) == 1
