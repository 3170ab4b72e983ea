"""What this engine gives to others that fetch from it: a question becomes a grant of blocks in its cache (R39).

Life of a holding:  a Find comes -> the engine keeps blocks for it -> a final Offer, and Found to the peer
                    -> the peer claims or registers, as decode does after prefill
                    -> every rank reports `released` -> the engine drops its references.
"""

import logging
from collections.abc import Container

from kvferry.connector.base import PrefixHolder
from kvferry.connector.entries import OrdersBuilder, PrefillHandoff
from kvferry.connector.peers import PrefixBoard
from kvferry.handoff.orders import Offer
from kvferry.ids import RequestId, TransferId
from kvferry.layout.blocks import TokenRange
from kvferry.settings import FetchSettings
from kvferry.wire.find import Find, Found
from kvferry.wire.prompt_digest import TOKEN_BYTES, Prompt

__all__ = ["MAX_STEP_BYTES", "Holdings"]

MAX_STEP_BYTES = 4 * 32_768
"""About how many bytes of token ids are looked up in one step, which takes about a millisecond: a peer that asks for a
lot waits, and steps go on. One question is always answered."""

logger = logging.getLogger(__name__)


class Holdings:
    """Answers the questions of other engines. Called on the engine's thread."""

    def __init__(self, board: PrefixBoard | None, settings: FetchSettings) -> None:
        self._board = board
        self._settings = settings
        self.holder: PrefixHolder | None = None

    @property
    def num_questions(self) -> int:
        """The number of questions that wait."""
        return 0 if self._board is None else self._board.num_questions

    def answer(self, in_use: Container[TransferId], orders: OrdersBuilder) -> list[PrefillHandoff]:
        """Answer the questions that wait, as many as a step has time for, and order the offers. Return what is offered
        now."""
        offered: list[PrefillHandoff] = []
        for question in self._board.take_questions(MAX_STEP_BYTES) if self._board is not None else ():
            find = question.find
            transfer = TransferId(find.transfer)
            if transfer in in_use or any(transfer == one.transfer for one in offered):
                found: Found | PrefillHandoff = Found.nothing(transfer, "its transfer id is in use here")
            else:
                found = self._offer(find, orders)
            if isinstance(found, PrefillHandoff):
                offered.append(found)
                found = Found(transfer=transfer, num_tokens=found.prompt.num_tokens)
            logger.debug(
                "find peer=%s transfer=%s tokens=%d cause=%s", find.engine, transfer, found.num_tokens, found.reason
            )
            question.answer(found)
        return offered

    def _offer(self, find: Find, orders: OrdersBuilder) -> Found | PrefillHandoff:
        transfer = TransferId(find.transfer)
        if self.holder is None or not self._settings.share:
            return Found.nothing(transfer, "it gives nothing of its cache (fetch.share is 0)")
        asked = Prompt.of((), find.salt, find.packed[: self._settings.max_tokens * TOKEN_BYTES])
        try:
            held = self.holder.hold(transfer, asked, more_than=find.more_than, share=self._settings.share)
        except Exception:
            logger.exception("a question cannot be answered peer=%s transfer=%s", find.engine, transfer)
            return Found.nothing(transfer, "looking it up has failed there")
        if isinstance(held, str):
            return Found.nothing(transfer, held)
        prompt = Prompt.of((), find.salt, asked.packed[: held.num_tokens * TOKEN_BYTES])
        entry = PrefillHandoff(RequestId(f"fetch {transfer}"), transfer, prompt, finished=True)
        orders.offer[transfer] = Offer(
            transfer=transfer,
            request=entry.request,
            tables=held.tables,
            ready=TokenRange(0, held.num_tokens),
            final=True,
            prompt=prompt,
        )
        return entry
