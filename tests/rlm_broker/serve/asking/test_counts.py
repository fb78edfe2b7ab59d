"""Requests with too many messages, parts, files or tools are refused before each of them is looked at."""

from typing import Any

import pytest

from rlm_broker.serve.bodies import validated
from rlm_broker.serve.chat.request import ChatRequest
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.questions import client_tools
from rlm_broker.serve.questions.client_tools import MOST_TOOLS, tools_of
from rlm_broker.serve.questions.options import MOST_FILES, MOST_ITEMS
from rlm_broker.serve.responses.request import ResponseRequest

CHAT_FILE = {"type": "file", "file": {"file_id": "f"}}
FILE = {"type": "input_file", "file_id": "f"}
TEXT = {"type": "text", "text": "x"}
INPUT = {"type": "input_text", "text": "x"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def output(parts: list[Any]) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": "c", "output": parts}


@pytest.mark.parametrize(
    ("kind", "field", "one", "most", "why"),
    [
        (ChatRequest, "messages", lambda n: [user("x")] * n, MOST_ITEMS, "5,000 messages or items"),
        (ResponseRequest, "input", lambda n: [user("x")] * n, MOST_ITEMS, "5,000 messages or items"),
        (ChatRequest, "messages", lambda n: [user([TEXT]), user([TEXT] * (n - 1))], MOST_ITEMS, "5,000 parts"),
        (ResponseRequest, "input", lambda n: [user([INPUT]), output([INPUT] * (n - 1))], MOST_ITEMS, "5,000 parts"),
        (ChatRequest, "messages", lambda n: [user([CHAT_FILE] * n)], MOST_FILES, "1,000 files"),
        (ResponseRequest, "input", lambda n: [user([FILE] * n)], MOST_FILES, "1,000 files"),
    ],
    ids=["messages", "items", "parts", "input parts", "files", "input files"],
)
def test_more_than_the_most_is_refused(kind: Any, field: str, one: Any, most: int, why: str) -> None:
    validated({"model": "m", field: one(most)}, kind)
    with pytest.raises(ApiError, match=f"{field}: there are more than {why}: ") as error:
        validated({"model": "m", field: one(most + 1)}, kind)
    assert (error.value.status, error.value.param) == (400, field)


def test_file_ids_of_a_container_are_counted() -> None:
    container = {"type": "auto", "file_ids": ["f"] * (MOST_FILES + 1)}
    asked = ResponseRequest(model="m", input="x", tools=[{"type": "code_interpreter", "container": container}])
    with pytest.raises(ApiError, match="has more than 1,000 files") as error:
        asked.require_supported()
    assert error.value.param == "tools.0.container.file_ids"


def test_tools_are_counted_before_their_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """No schema is checked if there are too many, in both interfaces."""
    checked = []
    monkeypatch.setattr(client_tools, "safe_schema", lambda *given: checked.append(given))
    function = {"name": "f", "parameters": {}}
    chat: Any = {"tools": [{"type": "function", "function": function}] * (MOST_TOOLS + 1), "messages": [user("x")]}
    response: Any = {"tools": [{"type": "function", **function}] * (MOST_TOOLS + 1), "input": "x"}
    for asked in (ChatRequest(model="m", **chat), ResponseRequest(model="m", **response)):
        with pytest.raises(ApiError, match="more than 128 tools"):
            asked.function_tools()
    assert not checked


def test_tools_share_one_room() -> None:
    """The texts of all tools count together, and so do the parts of their schemas."""
    with pytest.raises(ApiError, match="the tools have more than 100,000 characters, or 5,000 parts"):
        tools_of((f"t{n}", "x" * 30_000, None, "tools") for n in range(4))
    schema: Any = {"properties": {f"p{n}": {} for n in range(900)}}
    with pytest.raises(ApiError, match="the tools have more than 100,000 characters, or 5,000 parts"):
        tools_of((f"t{n}", None, schema, "tools") for n in range(6))
