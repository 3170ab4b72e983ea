"""Engines that fit each other, so that a test can change one thing of one."""

from dataclasses import replace

from kvferry.handshake.engine_description import EngineDescription, SpeculationFacts
from kvferry.handshake.exchange import Fit, LocalSide
from kvferry.handshake.facts import Facts
from kvferry.settings import Role, TransferMode
from kvferry.wire.hello import Hello, RankHello
from kvferry.wire.versions import ProtocolRange

EAGLE = SpeculationFacts(
    method="eagle3",
    draft_model="org/draft",
    draft_revision="v1",
    draft_code_revision="c1",
    parallel_drafting=False,
    draft_kv_dtype=None,
    aux_layers=(2, 16, 29),
    num_layers=1,
    num_tokens=3,
    attention_backend="TORCH_SDPA",
)

ENGINE = EngineDescription(
    engine="mini",
    engine_version="0.1.0",
    role=Role.PREFILL,
    mode=TransferMode.PULL,
    model_id="org/model",
    fingerprint="kf1-0123456789abcdef",
    revision="r1",
    tokenizer="kf1-tokens",
    dtype="auto",
    checkpoint_dtype="torch.bfloat16",
    total_kv_heads=8,
    head_size=128,
    hidden_layers=32,
    layer_kinds=("full",) * 16 + ("window",) * 16,
    rope={"rope_type": "llama3", "rope_theta": 500000.0},
    window_tokens=512,
    max_context_tokens=8192,
    kv_dtype="auto",
    attention_backend="torch_sdpa",
    kv_layout="NHD",
    block_tokens=(16, 16),
    layer_groups={"layers.0.attn": 0, "layers.1.attn": 1},
    speculation=EAGLE,
)


def facts(**changes: object) -> Facts:
    """Returns the facts of ENGINE with changes."""
    return Facts.from_engine(replace(ENGINE, **changes))  # type: ignore[arg-type]  # names are checked by replace


def decode_facts(**changes: object) -> Facts:
    """Returns the facts of a decode engine with changes."""
    return facts(**{"role": Role.DECODE, **changes})


def eagle(**changes: object) -> SpeculationFacts:
    """Returns EAGLE with changes."""
    return replace(EAGLE, **changes)  # type: ignore[arg-type]  # names are checked by replace


def hello(engine: str, incarnation: str, role: Role, num_ranks: int = 1) -> Hello:
    """Returns a payload whose layouts are opaque bytes."""
    ranks = tuple(
        RankHello(layout=b"layout-%d" % i, transport="nixl", transport_metadata=b"meta") for i in range(num_ranks)
    )
    return Hello(
        engine=engine,
        incarnation=incarnation,
        role=role,
        ranks=ranks,
        capabilities=("kv_digest", f"only_{role}"),
        host="127.0.0.1",
        port=7000,
    )


def fits(peer: Hello) -> None:
    """Accepts any layouts."""


def side(
    engine: str,
    incarnation: str = "i1",
    role: Role = Role.PREFILL,
    *,
    fit: Fit = fits,
    protocols: ProtocolRange | None = None,
    **changes: object,
) -> LocalSide:
    """Returns one engine's side of a handshake."""
    return LocalSide(
        facts=facts(role=role, **changes),
        hello=hello(engine, incarnation, role),
        fit=fit,
        protocols=protocols or ProtocolRange(),
    )
