"""The rows of the table of facts that are about speculative decoding (R3 to R7)."""

import json
import shlex
from collections.abc import Callable

from kvferry.handshake.effective import GARBAGE, kv_dtype, model_dtype, revision
from kvferry.handshake.engine_description import EngineDescription, SpeculationFacts
from kvferry.handshake.fact import Change, FactKind, FactSpec, Read, flag
from kvferry.handshake.values import STATELESS_METHODS, FactValue, effective_dtype, speculative_method
from kvferry.settings import Role

__all__ = ["SPECULATION", "speculative_config"]

_MUST, _BRIDGED, _INFO = FactKind.MUST_MATCH, FactKind.BRIDGED, FactKind.INFORMATIVE


def _drafting(engine: EngineDescription) -> SpeculationFacts | None:
    """Returns the speculation if its drafter keeps KV or reads hidden states; None for ngram, suffix and none (R3)."""
    spec = engine.speculation
    method = speculative_method(spec.method) if spec else None
    return None if method is None or method in STATELESS_METHODS else spec


def _stateless(engine: EngineDescription) -> str | None:
    method = speculative_method(engine.speculation.method) if engine.speculation else None
    return method if method in STATELESS_METHODS else None


def _method(engine: EngineDescription) -> str | None:
    spec = _drafting(engine)
    return speculative_method(spec.method) if spec else None


def _draft(read: Callable[[SpeculationFacts, EngineDescription], FactValue]) -> Read:
    def read_draft(engine: EngineDescription) -> FactValue:
        spec = _drafting(engine)
        return None if spec is None else read(spec, engine)

    return read_draft


def _draft_kv_dtype(spec: SpeculationFacts, engine: EngineDescription) -> str:
    override = spec.draft_kv_dtype
    if override is None:
        return kv_dtype(engine)
    return effective_dtype(override, model_dtype(engine), "draft_kv_dtype")


_KEYS = {
    "method": "method",
    "model": "draft_model",
    "revision": "draft_revision",
    "num_speculative_tokens": "num_tokens",
}
_VLLM_KEYS = {
    "code_revision": "draft_code_revision",
    "parallel_drafting": "parallel_drafting",
    "kv_cache_dtype": "draft_kv_dtype",
    "attention_backend": "attention_backend",
}
"""Map the keys of --speculative-config to the facts `speculation.*` that they decide. All engines have the first."""
_MINI_FACTS = {
    "method",
    "stateless_method",
    "draft_fingerprint",
    "draft_model",
    "draft_revision",
    "num_layers",
    "num_tokens",
}
"""The facts that the embedded engine's --speculative-config decides."""


def _speculative(fact: str) -> dict[str, str]:
    setting = "--speculative-config {speculative_config}"
    return flag(setting if fact in _MINI_FACTS else "", setting)


def speculative_config(engine: str, fact: Callable[[str], FactValue]) -> str | None:
    """Returns the text after `--speculative-config` with which this kind of engine drafts as the other side.

    It is JSON, quoted for a shell, since the other side may be hostile. `fact` returns its facts. None means that it
    drafts nothing.
    """
    facts = {name: fact(f"speculation.{name}") for name in (*_KEYS.values(), *_VLLM_KEYS.values())}
    facts["method"] = facts["method"] or fact("speculation.stateless_method")
    if facts["method"] is None:
        return None
    if facts["draft_kv_dtype"] == fact("kv.dtype"):
        facts["draft_kv_dtype"] = None  # inherited
    keys = _KEYS if engine == "mini" else {**_KEYS, **_VLLM_KEYS}
    config = {key: facts[name] for key, name in keys.items() if facts[name] not in (None, False)}
    return shlex.quote(json.dumps(config))


