"""A collector on loopback that takes spans by OTLP over HTTP, as protobuf, and keeps them."""

import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Received:
    """A span as it arrived, with its attributes as a dict."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    status: int
    words: str


class OtlpReceiver:
    """The collector, for the length of a `with`.

    Args:
        answers: Whether requests are answered; if not, they wait until the end.

    Attributes:
        spans: All spans so far.
        services: Names of the services that sent them.
        bodies: All bodies as bytes.
        arrived: A request has been read.
    """

    def __init__(self, *, answers: bool = True) -> None:
        self.spans: list[Received] = []
        self.services: list[str] = []
        self.bodies = b""
        self.arrived = threading.Event()
        self._answers = answers
        self._ending = threading.Event()

    @property
    def endpoint(self) -> str:
        """The address for `OTEL_EXPORTER_OTLP_ENDPOINT`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver._take(self.path, gzip.decompress(body) if self.headers["content-encoding"] else body)
                if not receiver._answers:
                    receiver._ending.wait()
                    return
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces", path
        self.bodies += body
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            named = attributes_of(resource.resource.attributes)
            self.services.append(named["service.name"])
            for scope in resource.scope_spans:
                self.spans += [received(each) for each in scope.spans]
        self.arrived.set()


def received(span: Any) -> Received:
    """Return a span of a protobuf message."""
    return Received(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=attributes_of(span.attributes),
        events=[(each.name, each.time_unix_nano, attributes_of(each.attributes)) for each in span.events],
        status=span.status.code,
        words=span.status.message,
    )


def attributes_of(pairs: Any) -> dict[str, Any]:
    """Return attributes of a protobuf message as a dict."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def below(spans: list[Received], parent: Received) -> Iterator[Received]:
    """Yield the spans whose parent is this one."""
    return (span for span in spans if span.parent == parent.id)
