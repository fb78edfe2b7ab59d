"""Values by OpenTelemetry's conventions: names of providers, classes of errors, the caller's `traceparent`.

The semantic conventions for generative AI have a repository of their own since May 2026
(`open-telemetry/semantic-conventions-genai`, version 1.42.0, in development); this is their state of August 2026.
`error.type` is of the core conventions 1.44.0.
"""

import builtins
import re
from contextvars import ContextVar
from typing import Final

_PROVIDERS: Final = {
    "azure": "azure.ai.openai",
    "azure_ai": "azure.ai.inference",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "mistral": "mistral_ai",
    "moonshot": "moonshot_ai",
    "vertex_ai": "gcp.vertex_ai",
    "watsonx": "ibm.watsonx.ai",
    "xai": "x_ai",
}
"""Provider in a model's name → its name in the conventions, where they differ."""
_BARE_NAMES: Final = {"gpt-": "openai", "claude-": "anthropic", "gemini-": "gcp.gemini"}
_OF_CLIENTS: Final = frozenset(
    {
        *("APIConnectionError", "APIError", "APIResponseValidationError", "AuthenticationError"),
        *("BadGatewayError", "BadRequestError", "BudgetExceededError", "ClientError"),
        *("ContentPolicyViolationError", "ContextWindowExceededError", "InternalServerError", "InvalidRequestError"),
        *("NotFoundError", "PermissionDeniedError", "RateLimitError", "ServiceUnavailableError"),
        *("Timeout", "UnprocessableEntityError", "UnsupportedParamsError"),
    }
)
"""Names of errors in front of a provider's words, as model clients write them."""
_STATUS = re.compile(r"\bHTTP status ([45]\d\d)\b")
_CLASS = re.compile(r"(?:^|: |\braised )([A-Z]\w{0,60}(?:Error|Exception|Timeout|Interrupt))\b")
_LATE = re.compile(r"no answer within|took longer than|not done within|timed out", re.IGNORECASE)


def provider_of(model: str) -> str:
    """Return the provider of a model by its name, as the conventions call it; "unknown" if the name does not tell."""
    prefix, slash, _ = model.partition("/")
    if slash and re.fullmatch(r"[a-z][a-z0-9_.-]{0,40}", prefix):
        return _PROVIDERS.get(prefix, prefix)
    if model == "offline":
        return model
    return next((provider for start, provider in _BARE_NAMES.items() if model.startswith(start)), "unknown")


def error_type(error: str) -> str:
    """Return the class of an error by its text: an HTTP status, `timeout`, `cancelled`, the name of an exception.

    The names of exceptions are Python's and the model clients'. All other errors are `_OTHER`, so no untrusted text
    becomes a class.
    """
    if error == "cancelled":
        return error
    if status := _STATUS.search(error[:500]):
        return status[1]
    if _LATE.search(error[:500]):
        return "timeout"
    found = _CLASS.search(error[:500])
    return found[1] if found and _is_known(found[1]) else "_OTHER"


def _is_known(name: str) -> bool:
    return name in _OF_CLIENTS or isinstance(getattr(builtins, name, None), type)


# -- the caller's place in a distributed trace -------------------------------------------------------------------------

traceparent: ContextVar[str | None] = ContextVar("rlm_broker_traceparent", default=None)
"""W3C `traceparent` of the caller of the runs started in this context; None if there is none.

A server sets it around `RLM.start`. It is read when the root run starts, and is not sent to a provider by itself.
"""
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def continue_trace(header: object) -> None:
    """Make the runs that are started in this context a part of the trace that a client has named.

    Example:
        ```python
        async def answer(request):  # of a server of your own
            continue_trace(request.headers.get("traceparent"))
            return await rlm.acompletion(request.text)
        ```

    Args:
        header: What the client sent as `traceparent`. It is ignored where it has not the form of W3C Trace Context.
    """
    text = header.strip() if isinstance(header, str) else ""
    traceparent.set(text if len(text) == 55 and _TRACEPARENT.fullmatch(text) else None)
