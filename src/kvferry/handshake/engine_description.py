"""The description that an engine gives of itself: plain values from its configuration, from which facts are made.

Raw settings (`auto`, `fp8`, `torch.bfloat16`) are fine: the table of facts turns them into effective values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.settings import Role, TransferMode
from kvferry.wire.versions import PROTOCOL_MAX

__all__ = ["EngineDescription", "SpeculationFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationFacts:
    """How an engine drafts. EngineDescription.speculation is None if it does not."""

    method: str
    """The method: `eagle`, `eagle3`, `mtp`, `dflash`, `dspark`, `draft_model`, `ngram` or `suffix`. Every name that
    ends in `mtp` counts as `mtp`."""
    draft_model: str | None = None
    """The id or path of the draft model; None if the draft is part of the target's checkpoint."""
    draft_revision: str | None = None
    draft_code_revision: str | None = None
    draft_fingerprint: str | None = None
    """The fingerprint of the draft's files (handshake.fingerprint). If both sides know it, a path and a name of one
    draft agree."""
    parallel_drafting: bool = False
    draft_kv_dtype: str | None = None
    """An override of the draft's KV dtype; None inherits the target's."""
    aux_layers: Sequence[int] | None = None
    """The ids of the target's layers whose hidden states the draft reads; None for the method's own choice."""
    num_layers: int | None = None
    """The number of the draft's layers (for MTP: modules) that keep KV."""
    num_tokens: int | None = None
    """The number of drafts per step. It never has to match (R5)."""
    attention_backend: str | None = None
    """The draft's attention backend. It never has to match (R5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """One engine: its name, its model, and the form of its cache. Fill in what is known; None means "not reported"."""

    engine: str
    """The kind of engine, `mini` or `vllm`. It also decides how remedies are worded."""
    engine_version: str
    role: Role
    mode: TransferMode
    protocol: int = PROTOCOL_MAX
    """The newest protocol version that this engine speaks."""
    strict: bool = False

    model_id: str
    """The model as the operator named it: a hub name or a path."""
    fingerprint: str | None = None
    """The fingerprint of the model's files (handshake.fingerprint). If it is not known, model id and revision are
    compared instead."""
    revision: str | None = None
    tokenizer: str | None = None
    """The fingerprint of tokenizer and chat template. If it is equal, both sides turn text into the same tokens."""
    quantization: str | None = None
    dtype: str
    """The dtype of weights and activations; `auto` stands for `checkpoint_dtype`."""
    checkpoint_dtype: str | None = None

    total_kv_heads: int
    """The number of KV heads of the whole model, before tensor parallelism; 1 for MLA."""
    head_size: int
    hidden_layers: int
    layer_kinds: Sequence[str] = ()
    """One word per hidden layer: `full`, `window`, `mamba`, ..."""
    rope: Mapping[str, object] | None = None
    """Everything that decides how positions become angles: theta, scaling, partial factor, ..."""
    window_tokens: int | None = None
    max_context_tokens: int | None = None

    kv_dtype: str = "auto"
    """The dtype of the cache; `auto` stands for the model's dtype."""
    kv_scales: str | None = None
    """A digest of the KV scales, or where they come from (`checkpoint`, `calculated`); None if there are no scales."""
    packings: Sequence[str] = ()
    """The tags of the opaque packings in use (layout.description.Tensor.encoding)."""
    state_dtypes: Sequence[str] = ()
    """The dtypes of recurrent states, per part: `conv=bfloat16`, `ssm=float32`."""

    attention_backend: str
    kv_layout: str | None = None
    """`NHD` or `HND`, or the engine's own name for its layout."""
    cross_layer_blocks: bool = False
    hma: bool = False
    """Whether the hybrid memory allocator is on: groups of layers share physical pages."""
    block_tokens: Sequence[int] = ()
    """The number of tokens per block, one number per cache group."""
    layer_groups: Mapping[str, int] | None = None
    """Maps a layer's name to its cache group."""
    tp: int = 1
    pp: int = 1
    cp: int = 1

    speculation: SpeculationFacts | None = None
