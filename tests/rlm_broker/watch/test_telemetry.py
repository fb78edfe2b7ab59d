import asyncio
import gc
import json
import subprocess
import sys
import weakref
from typing import Any

import pytest
from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rlm_broker import OpenTelemetry
from rlm_broker.broker.clients.base import LMReply, LMRequest, call_headers
from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.errors import ConfigurationError, LimitReached, ModelFailed
from rlm_broker.events.event import CallEnded, CallStarted
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.usage import Usage
from rlm_broker.watch.conventions import traceparent
from rlm_broker.watch.telemetry import CAPTURE
from tests.support.fake_openai import FakeOpenAI, completion, failure
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.places import PROJECT


class Memory:
    """A provider whose spans are read in the test."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def by_name(self, name: str) -> list[Any]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def memory() -> Memory:
    return Memory()


def test_environment_puts_content_on_and_the_argument_wins(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAPTURE, "true")
    for content in (None, False):
        receiver = OpenTelemetry(memory.provider, content=content)
        RLM(ScriptedClient(["FINAL(a)"]), on_event=receiver).completion("c", "the question")
    with_content, without = memory.by_name("invoke_agent rlm_broker")
    assert "the question" in with_content.attributes["gen_ai.input.messages"]
    assert "gen_ai.input.messages" not in without.attributes
    with pytest.raises(ConfigurationError, match="content"):
        OpenTelemetry(content="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("is_async", [False, True])
def test_root_is_below_the_current_span(memory: Memory, is_async: bool) -> None:
    """The context crosses to the run's event loop, whether it is the caller's or one of the background."""
    rlm = RLM(ScriptedClient(["FINAL(a)"]), on_event=OpenTelemetry(memory.provider))
    with memory.provider.get_tracer("test").start_as_current_span("mine") as mine:
        if is_async:
            asyncio.run(rlm.acompletion("c", "q"))
        else:
            rlm.completion("c", "q")
        assert otel.get_current_span() is mine
    (root,) = memory.by_name("invoke_agent rlm_broker")
    assert root.parent.span_id == mine.get_span_context().span_id
    assert root.context.trace_id == mine.get_span_context().trace_id


async def test_root_is_below_the_nearest_span_of_its_trace(memory: Memory) -> None:
    """That is the `traceparent` that was handed over, unless a server has a span of its own in the same trace."""
    other = f"00-{'ab' * 16}-{'cd' * 8}-01"
    rlm = RLM(ScriptedClient(["FINAL(a)"] * 4), on_event=OpenTelemetry(memory.provider))
    token = traceparent.set(other)
    run = rlm.start("c", "q")
    traceparent.reset(token)
    await run
    await rlm.start("c", "q")
    with memory.provider.get_tracer("test").start_as_current_span("server") as server:
        here = server.get_span_context()
        for given in (f"00-{here.trace_id:032x}-{'cd' * 8}-01", other):
            traceparent.set(given)
            await rlm.start("c", "q")
    handed, alone, own, stranger = memory.by_name("invoke_agent rlm_broker")
    assert (f"{handed.context.trace_id:032x}", f"{handed.parent.span_id:016x}") == ("ab" * 16, "cd" * 8)
    assert alone.parent is None
    assert own.parent.span_id == here.span_id
    assert f"{stranger.context.trace_id:032x}" == "ab" * 16


def test_provider_sees_the_span_of_each_call(memory: Memory) -> None:
    """Each request of a batch, and each attempt of a call, carries the `traceparent` of its own `chat` span."""
    code = "```repl\nprint(llm_query_batched(['a1', 'b2', 'c3']))\n```"

    def says(body: dict[str, Any]) -> Any:
        asked = body["messages"][-1]["content"]
        if asked in ("a1", "b2", "c3"):
            return completion(asked.upper())
        return completion("FINAL(done)" if len(body["messages"]) > 2 else code)

    with FakeOpenAI(failure(503, "busy"), *[says] * 6) as server:
        rlm = RLM(OpenAICompatibleClient(server.base_url, "m"), on_event=OpenTelemetry(memory.provider, content=True))
        rlm.completion("c", "q")
    calls = {f"{span.context.span_id:016x}": span for span in memory.by_name("chat m")}
    assert len(calls) == 5
    assert len(server.requests) == 6
    posted = [headers for headers in server.headers if "content-length" in headers]
    assert not any("traceparent" in headers for headers in server.headers if headers not in posted)
    for headers, body in zip(posted, server.requests, strict=True):
        version, trace_id, span_id, flags = headers["traceparent"].split("-")
        span = calls[span_id]
        assert (version, int(trace_id, 16), int(flags, 16) & 1) == ("00", span.context.trace_id, 1)
        asked = json.loads(span.attributes["gen_ai.input.messages"])[-1]["parts"][0]["content"]
        assert asked == body["messages"][-1]["content"]
    (retried,) = (span for span in calls.values() if span.events)
    assert retried.events[0].name == "rlm_broker.retry"
    assert retried.events[0].attributes["error.type"] == "503"


def test_no_header_without_telemetry() -> None:
    """The incoming `traceparent` of a server alone sends none on."""
    token = traceparent.set(f"00-{'ab' * 16}-{'cd' * 8}-01")
    with FakeOpenAI(completion("FINAL(a)")) as server:
        RLM(OpenAICompatibleClient(server.base_url, "m"), on_event=print).completion("c", "q")
    traceparent.reset(token)
    assert len(server.requests) == 1
    assert not any("traceparent" in headers for headers in server.headers)


class Traced(ScriptedClient):
    """A client whose own library makes spans, and asks for headers."""

    def __init__(self, provider: TracerProvider, replies: list[str]) -> None:
        super().__init__(replies)
        self.headers: list[str] = []
        self._tracer = provider.get_tracer("library")

    async def complete(self, request: LMRequest) -> LMReply:
        with self._tracer.start_as_current_span("http"):
            self.headers.append(call_headers.get().get("traceparent", ""))
            return await super().complete(request)


def test_spans_of_clients_and_tools_are_below(memory: Memory) -> None:
    tracer = memory.provider.get_tracer("tool")

    def look() -> int:
        with tracer.start_as_current_span("inside"):
            return 1

    client = Traced(memory.provider, ["```repl\nprint(look())\n```", "FINAL(a)"])
    RLM(client, tools={"look": look}, on_event=OpenTelemetry(memory.provider)).completion("c", "q")
    (tool,) = memory.by_name("execute_tool look")
    assert [span.parent.span_id for span in memory.by_name("inside")] == [tool.context.span_id]
    calls = [span.context.span_id for span in memory.by_name("chat scripted")]
    assert [span.parent.span_id for span in memory.by_name("http")] == calls
    assert [header.split("-")[2] for header in client.headers] == [f"{each:016x}" for each in calls]


def test_no_context_is_left_after_a_call(memory: Memory) -> None:
    """A call in the caller's own task leaves neither a span nor headers behind, and a call within a call its outer."""
    receiver = OpenTelemetry(memory.provider)
    receiver(CallStarted("1", 0, 1, "outer", "q", tree="t", n=1, time=1.0))
    outer, headers = otel.get_current_span(), call_headers.get()
    receiver(CallStarted("1", 0, 2, "inner", "q", tree="t", n=2, time=2.0))
    assert call_headers.get() != headers
    receiver(CallEnded("1", 0, 2, "inner", Usage(1), 1.0, "a", tree="t", n=3, time=3.0))
    assert otel.get_current_span() is outer
    assert call_headers.get() == headers
    receiver(CallEnded("1", 0, 1, "outer", Usage(1), 1.0, "a", tree="t", n=4, time=4.0))
    assert otel.get_current_span() is otel.INVALID_SPAN
    assert call_headers.get() == {}


