"""HTTP headers that belong to one call, beside those of its client."""

from collections.abc import Mapping
from contextvars import ContextVar

call_headers: ContextVar[Mapping[str, str]] = ContextVar("rlm_broker_call_headers", default={})  # noqa: B039 - not changed
"""Headers of the request of the call that is being made in this context; empty unless tracing is on.

The receiver of events that traces a call sets them at `CallStarted`, and takes them back at `CallEnded`. Both events
come in the task that makes the call, and the tasks that the call starts inherit them. So calls at the same time have
each their own.
"""
