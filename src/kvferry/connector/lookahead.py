"""How far a drafter reads beyond what the target has computed, and what that takes from a hand-off. R31, R32, R34.

The one place for these counts. Readers: the scheduler (truncation on prefill), the cache manager (tokens a window
keeps), the runner (prompt tokens beyond a chunk), the connector (what may be offered and matched) and the vLLM plug-in.

Why a hand-off backs off: slot p of MTP module i (the first is 0) is computed from the target's hidden state at p and
from token p + 1 + i. After the last chunk of a prompt of n tokens, those tokens are known up to n, the one just
chosen; what lies beyond is a draft. So module i keeps unverified drafts in its last i slots. A standalone engine
computes them again when the tokens are known, from hidden states that it still has. A decode engine elsewhere has no
such hidden states: it must compute the tail itself. docs/explanation/speculation.md has the picture.
"""

__all__ = [
    "HIDDEN_STATE_METHODS",
    "extra_window_tokens",
    "handoff_lookahead",
    "handoff_tokens",
    "num_prefill_lookahead_tokens",
    "prefill_backoff",
    "verified_tokens",
]

HIDDEN_STATE_METHODS = ("eagle", "eagle3", "mtp", "dflash", "dspark")
"""Drafters that read the target's hidden states (R3)."""


def num_prefill_lookahead_tokens(method: str | None, num_speculative_tokens: int, num_modules: int = 1) -> int:
    """How many tokens beyond the target's computed range the drafter reads during prefill. R31; no other place counts.

    `method`: None without speculation. `num_modules`: MTP modules in the checkpoint; 1 for any other drafter.
    """
    if method not in HIDDEN_STATE_METHODS or num_speculative_tokens == 0:
        return 0
    return num_speculative_tokens if method == "mtp" and num_modules > 1 else 1


def prefill_backoff(*, mamba: bool, lookahead: int) -> int:
    """How many tokens at the end of a prompt prefill leaves to decode. R32, to the letter; both sides call it.

    `mamba`: the model has layers with a state: the state after the whole prompt is of no use, for the last token has
    to be computed once more to choose the first one of the answer. `lookahead`: num_prefill_lookahead_tokens.
    """
    return max(1 if mamba else 0, lookahead - 1)


def handoff_lookahead(lookahead: int, *, num_modules: int, state: bool) -> int:
    """The lookahead that a hand-off backs off by: `handoff_tokens` takes it. `lookahead`: num_prefill_lookahead_tokens.

    `state`: the model keeps a recurrent state. It is the one after exactly as many tokens as prefill computed, and
    decode cannot take fewer; so both sides must stop at one token whatever their depths (R5). With several modules that
    is so many tokens before the end that each slot of each module has read known ones: the number of modules says it.
    """
    return num_modules if state and num_modules > 1 else lookahead


def handoff_tokens(num_prompt_tokens: int, *, mamba: bool, lookahead: int) -> int:
    """How many prompt tokens prefill computes for, and hands to, another engine; decode computes the others.

    The prompt less `prefill_backoff`, and, with several modules, less one more: the last module's slot before the cut
    reads the first token of the answer, which nobody knows before the whole prompt is computed. (Counted, and shown by
    a test that hands over one slot more.) 0 where the prompt is not longer than that: nothing is handed over, and
    decode computes the whole prompt.
    """
    backoff = prefill_backoff(mamba=mamba, lookahead=lookahead) + (lookahead > 1)
    return max(0, num_prompt_tokens - backoff)


def verified_tokens(num_computed: int, num_known: int, lookahead: int) -> int:
    """Leading tokens of which every slot of every drafter layer was computed from known tokens.

    `num_computed`: by the target; `num_known`: prompt and chosen tokens, drafts not counted. Only these tokens may be
    offered to a peer, and only blocks of these may enter the prefix cache: a block behind them is not the same for
    two requests that go on differently.
    """
    return max(0, min(num_computed, num_known - lookahead))


def extra_window_tokens(lookahead: int) -> int:
    """Tokens that a sliding window keeps beyond its own, so that the tail can be computed again. R34."""
    return max(0, lookahead - 1)
