"""Cost of watching: one-turn runs with a trace and metrics, and with spans, beside the same runs without any."""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from rlm_broker.events.event import Emit, Event
from rlm_broker.events.trace import TraceWriter
from rlm_broker.rlm import RLM
from rlm_broker.serve.metrics import Metrics
from rlm_broker.watch.telemetry import OpenTelemetry
from scripts.bench.measure import Effort, Model
from scripts.bench.row import OURS, Row, side

RUNS = 5
"""Runs of one sample."""


class _Encoding(SpanExporter):
    """Encodes spans as they are sent, and sends them nowhere."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def overhead(effort: Effort) -> list[Row]:
    """One-turn runs in process, one after the other: plain, with a trace and metrics, and with spans."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        trace = stack.enter_context(TraceWriter(Path(folder) / "run.jsonl"))
        metrics = Metrics([Model.model_name])
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(_Encoding()))
        stack.callback(provider.shutdown)

        def both(event: Event) -> None:
            trace(event)
            metrics(event)

        plain, watched, spans = asyncio.run(_by_turns(effort.times(80), (None, both, OpenTelemetry(provider))))
    floor = side("the same without", "ms", plain)
    seen, traced = side(OURS, "ms", watched), side(OURS, "ms", spans)
    return [
        Row("one-turn run with a trace and metrics", seen, [floor], [seen.at_most_times(1.05, floor)]),
        Row("one-turn run with OpenTelemetry", traced, [floor], [traced.at_most_times(1.1, floor)]),
    ]


async def _by_turns(rounds: int, receivers: Sequence[Emit | None]) -> list[list[float]]:
    """Return the seconds of one run, for each receiver and round. The receivers take turns."""
    samples: list[list[float]] = [[] for _ in receivers]
    model = Model(lambda _request: "```repl\nFINAL(str(len(context)))\n```")
    async with AsyncExitStack() as stack:
        rlms = [await stack.enter_async_context(RLM(model, on_event=receive)) for receive in receivers]
        for _ in range(rounds):
            for rlm, taken in zip(rlms, samples, strict=True):
                started = time.perf_counter()
                for _ in range(RUNS):
                    completion = await rlm.acompletion("some context", "how long is it?")
                    assert completion.response == "12", completion.response
                taken.append((time.perf_counter() - started) / RUNS)
    return samples
