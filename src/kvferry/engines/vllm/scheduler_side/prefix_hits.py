"""Finds what decode already has of a prompt although vLLM reports no hit: blocks of full attention beside windows.

vLLM's prefix hit is what *every* cache group has. After a hand-off a window group holds only the end of the prompt, so
the next prompt with the same beginning often hits nothing, and all of it would be transferred again (R30). The groups
that keep every token still have their blocks: a request that waits for a hand-off gets them in place of new ones.

This is done only before the windows begin: other requests read those blocks too, so no peer may ever write to them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["take_prefix_hits"]


def take_prefix_hits(manager: Any, request: Any, full: Sequence[int], windows: Mapping[int, int], cached: int) -> int:
    """Replaces blocks of `request` that were just allocated by cached ones; returns where the hand-off now begins.

    `manager` is vLLM's KVCacheManager, used on the engine's thread. `full` lists its groups that keep every token.
    `windows` maps each window group to the first token for which it has a block. `cached` is the hit that vLLM itself
    found, in tokens; the result is not smaller. The blocks that are given back were never written. vLLM releases the
    others with the request, as it releases hits.
    """
    begin = min(windows.values(), default=0)
    lookup = getattr(manager.coordinator, "find_longest_cache_hit_per_group", None)
    if lookup is None or begin <= cached or not full or not manager.prefix_cache_lookup_enabled(request):
        return cached
    known, lengths = lookup(request.block_hashes, begin)
    owners = [manager.coordinator.single_type_managers[group] for group in full]
    step = math.lcm(*(owner.block_size for owner in owners))
    begin = min(begin, *(lengths[group] for group in full)) // step * step
    if begin <= cached or cached % step:
        return cached
    for group, owner in zip(full, owners, strict=True):
        held = owner.req_to_blocks[request.request_id]
        first, last = cached // owner.block_size, begin // owner.block_size
        taken = known[group][first:last]
        manager.block_pool.touch(taken)
        fresh, held[first:last] = held[first:last], taken
        owner.num_cached_block[request.request_id] = last
        manager.block_pool.free_blocks(reversed(fresh))
    return int(begin)
