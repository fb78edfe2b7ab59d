"""Events of runs as events of responses, by both sets of types."""

import json
from typing import Any

import pytest

from rlm_broker import (
    Block,
    BlockEnded,
    BlockStarted,
    CallEnded,
    CallRetried,
    CallStarted,
    CallText,
    IterationStarted,
    ModelFailed,
    Replied,
    RunCancelled,
    Usage,
)
from rlm_broker.serve.questions.client_tools import ClientCall
from rlm_broker.serve.questions.runs import RunOutcome
from rlm_broker.serve.responses.bodies import Resource, ResponseRequest, repeated
from rlm_broker.serve.responses.events import LOGS_CHARS, Teller
from rlm_broker.serve.responses.store import ResponseEvents
from tests.support.response_types import check_body, check_events

USED = Usage(1, 10, 5, 0.25)


def told(journal: ResponseEvents) -> list[dict[str, Any]]:
    """The events of a journal, decoded; they fit both sets of types."""
    lines = [event.decode().split("\n") for event in journal.events()]
    events = [json.loads(data.removeprefix("data: ")) for _, data, *_ in lines]
    assert [line[0] for line in lines] == [f"event: {event['type']}" for event in events]
    check_events(events)
    return events


def teller(*, is_queued: bool = False, **given: Any) -> tuple[Teller, ResponseEvents]:
    """A teller that has begun, and the receiver of its events."""
    asked = repeated(ResponseRequest(model="m", input="q"))
    journal = ResponseEvents()
    made = Teller(Resource("resp_5f", "m", asked, rlm={"run": "5f"}), journal, **given)
    made.begin(is_queued=is_queued)
    return made, journal


def outcome(text: str, *, limit: str | None = None) -> RunOutcome:
    return RunOutcome(Usage(4, 40, 20, 1.0), text, limit=limit)


def end(made: Teller, ended: RunOutcome) -> None:
    made.ended(ended, {"run": "5f", "cost_usd": ended.usage.total_cost, "limit": ended.limit})


def run_of_two_turns(made: Teller) -> None:
    """A run whose first turn streams prose and runs a block that asks a child, and whose second answers."""
    made.tell(IterationStarted("1", 0, 1))
    made.tell(CallStarted("1", 0, 1, None, "?"))
    for piece in ("I lo", "ok.\n``", "`repl\nprint(1)\n```\n"):
        made.tell(CallText("1", 0, 1, piece))
    made.tell(CallEnded("1", 0, 1, "m", USED, 0.1, "I look.\n```repl\nprint(1)\n```\n"))
    made.tell(Replied("1", 0, 1, "I look.\n```repl\nprint(1)\n```\n"))
    made.tell(BlockStarted("1", 0, 1, 1, "print(1)"))
    made.tell(CallStarted("1", 0, 2, None, "sub", block=1))
    made.tell(CallText("1", 0, 2, "the reply to code"))
    made.tell(CallEnded("1", 0, 2, "m", USED, 0.1, "the reply to code"))
    made.tell(CallStarted("1.1", 1, 3, None, "child"))
    made.tell(CallEnded("1.1", 1, 3, "m", USED, 0.1, "of a child"))
    made.tell(BlockEnded("1", 0, 1, Block("print(1)", "ok", "1\n")))
    made.tell(CallStarted("1", 0, 4, None, "?"))
    made.tell(CallEnded("1", 0, 4, "m", USED, 0.1, "It is clear.\nFINAL(42)"))


def test_teller_tells_prose_and_answer() -> None:
    made, journal = teller()
    run_of_two_turns(made)
    end(made, outcome("42"))
    events = told(journal)
    body = events[-1]["response"]
    assert [item["type"] for item in body["output"]] == ["reasoning", "reasoning", "message"]
    assert [item["summary"][0]["text"].strip() for item in body["output"][:2]] == ["I look.", "It is clear."]
    assert body["output"][2]["content"][0]["text"] == "42"
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"], body["rlm"]["cost_usd"]) == (40, 20, 1.0)
    assert (body["status"], events[-1]["type"]) == ("completed", "response.completed")


