"""Prometheus metrics of a server, and the route `/metrics`: counters of what its runs did, gauges of what it holds."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rlm_broker.events.event import (
    BlockEnded,
    CallEnded,
    CallRetried,
    Event,
    RunEnded,
    RunStarted,
)
from rlm_broker.serve.guard import key_of
from rlm_broker.serve.parts import Parts

OTHER: Final = "other"
"""Label of a value that is not among the known ones."""
OUTCOMES: Final = frozenset(
    {"answered", "stopped", "cancelled", "limit", "provider", "sandbox", "output", "replay"}
    | {"configuration", "context", "isolation", "unknown_model", "failed"}
)
"""Outcomes of runs: kinds of `RunEnded`."""
STATUSES: Final = frozenset({"ok", "error", "exited", "interrupted", "killed"})
MOST_ROUTES: Final = 256
"""Different routes of HTTP requests; further ones are counted as `other`."""
MOST_TREES: Final = 8_192
"""Root runs whose models are remembered until they end. Of more, the oldest is counted as `other` at its end."""
RUN_BUCKETS_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1_800, 3_600)
CALL_BUCKETS_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300)
BLOCK_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)
HTTP_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5, 10, 60, 600)

Reading = Callable[[], float]
"""A function that returns the value of a gauge; it is called at each scrape, in any thread."""


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """Sources of the values of the gauges. A gauge without a function is left out.

    Attributes:
        queued_runs: Runs that wait for a place.
        active_runs: Runs that go on.
        live_repls: REPLs that are open, those of runs included.
        warm_repls: REPLs that are ready for the next block or run.
        containers: Containers that clients hold.
        file_bytes: Bytes of uploaded files.
    """

    queued_runs: Reading | None = None
    active_runs: Reading | None = None
    live_repls: Reading | None = None
    warm_repls: Reading | None = None
    containers: Reading | None = None
    file_bytes: Reading | None = None


_GAUGES: Final = {
    "queued_runs": ("rlm_broker_queued_runs", "Runs that wait for a place."),
    "active_runs": ("rlm_broker_active_runs", "Runs that go on."),
    "live_repls": ("rlm_broker_live_repls", "REPLs that are open."),
    "warm_repls": ("rlm_broker_warm_repls", "REPLs that are ready for the next run."),
    "containers": ("rlm_broker_containers", "Containers that clients hold."),
    "file_bytes": ("rlm_broker_file_bytes", "Bytes of uploaded files."),
}


class Metrics:
    """Counts events of runs and HTTP requests. It is a receiver of events, and may be used from any thread.

    Args:
        models: Names of the models that the server has, which are the values of the label `model`; all other names are
            `other`. A collection that grows may be given.
        gauges: Where the values of the gauges come from.
    """

    def __init__(self, models: Collection[str] = (), gauges: Gauges | None = None) -> None:
        self._models = models
        self._trees: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._registry = registry = CollectorRegistry(auto_describe=True)
        self._runs = Counter("rlm_broker_runs", "Root runs that ended.", ["model", "outcome"], registry=registry)
        self._run_s = Histogram(
            "rlm_broker_run_duration_seconds",
            "Seconds of root runs.",
            ["model"],
            buckets=RUN_BUCKETS_S,
            registry=registry,
        )
        self._children = Counter("rlm_broker_child_runs", "Child runs that ended.", ["outcome"], registry=registry)
        self._turns = Counter("rlm_broker_turns", "Turns of all runs.", registry=registry)
        self._blocks = Counter("rlm_broker_blocks", "Blocks of code that ended.", ["status"], registry=registry)
        self._block_s = Histogram(
            "rlm_broker_block_duration_seconds", "Seconds of blocks.", buckets=BLOCK_BUCKETS_S, registry=registry
        )
        self._calls = Counter(
            "rlm_broker_calls", "Calls of models that ended.", ["model", "outcome"], registry=registry
        )
        self._call_s = Histogram(
            "rlm_broker_call_duration_seconds",
            "Seconds of calls of models.",
            ["model"],
            buckets=CALL_BUCKETS_S,
            registry=registry,
        )
        self._retries = Counter("rlm_broker_call_retries", "Further attempts of calls.", registry=registry)
        self._tokens = Counter("rlm_broker_tokens", "Tokens of calls.", ["model", "kind"], registry=registry)
        self._usd = Counter("rlm_broker_usd", "US dollars of calls whose price is known.", ["model"], registry=registry)
        self._requests = Counter(
            "rlm_broker_http_requests", "HTTP requests that were answered.", ["route", "status"], registry=registry
        )
        self._request_s = Histogram(
            "rlm_broker_http_request_duration_seconds",
            "Seconds of HTTP requests.",
            ["route"],
            buckets=HTTP_BUCKETS_S,
            registry=registry,
        )
        self._routes: set[str] = set()
        registry.register(_Read(gauges or Gauges()))

    def __call__(self, event: Event) -> None:
        """Count one event."""
        match event:
            case CallEnded():
                self._call_ended(event)
            case BlockEnded(outcome=outcome):
                self._blocks.labels(outcome.status if outcome.status in STATUSES else OTHER).inc()
                self._block_s.observe(max(0.0, outcome.execution_time))
            case CallRetried():
                self._retries.inc()
            case RunStarted(depth=0, tree=tree, model=model):
                with self._lock:
                    self._trees[tree] = self._model(model)
                    if len(self._trees) > MOST_TREES:
                        self._trees.popitem(last=False)
            case RunEnded():
                self._run_ended(event)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count one HTTP request.

        Args:
            route: Pattern of the route, such as `/v1/files/{id}`, and never the path that a client sent.
            status: HTTP status of the answer.
            seconds: Time from the request to the end of the answer.
        """
        with self._lock:
            if route not in self._routes:
                route = route if len(self._routes) < MOST_ROUTES else OTHER
                self._routes.add(route)
        self._requests.labels(route, str(status) if 100 <= status <= 599 else OTHER).inc()
        self._request_s.labels(route).observe(max(0.0, seconds))

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics as a body, and its content type.

        Args:
            accept: The `Accept` header of the scraper, which chooses between OpenMetrics and Prometheus' text format.
        """
        wants_open = "application/openmetrics-text" in accept  # no further word of the client's gets into a header
        encode, content_type = choose_encoder("application/openmetrics-text; version=1.0.0" if wants_open else "")
        return encode(self._registry), content_type

    def _model(self, name: str | None) -> str:
        return name if name is not None and name in self._models else OTHER

    def _run_ended(self, event: RunEnded) -> None:
        outcome = event.kind if event.kind in OUTCOMES else OTHER
        self._turns.inc(max(0, event.iterations))
        if event.depth:
            self._children.labels(outcome).inc()
            return
        with self._lock:
            model = self._trees.pop(event.tree, OTHER)
        self._runs.labels(model, outcome).inc()
        self._run_s.labels(model).observe(max(0.0, event.duration_s))

    def _call_ended(self, event: CallEnded) -> None:
        model, usage = self._model(event.model), event.usage
        if event.error is None:
            outcome = "stored" if usage.stored_calls else "answered"
        else:
            outcome = "cancelled" if event.error == "cancelled" else "failed"
        self._calls.labels(model, outcome).inc()
        self._call_s.labels(model).observe(max(0.0, event.duration_s))
        self._tokens.labels(model, "input").inc(max(0, usage.total_input_tokens))
        self._tokens.labels(model, "cached_input").inc(max(0, usage.cached_input_tokens))
        self._tokens.labels(model, "output").inc(max(0, usage.total_output_tokens))
        if usage.total_cost is not None and not usage.stored_calls:
            self._usd.labels(model).inc(max(0.0, usage.total_cost))


class _Read(Collector):
    """Gauges that are read at each scrape. One whose function fails is left out, so that the others are seen."""

    def __init__(self, gauges: Gauges) -> None:
        self._readings: Mapping[str, Reading | None] = msgspec.structs.asdict(gauges)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges without values: the registry asks for them before the server has all that they read."""
        return (GaugeMetricFamily(name, about) for name, about in _GAUGES.values())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges with their values."""
        for field, read in self._readings.items():
            if read is None:
                continue
            try:
                value = float(read())
            except Exception:  # noqa: BLE001 - a function of the server's: a scrape must not fail as a whole
                continue
            name, about = _GAUGES[field]
            yield GaugeMetricFamily(name, about, value=value)


def gauges_of(parts: Parts) -> Gauges:
    """Return where the gauges of a server read their values."""
    sandbox = parts.rlm.sandbox
    return Gauges(
        queued_runs=lambda: parts.runs.queued,
        active_runs=lambda: parts.runs.running,
        live_repls=lambda: sandbox.stats().workers,
        warm_repls=lambda: sandbox.stats().ready,
        containers=lambda: len(parts.repls),
        file_bytes=lambda: parts.files.size_bytes,
    )


def routes(metrics: Metrics) -> list[Route]:
    """Return the route, which needs the right `metrics`."""

    async def answered(request: Request) -> Response:
        key_of(request).require("metrics")
        body, content_type = metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return [Route("/metrics", answered)]
