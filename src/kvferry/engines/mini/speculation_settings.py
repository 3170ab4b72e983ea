"""What an operator says about speculation: `--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'`.

The keys are vLLM's where vLLM has them, so that one JSON serves both engines.
"""

from dataclasses import dataclass, fields
from typing import Any

import msgspec

from kvferry.connector.lookahead import handoff_lookahead, num_prefill_lookahead_tokens
from kvferry.errors import ConfigError

__all__ = ["METHODS", "TEXT_METHODS", "SpeculationSettings", "SpeculativeConfig"]

TEXT_METHODS = ("ngram", "suffix")
"""They know only the text: nothing in the cache, nothing to hand over."""
METHODS = (*TEXT_METHODS, "draft_model", "eagle3", "mtp")
SAMPLE_METHODS = ("greedy", "probabilistic")
MAX_TOKENS = 32
MAX_LOOKUP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """How drafts are made. Out of range, unknown or missing: ConfigError with the key, the value and what is known."""

    method: str
    """`ngram`, `suffix`, `draft_model`, `eagle3` or `mtp`."""

    num_speculative_tokens: int
    """Drafts a step, at most. 0: the drafter keeps its KV (so that prefill may serve a decode engine that drafts), and
    drafts nothing."""

    model: str | None = None
    """The drafter's directory: for `draft_model` and `eagle3`. MTP modules are in the target's own checkpoint."""

    revision: str | None = None
    """Of `model`; compared with the other side's (R4)."""

    draft_sample_method: str = "greedy"
    """`greedy`: drafts are the drafter's likeliest tokens, and an answer by chance is, token for token, the one without
    drafts from the same seed. `probabilistic`: for requests by chance `draft_model`, `eagle3` and `mtp` draw theirs as
    the request draws its tokens; more of them stand, and the answers have the same distribution, but from the same seed
    not the same tokens as without drafts."""

    prompt_lookup_max: int = 5
    """ngram: the longest run of last tokens that is looked up in the text before."""

    prompt_lookup_min: int = 2
    """ngram: the shortest."""

    suffix_decoding_max_tree_depth: int = 24
    """suffix: how many tokens back a match is looked for, and drafts are taken from behind it."""

    suffix_decoding_max_cached_tokens: int = 65536
    """suffix: so many tokens of earlier answers are kept to draft from; the oldest answers go first."""

    suffix_decoding_max_spec_factor: float = 2.0
    """suffix: at most this many drafts for each token that matched."""

    suffix_decoding_min_token_prob: float = 0.1
    """suffix: a draft must have followed at least this share of the times."""

    cold_start: bool = False
    """Decode: pair also with a prefill engine that has no drafter. Drafts then begin behind the prompt, from an empty
    drafter's cache: right text, fewer accepted drafts."""

    unsafe_without_backoff: bool = False
    """UNSAFE, for `python -m benchmarks.spec` alone, a model of the published fault, not its code. Two things: prefill
    hands over the whole prompt, with unverified drafts in the last slots of its modules; and decode's drafter pairs
    hidden states with tokens that are back-off places too early, for the whole answer (a back-off of 0: it changes
    nothing). The text stays right; nearly all drafts are rejected. A warning is logged."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"speculative method={self.method!r} is unknown. Known: {', '.join(METHODS)}.")
        if not 0 <= self.num_speculative_tokens <= MAX_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens={self.num_speculative_tokens!r} must be from 0 to {MAX_TOKENS}. "
                "Leave the speculative config out to decode without drafts."
            )
        if self.method in ("draft_model", "eagle3") and not self.model:
            raise ConfigError(f"speculative method={self.method!r} needs a drafter: set model to its directory.")
        if self.method in ("mtp", *TEXT_METHODS) and self.model:
            raise ConfigError(
                f"speculative method={self.method!r} takes no model, and got model={self.model!r}. Leave it out."
            )
        if self.draft_sample_method not in SAMPLE_METHODS:
            raise ConfigError(
                f"draft_sample_method={self.draft_sample_method!r} is unknown. Known: {', '.join(SAMPLE_METHODS)}."
            )
        if self.draft_sample_method == "probabilistic" and self.method in TEXT_METHODS:
            raise ConfigError(
                f"speculative method={self.method!r} names tokens and has no probabilities to draw them from: "
                "draft_sample_method must be 'greedy'."
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= MAX_LOOKUP:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min!r} must be from 1 to "
                f"prompt_lookup_max={self.prompt_lookup_max!r}, and that at most {MAX_LOOKUP}."
            )
        for name, low in (
            ("suffix_decoding_max_tree_depth", 2),
            ("suffix_decoding_max_cached_tokens", 0),
            ("suffix_decoding_max_spec_factor", 0.0),
            ("suffix_decoding_min_token_prob", 0.0),
        ):
            if getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least {low}.")

    @classmethod
    def from_json(cls, text: str) -> "SpeculationSettings":
        """Raises ConfigError for what is no JSON object, a wrong type, an unknown key or a value out of range."""
        try:
            raw = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--speculative-config {text!r} is no JSON object: {error}.") from error
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(raw) - known)
        if unknown:
            raise ConfigError(f"--speculative-config has no key {unknown[0]!r}. Known: {', '.join(sorted(known))}.")
        missing = [name for name in ("method", "num_speculative_tokens") if name not in raw]
        if missing:
            raise ConfigError(f"--speculative-config {text!r} lacks {missing[0]!r}. Set it.")
        try:
            return msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--speculative-config {text!r}: {error}.") from error


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The settings with what the drafter's checkpoint adds. The one source of R31 for scheduler, cache and runner."""

    settings: SpeculationSettings
    num_modules: int
    """Of a drafter that keeps KV and reads hidden states: MTP modules, or 1. 0 for others."""

    @property
    def num_tokens(self) -> int:
        """Drafts a step, at most."""
        return self.settings.num_speculative_tokens

    @property
    def keeps_kv(self) -> bool:
        """The drafter has layers of its own in the cache."""
        return self.settings.method not in TEXT_METHODS

    @property
    def num_prefill_lookahead_tokens(self) -> int:
        """R31. See connector.lookahead."""
        return num_prefill_lookahead_tokens(self.settings.method, self.num_tokens, self.num_modules)

    def handoff_lookahead(self, *, state: bool) -> int:
        """connector.lookahead.handoff_lookahead; 0 where no slot of the drafter is handed over, and with the unsafe
        switch."""
        if self.settings.unsafe_without_backoff or self.settings.cold_start:
            return 0
        return handoff_lookahead(self.num_prefill_lookahead_tokens, num_modules=self.num_modules, state=state)

    @property
    def trailing_dependency(self) -> int:
        """How many tokens behind a block the drafter's slots of that block depend on. A prefix hit is good for that
        much less than its length, and a block enters the prefix cache that much later."""
        return self.num_modules
