"""Spans of a command, sent to the collector of the environment within a bounded time."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from rlm_broker.events.event import Emit
from rlm_broker.watch.telemetry import OpenTelemetry

END_S: Final = 3.0
"""Seconds to wait for the collector at the end of a command."""


class _Exporter(OTLPSpanExporter):
    """Counts the spans without an acknowledgement of the collector."""

    lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.lost += len(spans)
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self.lost -= len(spans)
        return result


@contextmanager
def exporting(tell: Callable[[str], object], end_s: float = END_S) -> Iterator[Emit]:
    """Yield a receiver of events, and send their spans to the collector of the `OTEL_EXPORTER_OTLP_*` variables.

    Args:
        tell: Called with one sentence if spans were lost.
        end_s: Seconds to wait for the collector at the end.
    """
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
            tell(f"spans were not sent: no answer of the OpenTelemetry collector within {end_s:g} s")
        elif exporter.lost:
            tell(f"{exporter.lost:,} spans were not sent: the OpenTelemetry collector did not take them")


def _named() -> Resource:
    """Return the resource of the environment, without the SDK's made-up name for a nameless service."""
    made = Resource.create()
    named = {name: value for name, value in made.attributes.items() if not str(value).startswith("unknown_service")}
    return Resource(named)
