"""Spans of commands, if the environment names an OpenTelemetry collector and the extra `otel` is installed."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from rlm_broker.cli.terminal import say
from rlm_broker.events.event import Emit
from rlm_broker.watch.conventions import continue_trace

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def sent_spans() -> AbstractContextManager[Emit | None]:
    """Return a receiver of events that sends spans, as a context manager; it is None if no spans are to be sent.

    The variables are OpenTelemetry's own, which hold for all programs of a machine. So a missing extra is no error, and
    a line reports it.
    `TRACEPARENT` names the span of the caller, for example a CI job's.
    """
    if not is_wanted(os.environ):
        return nullcontext()
    try:
        from rlm_broker.watch.collector import exporting
    except ImportError:
        _tell("no spans are sent: they need packages that are not installed: pip install 'rlm-broker[otel]'")
        return nullcontext()
    protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "http/protobuf")
    if protocol != "http/protobuf":
        _tell(f"no spans are sent: the protocol {protocol[:40]!r} is not supported, http/protobuf is")
        return nullcontext()
    continue_trace(os.environ.get("TRACEPARENT"))
    return exporting(_tell)


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Return whether the variables of OpenTelemetry name a collector and do not switch spans off."""
    is_off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporters = environment.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    return not is_off and "otlp" in map(str.strip, exporters) and any(environment.get(name) for name in _ENDPOINTS)


def _tell(sentence: str) -> None:
    say(f"warning: {sentence}", err=True)
