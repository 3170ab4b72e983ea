"""What an engine fills in to say what it is: plain values, straight from its configuration. Facts are made from it.

Raw settings are welcome (`auto`, `fp8`, `torch.bfloat16`): the table of facts turns them into effective values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.settings import Role, TransferMode
from kvferry.wire.versions import PROTOCOL_MAX

__all__ = ["EngineDescription", "SpeculationFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationFacts:
    """How an engine drafts. Leave it out of the EngineDescription where it does not."""

    method: str
    """`eagle`, `eagle3`, `mtp`, `dflash`, `dspark`; `draft_model`; `ngram`, `suffix`. `deepseek_mtp` is `mtp`."""
    draft_model: str | None = None
    """Id or path of the draft model; None where the draft is part of the target's checkpoint."""
    draft_revision: str | None = None
    draft_code_revision: str | None = None
    draft_fingerprint: str | None = None
    """handshake.fingerprint of the draft's files: where it is known, a path and a name of one draft agree."""
    parallel_drafting: bool = False
    draft_kv_dtype: str | None = None
    """The override; None inherits the target's KV dtype."""
    aux_layers: Sequence[int] | None = None
    """Ids of the target's layers whose hidden states the draft reads; None: the method's own choice."""
    num_layers: int | None = None
    """Layers (MTP: modules) of the draft that keep KV."""
    num_tokens: int | None = None
    """Draft depth. Never compared (R5)."""
    attention_backend: str | None = None
    """Of the draft. Never compared (R5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """One engine: who it is, what its model is, how its cache looks. Fill in what you know; None is "not told"."""

    engine: str
    """`mini` or `vllm`: chooses the words of remedies, too."""
    engine_version: str
    role: Role
    mode: TransferMode
    protocol: int = PROTOCOL_MAX
    """The newest protocol version that this engine speaks."""
    strict: bool = False

    model_id: str
    """As the operator named it: a hub name or a path."""
    fingerprint: str | None = None
    """handshake.fingerprint of the model's files. Unknown: model id and revision are compared in its place."""
    revision: str | None = None
    tokenizer: str | None = None
    """handshake.fingerprint of tokenizer and chat template: both sides turn the same text into tokens."""
    quantization: str | None = None
    dtype: str
    """Of weights and activations; `auto` takes `checkpoint_dtype`."""
    checkpoint_dtype: str | None = None

    total_kv_heads: int
    """Of the whole model, before tensor parallelism. MLA: 1."""
    head_size: int
    hidden_layers: int
    layer_kinds: Sequence[str] = ()
    """One word a hidden layer: `full`, `window`, `mamba`, ..."""
    rope: Mapping[str, object] | None = None
    """Everything that decides how positions are turned into angles: theta, scaling, partial factor, ..."""
    window_tokens: int | None = None
    max_context_tokens: int | None = None

    kv_dtype: str = "auto"
    """`auto` takes the model's dtype."""
    kv_scales: str | None = None
    """A digest of the KV scales, or where they come from (`checkpoint`, `calculated`); None: no scales."""
    packings: Sequence[str] = ()
    """Tags of opaque packings (layout.description.Tensor.encoding) in use."""
    state_dtypes: Sequence[str] = ()
    """dtypes of recurrent states, by part: `conv=bfloat16`, `ssm=float32`."""

    attention_backend: str
    kv_layout: str | None = None
    """`NHD` or `HND`, or the engine's own word."""
    cross_layer_blocks: bool = False
    hma: bool = False
    """Hybrid memory allocator: groups of layers share physical pages."""
    block_tokens: Sequence[int] = ()
    """Tokens a block, one number a cache group."""
    layer_groups: Mapping[str, int] | None = None
    """Layer name to cache group."""
    tp: int = 1
    pp: int = 1
    cp: int = 1

    speculation: SpeculationFacts | None = None
