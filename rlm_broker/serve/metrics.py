"""Prometheus metrics of a server, and the route `/metrics`: counters of what its runs did, gauges of what it holds."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rlm_broker.events.event import BlockEnded, CallEnded, CallRetried, Event, RunEnded, RunStarted
from rlm_broker.serve.guard import key_of
from rlm_broker.serve.parts import Parts

OTHER: Final = "other"
"""Label of an unknown value."""
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
GAUGES: Final = {
    "queued_runs": "Runs waiting for a place.",
    "active_runs": "Runs under way.",
    "live_repls": "Open REPLs.",
    "warm_repls": "REPLs ready for the next run.",
    "containers": "Containers held by clients.",
    "file_bytes": "Bytes of uploaded files.",
}
"""Names of the gauges, and what each is."""


class Metrics:
    """Counts events of runs and HTTP requests. It is a receiver of events, and may be used from any thread.

    Example:
        >>> metrics = Metrics(models=["offline"], gauges={"active_runs": lambda: 0})
        >>> rlm = RLM("offline", on_event=metrics)
        >>> body, content_type = metrics.exposition()

    Args:
        models: Names of the server's models, the values of the label `model`; all other names are `other`. It may be a
            growing collection.
        gauges: Name of a gauge → function returning its value: `queued_runs`, `active_runs`, `live_repls`,
            `warm_repls`, `containers`, `file_bytes`. It is called at each scrape, in any thread; one that fails is
            left out.
    """

    def __init__(self, models: Collection[str] = (), gauges: Mapping[str, Callable[[], float]] | None = None) -> None:
        self._models = models
        self._trees: OrderedDict[str, str] = OrderedDict()
        self._routes: set[str] = set()
        self._lock = threading.Lock()
        self._registry = CollectorRegistry(auto_describe=True)
        counter, seconds = self._counter, self._seconds
        self._turns = counter("turns", "Turns of all runs.")
        self._block_s = seconds("block", "Seconds of blocks.", BLOCK_BUCKETS_S)
        self._retries = counter("call_retries", "Further attempts of calls.")
        # A counter of given labels is found once: each further look-up of prometheus_client's takes a lock and checks.
        self._runs = cache(counter("runs", "Root runs that ended.", "model", "outcome").labels)
        self._run_s = cache(seconds("run", "Seconds of root runs.", RUN_BUCKETS_S, "model").labels)
        self._children = cache(counter("child_runs", "Child runs that ended.", "outcome").labels)
        self._blocks = cache(counter("blocks", "Blocks of code that ended.", "status").labels)
        self._calls = cache(counter("calls", "Calls of models that ended.", "model", "outcome").labels)
        self._call_s = cache(seconds("call", "Seconds of calls of models.", CALL_BUCKETS_S, "model").labels)
        self._tokens = cache(counter("tokens", "Tokens of calls.", "model", "kind").labels)
        self._usd = cache(counter("usd", "US dollars of calls whose price is known.", "model").labels)
        self._requests = cache(counter("http_requests", "HTTP requests that were answered.", "route", "status").labels)
        self._request_s = cache(seconds("http_request", "Seconds of HTTP requests.", HTTP_BUCKETS_S, "route").labels)
        self._registry.register(_Gauges(gauges or {}))

    def __call__(self, event: Event) -> None:
        """Count one event."""
        match event:
            case CallEnded():
                self._call_ended(event)
            case BlockEnded(outcome=outcome):
                self._blocks(outcome.status if outcome.status in STATUSES else OTHER).inc()
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

        Example:
            ```python
            metrics = Metrics()
            metrics.request("/v1/files/{id}", 200, 0.05)
            ```

        Args:
            route: Pattern of the route, for example `/v1/files/{id}`, and never the path that a client sent.
            status: HTTP status of the answer.
            seconds: Time from the request to the end of the answer.
        """
        with self._lock:
            if route not in self._routes:
                route = route if len(self._routes) < MOST_ROUTES else OTHER
                self._routes.add(route)
        self._requests(route, str(status) if 100 <= status <= 599 else OTHER).inc()
        self._request_s(route).observe(max(0.0, seconds))

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics as a body, and its content type.

        Example:
            ```python
            body, content_type = Metrics().exposition("application/openmetrics-text")
            ```

        Args:
            accept: The `Accept` header of the scraper: it chooses between OpenMetrics and Prometheus' text format.
        """
        wants_open = "application/openmetrics-text" in accept  # no further word of the client's gets into a header
        encode, content_type = choose_encoder("application/openmetrics-text; version=1.0.0" if wants_open else "")
        return encode(self._registry), content_type

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"rlm_broker_{name}", about, labels, registry=self._registry)

    def _seconds(self, name: str, about: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        name = f"rlm_broker_{name}_duration_seconds"
        return Histogram(name, about, labels, buckets=buckets, registry=self._registry)

    def _model(self, name: str | None) -> str:
        return name if name is not None and name in self._models else OTHER

    def _run_ended(self, event: RunEnded) -> None:
        outcome = event.kind if event.kind in OUTCOMES else OTHER
        self._turns.inc(max(0, event.iterations))
        if event.depth:
            self._children(outcome).inc()
            return
        with self._lock:
            model = self._trees.pop(event.tree, OTHER)
        self._runs(model, outcome).inc()
        self._run_s(model).observe(max(0.0, event.duration_s))

    def _call_ended(self, event: CallEnded) -> None:
        model, usage = self._model(event.model), event.usage
        if event.is_remembered:
            outcome = "remembered"
        elif event.error is None:
            outcome = "stored" if usage.stored_calls else "answered"
        else:
            outcome = "cancelled" if event.error == "cancelled" else "failed"
        self._calls(model, outcome).inc()
        self._call_s(model).observe(max(0.0, event.duration_s))
        tokens = {"cached_input": usage.cached_input_tokens, "output": usage.total_output_tokens}
        for kind, number in {"input": usage.total_input_tokens, **tokens}.items():
            counted = self._tokens(model, kind)
            if number > 0:
                counted.inc(number)
        if usage.total_cost is not None and not usage.stored_calls:
            self._usd(model).inc(max(0.0, usage.total_cost))


class _Gauges(Collector):
    """Gauges read at each scrape. One whose function fails is left out, so that the others are seen."""

    def __init__(self, readings: Mapping[str, Callable[[], float]]) -> None:
        self._readings = {name: readings[name] for name in GAUGES if name in readings}

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges without values: the registry asks for them before the server is open."""
        return (GaugeMetricFamily(f"rlm_broker_{name}", about) for name, about in GAUGES.items())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges with their values."""
        for name, read in self._readings.items():
            try:
                value = float(read())
            except Exception:  # noqa: BLE001 - a function of the server's: a scrape must not fail as a whole
                continue
            yield GaugeMetricFamily(f"rlm_broker_{name}", GAUGES[name], value=value)


def metrics_of(parts: Parts) -> Metrics:
    """Return the metrics of a server."""
    sandbox = parts.rlm.sandbox
    gauges: dict[str, Callable[[], float]] = {
        "queued_runs": lambda: parts.runs.queued,
        "active_runs": lambda: parts.runs.running,
        "live_repls": lambda: sandbox.stats().workers,
        "warm_repls": lambda: sandbox.stats().ready,
        "containers": lambda: len(parts.repls),
        "file_bytes": lambda: parts.files.size_bytes,
    }
    return Metrics(parts.rlm.handler.routing.by_name, gauges)


def routes(metrics: Metrics) -> list[Route]:
    """Return the route. It needs the right `metrics`."""

    async def answered(request: Request) -> Response:
        key_of(request).require("metrics")
        body, content_type = metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return [Route("/metrics", answered)]
