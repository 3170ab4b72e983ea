"""Describes vLLM's cache of one rank as a CacheLayout, from plain records about each layer.

vLLM allocates one storage for all layers. A layer is a view [blocks, heads, tokens, content], where content is the key
followed by the value of one head of one token; the strides say the rest (LBHNC, LBNHC, BLHNC, ...). Cache groups share
the storage from byte 0 on: a block id belongs to one group at a time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.engines.vllm.describe.block_tables import GroupForm
from kvferry.engines.vllm.describe.head_packing import HeadPacking
from kvferry.engines.vllm.describe.recurrent_states import StatePiece
from kvferry.layout.builders import Heads
from kvferry.layout.description import Axis, CacheLayout, MemoryKind, Paging, Rank, Region, Tensor

__all__ = ["AttentionForm", "LayerView", "Memory", "StateForm", "describe_cache"]


@dataclass(frozen=True, slots=True)
class Memory:
    """The storage that a view points into."""

    address: int
    num_bytes: int
    kind: MemoryKind = MemoryKind.DRAM
    device: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """The meaning of the content of an attention layer's view."""

    heads: Heads
    """The heads of the whole model, and which of them this rank holds."""
    encoding: str
    element_bytes: int
    head_size: int
    """The number of elements of a key, or, for MLA, of the latent with its rotary part."""
    head_size_v: int
    latent: bool = False
    """MLA: one latent per token, the same on every rank, without heads and values."""
    packing: HeadPacking | None = None
    """How the CPU backend packs a head's block; None: token by token, the key before the value."""
    opaque: str = ""
    """A tag if the content of a token and head is a quantised packing that is moved unchanged; else empty."""


@dataclass(frozen=True, slots=True)
class StateForm:
    """The meaning of a Mamba layer's view: the parts of its page."""

    pieces: tuple[StatePiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """One layer's view of the storage. Strides are in bytes; a recurrent state has only the stride of blocks."""

    layer: str
    """The canonical layer name."""
    group: int
    memory: Memory
    address: int
    """The address of block 0."""
    num_blocks: int
    block_stride: int
    head_stride: int = 0
    token_stride: int = 0
    tokens: int = 0
    content_bytes: int = 0
    """The bytes of one token of one head."""
    form: AttentionForm | StateForm


def describe_cache(rank: Rank, forms: Sequence[GroupForm], views: Iterable[LayerView]) -> CacheLayout:
    """Builds the layout. Raises MalformedMessage if the pieces do not fit, which means that vLLM's cache was
    misread.
    """
    regions: dict[Memory, int] = {}
    tensors: list[Tensor] = []
    for view in views:
        region = regions.setdefault(view.memory, len(regions))
        parts = _attention(view, view.form) if isinstance(view.form, AttentionForm) else _state(view, view.form)
        tensors.extend(
            Tensor(
                layer=view.layer,
                part=part.name,
                encoding=part.encoding,
                element_bytes=part.element_bytes,
                region=region,
                group=view.group,
                offset_bytes=view.address - view.memory.address + part.offset,
                paging=Paging(view.num_blocks, view.block_stride, part.token_stride),
                axes=part.axes,
            )
            for part in parts
        )
    return CacheLayout(
        rank,
        tuple(Region(memory.address, memory.num_bytes, memory.kind, memory.device) for memory in regions),
        tuple(form.cache_group for form in forms),
        tuple(tensors),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    encoding: str
    element_bytes: int
    offset: int
    token_stride: int | None
    axes: tuple[Axis, ...]


def _attention(view: LayerView, form: AttentionForm) -> Iterator[_Part]:
    size = form.element_bytes
    heads = form.heads
    head = () if form.latent else (Axis("head", heads.extent, heads.start, heads.stop, view.head_stride),)
    if form.opaque:
        name = "latent" if form.latent else "kv"
        yield _Part(name, form.opaque, view.content_bytes, 0, view.token_stride, head)
    elif form.packing is not None and form.packing.tag:
        block = view.tokens * view.content_bytes
        yield _Part("kv", form.packing.tag, block, 0, None, head)
    elif form.latent:
        dim = Axis("dim", form.head_size, 0, form.head_size, size)
        yield _Part("latent", form.encoding, size, 0, view.token_stride, (dim,))
    else:
        packing = form.packing or HeadPacking(
            k_token=view.token_stride // size,
            k_dim=1,
            v_offset=form.head_size,
            v_token=view.token_stride // size,
            v_dim=1,
        )
        for name, extent, offset, token, step in (
            ("k", form.head_size, packing.k_offset, packing.k_token, packing.k_dim),
            ("v", form.head_size_v, packing.v_offset, packing.v_token, packing.v_dim),
        ):
            axes = (*head, Axis("dim", extent, 0, extent, step * size))
            yield _Part(name, form.encoding, size, offset * size, token * size, axes)


def _state(view: LayerView, form: StateForm) -> Iterator[_Part]:
    for piece in form.pieces:
        yield _Part(piece.part, piece.encoding, piece.element_bytes, piece.offset_bytes, None, piece.axes)
