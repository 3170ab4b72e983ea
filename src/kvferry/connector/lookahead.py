"""How far a drafter reads ahead of the target, and how many tokens that takes from a hand-off. R31, R32, R34.

These counts are made here and nowhere else. They are used by the scheduler (it truncates prompts on prefill), the cache
manager (tokens that a window keeps), the runner (prompt tokens after a chunk), the connector (tokens that may be
offered and matched) and the vLLM plug-in.

Why a hand-off backs off: slot p of MTP module i (the first is 0) is computed from the target's hidden state at p and
from token p + 1 + i. After the last chunk of a prompt of n tokens, tokens are known up to position n, the one just
sampled; those after it are drafts. So the last i slots of module i are computed from unverified drafts. A standalone
engine computes them again once the tokens are known, from hidden states that it still has. A decode engine elsewhere
does not have these hidden states: it must compute the tail itself. docs/explanation/speculation.md has a picture.
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
"""The drafters that read the target's hidden states (R3)."""


def num_prefill_lookahead_tokens(method: str | None, num_speculative_tokens: int, num_modules: int = 1) -> int:
    """Return how many tokens after the target's computed range the drafter reads during prefill (R31).

    `method` is None without speculation. `num_modules` is the number of MTP modules in the checkpoint, and 1 for any
    other drafter.
    """
    if method not in HIDDEN_STATE_METHODS or num_speculative_tokens == 0:
        return 0
    return num_speculative_tokens if method == "mtp" and num_modules > 1 else 1


def prefill_backoff(*, mamba: bool, lookahead: int) -> int:
    """Return how many tokens at the end of a prompt prefill leaves to decode, exactly as R32 says. Both sides call it.

    `mamba` says that the model has layers with a recurrent state: the state after the whole prompt is of no use,
    because the last token is computed once more to choose the first token of the answer. `lookahead` comes from
    num_prefill_lookahead_tokens.
    """
    return max(1 if mamba else 0, lookahead - 1)


def handoff_lookahead(lookahead: int, *, num_modules: int, state: bool) -> int:
    """Return the lookahead that `handoff_tokens` takes, from that of num_prefill_lookahead_tokens.

    `state` says that the model keeps a recurrent state. A state belongs to exactly as many tokens as prefill computed,
    and decode cannot take fewer; so both sides must stop at the same token, whatever their draft depths (R5). With
    several modules that is the token before which every slot of every module has read known tokens only: the number of
    modules gives it.
    """
    return num_modules if state and num_modules > 1 else lookahead


def handoff_tokens(num_prompt_tokens: int, *, mamba: bool, lookahead: int) -> int:
    """Return how many prompt tokens prefill computes and hands to another engine; decode computes the others.

    This is the prompt less `prefill_backoff` and, with several modules, less one more: the last module's slot before
    the cut reads the first token of the answer, which is not known before the whole prompt is computed. (A test that
    hands over one slot more shows it.) It is 0 if the prompt is no longer than that: then nothing is handed over, and
    decode computes the whole prompt.
    """
    backoff = prefill_backoff(mamba=mamba, lookahead=lookahead) + (lookahead > 1)
    return max(0, num_prompt_tokens - backoff)


def verified_tokens(num_computed: int, num_known: int, lookahead: int) -> int:
    """Return the number of leading tokens for which every slot of every drafter layer was computed from known tokens.

    `num_computed` counts tokens that the target has computed; `num_known` counts prompt and sampled tokens, without
    drafts. Only these leading tokens may be offered to a peer, and only their blocks may enter the prefix cache: a
    block after them differs between two requests that continue differently.
    """
    return max(0, min(num_computed, num_known - lookahead))


def extra_window_tokens(lookahead: int, num_modules: int = 0) -> int:
    """Return how many tokens more than its own a sliding window keeps, so that the tail can be computed again (R34).

    Every module runs at any draft depth, so that a peer may draft deeper (R5): after a step, module i (the first is 0)
    computes its last i slots again, and attends to what its window had there. So the lookahead counts as the number of
    modules at least. A test that keeps one token less shows that no more is needed, and no less.
    """
    return max(0, max(lookahead, num_modules) - 1)
