"""The names under which models are served: GET /v1/models, GET /v1/models/NAME, and the error for an unknown name."""

from collections.abc import Callable, Iterable, Sequence

import msgspec
from aiohttp import web

from kvferry.web.api_errors import ApiError
from kvferry.web.records import ModelCard

__all__ = ["model_routes", "unknown_model"]

_MAX_SHOWN_CHARS = 100
_MAX_SHOWN_NAMES = 20


def model_routes(cards: Callable[[], Sequence[ModelCard]]) -> list[web.RouteDef]:
    """Returns the two routes; `cards` returns what is served now. A name may have slashes."""

    async def all_of_them(_: web.Request) -> web.Response:
        return _json({"object": "list", "data": cards()})

    async def one(request: web.Request) -> web.Response:
        name, served = request.match_info["name"], cards()
        for card in served:
            if card.id == name:
                return _json(card)
        raise unknown_model(name, (card.id for card in served))

    return [web.get("/v1/models", all_of_them), web.get("/v1/models/{name:.+}", one)]


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def unknown_model(name: str, known: Iterable[str]) -> ApiError:
    """Returns the error for a name that is not served, with the names that are."""
    names = [repr(one[:_MAX_SHOWN_CHARS]) for one in dict.fromkeys(known)]
    more = f", or one of {len(names) - _MAX_SHOWN_NAMES} others" if len(names) > _MAX_SHOWN_NAMES else ""
    remedy = f"send {' or '.join(names[:_MAX_SHOWN_NAMES])}{more}" if names else "no model is, at the moment"
    return ApiError(
        404, f"model={name[:_MAX_SHOWN_CHARS]!r} is not served here: {remedy}",
        param="model", code="model_not_found",
    )  # fmt: skip
