"""Spans of commands, if the environment names an OpenTelemetry collector and the extra `otel` is installed."""

import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from rlm_broker.events.event import Emit

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def sent_spans() -> AbstractContextManager[Emit | None]:
    """Return a receiver of events that sends spans, as a context manager; it is None if no spans are to be sent.

    The variables are OpenTelemetry's own, and hold for all programs of a machine. So a missing extra is a warning.
    """
    if not is_wanted(os.environ):
        return nullcontext()
    try:
        from rlm_broker.watch.collector import exported_spans
    except ImportError:
        needed = "packages that are not installed: pip install 'rlm-broker[otel]'"
        warnings.warn(f"no spans are sent: they need {needed}", stacklevel=2)
        return nullcontext()
    return exported_spans()


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Return whether the variables of OpenTelemetry name a collector and do not switch spans off."""
    is_off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporters = environment.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    return not is_off and "otlp" in map(str.strip, exporters) and any(environment.get(name) for name in _ENDPOINTS)
