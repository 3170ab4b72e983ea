"""What decode has of a prompt although vLLM does not say so: whole blocks of full attention, in a model with windows.

vLLM's prefix hit is what *every* cache group has. After a hand-off a window group has the end of the prompt only, so
the next prompt with the same beginning often hits nothing, and all of it would come again (R30). The groups that keep
every token have their blocks all the same: a request that waits for a hand-off is given these in the place of new ones.

Only below the windows' beginning: what is known there is read by others, too, and must never be written by a peer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["take_known_blocks"]


def take_known_blocks(manager: Any, request: Any, full: Sequence[int], windows: Mapping[int, int], cached: int) -> int:
    """Change the blocks of `request`, which were just allocated, for known ones; return where the hand-off begins now.

    manager: vLLM's KVCacheManager; on the engine's thread. full: its groups that keep every token. windows: of each
    window group, the first token that it has a block for. cached: what vLLM itself has found; the result is not below
    it. The blocks that are given back were never written. vLLM releases the others with the request, as it does hits.
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
