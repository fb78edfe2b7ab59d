"""Spans of a command, sent to the collector that the environment names, within a bounded time."""

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
"""Seconds for which the end of a command waits for the collector."""


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
def exporting(tell: Callable[[str], object], end_s: float = END_S) -> Iterator[Emit]:
    """Yield a receiver of events whose spans are sent to the collector of the `OTEL_EXPORTER_OTLP_*` variables.

    Args:
        tell: Called with one sentence if spans were lost.
        end_s: Seconds for which the end waits for the collector.
    """
    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())  # else each attempt is printed to stderr
    exporter = _Exporter()
    # `create` puts OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES over what it is given only if that is not set here.
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
    """Return the resource of the environment, without the name that the SDK makes up for a service without one."""
    made = Resource.create()
    named = {name: value for name, value in made.attributes.items() if not str(value).startswith("unknown_service")}
    return Resource(named)
