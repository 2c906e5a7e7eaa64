"""Errors in the words of the two APIs, with the HTTP status that makes SDKs retry or give up."""

import math
from collections.abc import Mapping
from typing import Any

from mcore_rl.agents.messages import EpisodeEnded

_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An error that the client is told about.

    code    for programs, such as unsupported_parameter
    param   the field of the request that is to blame, if one is
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers or {}


class BadRequest(ValueError):
    """A request that is malformed, or asks for something the gateway does not do."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(f"{param}: {message}")
        self.error = ApiError(400, code, f"{param}: {message}", param)


def unsupported(param: str, remedy: str) -> BadRequest:
    """Return the refusal of a field that this gateway does not support."""
    return BadRequest(param, f"the gateway does not support it; {remedy}", "unsupported_parameter")


def episode_over(ended: EpisodeEnded) -> ApiError:
    """Return the error for a request to an episode that is over.

    Its status is 400, because no SDK and no agent sends such a request again.
    """
    return ApiError(400, "episode_over", f"the episode is over: {ended}")


def overloaded(retry_after_s: float) -> ApiError:
    """Return a 429 that tells the client when to ask again, in whole seconds and milliseconds."""
    headers = {
        "Retry-After": str(max(1, math.ceil(retry_after_s))),
        "retry-after-ms": str(max(1, math.ceil(1000 * retry_after_s))),
    }
    message = f"the policy's engines are busy; ask again in {retry_after_s:g} s"
    return ApiError(429, "overloaded", message, headers=headers)


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error of OpenAI's APIs."""
    fallback = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": _OPENAI_TYPES.get(error.status, fallback),
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error of Anthropic's API, with the code in addition."""
    fallback = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, fallback)
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message, "code": error.code},
    }
