"""Reads vLLM's configuration objects into an EngineDescription of effective values. It imports no vllm.

Facts that other engines state too are written in the same way, so that one checkpoint is the same model on both.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError, UnknownModel
from kvferry.handshake.engine_description import EngineDescription, SpeculationFacts
from kvferry.handshake.fingerprint import model_fingerprint, tokenizer_fingerprint
from kvferry.modelfiles import find_model
from kvferry.settings import FerrySettings, Role
from kvferry.wire.versions import protocol_range

__all__ = ["backoff_tokens", "describe"]

_LAYER_WORDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "mamba": "mamba",
    "linear_attention": "linear",
}


def backoff_tokens(num_lookahead_tokens: int, *, states: bool, windows: bool) -> int:
    """Returns how many tokens at the end of a prompt prefill leaves to decode (R32).

    A window needs one as well: vLLM computes the prompt's last token again after a hand-off, and that token looks one
    token further back than the window that prefill has kept.
    """
    return max(1 if states or windows else 0, num_lookahead_tokens - 1)


def describe(
    config: Any,
    *,
    version: str,
    settings: FerrySettings,
    role: Role,
    backends: Iterable[str],
    packings: Iterable[str],
    state_dtypes: Iterable[str],
    block_tokens: Sequence[int],
    layer_groups: Mapping[str, int],
    kv_layout: str | None,
) -> EngineDescription:
    """Describes an engine from its resolved VllmConfig. Blocks on the disk to take fingerprints."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    text = model.hf_text_config
    mla = bool(getattr(model, "use_mla", False))
    path = _path(model.model, model.revision)
    tokenizer = _path(model.tokenizer, getattr(model, "tokenizer_revision", None))
    return EngineDescription(
        engine="vllm",
        engine_version=version,
        role=role,
        mode=settings.transfer.mode,
        strict=settings.strict,
        protocol=protocol_range(settings.side_channel.protocol_max).newest,
        model_id=str(model.model),
        fingerprint=_fingerprint(path),
        revision=model.revision,
        tokenizer=tokenizer_fingerprint(tokenizer) if tokenizer is not None else None,
        quantization=model.quantization,
        dtype=str(model.dtype),
        total_kv_heads=1 if mla else int(model.get_total_num_kv_heads()),
        head_size=int(model.get_head_size()),
        hidden_layers=int(text.num_hidden_layers),
        layer_kinds=_layer_kinds(text),
        rope=_rope(text),
        window_tokens=_window(text),
        max_context_tokens=int(model.max_model_len),
        kv_dtype=str(cache.cache_dtype),
        kv_scales="calculated" if getattr(cache, "calculate_kv_scales", False) else None,
        packings=sorted(set(packings)),
        state_dtypes=sorted(set(state_dtypes)),
        attention_backend=",".join(sorted(set(backends))),
        kv_layout=kv_layout,
        cross_layer_blocks=kv_layout is not None and kv_layout.startswith("B"),
        hma=not config.scheduler_config.disable_hybrid_kv_cache_manager,
        block_tokens=tuple(block_tokens),
        layer_groups=dict(layer_groups),
        tp=int(parallel.tensor_parallel_size),
        pp=int(parallel.pipeline_parallel_size),
        speculation=_speculation(config.speculative_config),
    )


def _path(name: str, revision: str | None) -> Path | None:
    try:
        return find_model(str(name), revision)
    except UnknownModel:
        return None  # a name that vLLM resolves in its own way: compared by name and revision


def _fingerprint(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return model_fingerprint(path)
    except (UnknownModel, ConfigError):
        return None


def _layer_kinds(text: Any) -> tuple[str, ...]:
    words = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    count = int(text.num_hidden_layers)
    if words is not None and len(words) == count:
        return tuple(_LAYER_WORDS.get(str(word), str(word)) for word in words)
    return ("full" if _window(text) is None else "window",) * count


def _window(text: Any) -> int | None:
    """Returns how many tokens a window covers; None if no layer has a window."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if window is None or getattr(text, "use_sliding_window", None) is False:
        return None
    return int(window) if kinds is None or "sliding_attention" in kinds else None


def _rope(text: Any) -> Mapping[str, object] | None:
    """Returns `theta`, `kind` and the numbers of that kind; for a model with several ropes, those of each layer
    kind.
    """
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    theta = getattr(text, "rope_theta", None)
    longest = getattr(text, "max_position_embeddings", None)
    if not rope and theta is None:
        return None
    if rope and all(isinstance(value, Mapping) for value in rope.values()):
        return {str(kind): _one_rope(value, theta, longest) for kind, value in rope.items()}
    return _one_rope(rope, theta, longest)


def _one_rope(rope: Mapping[str, object], theta: object, longest: object) -> dict[str, object]:
    options = {str(key): value for key, value in rope.items() if value is not None}
    kind = str(options.pop("rope_type", None) or options.pop("type", None) or "default")
    options.pop("type", None)
    base = options.pop("rope_theta", None) or theta or 10000.0
    if longest is not None:
        options.setdefault("original_max_position_embeddings", longest)
    return {"theta": float(str(base)), "kind": kind, "options": options}


def _speculation(config: Any) -> SpeculationFacts | None:
    if config is None:
        return None
    draft = getattr(config, "draft_model_config", None)
    path = _path(draft.model, draft.revision) if draft is not None and draft.model else None
    aux = getattr(getattr(draft, "hf_config", None), "eagle_aux_hidden_state_layer_ids", None)
    return SpeculationFacts(
        method=str(config.method),
        draft_model=None if draft is None else str(draft.model),
        draft_revision=None if draft is None else draft.revision,
        draft_code_revision=None if draft is None else getattr(draft, "code_revision", None),
        draft_fingerprint=_fingerprint(path),
        parallel_drafting=bool(getattr(config, "parallel_drafting", False)),
        draft_kv_dtype=getattr(config, "kv_cache_dtype", None),
        aux_layers=None if aux is None else tuple(int(layer) for layer in aux),
        num_tokens=config.num_speculative_tokens,
        attention_backend=getattr(config, "attention_backend", None) and str(config.attention_backend),
    )
