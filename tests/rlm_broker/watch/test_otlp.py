import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.errors import ConfigurationError, ModelFailed
from rlm_broker.events.event import Event, RunStarted
from rlm_broker.events.trace import TraceWriter, events
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.watch import otlp as module
from rlm_broker.watch.otlp import export, otlp
from rlm_broker.watch.spans import Spans
from tests.support.otlp_receiver import Received, received

CODE = "```repl\nprint(look())\nprint(llm_query_batched(['one', 'two']), rlm_query('the child'))\n1 / 0\n```"


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
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    replies = [CODE, "of one", "of two", "FINAL(below)", "FINAL(found)"]
    with (
        TraceWriter(path) as writer,
        RLM(
            ScriptedClient(replies, cost_per_call=0.5),
            tools={"look": lambda: 1},
            limits=Limits(max_depth=2),
            on_event=writer,
        ) as rlm,
    ):
        assert rlm.completion("c", "the question").response == "found"
        with pytest.raises(ModelFailed):
            rlm.completion("c", "the second question")
    return path


def test_a_trace_becomes_a_document_of_a_collector(trace: Path) -> None:
    spans = parsed("".join(otlp(events(trace))))
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans) == 11
    assert len({span.trace for span in spans}) == 2
    for span in spans:
        assert (len(span.trace), len(span.id)) == (32, 16)
        assert 10**18 < span.start_ns <= span.end_ns
        if span.parent:
            above = by_id[span.parent]
            assert above.trace == span.trace
            assert above.start_ns <= span.start_ns <= span.end_ns <= above.end_ns
    roots = [span for span in spans if not span.parent]
    assert [span.attributes["rlm_broker.run.outcome"] for span in roots] == ["answered", "provider"]
    (child,) = (span for span in spans if span.name.startswith("invoke_agent") and span.parent)
    assert by_id[child.parent].name == "execute_tool python"
    (block,) = (span for span in spans if span.name == "execute_tool python")
    assert block.attributes["error.type"] == "ZeroDivisionError"
    assert block.words == "ZeroDivisionError: division by zero"
    assert "look()" in block.attributes["gen_ai.tool.call.arguments"]


def test_file_and_live_spans_are_the_same(trace: Path) -> None:
    """Both are made by one mapping: names, times and attributes are equal. Content can be left out."""
    live: list[Any] = []
    spans = Spans(lambda _: None, live.append)
    for event in events(trace):
        spans.take(event)
    document = "".join(otlp(events(trace), content=False))
    assert [(span.name, span.start_ns, span.end_ns, span.attributes) for span in parsed(document)] == [
        (span.name, span.start_ns, span.end_ns, span.attributes | span.results) for span in live
    ]
    assert not [text for text in ("question", "look()", "of one", "division", "below") if text in document]
    assert "\n".join(export(trace, None)) == "\n".join(otlp(events(trace)))


def test_trace_that_breaks_off_has_all_spans(trace: Path) -> None:
    whole = list(events(trace))
    for count in range(len(whole)):
        spans = parsed("".join(otlp(whole[:count])))
        begun = sum(
            type(each).__name__ in ("RunStarted", "CallStarted", "BlockStarted", "ToolStarted")
            for each in whole[:count]
        )
        assert len(spans) == begun


@pytest.mark.parametrize("text", ["", "no trace\n", '{"event": "run_started", "run": "1", "depth": 0}\n'])
def test_file_that_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    """The refusal comes before a first line, so that no file is begun."""
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="is not a trace"):
        next(export(path, None))


def test_hostile_events_make_a_document() -> None:
    hostile = [
        RunStarted("1\ud800\x00", 0, "</script>\ud800", "m" * 10**6, {"version": [1], "sub_model": {}}, tree="\udfff"),
        RunStarted("1", 0, "q", "m", {}, tree="t", time=sys.float_info.max),
        Event("1", 0, tree="t"),
    ]
    spans = parsed("".join(otlp(hostile)).replace("\\ud800", "?").replace("\\udfff", "?"))
    assert [span.attributes["error.type"] for span in spans] == ["unfinished"] * 2
    assert max(len(span.attributes["gen_ai.request.model"]) for span in spans) <= 200


def test_spans_of_a_document_are_bounded(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SPANS", 3)
    assert len(parsed("".join(otlp(events(trace))))) == 3
