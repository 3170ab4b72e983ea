"""Reads vLLM's description of its cache into plain records. It imports no vllm: objects are known by class names.

A cache that cannot be described is refused here, when the worker starts, with the setting to change.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvferry.engines.vllm.describe.block_tables import GroupForm
from kvferry.engines.vllm.describe.cache_layout import AttentionForm, LayerView, Memory, StateForm
from kvferry.engines.vllm.describe.head_packing import HeadPacking
from kvferry.engines.vllm.describe.recurrent_states import StateArray, state_pieces
from kvferry.errors import ConfigError
from kvferry.layout.builders import Heads, head_range
from kvferry.layout.description import CacheKind, MemoryKind, Rank

__all__ = ["ENCODINGS", "RankView", "group_forms", "is_kind", "layer_kinds", "layer_specs", "layer_views"]

ENCODINGS = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float8_e4m3fn": "fp8_e4m3",
    "torch.float8_e5m2": "fp8_e5m2",
}
_PLAIN_QUANT = ("NONE", "FP8_PER_TENSOR")
_HMA_OFF = "start both sides with --disable-hybrid-kv-cache-manager"

PackingOf = Callable[[str, Any, int], HeadPacking | None]
"""Maps (vLLM's layer name, its spec, tokens per kernel block) to the packing of a head's block; None: token by token.
"""


class RankView:
    """What one worker knows about itself: its rank, and the model's numbers that a cache spec does not hold."""

    def __init__(
        self,
        rank: Rank,
        *,
        kv_dtype: str,
        total_kv_heads: int,
        draft_kv_heads: int | None = None,
        mamba_groups: int | None = None,
        channels_first: bool = False,
    ) -> None:
        self.rank = rank
        self.kv_dtype = kv_dtype
        self.total_kv_heads = total_kv_heads
        self.draft_kv_heads = draft_kv_heads
        self.mamba_groups = mamba_groups
        self.channels_first = channels_first


def is_kind(spec: Any, name: str) -> bool:
    """Whether `spec` is an instance of vLLM's class `name`, or of a class derived from it."""
    return any(base.__name__ == name for base in type(spec).__mro__)


def layer_specs(config: Any) -> dict[str, tuple[int, Any]]:
    """Maps vLLM's layer name to (index among the groups that are handed over, the layer's own spec)."""
    found: dict[str, tuple[int, Any]] = {}
    for index, group in enumerate(config.transfer_groups):
        each = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {}
        for name in group.layer_names:
            found[name] = (index, each.get(name, group.kv_cache_spec))
    return found


def layer_kinds(config: Any) -> dict[str, str]:
    """Maps vLLM's layer name to `attn` or `mamba`, for canonical names."""
    return {name: "mamba" if is_kind(spec, "MambaSpec") else "attn" for name, (_, spec) in layer_specs(config).items()}


def group_forms(config: Any, kernel_tokens: Sequence[int | None]) -> tuple[GroupForm, ...]:
    """Returns the groups that are handed over. `kernel_tokens` has None for a group of which this rank has no layer.

    Raises ConfigError for a kind of cache that cannot be handed over.
    """
    forms = []
    for group, measured in zip(config.transfer_groups, kernel_tokens, strict=True):
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        spec = next(iter(specs.values())) if specs else group.kv_cache_spec
        name = type(spec).__name__
        if getattr(group, "host_resident", False):
            raise ConfigError("a cache group in host memory (HiSparse) cannot be handed over: turn HiSparse off")
        if is_kind(spec, "MambaSpec"):
            scratch = int(spec.num_speculative_blocks)
            forms.append(GroupForm(kind=CacheKind.STATE, block_tokens=0, kernel_tokens=0, scratch_blocks=scratch))
            continue
        if getattr(spec, "tokens_per_state", 1) != 1:
            raise ConfigError(f"cache kind {name!r} keeps one state for several tokens: it cannot be handed over")
        tokens = int(spec.block_size)
        kernel = measured or tokens
        if is_kind(spec, "RSWASpec") or is_kind(spec, "CircularBufferSpec"):
            raise ConfigError(f"cache kind {name!r} drops tokens in the middle of a request: it cannot be handed over")
        if is_kind(spec, "SlidingWindowSpec"):
            window = int(spec.sliding_window)
            forms.append(
                GroupForm(kind=CacheKind.WINDOW, block_tokens=tokens, kernel_tokens=kernel, window_tokens=window)
            )
        elif is_kind(spec, "FullAttentionSpec"):
            # Without the hybrid allocator one group mixes windowed and full layers; all of it is handed over.
            forms.append(GroupForm(kind=CacheKind.FULL, block_tokens=tokens, kernel_tokens=kernel))
        else:
            raise ConfigError(f"cache kind {name!r} cannot be handed over: {_HMA_OFF}")
    return tuple(forms)


def layer_views(
    config: Any,
    caches: Mapping[str, Any],
    names: Mapping[str, str],
    view: RankView,
    packing_of: PackingOf,
) -> list[LayerView]:
    """Returns every layer of this rank that owns a cache, without layers that share one. Raises ConfigError."""
    block_strides = {name: int(t.block_stride) for t in config.kv_cache_tensors for name in t.layers}
    views = []
    for name, (group, spec) in layer_specs(config).items():
        if name not in caches:
            continue
        tensor = caches[name]
        if is_kind(spec, "MambaSpec"):
            views.append(_state_view(config, name, names[name], group, spec, tensor, view, block_strides[name]))
        else:
            views.append(_attention_view(name, names[name], group, spec, tensor, view, packing_of))
    return views


def _memory(tensor: Any) -> Memory:
    storage = tensor.untyped_storage()
    device = tensor.device
    if device.type == "cpu":
        return Memory(storage.data_ptr(), storage.nbytes())
    return Memory(storage.data_ptr(), storage.nbytes(), MemoryKind.VRAM, device.index or 0)


def _state_view(
    config: Any, name: str, layer: str, group: int, spec: Any, tensor: Any, view: RankView, block_stride: int
) -> LayerView:
    arrays = [
        StateArray(tuple(int(n) for n in shape), dtype.itemsize, ENCODINGS.get(str(dtype), str(dtype)))
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    kind = str(getattr(spec.mamba_type, "name", spec.mamba_type))
    replicated = bool(getattr(spec, "tp_replicated", False))
    rank = view.rank
    pieces = state_pieces(
        kind,
        arrays,
        tp_rank=0 if replicated else rank.tp_rank,
        tp_size=1 if replicated else rank.tp_size,
        groups=view.mamba_groups,
        channels_first=view.channels_first,
    )
    return LayerView(
        layer=layer,
        group=group,
        memory=_memory(tensor),
        address=int(tensor.data_ptr()),
        num_blocks=int(config.num_blocks),
        block_stride=block_stride,
        form=StateForm(pieces),
    )


def _attention_view(
    name: str, layer: str, group: int, spec: Any, tensor: Any, view: RankView, packing_of: PackingOf
) -> LayerView:
    if len(tensor.shape) != 4:
        raise ConfigError(f"the cache of layer {name!r} has shape {tuple(tensor.shape)!r}: it cannot be described")
    blocks, heads, tokens, content = (int(n) for n in tensor.shape)
    size = int(tensor.element_size())
    block_stride, head_stride, token_stride, content_stride = (int(n) * size for n in tensor.stride())
    if content_stride != size:
        raise ConfigError(f"the cache of layer {name!r} has content {content_stride} bytes apart: it is not described")
    return LayerView(
        layer=layer,
        group=group,
        memory=_memory(tensor),
        address=int(tensor.data_ptr()),
        num_blocks=blocks,
        block_stride=block_stride,
        head_stride=head_stride,
        token_stride=token_stride,
        tokens=tokens,
        content_bytes=content * size,
        form=_form(name, layer, spec, view, size, heads, tokens, content, packing_of),
    )


def _form(
    name: str,
    layer: str,
    spec: Any,
    view: RankView,
    size: int,
    heads: int,
    tokens: int,
    content: int,
    packing_of: PackingOf,
) -> AttentionForm:
    latent = is_kind(spec, "MLAAttentionSpec") or is_kind(spec, "SlidingWindowMLASpec")
    quant = str(getattr(spec.kv_quant_mode, "name", spec.kv_quant_mode))
    fp8 = view.kv_dtype if view.kv_dtype.startswith("fp8") else ""
    encoding = fp8 or ENCODINGS.get(str(spec.dtype), str(spec.dtype).removeprefix("torch."))
    opaque = ""
    if quant not in _PLAIN_QUANT or (getattr(spec, "state_content_bytes", None) is not None and not latent):
        opaque = f"vllm-{quant.lower()}-{getattr(spec, 'cache_dtype_str', None) or encoding}-{content * size}"
    elif latent and content * size != spec.head_size * size:
        opaque = f"vllm-mla-{getattr(spec, 'cache_dtype_str', None) or encoding}-{content * size}"
    size_v = 0 if latent else content - int(spec.head_size)
    return AttentionForm(
        heads=Heads(1, 0, 1) if latent else _heads(name, layer, heads, view),
        encoding=encoding,
        element_bytes=size,
        head_size=content if latent else int(spec.head_size),
        head_size_v=size_v,
        latent=latent,
        packing=None if latent or opaque else packing_of(name, spec, tokens),
        opaque=opaque,
    )


def _heads(name: str, layer: str, held: int, view: RankView) -> Heads:
    """Returns which of the layer's heads this rank holds: an even share, or one of which several ranks hold copies."""
    rank = view.rank
    total = view.draft_kv_heads if layer.startswith("draft.") and view.draft_kv_heads else view.total_kv_heads
    total = held * rank.tp_size if held > 1 else min(rank.tp_size, total)
    heads = head_range(total, rank.tp_rank, rank.tp_size)
    if len(heads) != held:
        raise ConfigError(
            f"layer {name!r} has {held} heads on a rank of {rank.tp_size}, of {total}: it is not known which. "
            "Use a --tensor-parallel-size that divides the KV heads"
        )
    return heads
