"""Errors as the HTTP client sees them: OpenAI's shape, one constructor per kind of fault.

400 invalid_request        the body is at fault; names the field and the mend
401 unauthorized           no key, or a wrong one
403 forbidden              this client may not use this endpoint
404 not_found              no such model or path
405 wrong_method           the path takes other methods
413 body_too_large
500 internal               the engine or the server is at fault
503 unavailable            loading, draining or full: try again after `Retry-After`
504 timed_out              over --request-timeout; never retried by OpenAI's client
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from engine.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
)

INVALID_REQUEST = "invalid_request_error"
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it shows in the counters


class ApiError(Exception):
    """An answer other than success: HTTP status, OpenAI's error fields and extra headers."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, INVALID_REQUEST, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    return invalid_request(message, param, "unsupported_parameter")


def unauthorized() -> ApiError:
    return ApiError(
        401,
        "Missing or wrong API key; send it as 'Authorization: Bearer KEY'.",
        INVALID_REQUEST,
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def forbidden(message: str) -> ApiError:
    return ApiError(403, message, "permission_error", code="forbidden")


def not_found(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(404, message, INVALID_REQUEST, param=param, code=code)


def wrong_method(path: str, method: str, allowed: str) -> ApiError:
    return ApiError(
        405,
        f"{path} takes {allowed}, not {method}.",
        INVALID_REQUEST,
        code="method_not_allowed",
        headers={"allow": allowed},
    )


def body_too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes, the most that this server takes.",
        INVALID_REQUEST,
        code="request_too_large",
    )


def internal(message: str) -> ApiError:
    return ApiError(500, message, "server_error", code="internal_error")


def unavailable(message: str, code: str, retry_after: float = 1.0) -> ApiError:
    headers = {"retry-after": str(max(1, math.ceil(retry_after)))}
    return ApiError(503, message, "service_unavailable_error", code=code, headers=headers)


def timed_out(seconds: float) -> ApiError:
    """A second try would run into the same limit: `x-should-retry` tells OpenAI's client so."""
    return ApiError(
        504,
        f"The request ran longer than {seconds:g} seconds, the limit of this server; "
        "generation was stopped. Ask for fewer tokens.",
        "timeout_error",
        code="request_timeout",
        headers={"x-should-retry": "false"},
    )


def from_engine(error: Exception) -> ApiError:
    """The client's view of what the engine raised; unknown failures reveal nothing of their own."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return invalid_request(str(error), error.param, error.code)
    if isinstance(error, QueueFullError):
        return unavailable(str(error), "queue_full", error.retry_after)
    if isinstance(error, EngineClosedError):
        return draining()
    if isinstance(error, EngineDeadError):
        return internal("The engine has failed and serves no more requests.")
    return internal("The server failed to answer this request.")


def draining() -> ApiError:
    return unavailable("The server is shutting down and takes no new work.", "draining", 5.0)


def error_response(error: ApiError) -> Response:
    return Response(
        orjson.dumps(error.body()),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )
