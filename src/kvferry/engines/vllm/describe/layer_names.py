"""Translates vLLM's layer names into the canonical names that every engine uses.

vLLM numbers layers over all pipeline stages, and so do the canonical names. The embedded engine uses the same names,
which is what lets a cache cross from one engine to the other.
"""

import re
from collections import Counter
from collections.abc import Mapping

__all__ = ["canonical_names"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


def canonical_names(kinds: Mapping[str, str], num_hidden_layers: int) -> dict[str, str]:
    """Maps vLLM's layer names to canonical ones. `kinds` maps vLLM's layer name to `attn` or `mamba`.

    Layers after the target's last one belong to the drafter: vLLM continues the numbering. A name without a number is
    kept, and so are names that would collide, as for a layer with several caches (an indexer's beside the attention's).
    """
    found: dict[str, str] = {}
    for name, kind in kinds.items():
        match = _LAYER.search(name)
        if match is None:
            found[name] = name
            continue
        index = int(match[1])
        drafts = index >= num_hidden_layers or name.startswith(("draft_model.", "draft."))
        if drafts:
            index -= num_hidden_layers if index >= num_hidden_layers else 0
        found[name] = f"{'draft.' if drafts else ''}layers.{index}.{kind}"
    uses = Counter(found.values())
    return {name: canonical if uses[canonical] == 1 else name for name, canonical in found.items()}
