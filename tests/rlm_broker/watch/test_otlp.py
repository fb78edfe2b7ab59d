"""Spans of a real run: in a document of its trace file, and at a collector as it goes on."""

import base64
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google.protobuf import json_format
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from rlm_broker import OpenTelemetry
from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.errors import ConfigurationError, ModelFailed
from rlm_broker.events.event import Event, EventsMissed, RunStarted, all_of
from rlm_broker.events.trace import TraceWriter, events
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.watch import otlp as module
from rlm_broker.watch.otlp import otlp, otlp_lines
from tests.support.otlp_receiver import OtlpReceiver, Received, below, received

SECRET = "sk-proj-" + "Zq9" * 16
CODE = f"""
try: lookup("x" * 3)
except Exception: pass
print(llm_query_batched(["part one", "part two"]))
print(rlm_query("the child"))
print("{SECRET}")
1 / 0
"""
CLIENT = 3


def lookup(word: str) -> str:
    """Look a word up."""
    raise ValueError(f"no {word}")


def says(request: LMRequest) -> str:
    """Answer each call of the tree by what is asked."""
    asked = str(request.messages[-1].content)
    if "part" in asked[:10]:
        return "of the part"
    if "second" in str(request.messages):
        raise RuntimeError("down")
    if request.depth:
        return "FINAL(from below)"
    spoken = sum(message.role == "assistant" for message in request.messages)
    return "FINAL(found)" if spoken else f"```repl{CODE}```"


class Told(NamedTuple):
    """A trace of two runs, of which the second failed, and what collectors got, without and with content."""

    trace: Path
    live: dict[bool, OtlpReceiver]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    with ExitStack() as stack:
        live = {content: stack.enter_context(OtlpReceiver()) for content in (False, True)}
        receivers: list[Any] = [stack.enter_context(TraceWriter(path))]
        for content, collector in live.items():
            provider = TracerProvider(shutdown_on_exit=False)
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{collector.endpoint}/v1/traces")))
            receivers.append(OpenTelemetry(provider, content=content))
            stack.callback(provider.shutdown)
        client = ScriptedClient(says, "openai/gpt-5-mini", cost_per_call=0.25)
        limits, tools = Limits(max_depth=2), {"lookup": lookup}
        with RLM(client, limits=limits, tools=tools, on_event=all_of(receivers)) as rlm:
            assert rlm.completion("the private context", "the private question").response == "found"
            with pytest.raises(ModelFailed):
                rlm.completion("c", "the second question")
    return Told(path, live)


def parsed(document: str) -> list[Received]:
    """Return the spans as a collector's own parser reads them; it refuses unknown fields.

    OTLP/JSON has ids as hexadecimal digits, and protobuf's JSON has bytes in base64. That is their one difference.
    """
    value: Any = json.loads(document)
    for span in value["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for name in ("traceId", "spanId", "parentSpanId"):
            if name in span:
                span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    data = json_format.ParseDict(value, TracesData())
    (resource,) = data.resource_spans
    assert resource.resource.attributes[0].value.string_value == "rlm-broker"
    (scope,) = resource.scope_spans
    assert scope.scope.name == "rlm_broker"
    return [received(span) for span in scope.spans]


@pytest.fixture(scope="module")
def spans(told: Told) -> list[Received]:
    return parsed("".join(otlp_lines(told.trace)))


def named(spans: list[Received], name: str) -> list[Received]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_ns)


def facts(spans: list[Received]) -> list[Any]:
    """All of the spans but their ids, in the order of their starts; a parent by its name and its start."""
    by_id = {span.id: (span.name, span.start_ns) for span in spans}
    return sorted(
        (
            *(span.start_ns, span.name, span.end_ns, span.kind, span.status, span.words),
            *(by_id.get(span.parent, ()), sorted(span.attributes.items()), span.events),
        )
        for span in spans
    )


def test_file_and_live_spans_are_the_same(told: Told, spans: list[Received]) -> None:
    """One mapping makes both: names, times, parents and attributes are equal."""
    assert facts(spans) == facts(told.live[True].spans)


def test_content_is_there_on_request_alone(told: Told, spans: list[Received]) -> None:
    bodies = told.live[False].bodies
    for text in (b"private", b"part", b"found", b"print", b"xxx", b"division", b"no x", b"second", SECRET.encode()):
        assert text not in bodies, text
    root, block = named(spans, "invoke_agent rlm_broker")[0], named(spans, "execute_tool python")[0]
    asked = json.loads(root.attributes["gen_ai.input.messages"])
    assert asked == [{"role": "user", "parts": [{"type": "text", "content": "the private question"}]}]
    assert "rlm_query" in json.loads(block.attributes["gen_ai.tool.call.arguments"])["code"]
    assert "of the part" in json.loads(block.attributes["gen_ai.tool.call.result"])["stdout"]
    assert block.words == "ZeroDivisionError: division by zero"
    assert SECRET.encode() not in told.live[True].bodies
    first = named(spans, "chat openai/gpt-5-mini")[0]
    assert first.attributes["gen_ai.system_instructions"]
    assert "rlm_query" in first.attributes["gen_ai.output.messages"]


