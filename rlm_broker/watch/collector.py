"""Spans for the collector that the environment names, sent within a bounded time."""

import logging
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from rlm_broker.events.event import Emit
from rlm_broker.watch.conventions import continue_trace
from rlm_broker.watch.telemetry import OpenTelemetry

PROTOCOL: Final = "http/protobuf"
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class _Exporter(OTLPSpanExporter):
    """Counts the spans that the collector has not taken."""

    lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.lost += len(spans)
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self.lost -= len(spans)
        return result


@contextmanager
def exported_spans(end_s: float = 3.0) -> Iterator[Emit | None]:
    """Yield a receiver of events that sends spans to the collector of the `OTEL_EXPORTER_OTLP_*` variables.

    `TRACEPARENT` names the span of the caller, for example a CI job's. Spans that were lost are a warning. So is a
    protocol other than http/protobuf, and the receiver is then None.

    Example:
        ```python
        with exported_spans() as spans:
            RLM("offline", on_event=spans).completion("a", "Which letter is it?")
        ```

    Args:
        end_s: Seconds to wait for the collector at the end.
    """
    protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), PROTOCOL)
    if protocol != PROTOCOL:
        _warn(f"no spans are sent: the protocol {protocol[:40]!r} is not supported, {PROTOCOL} is")
        yield None
        return
    continue_trace(os.environ.get("TRACEPARENT"))
    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())  # else each attempt is printed to stderr
    exporter = _Exporter()
    # `create` lets OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win only over names that are not set here.
    resource = Resource({"service.name": "rlm-broker"}).merge(_named())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    processor = BatchSpanProcessor(exporter)
    provider.add_span_processor(processor)
    receiver = OpenTelemetry(provider)
    try:
        yield receiver
    finally:
        receiver.close()
        ending = threading.Thread(target=processor.shutdown, name="rlm-broker-spans", daemon=True)
        ending.start()
        ending.join(end_s)
        if ending.is_alive():
            _warn(f"spans were not sent: no answer of the OpenTelemetry collector within {end_s:g} s")
        elif exporter.lost:
            _warn(f"{exporter.lost:,} spans were not sent: the OpenTelemetry collector did not take them")


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=4)  # the caller of the context manager


def _named() -> Resource:
    """Return the resource of the environment, without the SDK's made-up name for a nameless service."""
    made = Resource.create()
    named = {name: value for name, value in made.attributes.items() if not str(value).startswith("unknown_service")}
    return Resource(named)
