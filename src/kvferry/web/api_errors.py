"""An error as the OpenAI API tells it: a status, and {"error": {message, type, param, code}}."""

import logging
from collections.abc import Callable

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from kvferry.errors import FerryError, Overloaded, RequestError, RequestTooLong

__all__ = ["REQUEST_ID", "ApiError", "as_api_error", "error_middleware", "request_id_of", "too_large"]

logger = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("kvferry_request_id", str)
_MAX_REQUEST_ID_CHARS = 128
_HINTS = {
    404: "There is no {method} {path} here; see /v1/models, /v1/completions, /v1/chat/completions, /health, /metrics.",
    405: "{path} does not answer to {method}; use another method.",
}


class ApiError(FerryError):
    """What the client is told. `message` is one sentence of fact with the values, then the remedy."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The OpenAI error body."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        """Retry-After, where waiting helps."""
        return {} if self.retry_after_s is None else {hdrs.RETRY_AFTER: str(self.retry_after_s)}

    def response(self) -> web.Response:
        """The whole answer."""
        return web.Response(
            status=self.status, body=self.body(), content_type="application/json", headers=self.headers()
        )


def as_api_error(error: FerryError) -> ApiError:
    """How an error of the engine or the wire is told to a client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestTooLong):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=_leading_field(str(error)))
    if isinstance(error, Overloaded):
        return ApiError(503, str(error), kind="overloaded_error", code="overloaded", retry_after_s=1)
    return ApiError(500, str(error), code="internal_error")


def _leading_field(message: str) -> str | None:
    """Messages that begin with a field's name (`top_p=7 must be ...`) name the parameter."""
    word = message.split("=", 1)[0].split(":", 1)[0]
    return word if word.isidentifier() and len(word) < len(message) else None


def request_id_of(request: web.Request) -> str:
    """The id under which this request is logged here, on every worker, and in the answer's X-Request-Id."""
    return request[REQUEST_ID]


def error_middleware(new_request_id: Callable[[], str]) -> Middleware:
    """Outermost: gives the request its id, and turns every exception into an OpenAI error body."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-Id", "")
        usable = given.isascii() and given.isprintable() and 0 < len(given) <= _MAX_REQUEST_ID_CHARS
        request[REQUEST_ID] = given if usable else new_request_id()
        try:
            response = await handler(request)
        except FerryError as error:
            api_error = as_api_error(error)
            if api_error is not error and api_error.status == 500:
                logger.exception("request failed request=%s path=%s", request[REQUEST_ID], request.path)
            response = api_error.response()
        except web.HTTPRequestEntityTooLarge as error:
            response = too_large(request, error).response()
        except web.HTTPException as error:
            if error.status < 400:
                raise
            hint = _HINTS.get(error.status, "{method} {path}: " + error.reason)
            message = hint.format(method=request.method, path=request.path)
            response = ApiError(error.status, message, code=error.reason.lower().replace(" ", "_")).response()
        except ConnectionError:
            raise  # the client is gone: nobody to tell
        except Exception:
            logger.exception("request failed request=%s path=%s", request[REQUEST_ID], request.path)
            text = f"internal error in request {request[REQUEST_ID]!r}; the log of this server has the traceback"
            response = ApiError(500, text, code="internal_error").response()
        if not response.prepared:
            response.headers["X-Request-Id"] = request[REQUEST_ID]
        return response

    return middleware


def too_large(request: web.Request, error: web.HTTPRequestEntityTooLarge) -> ApiError:
    """413, with the limit."""
    limit = request.app._client_max_size  # aiohttp has no public name for it
    return ApiError(
        413,
        f"the body has {request.content_length or 'more than ' + str(limit)} bytes and at most {limit} are accepted: "
        f"send a shorter prompt, or start the server with a larger --max-body-bytes",
        code="body_too_large",
    )