def test_spans_of_a_tree_have_their_parents_and_places(spans: list[Received]) -> None:
    root, child, second = named(spans, "invoke_agent rlm_broker")
    assert [span.parent for span in (root, second)] == ["", ""]
    assert {span.trace for span in spans} == {root.trace, second.trace}
    (failed,) = (span for span in below(spans, root) if span.name == "execute_tool python")
    assert {span.name for span in below(spans, root)} == {"chat openai/gpt-5-mini", "execute_tool python"}
    assert child.parent == failed.id
    assert [span.parent for span in named(spans, "execute_tool lookup")] == [failed.id]
    batch = [span for span in below(spans, failed) if span.kind == CLIENT]
    assert sorted(span.attributes["rlm_broker.call.batch_size"] for span in batch) == [2, 2]
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans) == 11
    for span in spans:
        assert (len(span.trace), len(span.id)) == (32, 16)
        assert 10**18 < span.start_ns <= span.end_ns
        if span.parent:
            above = by_id[span.parent]
            assert above.trace == span.trace
            assert above.start_ns <= span.start_ns <= span.end_ns <= above.end_ns


OF_SPANS: dict[str, dict[str, Any]] = {
    "invoke_agent rlm_broker": {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "openai",
        "rlm_broker.run.outcome": "answered",
        "rlm_broker.cost_usd": 5 * 0.25,
        "rlm_broker.usage.calls": 5,
    },
    "chat openai/gpt-5-mini": {
        "gen_ai.request.model": "openai/gpt-5-mini",
        "gen_ai.response.model": "openai/gpt-5-mini",
        "rlm_broker.cost_usd": 0.25,
    },
    "execute_tool python": {
        "gen_ai.tool.name": "python",
        "rlm_broker.block.status": "error",
        "error.type": "ZeroDivisionError",
    },
    "execute_tool lookup": {"error.type": "ValueError", "gen_ai.tool.type": "function"},
}


def test_spans_have_the_attributes_of_the_conventions(spans: list[Received]) -> None:
    first = {name: named(spans, name)[0] for name in OF_SPANS}
    assert {name: {key: first[name].attributes[key] for key in wanted} for name, wanted in OF_SPANS.items()} == OF_SPANS
    assert [(span.kind, span.status) for span in first.values()] == [(1, 0), (CLIENT, 0), (1, 2), (1, 2)]
    root, call, *_ = first.values()
    assert not any(name.startswith("gen_ai.usage") for name in root.attributes)
    assert min(call.attributes[f"gen_ai.usage.{side}_tokens"] for side in ("input", "output")) > 0
    assert named(spans, "invoke_agent rlm_broker")[-1].attributes["rlm_broker.run.outcome"] == "provider"


def test_trace_that_breaks_off_has_all_spans(told: Told) -> None:
    whole = list(events(told.trace))
    for count in range(len(whole)):
        begun = [
            each
            for each in whole[:count]
            if type(each).__name__ in ("RunStarted", "CallStarted", "BlockStarted", "ToolStarted")
        ]
        assert len(parsed("".join(otlp(whole[:count])))) == len(begun)


@pytest.mark.parametrize("text", ["", "no trace\n", '{"event": "run_started", "run": "1", "depth": 0}\n'])
def test_file_that_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    """The refusal comes before a first line, so that no file is begun."""
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="is not a trace"):
        next(otlp_lines(path))


def test_hostile_events_make_a_document() -> None:
    hostile: list[Event] = [
        RunStarted("1\ud800\x00", 0, "</script>\ud800", "m" * 10**6, {"version": [1], "sub_model": {}}, tree="\udfff"),
        RunStarted("1", 0, "q", "m", {}, tree="t", time=sys.float_info.max),
        EventsMissed("1", 0, 1, tree="t"),
    ]
    spans = parsed("".join(otlp(hostile)).replace("\\ud800", "?").replace("\\udfff", "?"))
    assert [span.attributes["error.type"] for span in spans] == ["unfinished"] * 2
    assert max(len(span.attributes["gen_ai.request.model"]) for span in spans) <= 200


def test_spans_of_a_document_are_bounded(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SPANS", 3)
    assert len(parsed("".join(otlp(events(told.trace))))) == 3
