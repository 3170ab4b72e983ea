"""Settings of speculative decoding: `--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'`.

The keys that vLLM has, too, have vLLM's names, so that one JSON text serves both engines.
"""

from dataclasses import dataclass, fields
from typing import Any

import msgspec

from kvferry.connector.lookahead import handoff_lookahead, num_prefill_lookahead_tokens
from kvferry.errors import ConfigError

__all__ = ["METHODS", "TEXT_METHODS", "SpeculationSettings", "SpeculativeConfig"]

TEXT_METHODS = ("ngram", "suffix")
"""Methods that draft from the text alone: they keep nothing in the cache, and nothing is handed over for them."""
METHODS = (*TEXT_METHODS, "draft_model", "eagle3", "mtp")
SAMPLE_METHODS = ("greedy", "probabilistic")
MAX_TOKENS = 32
MAX_LOOKUP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """How drafts are made. A value that is missing, unknown or out of range raises ConfigError with the known
    values."""

    method: str
    """The method: `ngram`, `suffix`, `draft_model`, `eagle3` or `mtp`."""

    num_speculative_tokens: int
    """The largest number of drafts per step. With 0 the drafter keeps its KV, so that prefill can serve a decode engine
    that drafts, but drafts nothing itself."""

    model: str | None = None
    """The drafter's directory, for `draft_model` and `eagle3`. MTP modules are in the target's own checkpoint."""

    revision: str | None = None
    """The revision of `model`. It must be the same on both sides (R4)."""

    draft_sample_method: str = "greedy"
    """How drafts are chosen. With `greedy` they are the drafter's likeliest tokens, and a sampled answer has exactly
    the tokens that it would have without drafts from the same seed. With `probabilistic`, for sampled requests,
    `draft_model`, `eagle3` and `mtp` sample drafts as the request samples tokens: more drafts are accepted, and answers
    have the same distribution, but not the same tokens from the same seed."""

    prompt_lookup_max: int = 5
    """For `ngram`: the largest number of last tokens that are looked up in the preceding text."""

    prompt_lookup_min: int = 2
    """For `ngram`: the smallest number of last tokens that are looked up in the preceding text."""

    suffix_decoding_max_tree_depth: int = 24
    """For `suffix`: the largest number of tokens that a match and the drafts after it may have together."""

    suffix_decoding_max_cached_tokens: int = 65536
    """For `suffix`: how many tokens of earlier answers are kept to draft from. The oldest answers are dropped first."""

    suffix_decoding_max_spec_factor: float = 2.0
    """For `suffix`: the largest number of drafts per matched token."""

    suffix_decoding_min_token_prob: float = 0.1
    """For `suffix`: a token is drafted only if it and the drafts before it followed in at least this share of the
    earlier occurrences of the match."""

    cold_start: bool = False
    """On decode: also accept a prefill engine without a drafter. The drafter then starts after the prompt with an empty
    cache: the text is the same, but fewer drafts are accepted."""

    unsafe_without_backoff: bool = False
    """UNSAFE, only for `python -m benchmarks.spec`: reproduces the effect of the published fault (not its code).
    Prefill hands over the whole prompt, with unverified drafts in the last slots of its modules. Decode's drafter pairs
    hidden states with tokens that are too early by the back-off, for the whole answer (a back-off of 0 changes
    nothing). The text stays right, but nearly all drafts are rejected. A warning is logged."""

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
                f"speculative method={self.method!r} names tokens and has no probabilities to sample them from: "
                "set draft_sample_method to 'greedy', or leave it out."
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
        """Reads settings from JSON. Raises ConfigError if it is not an object, or a key, type or value is wrong."""
        try:
            raw = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--speculative-config {text!r} is not a JSON object: {error}. Give one.") from error
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
    """The settings, and what the drafter's checkpoint adds. Scheduler, cache and runner take the lookahead from here
    (R31)."""

    settings: SpeculationSettings
    num_modules: int
    """The number of MTP modules; 1 for another drafter that keeps KV and reads hidden states, and 0 for all others."""

    @property
    def num_tokens(self) -> int:
        """The largest number of drafts per step."""
        return self.settings.num_speculative_tokens

    @property
    def keeps_kv(self) -> bool:
        """Whether the drafter has layers of its own in the cache."""
        return self.settings.method not in TEXT_METHODS

    @property
    def num_prefill_lookahead_tokens(self) -> int:
        """How many tokens beyond the target's computed range the drafter reads during prefill (R31)."""
        return num_prefill_lookahead_tokens(self.settings.method, self.num_tokens, self.num_modules)

    def handoff_lookahead(self, *, state: bool) -> int:
        """Returns connector.lookahead.handoff_lookahead, or 0 if no slot of the drafter is handed over, or with
        `unsafe_without_backoff`."""
        if self.settings.unsafe_without_backoff or self.settings.cold_start:
            return 0
        return handoff_lookahead(self.num_prefill_lookahead_tokens, num_modules=self.num_modules, state=state)

    @property
    def trailing_dependency(self) -> int:
        """How many tokens after a block influence the drafter's slots in it. A prefix hit is this much shorter for that
        reason, and a block enters the prefix cache this many tokens later."""
        return self.num_modules
