"""What only workers, routers and operators may ask for: no page in a browser."""

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from kvferry.web.api_errors import ApiError

__all__ = ["no_page", "refuse_page"]


def refuse_page(request: web.Request) -> None:
    """Any page can have a browser send a POST to whatever the browser reaches, loopback too; browsers say so.

    Raises ApiError 403 for a request with an Origin.
    """
    if hdrs.ORIGIN in request.headers:
        raise ApiError(
            403,
            f"{request.path} was asked for by a web page ({hdrs.ORIGIN}: {request.headers[hdrs.ORIGIN]!r}), and is for "
            "workers, routers and operators only: ask without that header.",
            code="web_page",
        )


def no_page(handler: Handler) -> Handler:
    """The handler, for everybody but pages."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        refuse_page(request)
        return await handler(request)

    return guarded
