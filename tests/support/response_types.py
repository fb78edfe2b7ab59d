"""Bodies and events of responses, checked against the types of OpenAI's client and of Open Responses."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import openresponses_types.types as open_types
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

_OPENAI: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_OPENAI_BODY = TypeAdapter(Response)
_OPENAI_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
_OPEN_EVENTS = {
    f"response.{name}": getattr(open_types, f"Response{re.sub('[_.]', '', name.title())}StreamingEvent")
    for name in (
        *("created", "queued", "in_progress", "completed", "incomplete", "failed"),
        *("output_item.added", "output_item.done", "content_part.added", "content_part.done"),
        *("output_text.delta", "output_text.done", "reasoning_summary_part.added", "reasoning_summary_part.done"),
        *("function_call_arguments.delta", "function_call_arguments.done"),
    )
} | {
    "response.reasoning_summary_text.delta": open_types.ResponseReasoningSummaryDeltaStreamingEvent,
    "response.reasoning_summary_text.done": open_types.ResponseReasoningSummaryDoneStreamingEvent,
}


def check_body(body: Mapping[str, Any]) -> None:
    """Check the body of a response against both sets of types."""
    _OPENAI_BODY.validate_python(body)
    if not _names_code(body):
        open_types.ResponseResource.model_validate(_without_schema(body))


def check_items(items: Iterable[Mapping[str, Any]]) -> None:
    """Check items of a list against the types of OpenAI's client."""
    for item in items:
        _OPENAI_ITEM.validate_python(item)


def check_events(events: Iterable[Mapping[str, Any]]) -> None:
    """Check a whole stream: each event by both sets of types, their numbers, and the order of items and parts."""
    open_item: str | None = None
    items = 0
    for number, event in enumerate(events):
        kind = event["type"]
        assert event["sequence_number"] == number
        assert _OPENAI.validate_python(event).type == kind
        if "response" in event:
            check_body(event["response"])
        _check_open(event)
        if kind == "response.output_item.added":
            assert open_item is None
            assert event["output_index"] == items
            open_item = event["item"]["id"]
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == open_item
            assert event["output_index"] == items
            open_item, items = None, items + 1
        elif "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (open_item, items)
    assert open_item is None


def _check_open(event: Mapping[str, Any]) -> None:
    """Check an event against Open Responses, unless it tells of a block, which that schema does not know."""
    kind = event["type"]
    is_of_code = "code_interpreter_call" in kind or event.get("item", {}).get("type") == "code_interpreter_call"
    if is_of_code or ("response" in event and _names_code(event["response"])):
        return
    event = {**event, "response": _without_schema(event["response"])} if "response" in event else event
    _OPEN_EVENTS[kind].model_validate(event)


def _names_code(body: Mapping[str, Any]) -> bool:
    """Whether a response shows blocks, which Open Responses does not know."""
    kinds = {each["type"] for each in (*body["tools"], *body["output"])}
    return bool(kinds & {"code_interpreter", "code_interpreter_call"})


def _without_schema(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without the schema of its format: the Open Responses types allow null alone there."""
    form = body["text"]["format"]
    return {**body, "text": {**body["text"], "format": {**form, "schema": None} if "schema" in form else form}}