def test_teller_tells_blocks_as_items() -> None:
    made, journal = teller(container="cntr_1", tells_logs=True)
    run_of_two_turns(made)
    end(made, outcome("42"))
    events = told(journal)
    block = events[-1]["response"]["output"][1]
    assert (block["code"], block["container_id"], block["status"]) == ("print(1)", "cntr_1", "completed")
    assert block["outputs"] == [{"type": "logs", "logs": "1"}]


def test_long_output_of_a_block_is_cut() -> None:
    made, journal = teller(container="cntr_1", tells_logs=True)
    made.tell(BlockStarted("1", 0, 1, 1, "x"))
    made.tell(BlockEnded("1", 0, 1, Block("x", "error", "y" * 100_000, error="ValueError: no")))
    end(made, outcome("42"))
    block = told(journal)[-1]["response"]["output"][0]
    logs = block["outputs"][0]["logs"]
    assert len(logs) < LOGS_CHARS + 100
    assert logs.endswith("ValueError: no")
    assert block["status"] == "failed"


def test_long_answer_is_told_in_pieces() -> None:
    made, journal = teller()
    end(made, outcome("abc" * 2_000))
    pieces = [event["delta"] for event in told(journal) if event["type"] == "response.output_text.delta"]
    assert len(pieces) == 3
    assert "".join(pieces) == "abc" * 2_000


def test_queued_response_begins_with_its_run() -> None:
    made, journal = teller(is_queued=True)
    run_of_two_turns(made)
    end(made, outcome("42"))
    events = told(journal)
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]


def test_retried_call_begins_a_new_item() -> None:
    """Text of an attempt that failed stands, and the next attempt is told apart from it."""
    made, journal = teller()
    made.tell(CallStarted("1", 0, 1, None, "?"))
    made.tell(CallText("1", 0, 1, "I lo"))
    made.tell(CallRetried("1", 0, 1, 2, 0.0, "reset"))
    made.tell(CallText("1", 0, 1, "I look."))
    made.tell(CallEnded("1", 0, 1, "m", USED, 0.1, "I look."))
    end(made, outcome("42"))
    events = told(journal)
    assert [item["summary"][0]["text"] for item in events[-1]["response"]["output"][:2]] == ["I lo", "I look."]


def test_calls_of_functions_end_the_response() -> None:
    made, journal = teller(container="cntr_1")
    made.tell(BlockStarted("1", 0, 1, 1, "print(weather(city='Bonn'))"))
    calls = ClientCall("call_1", "weather", '{"city": "Bonn"}'), ClientCall("call_2", "weather", "{}")
    end(made, RunOutcome(USED, calls=calls))
    events = told(journal)
    body = events[-1]["response"]
    assert [item["type"] for item in body["output"]] == ["code_interpreter_call", "function_call", "function_call"]
    assert body["output"][0]["status"] == "incomplete"
    assert body["output"][1]["arguments"] == '{"city": "Bonn"}'
    assert body["status"] == "completed"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ModelFailed("the model is gone"), "failed", "response.failed"),
        (RunCancelled(), "cancelled", "response.incomplete"),
    ],
)
def test_error_ends_the_response(error: Exception, status: str, kind: str) -> None:
    made, journal = teller()
    made.tell(CallStarted("1", 0, 1, None, "?"))
    made.tell(CallText("1", 0, 1, "I look."))
    made.failed(error, USED)
    events = told(journal)
    assert (events[-1]["type"], events[-1]["response"]["status"]) == (kind, status)


def test_limit_is_an_incomplete_response() -> None:
    made, journal = teller()
    end(made, outcome("so far", limit="max_iterations"))
    events = told(journal)
    body = events[-1]["response"]
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["rlm"]["limit"] == "max_iterations"
    check_body(body)
