"""The scheduler half in vLLM's terms, with a manager and requests that behave like vLLM's; vLLM is not needed."""

from dataclasses import dataclass, field
from typing import Any

from kvferry.connector.base import EngineIdentity, Failed, Landed, StepReport
from kvferry.connector.by_mode import make_scheduler
from kvferry.connector.peers import PeerStatus, PeerView
from kvferry.engines.vllm.describe.block_tables import GroupForm
from kvferry.engines.vllm.scheduler_side.scheduler import VllmScheduler
from kvferry.ids import EngineId, Incarnation, RequestId, TransferId
from kvferry.layout.blocks import TokenRange
from kvferry.layout.description import CacheKind
from kvferry.settings import FailurePolicy, FerrySettings, TransferMode, TransferSettings

FULL = GroupForm(kind=CacheKind.FULL, block_tokens=16, kernel_tokens=16)
STATE = GroupForm(kind=CacheKind.STATE, block_tokens=0, kernel_tokens=0)


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0


@dataclass
class Pool:
    """Counts references as vLLM's BlockPool does; a block without one can be allocated."""

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "freed twice"
            block.ref_cnt -= 1


@dataclass
class Blocks:
    blocks: tuple[list[Block], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple([block.block_id for block in group] for group in self.blocks)


@dataclass
class Manager:
    held: dict[str, tuple[list[Block], ...]] = field(default_factory=dict)
    block_pool: Pool = field(default_factory=Pool)

    def allocate(self, request_id: str, *groups: int) -> Blocks:
        fresh = tuple([Block(10 * g + i + 1, 1) for i in range(count)] for g, count in enumerate(groups))
        self.held[request_id] = fresh
        return Blocks(fresh)

    def get_blocks(self, request_id: str) -> Blocks:
        return Blocks(self.held.get(request_id, ([],)))

    def pop_blocks_for_free(self, request: Any) -> list[Block]:
        return [block for group in self.held.pop(request.request_id, ()) for block in group]

    def free(self, request_id: str) -> None:
        self.block_pool.free_blocks([block for group in self.held.pop(request_id, ()) for block in group])


@dataclass
class Request:
    request_id: str
    kv_transfer_params: Any
    prompt_token_ids: list[int] = field(default_factory=lambda: list(range(40)))
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    max_tokens: int = 16
    skips_cache: bool = False
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Any = None
    prompt_embeds: Any = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self._all_token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    def get_skip_reading_prefix_cache(self) -> bool:
        return self.skips_cache


class Board:
    """The handshake's answer, as the test sets it."""

    def __init__(self) -> None:
        self.answer = PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("i"))

    def view(self, engine: EngineId, incarnation: Incarnation | None, host: str, port: int) -> PeerView:
        return self.answer


class Engine:
    """A scheduler half of one rank."""

    def __init__(
        self,
        mode: TransferMode = TransferMode.PULL,
        policy: FailurePolicy = FailurePolicy.RECOMPUTE,
        forms: tuple[GroupForm, ...] = (FULL,),
        backoff: int = 0,
    ) -> None:
        settings = FerrySettings(transfer=TransferSettings(mode=mode, on_failure=policy, first_token=False))
        self.board = Board()
        me = EngineIdentity(EngineId("me"), Incarnation("x"), "127.0.0.1", 1)
        self.half = VllmScheduler(
            make_scheduler(me, self.board, settings),
            forms,
            engine_id="me",
            mode=mode,
            policy=policy,
            backoff=backoff,
            progress=True,
            group_ids=range(len(forms)),
        )
        self.manager = Manager()
        self.half.bind(self.manager)

    def orders(self, *preempted: str) -> Any:
        self.half.prepare(preempted)
        return self.half.build_orders()


def from_prefill(transfer: str = "t1", **more: Any) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_engine_id": "p",
        "remote_host": "127.0.0.1",
        "remote_port": 5,
        **more,
    }


def landed(transfer: str = "t1", request: str = "r", stop: int = 40) -> StepReport:
    return StepReport(landed=(Landed(TransferId(transfer), RequestId(request), TokenRange(0, stop), 1, 1, 0.1),))


def failed(transfer: str = "t1", request: str = "r", *, released: bool = False) -> StepReport:
    gone = frozenset({TransferId(transfer)}) if released else frozenset()
    bad = Failed(TransferId(transfer), RequestId(request), "the peer is gone", TokenRange(0, 0))
    return StepReport(failed=(bad,), released=gone)


def released(transfer: str = "t1") -> StepReport:
    return StepReport(released=frozenset({TransferId(transfer)}))


def waiting(engine: Engine, params: dict[str, Any] | None = None, cached: int = 0) -> Request:
    """Makes a decode request that waits for its KV in its own blocks."""
    request = Request("r", params or from_prefill())
    engine.half.on_new_request(request)
    num_tokens, later = engine.half.get_num_new_matched_tokens(request, cached)
    assert num_tokens
    assert later
    blocks = engine.manager.allocate("r", *(3 for _ in engine.half._forms))
    engine.half.update_state_after_alloc(request, blocks, num_tokens)
    request.num_computed_tokens = cached + num_tokens
    return request
