"""Errors of requests, in the envelope that OpenAI's clients read."""

import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from rlm_broker import (
    ConfigurationError,
    FileRefused,
    LimitReached,
    ModelFailed,
    OutputInvalid,
    ReplBusy,
    ReplClosed,
    RlmBrokerError,
    RunCancelled,
    UnknownModel,
    ValueTooLarge,
)
from rlm_broker.serve.hosting.owner import Busy, MoneySpent, NotAllowed, UnknownHandle
from rlm_broker.values.text import clip

INVALID = "invalid_request_error"
"""Type of all errors caused by the request itself."""
MOST_CHARS = 2_000
"""Characters of an error's message; a longer one, with words of the request, is cut."""
NO_RETRY: Mapping[str, str] = {"x-should-retry": "false"}
"""Header that keeps OpenAI's clients from sending a request again: it would be paid twice."""


class ApiError(Exception):
    """A request is answered with an error.

    Attributes:
        status: HTTP status.
        message: One sentence: what is wrong, which limit, what to do.
        code: Name of the error for programs, or None.
        param: Field of the wrong request, or None.
        kind: Type of the error, as OpenAI names types.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str = INVALID,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        said = clip(self.message, MOST_CHARS)
        return {"error": {"message": said, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def not_found(what: str, id: str, param: str | None = None) -> ApiError:
    """Return the error for a thing unknown to this key, whether or not another key has it."""
    return ApiError(404, f"there is no {what} {id[:100]!r}", code="not_found", param=param)


def api_error_of(error: Exception, *, is_paid: bool = False) -> ApiError:
    """Return the answer to a request that failed with this error.

    Args:
        error: What was raised.
        is_paid: Whether a model was called: the client must not send the request again by itself.
    """
    made = error if isinstance(error, ApiError) else _made_of(error)
    if is_paid or isinstance(error, RunCancelled):  # a stopped run must not begin again
        made.headers |= NO_RETRY
    return made


def _made_of(error: Exception) -> ApiError:
    said = str(error)
    if isinstance(error, Busy):
        retry = {"retry-after": str(math.ceil(error.retry_after_s))}
        return ApiError(429, said, code="busy", kind="rate_limit_error", headers=retry)
    if isinstance(error, MoneySpent):
        retry = {"retry-after": str(math.ceil(error.retry_after_s)), **NO_RETRY}
        return ApiError(429, said, code="insufficient_quota", kind="insufficient_quota", headers=retry)
    if isinstance(error, ModelFailed):
        status = 503 if error.cause == "transient" else 400 if error.cause == "request" else 502
        return ApiError(status, said, code="model_failed", kind="server_error" if status >= 500 else INVALID)
    for kind, status, code in _STATUSES:
        if isinstance(error, kind):
            return ApiError(status, said, code=code, param="model" if kind is UnknownModel else None)
    if isinstance(error, RlmBrokerError):
        return ApiError(500, said, code=error.kind, kind="server_error")
    return ApiError(500, "the server failed: its log says why", code="internal", kind="server_error")


_STATUSES: tuple[tuple[type[RlmBrokerError], int, str], ...] = (
    (NotAllowed, 403, "not_allowed"),
    (UnknownHandle, 404, "not_found"),
    (UnknownModel, 404, "model_not_found"),
    (ReplBusy, 409, "busy"),
    (ReplClosed, 410, "closed"),
    (ValueTooLarge, 413, "too_large"),
    (FileRefused, 400, "file"),
    (OutputInvalid, 422, "output"),
    (LimitReached, 400, "limit"),
    (RunCancelled, 409, "cancelled"),
    (ConfigurationError, 400, "invalid"),
)
"""Kinds of errors with their status and code, the more special ones first."""
