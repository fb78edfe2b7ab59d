"""The route `/metrics`, and the gauges that it reads from the parts of the server."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rlm_broker.service.guard import key_of
from rlm_broker.service.metrics import Gauges, Metrics
from rlm_broker.service.parts import Parts


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
