"""The settings of speculation: `--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'`.

The keys are vLLM's wherever vLLM has one, so that the same JSON works for both engines.
"""

from dataclasses import dataclass, fields
from typing import Any

import msgspec

from kvferry.connector.lookahead import handoff_lookahead, num_prefill_lookahead_tokens
from kvferry.errors import ConfigError

__all__ = ["METHODS", "TEXT_METHODS", "SpeculationSettings", "SpeculativeConfig"]

TEXT_METHODS = ("ngram", "suffix")
"""Methods that know only the text: they keep nothing in the cache and hand nothing over."""
METHODS = (*TEXT_METHODS, "draft_model", "eagle3", "mtp")
SAMPLE_METHODS = ("greedy", "probabilistic")
MAX_TOKENS = 32
MAX_LOOKUP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """How drafts are made. A wrong key or value raises ConfigError with the key, the value and what is allowed."""

    method: str
    """`ngram`, `suffix`, `draft_model`, `eagle3` or `mtp`."""

    num_speculative_tokens: int
    """The most drafts per step and request. 0: the drafter keeps its KV, so that prefill can serve a decode engine that
    drafts, but drafts nothing itself."""

    model: str | None = None
    """The drafter's directory, for `draft_model` and `eagle3`. MTP modules are in the target's own checkpoint."""

    revision: str | None = None
    """The revision of `model`; it is compared with the other side's (R4)."""

    draft_sample_method: str = "greedy"
    """`greedy`: drafts are the drafter's likeliest tokens, and a sampled answer is, token for token, the one that the
    same seed gives without drafts. `probabilistic`: for requests that sample, `draft_model`, `eagle3` and `mtp` sample
    their drafts too. More drafts are accepted, and answers keep their distribution, but a seed gives other tokens than
    without drafts."""

    prompt_lookup_max: int = 5
    """ngram: the most last tokens that are looked up in the earlier text."""

    prompt_lookup_min: int = 2
    """ngram: the fewest last tokens that are looked up in the earlier text."""

    suffix_decoding_max_tree_depth: int = 24
    """suffix: the most tokens of a match and the drafts after it together."""

    suffix_decoding_max_cached_tokens: int = 65536
    """suffix: up to this many tokens of earlier answers are kept to draft from; the oldest answers are dropped
    first."""

    suffix_decoding_max_spec_factor: float = 2.0
    """suffix: at most this many drafts for each token that matched."""

    suffix_decoding_min_token_prob: float = 0.1
    """suffix: a draft must have followed in at least this fraction of the cases."""

    cold_start: bool = False
    """Decode: also pair with a prefill engine that has no drafter. The drafter then starts after the prompt with an
    empty cache: the text is the same, and fewer drafts are accepted."""

    unsafe_without_backoff: bool = False
    """UNSAFE, only for `python -m benchmarks.spec`: it imitates the published fault. Prefill hands over the whole
    prompt, with unverified drafts in the last slots of its modules; and for the whole answer, decode's drafter pairs
    hidden states with tokens that are too early by the back-off (a back-off of 0 changes nothing). The text stays
    right, and nearly all drafts are rejected. A warning is logged."""

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
    """The settings and what the drafter's checkpoint adds. Scheduler, cache and runner all take R31 from here."""

    settings: SpeculationSettings
    num_modules: int
    """The number of modules of a drafter that reads hidden states: MTP modules, or 1 for EAGLE. 0 for others."""

    @property
    def num_tokens(self) -> int:
        """The most drafts per step and request."""
        return self.settings.num_speculative_tokens

    @property
    def keeps_kv(self) -> bool:
        """Whether the drafter has layers of its own in the cache."""
        return self.settings.method not in TEXT_METHODS

    @property
    def num_prefill_lookahead_tokens(self) -> int:
        """How many tokens after the target's the drafter reads during prefill (R31); see connector.lookahead."""
        return num_prefill_lookahead_tokens(self.settings.method, self.num_tokens, self.num_modules)

    def handoff_lookahead(self, *, state: bool) -> int:
        """Returns connector.lookahead.handoff_lookahead, or 0 if no slot of the drafter is handed over (cold start), or
        with the unsafe switch."""
        if self.settings.unsafe_without_backoff or self.settings.cold_start:
            return 0
        return handoff_lookahead(self.num_prefill_lookahead_tokens, num_modules=self.num_modules, state=state)

    @property
    def trailing_dependency(self) -> int:
        """How many tokens after a block the drafter's slots of that block depend on.

        A prefix hit is usable for that much less than its length, and a block enters the prefix cache that much later.
        """
        return self.num_modules
