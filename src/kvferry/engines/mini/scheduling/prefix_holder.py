"""Keeps cached prefixes for engines that fetch them (R39): finds the blocks, references them, and gives them up.

Life of what is held:  `hold` -> the transfer has the references (BlockManager.hold) -> a peer takes the KV, or does not
                       -> the connector releases the transfer, and the references are dropped.
If a request of this engine has no room, `give_up` names transfers to be withdrawn.
"""

from kvferry.connector.base import HeldPrefix
from kvferry.engines.mini.scheduling.block_manager import BlockManager, hash_packed
from kvferry.engines.mini.scheduling.cache_groups import Groups, PrefixHit
from kvferry.ids import TransferId
from kvferry.layout.blocks import BlockTable
from kvferry.layout.description import CacheKind
from kvferry.wire.prompt_digest import Prompt

__all__ = ["PrefixHolder"]


class PrefixHolder:
    """The holder of one engine (connector.base.PrefixHolder). Called on the engine's thread only."""

    def __init__(self, blocks: BlockManager, groups: Groups, *, block_tokens: int) -> None:
        self._blocks = blocks
        self._groups = groups
        self._block_tokens = block_tokens
        self._held: dict[TransferId, int] = {}
        """The number of blocks of each transfer, oldest first."""
        self._given_up: set[TransferId] = set()

    @property
    def num_blocks(self) -> int:
        """The number of references that are held for other engines."""
        return sum(self._held.values())

    def hold(self, transfer: TransferId, prompt: Prompt, *, more_than: int, share: float) -> HeldPrefix | str:
        """Keeps the longest cached prefix of a prompt (connector.base.PrefixHolder)."""
        most = int(share * self._blocks.num_usable)
        hit = self._groups.find_for_others(hash_packed(prompt.packed, self._block_tokens, prompt.salt_text))
        if hit.num_tokens <= more_than:
            return f"it holds {hit.num_tokens} of these tokens, and {more_than} are there already"
        if self.num_blocks + len(hit.block_ids) > most:
            return (
                f"busy: {self.num_blocks} blocks are kept for other engines, these would be {len(hit.block_ids)} more, "
                f"and {most} may be kept (fetch.share={share:g})"
            )
        self._blocks.take(hit.block_ids)
        self._blocks.hold(transfer, hit.block_ids)
        self._held[transfer] = len(hit.block_ids)
        return HeldPrefix(hit.num_tokens, self._tables(hit))

    def _tables(self, hit: PrefixHit) -> tuple[BlockTable, ...]:
        return tuple(
            BlockTable(
                group,
                hit.num_tokens if spec.kind is CacheKind.STATE else held.first * self._block_tokens,
                tuple(held.ids),
            )
            for group, (spec, held) in enumerate(zip(self._groups.specs, hit.blocks, strict=True))
        )

    def released(self, transfer: TransferId) -> None:
        """The references of this transfer were dropped. Any transfer may be named."""
        self._held.pop(transfer, None)
        self._given_up.discard(transfer)

    def give_up(self, num_blocks: int) -> list[TransferId]:
        """Returns the oldest transfers to be withdrawn so that a request of this engine has `num_blocks` more, each of
        them once. None if that would not be enough."""
        if num_blocks > self.num_blocks:
            return []
        chosen: list[TransferId] = []
        for transfer, held in self._held.items():
            if num_blocks <= 0:
                break
            num_blocks -= held
            if transfer not in self._given_up:
                chosen.append(transfer)
        self._given_up |= set(chosen)
        return chosen
