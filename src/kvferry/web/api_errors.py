"""Errors in the form of the OpenAI API: a status, and {"error": {message, type, param, code}}."""

import logging
from collections.abc import Callable

import msgspec
from aiohttp import hdrs, web
from aiohttp.compression_utils import HAS_BROTLI
from aiohttp.typedefs import Handler, Middleware

from kvferry.errors import FerryError, Overloaded, RequestError, RequestTooLong

__all__ = ["REQUEST_ID", "ApiError", "as_api_error", "error_middleware", "request_id_of", "too_large"]

logger = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("kvferry_request_id", str)
_MAX_REQUEST_ID_CHARS = 512
"""vllm-router names both workers in it, with their host names."""
_READABLE = ("identity", "gzip", "deflate", *(("br",) if HAS_BROTLI else ()))
"""What `Content-Encoding` of a request may say."""
_MAX_SHOWN_CHARS = 40
_HINTS = {
    404: "There is no {method} {path} here; see /v1/models, /v1/completions, /v1/chat/completions, /health, "
    "/metrics{more}.",
    405: "{path} does not answer to {method}; use another method.",
}


class ApiError(FerryError):
    """An error to answer a client with. `message` states the fact with its values, then the remedy."""

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
        """Returns the body of the response, as JSON."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        """Returns Retry-After if waiting helps, else no headers."""
        return {} if self.retry_after_s is None else {hdrs.RETRY_AFTER: str(self.retry_after_s)}

    def response(self) -> web.Response:
        """Returns the complete response."""
        return web.Response(
            status=self.status, body=self.body(), content_type="application/json", headers=self.headers()
        )


def as_api_error(error: FerryError) -> ApiError:
    """Returns the error for the client that stands for an error of the engine or of a peer."""
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
    """Returns the field's name that a message begins with (`top_p=7 must be ...`), or None."""
    word = message.split("=", 1)[0].split(":", 1)[0]
    return word if word.isidentifier() and len(word) < len(message) else None


def request_id_of(request: web.Request) -> str:
    """Returns the id of this request: in logs here and on every worker, and in X-Request-Id of the response."""
    return request[REQUEST_ID]


def error_middleware(new_request_id: Callable[[], str], more_paths: str = "") -> Middleware:
    """Returns the outermost middleware: it gives each request an id and turns exceptions into OpenAI error bodies.

    `more_paths`, such as ", /ui", are named besides the common ones to a client that asks for an unknown path.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-Id", "")
        usable = given.isascii() and given.isprintable() and 0 < len(given) <= _MAX_REQUEST_ID_CHARS
        request[REQUEST_ID] = given if usable else new_request_id()
        try:
            _check_content_encoding(request)
            response = await handler(request)
        except FerryError as error:
            api_error = as_api_error(error)
            if api_error is not error and api_error.status == 500:
                logger.exception("request failed request=%s path=%s", request[REQUEST_ID], request.path)
            response = api_error.response()
        except web.RequestPayloadError:
            response = _unreadable(request).response()
            response.force_close()  # where the next request begins is not known
        except web.HTTPRequestEntityTooLarge as error:
            response = too_large(request, error).response()
        except web.HTTPException as error:
            if error.status < 400:
                raise
            hint = _HINTS.get(error.status, "{method} {path}: " + error.reason)
            message = hint.format(method=request.method, path=request.path, more=more_paths)
            response = ApiError(error.status, message, code=error.reason.lower().replace(" ", "_")).response()
        except ConnectionError:
            raise  # the client has disconnected: there is no one to answer
        except Exception:
            logger.exception("request failed request=%s path=%s", request[REQUEST_ID], request.path)
            text = f"internal error in request {request[REQUEST_ID]!r}; see the traceback in the log of this server"
            response = ApiError(500, text, code="internal_error").response()
        if not response.prepared:
            response.headers["X-Request-Id"] = request[REQUEST_ID]
        return response

    return middleware


def _check_content_encoding(request: web.Request) -> None:
    """Raises ApiError (415) for a body in an encoding that is not read here."""
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity")
    if encoding.strip().lower() not in _READABLE:
        raise ApiError(
            415,
            f"Content-Encoding={encoding[:_MAX_SHOWN_CHARS]!r} is not read here: send the body as it is, without that "
            f"header, or in one of {', '.join(_READABLE[1:])}",
            code="unsupported_encoding",
        )


def _unreadable(request: web.Request) -> ApiError:
    """Returns the error for a body that is not what its headers say: status 400."""
    encoding = request.headers.get(hdrs.CONTENT_ENCODING)
    if encoding is None:
        return ApiError(400, "the body is not framed as its headers say: send it again, whole", code="invalid_body")
    return ApiError(
        400,
        f"the body is not in Content-Encoding={encoding[:_MAX_SHOWN_CHARS]!r}, or ends early: compress it again, or "
        "send it as it is, without that header",
        code="invalid_encoding",
    )


def too_large(request: web.Request, error: web.HTTPRequestEntityTooLarge) -> ApiError:
    """Returns the error for a body over the limit: status 413."""
    limit = request.app._client_max_size  # aiohttp has no public name for this
    return ApiError(
        413,
        f"the body has {request.content_length or 'more than ' + str(limit)} bytes and at most {limit} are accepted: "
        f"send a shorter prompt, or start the server with a larger --max-body-bytes",
        code="body_too_large",
    )
