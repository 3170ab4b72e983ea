"""The names under which a fleet serves its models: what GET /v1/models lists, and what a request may give as `model`.

Decode workers decide: each request is answered by one of them, and they compute prompts too if no prefill worker serves
the name. A name is refused only if it is known that no worker serves it: not while one has never answered, and not
before vLLM servers, which load adapters while they run, were asked again.
"""

import math

import msgspec

from kvferry.router.fleet.worker import Worker
from kvferry.router.fleet.workers import Fleet
from kvferry.web.models import unknown_model
from kvferry.web.records import ModelCard

__all__ = ["check_model", "served_models"]


def served_models(fleet: Fleet) -> list[ModelCard]:
    """Returns a card for each name that a usable decode worker serves, by name. If several serve it, the card is that
    of the first one, with the longest request that any of them takes."""
    cards: dict[str, ModelCard] = {}
    for worker in fleet.decode:
        if worker.unusable_reason is None:
            for card in _cards_of(worker):
                first = cards.setdefault(card.id, card)
                longest = max(first.max_model_len or 0, card.max_model_len or 0)
                cards[card.id] = msgspec.structs.replace(first, max_model_len=longest or None)
    return [cards[name] for name in sorted(cards)]


def _cards_of(worker: Worker) -> list[ModelCard]:
    """Returns the cards of one worker. What its cache cannot hold is beyond its `max_model_len`."""
    assert worker.info is not None, "only workers that have answered have cards"
    longest = worker.longest_request
    limit = None if longest == math.inf else int(longest)
    cards = worker.info.models or tuple(ModelCard(id=name, root=name) for name in worker.info.names)
    return [
        msgspec.structs.replace(card, max_model_len=min(filter(None, (card.max_model_len, limit)), default=None))
        for card in cards
    ]


async def check_model(fleet: Fleet, model: str) -> bool:
    """Raises ApiError 404, which names the models that are served, if no decode worker serves this one. Returns True if
    it was learned just now that one does; False if that was known before, or if no one can say: a worker has never
    answered, or there is none."""
    if _may_be_served(fleet, model):
        return False
    await fleet.learn_models()
    if _may_be_served(fleet, model):
        return True
    raise unknown_model(model, sorted({name for one in fleet.decode if one.info for name in one.info.names}))


def _may_be_served(fleet: Fleet, model: str) -> bool:
    known = [worker for worker in fleet.decode if worker.info is not None]
    return len(known) < len(fleet.decode) or not known or any(worker.serves(model) for worker in known)