def test_failures_have_their_class_and_no_words(memory: Memory) -> None:
    receiver = OpenTelemetry(memory.provider)
    spins = ScriptedClient(["```repl\nimport time; time.sleep(1000)\n```"])
    with pytest.raises(LimitReached):
        RLM(spins, limits=Limits(run_timeout_s=0.3), on_event=receiver).completion("c", "q")
    (root,) = memory.by_name("invoke_agent rlm_broker")
    assert root.attributes["error.type"] == root.attributes["rlm_broker.run.outcome"] == "limit"
    assert root.attributes["rlm_broker.limit"] == "run_timeout_s"
    assert not root.status.is_ok
    assert [span.attributes["error.type"] for span in memory.by_name("execute_tool python")] == ["unfinished"]
    with FakeOpenAI(failure(401, "your key is wrong")) as server, pytest.raises(ModelFailed):
        RLM(OpenAICompatibleClient(server.base_url, "m"), on_event=receiver).completion("c", "q")
    (call,) = memory.by_name("chat m")
    assert (call.attributes["error.type"], call.status.description) == ("401", None)


def test_lone_surrogates_cost_no_spans() -> None:
    """Text that is no UTF-8 is replaced: an exporter would drop its whole batch."""
    with OtlpReceiver() as collector:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{collector.endpoint}/v1/traces")))
        receiver = OpenTelemetry(provider, content=True)
        receiver(CallStarted("1", 0, 1, "m\ud800", "q\ud800", tree="t", n=1, time=1.0))
        receiver(CallEnded("1", 0, 1, "m\ud800", Usage(1), 1.0, "a\ud800", tree="t", n=2, time=2.0))
        provider.shutdown()
    assert [span.name for span in collector.spans] == ["chat m?"]


def test_close_ends_what_is_open(memory: Memory) -> None:
    receiver = OpenTelemetry(memory.provider)

    def closes(_request: LMRequest) -> str:
        receiver.close()
        return "FINAL(a)"

    RLM(ScriptedClient(closes), on_event=receiver).completion("c", "q")
    ended = {span.name: (span.attributes or {})["error.type"] for span in memory.exporter.get_finished_spans()}
    assert ended == {"chat scripted": "unfinished", "invoke_agent rlm_broker": "unfinished"}


def test_no_state_of_ended_runs_is_kept(memory: Memory) -> None:
    receiver = OpenTelemetry(memory.provider)
    with RLM(ScriptedClient(["```repl\nprint(1)\n```", "FINAL(a)"] * 3), on_event=receiver) as rlm:
        for _ in range(3):
            rlm.completion("c", "q")
    (span,) = memory.by_name("invoke_agent rlm_broker")[:1]
    kept = weakref.ref(span)
    assert not receiver._spans._trees
    memory.exporter.clear()
    del span
    gc.collect()
    assert kept() is None


def test_core_imports_no_optional_package_and_a_missing_one_is_one_sentence() -> None:
    core = (
        "import sys, rlm_broker.rlm, rlm_broker.cli.main, rlm_broker.cli.ask, rlm_broker.watch.otlp\n"
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry', 'prometheus'))]\n"
        "sys.modules['opentelemetry'] = None\nfrom rlm_broker import OpenTelemetry"
    )
    done = subprocess.run([sys.executable, "-c", core], cwd=PROJECT, capture_output=True, text=True, check=False)
    said = "ImportError: OpenTelemetry needs packages that are not installed: pip install 'rlm-broker[otel]'"
    assert done.stderr.splitlines()[-1] == said
