"""Why a hand-off is not for these tokens (R51): the reasons, with their remedies, as either side gives them.

Who compares: prefill, because it has the tokens of the prompt that it computed, and decode states digests of its own in
the Claim or Register. It hands over what the two have in common, and says how much that is; wire.prompt_digest counts
it. Decode believes that, takes no first token for another prompt, and reports the difference.

A peer before protocol version 4 cannot say for which tokens a hand-off is. Then `transfer.older_peers` decides: nothing
is handed over, or the number of tokens is all that is compared, by whichever side knows both.
"""

from kvferry.ids import EngineId
from kvferry.wire.versions import BINDING

__all__ = ["counts_differ", "prompts_differ", "too_old"]

_REMEDY = (
    "Check that the router or client gives each request the kv_transfer_params of its own prefill, and that both "
    "workers have the same tokenizer and chat template"
)


def prompts_differ(num_same: int) -> str:
    """Returns the reason for prompts that have their first `num_same` tokens in common, and no more."""
    first = {0: "at the first token", 1: "after 1 token"}.get(num_same, f"after {num_same} tokens")
    return f"prefill computed another prompt, which differs {first}. {_REMEDY}"


def counts_differ(num_offered: int, num_expected: int) -> str:
    """Returns the reason if one side cannot compare prompts, and even the numbers of tokens differ."""
    return f"prefill computed another prompt: it has {num_offered} tokens to hand over, not {num_expected}. {_REMEDY}"


def too_old(engine: EngineId, protocol: int) -> str:
    """Returns the reason for a peer from which nothing is taken, or to which nothing is given, by the setting."""
    return (
        f"{str(engine)!r} speaks protocol version {protocol} and cannot say for which tokens a hand-off is: "
        f"upgrade it to a kvferry that speaks version {BINDING}, or set --older-peers count (transfer.older_peers) to "
        "compare the number of tokens only"
    )
