"""The table of facts: each fact's class, its meaning, how its effective value is found, and how a difference is fixed.

This table is the compatibility matrix (R2 to R7, R13): the code compares facts by it, and
docs/reference/compatibility.md is made from it. A new fact is a row here. Its value must be None if it changes nothing,
so that older peers, which do not report it, still fit.
"""

from kvferry.handshake.effective import GARBAGE, kv_dtype, model_dtype, revision
from kvferry.handshake.engine_description import EngineDescription
from kvferry.handshake.fact import Change, FactKind, FactSpec, flag
from kvferry.handshake.table_speculation import SPECULATION
from kvferry.handshake.values import config_text, dtype_name, run_length, short_digest

__all__ = ["FACTS"]

_MUST, _BRIDGED, _INFO = FactKind.MUST_MATCH, FactKind.BRIDGED, FactKind.INFORMATIVE
_MODEL = {"mini": "kvferry serve {model}", "": "--model {model}"}


def _groups(engine: EngineDescription) -> str | None:
    if not engine.layer_groups:
        return None
    return f"{len(set(engine.layer_groups.values()))} groups, map {short_digest(engine.layer_groups)}"


def _state_dtype(text: str) -> str:
    part, equals, dtype = text.partition("=")
    return f"{part}={dtype_name(dtype)}" if equals else dtype_name(part)


