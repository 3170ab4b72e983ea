"""Guards endpoints that are for workers, routers and operators, and not for pages in a browser."""

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from kvferry.web.api_errors import ApiError

__all__ = ["no_page", "refuse_page"]


def refuse_page(request: web.Request) -> None:
    """Raises ApiError (403) for a request with an Origin header.

    Any page can make a browser send a POST to every address that the browser reaches, loopback included; browsers then
    add this header.
    """
    if hdrs.ORIGIN in request.headers:
        raise ApiError(
            403,
            f"{request.path} is for workers, routers and operators only, and a web page asked for it "
            f"({hdrs.ORIGIN}: {request.headers[hdrs.ORIGIN]!r}): send the request without that header.",
            code="web_page",
        )


def no_page(handler: Handler) -> Handler:
    """Returns the handler, guarded by `refuse_page`."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        refuse_page(request)
        return await handler(request)

    return guarded
