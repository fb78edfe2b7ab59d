"""A trace as OTLP/JSON, for every OpenTelemetry collector. No package of OpenTelemetry is needed."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final

from rlm_broker.errors import ConfigurationError
from rlm_broker.events.event import Event
from rlm_broker.events.trace import events
from rlm_broker.values.host_files import refusal_told, replacement
from rlm_broker.watch.spans import AGENT, CHAT, Span, Spans, Value

INTERNAL, CLIENT = 1, 3
"""Kinds of spans in OTLP."""
ERROR: Final = 2
"""Status of a failed span in OTLP."""
MOST_SPANS: Final = 1_000_000
"""Spans of one document; further ones are left out."""


def otlp_lines(trace: Path) -> Iterator[str]:
    """Yield the lines of the document of a trace, the first one once an event is read.

    Raises:
        ConfigurationError: The trace cannot be read, or is none.
    """
    found = events(trace)
    first = next(found, None)
    if first is None:
        raise ConfigurationError(f"{trace} is not a trace: it is empty")
    yield from otlp(chain([first], found))


def write_otlp(trace: Path, out: Path) -> None:
    """Write the document of a trace to the new file `out`. A file that is no trace makes no file.

    Raises:
        ConfigurationError: The trace cannot be read, or the file exists or cannot be written.
    """
    lines = otlp_lines(trace)
    first = next(lines)
    with refusal_told(f"cannot write {out}"):
        if os.path.lexists(out):
            raise ConfigurationError(f"{out} exists: remove it, or write to another file")
        with replacement(out, 0o666) as file:
            file.writelines(f"{line}\n".encode() for line in chain([first], lines))


def otlp(events: Iterable[Event]) -> Iterator[str]:
    """Yield the lines of one OTLP/JSON document (`resourceSpans`), one for each span.

    Ids are hashes of the ids of run trees and the places of spans, so the same trace gives the same document. A span
    without an end has the error `unfinished`. Spans are in the order of their ends.

    Args:
        events: Events of the trace, in order.
    """
    done: list[Span] = []
    spans = Spans(lambda _: None, done.append, has_content=True)
    resource = {"attributes": [_attribute("service.name", "rlm-broker")]}
    scope = {"name": AGENT}
    yield f'{{"resourceSpans":[{{"resource":{_json(resource)},"scopeSpans":[{{"scope":{_json(scope)},"spans":['
    count = 0
    for event in chain(events, [None]):
        if event is None:
            spans.close()
        else:
            spans.take(event)
        for span in done[: MOST_SPANS - count]:
            yield f"{',' if count else ''}{_json(_span(span))}"
            count += 1
        done.clear()
    yield "]}]}]}"


def _span(span: Span) -> dict[str, Any]:
    made: dict[str, Any] = {
        "traceId": _id(span.tree, "", 16),
        "spanId": _id(span.tree, f"{span.key} {span.start_ns}", 8),
        "name": span.name,
        "kind": CLIENT if span.operation == CHAT else INTERNAL,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": [_attribute(*each) for each in (span.attributes | span.results).items()],
    }
    if span.parent is not None:
        made["parentSpanId"] = _id(span.tree, f"{span.parent.key} {span.parent.start_ns}", 8)
    if span.events:
        made["events"] = [
            {
                "name": each.name,
                "timeUnixNano": str(each.time_ns),
                "attributes": [_attribute(*pair) for pair in each.attributes.items()],
            }
            for each in span.events
        ]
    if span.has_failed:
        made["status"] = {"code": ERROR, "message": span.words} if span.words else {"code": ERROR}
    return made


def _attribute(name: str, value: Value) -> dict[str, Any]:
    """Return an attribute in OTLP/JSON, where whole numbers are texts."""
    if isinstance(value, bool):
        return {"key": name, "value": {"boolValue": value}}
    if isinstance(value, int):
        return {"key": name, "value": {"intValue": str(value)}}
    if isinstance(value, float):
        return {"key": name, "value": {"doubleValue": value}}
    return {"key": name, "value": {"stringValue": value}}


def _id(tree: str, key: str, size: int) -> str:
    """Return the id of a tree or a span in hexadecimal digits."""
    return hashlib.blake2b(f"{tree}\n{key}".encode(errors="replace"), digest_size=size).hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))  # ASCII alone: a trace may have lone surrogates
