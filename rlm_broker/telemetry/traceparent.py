"""The caller's place in a distributed trace, as a server hands it over with a run."""

import re
from contextvars import ContextVar
from typing import Final

traceparent: ContextVar[str | None] = ContextVar("rlm_broker_traceparent", default=None)
"""W3C `traceparent` of the caller of the runs that are started in this context; None if there is none.

A server sets it around `RLM.start`. It is read when the root run starts, and is not sent to a provider by itself.
"""
_FORM: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def checked(header: str | None) -> str | None:
    """Return a `traceparent` header that a client sent; None if it has another form than W3C Trace Context has."""
    text = (header or "").strip()
    return text if len(text) == 55 and _FORM.fullmatch(text) else None