_ROWS = (
    FactSpec(
        name="handshake.strict",
        kind=_INFO,
        read=lambda e: e.strict or None,
        meaning="whether this side compares the bridged facts of strict mode, too",
        reason="strict on one side is strict for the pair",
        settings=flag("--strict", '--kv-transfer-config \'{"kv_connector_extra_config": {"strict": true}}\''),
    ),
    FactSpec(
        name="role",
        kind=_MUST,
        read=lambda e: str(e.role),
        meaning="prefill, decode or both",
        reason="two prefill (or two decode) workers have nothing to hand over",
        settings=flag("--role {value}", '--kv-transfer-config \'{"kv_role": "{value}"}\''),
        vllm_values={"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"},
        change=Change.EITHER,
        complement=True,
        lacking="the two hand nothing over to each other, and each may fetch prefixes that the other holds",
    ),
    FactSpec(
        name="transfer.mode",
        kind=_MUST,
        read=lambda e: str(e.mode),
        meaning="pull: decode reads; push: prefill writes",
        reason="each side would wait for the other to move the bytes",
        settings=flag(
            "--transfer-mode {value}", '--kv-transfer-config \'{"kv_connector_extra_config": {"mode": "{value}"}}\''
        ),
        strict=True,
        rules="R13",
    ),
    FactSpec(
        name="protocol",
        kind=_BRIDGED,
        read=lambda e: e.protocol,
        meaning="the newest protocol version that this side speaks",
        reason="both sides speak the highest version that both know",
        settings={"": "upgrade kvferry"},
        change=Change.OLDER,
        strict=True,
        rules="R2 R11",
    ),
    FactSpec(
        name="engine.name",
        kind=_BRIDGED,
        read=lambda e: e.engine,
        meaning="which engine made the cache",
        reason="layers and axes are matched by name, so an engine's own strides do not matter; opaque packings are"
        " compared by kv.packings",
        settings={"": "run the same engine on both sides ({value})"},
        strict=True,
        rules="R2",
    ),
    FactSpec(
        name="engine.version",
        kind=_INFO,
        read=lambda e: e.engine_version,
        meaning="the engine's release",
        reason="everything that a release can change about the bytes is compared by other facts",
        settings={"": "install version {value}"},
        change=Change.OLDER,
        strict=True,
        rules="R2",
    ),
    FactSpec(
        name="model.fingerprint",
        kind=_MUST,
        read=lambda e: e.fingerprint,
        meaning="a digest of the model's config and weights, whatever the model is called",
        reason="KV that other weights computed is meaningless",
        settings=_MODEL,
    ),
    FactSpec(
        name="model.id",
        kind=_MUST,
        read=lambda e: e.model_id,
        meaning="the name or path of the model, as the operator gave it",
        reason="stands in for the fingerprint if that is not known; otherwise a path and a name of one model agree",
        settings=_MODEL,
        strict=True,
        settled_by="model.fingerprint",
        rules="R2",
    ),
    FactSpec(
        name="model.revision",
        kind=_MUST,
        read=lambda e: revision(e.revision),
        meaning="the revision of the model on the hub; `main` equals none",
        reason="stands in for the fingerprint if that is not known",
        settings=flag("", "--revision {value}"),
        settled_by="model.fingerprint",
    ),
    FactSpec(
        name="model.tokenizer",
        kind=_MUST,
        read=lambda e: e.tokenizer,
        meaning="a fingerprint of tokenizer and chat template",
        reason="the same text would become different tokens on the other side",
        settings=flag("{model}", "--tokenizer DIR --chat-template FILE, with the same files on both sides"),
    ),
    FactSpec(
        name="model.quantization",
        kind=_MUST,
        read=lambda e: e.quantization.lower() if e.quantization else None,
        meaning="how the weights are quantised when the model is loaded",
        reason="the tokens would differ from those of either engine alone",
        settings=flag("", "--quantization {value}"),
    ),
    FactSpec(
        name="model.dtype",
        kind=_MUST,
        read=model_dtype,
        meaning="the model's effective dtype; `auto` is the checkpoint's",
        reason="KV computed in one precision and continued in another gives the tokens of neither",
        settings=flag("--dtype {value}", "--dtype {value}"),
        strict=True,
        rules="R2 R6",
    ),
    FactSpec(
        name="model.total_kv_heads",
        kind=_MUST,
        read=lambda e: e.total_kv_heads,
        meaning="the number of KV heads of the whole model",
        reason="heads would be cut in the wrong places",
        settings=_MODEL,
        strict=True,
        rules="R2",
    ),
    FactSpec(
        name="model.head_size",
        kind=_MUST,
        read=lambda e: e.head_size,
        meaning="the number of elements of one head",
        reason=GARBAGE,
        settings=_MODEL,
        strict=True,
        rules="R2",
    ),
    FactSpec(
        name="model.hidden_layers",
        kind=_MUST,
        read=lambda e: e.hidden_layers,
        meaning="the number of hidden layers of the whole model",
        reason="layers without KV would be read",
        settings=_MODEL,
        strict=True,
        rules="R2",
    ),
    FactSpec(
        name="model.layer_kinds",
        kind=_MUST,
        read=lambda e: run_length(e.layer_kinds),
        meaning="what each layer caches: full, window, mamba, ...",
        reason="a layer would be read as another kind of cache",
        settings=_MODEL,
    ),
    FactSpec(
        name="model.rope",
        kind=_MUST,
        read=lambda e: config_text(e.rope),
        meaning="the parameters of the rotary embedding, with every override",
        reason="keys are rotated by these angles: other angles would change attention without any error",
        settings=flag("", "--hf-overrides '{\"rope_parameters\": {value}}'"),
    ),
    FactSpec(
        name="model.window_tokens",
        kind=_MUST,
        read=lambda e: e.window_tokens,
        meaning="the number of tokens that a sliding-window layer attends to",
        reason="decode would attend to tokens that prefill did not, or would keep blocks that were never filled",
        settings=flag("{model}", "--hf-overrides '{\"sliding_window\": {value}}'"),
    ),
    FactSpec(
        name="model.max_context_tokens",
        kind=_INFO,
        read=lambda e: e.max_context_tokens,
        meaning="the longest context that this side accepts",
        reason="a request that is too long for a side is refused there",
        settings=flag("--max-model-len {value}", "--max-model-len {value}"),
    ),
    FactSpec(
        name="kv.dtype",
        kind=_MUST,
        read=kv_dtype,
        meaning="the cache's effective dtype; `auto` is the model's, `fp8` is `fp8_e4m3`",
        reason=GARBAGE,
        settings=flag("--kv-dtype {value}", "--kv-cache-dtype {value}"),
        strict=True,
        rules="R2 R6",
    ),
    FactSpec(
        name="kv.scales",
        kind=_MUST,
        read=lambda e: e.kv_scales,
        meaning="the scales with which quantised KV is stored",
        reason="values would come back multiplied by the wrong scale",
        settings=flag("{model}", "use the same KV scales in the checkpoint, or the same --calculate-kv-scales"),
    ),
    FactSpec(
        name="kv.packings",
        kind=_MUST,
        read=lambda e: tuple(sorted(set(e.packings))) or None,
        meaning="tags of opaque packings, which only their kernels understand",
        reason=GARBAGE,
        settings={"": "use the same attention backend, block size and CPU or GPU type on both sides (packing {value})"},
    ),
    FactSpec(
        name="kv.state_dtypes",
        kind=_MUST,
        read=lambda e: tuple(sorted(_state_dtype(text) for text in e.state_dtypes)) or None,
        meaning="the dtypes of recurrent states",
        reason="a state would be read as other numbers",
        settings=flag("", "--mamba-cache-dtype and --mamba-ssm-cache-dtype, to get {value}"),
    ),
    FactSpec(
        name="kv.layout",
        kind=_BRIDGED,
        read=lambda e: e.kv_layout,
        meaning="the order of tokens and heads in a block (NHD, HND)",
        reason="the planner follows the strides; different orders make more and shorter runs",
        settings=flag("", "VLLM_KV_CACHE_LAYOUT={value}"),
        rules="R22",
    ),
    FactSpec(
        name="kv.block_tokens",
        kind=_BRIDGED,
        read=lambda e: tuple(e.block_tokens) or None,
        meaning="the number of tokens per block, for each cache group",
        reason="tokens are matched by position; runs are as long as the smaller block",
        settings=flag("--block-tokens {value}", "--block-size {value}"),
        rules="R22 R23",
    ),
    FactSpec(
        name="kv.cross_layer_blocks",
        kind=_BRIDGED,
        read=lambda e: e.cross_layer_blocks,
        meaning="whether a block of all layers is one stretch of memory",
        reason="layers are matched by name; runs are only as long as those of the more scattered side",
        settings=flag("", "VLLM_KV_CACHE_LAYOUT={value}"),
        vllm_values={True: "BLNHC", False: "LBNHC"},
        strict=True,
        rules="R2 R22",
    ),
    FactSpec(
        name="kv.hma",
        kind=_BRIDGED,
        read=lambda e: e.hma,
        meaning="whether the hybrid memory allocator is on",
        reason="without it a window layer keeps more blocks than are handed over; only the window is moved",
        settings=flag("", "{value}"),
        vllm_values={True: "--no-disable-hybrid-kv-cache-manager", False: "--disable-hybrid-kv-cache-manager"},
        strict=True,
        rules="R2 R22",
    ),
    FactSpec(
        name="kv.groups",
        kind=_BRIDGED,
        read=_groups,
        meaning="which layers share a block table",
        reason="layers are matched by name, whatever group they are in on each side",
        settings={"": "use the same model, block size and hybrid memory setting on both sides"},
        rules="R22",
    ),
    FactSpec(
        name="attention.backend",
        kind=_BRIDGED,
        read=lambda e: e.attention_backend.upper(),
        meaning="the attention backend that is actually used",
        reason="it affects only the layout, which is paired layer by layer",
        settings=flag("", "--attention-backend {value}"),
        strict=True,
        rules="R2 R22",
    ),
    FactSpec(
        name="parallel.tp",
        kind=_BRIDGED,
        read=lambda e: e.tp,
        meaning="the number of tensor-parallel ranks",
        reason="each rank reads its heads from the ranks that have them",
        settings=flag("--tp {value}", "--tensor-parallel-size {value}"),
        rules="R22 R23",
    ),
    FactSpec(
        name="parallel.pp",
        kind=_BRIDGED,
        read=lambda e: e.pp,
        meaning="the number of pipeline-parallel ranks",
        reason="each rank reads its layers, by name, from the ranks that have them",
        settings=flag("--pp {value}", "--pipeline-parallel-size {value}"),
        rules="R22 R23",
    ),
    FactSpec(
        name="parallel.cp",
        kind=_BRIDGED,
        read=lambda e: e.cp,
        meaning="the number of context-parallel ranks",
        reason="tokens are dealt out in runs, and each is read from the rank that has it",
        settings=flag("", "--decode-context-parallel-size {value}"),
        rules="R22",
    ),
)

FACTS: dict[str, FactSpec] = {spec.name: spec for spec in (*_ROWS, *SPECULATION)}
"""Maps the name of every fact to its row, in the order in which facts are shown."""
