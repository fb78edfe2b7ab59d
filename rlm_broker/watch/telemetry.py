"""`OpenTelemetry`: spans of runs, made of their events as they go on."""

import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from rlm_broker.broker.clients.base import call_headers
from rlm_broker.errors import require_kind
from rlm_broker.events.event import Event
from rlm_broker.watch.conventions import traceparent
from rlm_broker.watch.spans import AGENT, CHAT, Span, Spans
from sandbox_worker import RELEASE

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    raise ImportError("OpenTelemetry needs packages that are not installed: pip install 'rlm-broker[otel]'") from None

CAPTURE: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""Environment variable that turns content on for all instrumentations of generative AI."""
_CAPTURES: Final = frozenset({"true", "1", "span_only", "span_and_event"})
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class _Handle(msgspec.Struct, eq=False):
    """The span of the SDK, and what was current before it."""

    span: trace.Span
    context: Context
    headers: Mapping[str, str] | None = None
    before: Context | None = None
    headers_before: Mapping[str, str] | None = None


class OpenTelemetry:
    """Makes spans of runs, by OpenTelemetry's conventions for generative AI, version 1.42.0 (in development).

    Each run is `invoke_agent`, each call of a model `chat`, each block and each call of a tool `execute_tool`. The root
    is a child of the current span at the start of the run. While a call is made, its span is current, and
    requests of `OpenAICompatibleClient` and `LiteLLMClient` carry its `traceparent`.

    Example:
        ```python
        from opentelemetry.sdk.trace import TracerProvider

        RLM("offline", on_event=OpenTelemetry(TracerProvider()))
        ```

    Args:
        tracer_provider: Provider of the tracer; None takes the global one.
        content: Whether spans have prompts, replies, code, output and the words of errors, each text cut to 16,384
            characters. None asks the variable `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`; its default is off.

    Raises:
        ConfigurationError: `content` is neither True, False nor None.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None, *, content: bool | None = None) -> None:
        require_kind("content", content, bool, type(None))
        if content is None:
            content = os.environ.get(CAPTURE, "").strip().lower() in _CAPTURES
        self._tracer = trace.get_tracer(AGENT, RELEASE, tracer_provider)
        self._spans = Spans(self._begun, self._ended, has_content=content)

    def __call__(self, event: Event) -> None:
        """Take one event."""
        self._spans.take(event)

    def close(self) -> None:
        """End the spans of all live runs, with the error `unfinished`. The provider stays open.

        Example:
            ```python
            spans = OpenTelemetry()
            RLM("offline", on_event=spans).completion("a", "Which letter is it?")
            spans.close()
            ```
        """
        self._spans.close()

    def _begun(self, span: Span) -> None:
        above = _above() if span.parent is None else span.parent.handle.context
        made = self._tracer.start_span(
            span.name,
            above,
            SpanKind.CLIENT if span.operation == CHAT else SpanKind.INTERNAL,
            attributes=span.attributes,
            start_time=span.start_ns,
        )
        handle = span.handle = _Handle(made, trace.set_span_in_context(made, above))
        if span.operation == CHAT:
            headers: dict[str, str] = {}
            _PROPAGATOR.inject(headers, handle.context)
            handle.headers, handle.headers_before = headers, call_headers.get()
            call_headers.set(headers)
        if span.operation == CHAT or span.attributes.get("gen_ai.tool.type") == "function":
            handle.before = contexts.get_current()  # what a client or a tool of the user's traces is below this span
            contexts.attach(handle.context)

    def _ended(self, span: Span) -> None:
        handle: _Handle = span.handle
        made = handle.span
        # The end of an abandoned span may come in another context than its start: leave that context alone.
        if handle.headers is not None and call_headers.get() is handle.headers:
            call_headers.set(handle.headers_before or {})
        if handle.before is not None and trace.get_current_span() is made:
            contexts.attach(handle.before)
        if made.is_recording():
            made.update_name(span.name)
            made.set_attributes(span.results)
            for each in span.events:
                made.add_event(each.name, each.attributes, each.time_ns)
            if span.has_failed:
                made.set_status(Status(StatusCode.ERROR, span.words or None))
        made.end(span.end_ns)


def _above() -> Context:
    """Return the context of the caller: the current span, unless the caller named another trace by `traceparent`."""
    current = contexts.get_current()
    named = traceparent.get()
    if named is None:
        return current
    carrier: dict[str, Any] = {"traceparent": named}
    remote = _PROPAGATOR.extract(carrier, Context())
    told = trace.get_current_span(remote).get_span_context()
    here = trace.get_current_span(current).get_span_context()
    if not told.is_valid or (here.is_valid and here.trace_id == told.trace_id):
        return current  # the server is traced itself: its span is nearer than the client's
    return trace.set_span_in_context(trace.get_current_span(remote), current)
