"""Canonical layer names: what vLLM calls a layer, in the words that every engine uses. Pure.

vLLM's names are global over pipeline stages, so the canonical ones are, too. The embedded engine uses the same words,
which is what lets a cache cross from one engine to the other.
"""

import re
from collections import Counter
from collections.abc import Mapping

__all__ = ["canonical_names"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


def canonical_names(kinds: Mapping[str, str], num_hidden_layers: int) -> dict[str, str]:
    """vLLM's layer name to the canonical one. `kinds`: vLLM's layer name to `attn` or `mamba`.

    Layers behind the target's last one are the drafter's: vLLM numbers them on. A name without a number stays as it is,
    and so do names that would become one: a layer with several caches (an indexer's beside the attention's).
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