SPECULATION = (
    FactSpec(
        name="speculation.method",
        kind=_MUST,
        read=_method,
        meaning="the method, if its drafter reads hidden states or keeps KV of its own; ngram and suffix do neither",
        reason="the drafter's cache would be empty or another drafter's: drafts would be rejected, or layers missing",
        may_lack=Role.DECODE,
        lacking="decode drafts nothing and takes only the model's own layers; prefill's drafter is wasted work, and"
        " decode computes the last prompt tokens",
        settings=_speculative("method"),
        change=Change.ABSENT,
        strict=True,
        rules="R3 R4 R7",
    ),
    FactSpec(
        name="speculation.stateless_method",
        kind=_BRIDGED,
        read=_stateless,
        meaning="ngram or suffix: drafts from the text alone",
        reason="there is nothing to hand over, so one side may have it and the other not",
        settings=_speculative("stateless_method"),
        rules="R3 R7",
    ),
    FactSpec(
        name="speculation.draft_fingerprint",
        kind=_MUST,
        read=_draft(lambda s, e: s.draft_fingerprint),
        meaning="a digest of the draft model's config and weights",
        reason="the drafter's cache would be another drafter's",
        settings=_speculative("draft_fingerprint"),
        part_of="speculation.method",
    ),
    FactSpec(
        name="speculation.draft_model",
        kind=_MUST,
        read=_draft(lambda s, e: s.draft_model),
        meaning="the name or path of the draft model, as the operator gave it",
        reason="stands in for the draft's fingerprint if that is not known",
        settings=_speculative("draft_model"),
        part_of="speculation.method",
        settled_by="speculation.draft_fingerprint",
        strict=True,
        rules="R4 R7",
    ),
    FactSpec(
        name="speculation.draft_revision",
        kind=_MUST,
        read=_draft(lambda s, e: revision(s.draft_revision)),
        meaning="the draft's revision; `main` equals none",
        reason="the drafter's cache would be another drafter's",
        settings=_speculative("draft_revision"),
        part_of="speculation.method",
        strict=True,
        rules="R4",
    ),
    FactSpec(
        name="speculation.draft_code_revision",
        kind=_MUST,
        read=_draft(lambda s, e: revision(s.draft_code_revision)),
        meaning="the revision of the draft's code",
        reason="different code may compute different KV from the same weights",
        settings=_speculative("draft_code_revision"),
        part_of="speculation.method",
        strict=True,
        rules="R4",
    ),
    FactSpec(
        name="speculation.parallel_drafting",
        kind=_MUST,
        read=_draft(lambda s, e: s.parallel_drafting),
        meaning="whether all draft tokens come from one pass",
        reason="the drafter's cache would hold other positions",
        settings=_speculative("parallel_drafting"),
        part_of="speculation.method",
        strict=True,
        rules="R4",
    ),
    FactSpec(
        name="speculation.draft_kv_dtype",
        kind=_MUST,
        read=_draft(_draft_kv_dtype),
        meaning="the draft cache's effective dtype: the override, else the target's KV dtype",
        reason=GARBAGE,
        settings=_speculative("draft_kv_dtype"),
        part_of="speculation.method",
        strict=True,
        rules="R4 R6",
    ),
    FactSpec(
        name="speculation.aux_layers",
        kind=_MUST,
        read=_draft(lambda s, e: None if s.aux_layers is None else tuple(s.aux_layers)),
        meaning="ids of the layers whose hidden states the draft reads, in order",
        reason="the drafter's cache would have been computed from other hidden states",
        settings={
            "": "eagle_aux_hidden_state_layer_ids={value} in the draft's config.json",
        },
        part_of="speculation.method",
        strict=True,
        rules="R4",
    ),
    FactSpec(
        name="speculation.num_layers",
        kind=_MUST,
        read=_draft(lambda s, e: s.num_layers),
        meaning="the number of the draft's layers or modules that keep KV",
        reason="decode would need layers that prefill has not computed",
        settings=_speculative("num_layers"),
        part_of="speculation.method",
    ),
    FactSpec(
        name="speculation.num_tokens",
        kind=_INFO,
        read=lambda e: e.speculation.num_tokens if e.speculation else None,
        meaning="the number of drafts per step",
        reason="prefill reports the exact range that it computed, and decode computes the rest",
        settings=_speculative("num_tokens"),
        part_of="speculation.method",
        rules="R5",
    ),
    FactSpec(
        name="speculation.attention_backend",
        kind=_INFO,
        read=_draft(lambda s, e: s.attention_backend.upper() if s.attention_backend else None),
        meaning="the draft's attention backend",
        reason="it affects only the layout, which is paired layer by layer",
        settings=_speculative("attention_backend"),
        part_of="speculation.method",
        rules="R5",
    ),
)
