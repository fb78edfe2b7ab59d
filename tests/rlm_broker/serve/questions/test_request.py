"""Requests of both interfaces: bounds on their items, what is ignored or refused, and the form of their answers."""

import asyncio
import threading
from typing import Any

import pytest

from rlm_broker.serve.bodies import validated
from rlm_broker.serve.chat import ChatRequest
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.owner import Busy, Owner
from rlm_broker.serve.questions import client_tools
from rlm_broker.serve.questions.client_tools import MOST_TOOLS, checked_in_turn, forced_call, safe_schema, tools_of
from rlm_broker.serve.questions.request import MOST_FILES, MOST_ITEMS, AnswerForm, DialectRequest
from rlm_broker.serve.responses.bodies import ResponseRequest
from tests.support.waiting import WAIT_S

ANN = Owner("ann")
TEXT: dict[str, Any] = {"type": "text", "text": "x"}


def asked(kind: type[DialectRequest], **fields: Any) -> DialectRequest:
    said: Any = {"messages": [user("x")]} if kind is ChatRequest else {"input": "x"}
    return kind(**{"model": "m", **said, **fields})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def function(name: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "description": f"Does {name}.", "parameters": {"type": "object", **schema}}


def test_more_than_the_most_is_refused() -> None:
    """Messages, parts and files are counted before each of them is looked at."""
    output = {"type": "function_call_output", "call_id": "c"}
    cases: list[tuple[Any, str, Any, int, str]] = [
        (ChatRequest, "messages", lambda n: [user("x")] * n, MOST_ITEMS, "5,000 messages or items"),
        (ResponseRequest, "input", lambda n: [user("x")] * n, MOST_ITEMS, "5,000 messages or items"),
        (ChatRequest, "messages", lambda n: [user([TEXT]), user([TEXT] * (n - 1))], MOST_ITEMS, "5,000 parts"),
        (
            ResponseRequest,
            "input",
            lambda n: [user([TEXT]), {**output, "output": [TEXT] * (n - 1)}],
            MOST_ITEMS,
            "parts",
        ),
        (ChatRequest, "messages", lambda n: [user([{"type": "file"}] * n)], MOST_FILES, "1,000 files"),
        (ResponseRequest, "input", lambda n: [user([{"type": "input_file"}] * n)], MOST_FILES, "1,000 files"),
    ]
    for kind, field, made, most, why in cases:
        validated({"model": "m", field: made(most)}, kind)
        with pytest.raises(ApiError, match=f"{field}: there are more than .*{why}: ") as error:
            validated({"model": "m", field: made(most + 1)}, kind)
        assert (error.value.status, error.value.param) == (400, field)
    container = {"type": "auto", "file_ids": ["f"] * (MOST_FILES + 1)}
    with pytest.raises(ApiError, match="has more than 1,000 files") as error:
        asked(ResponseRequest, tools=[{"type": "code_interpreter", "container": container}]).require_supported()
    assert error.value.param == "tools.0.container.file_ids"


async def test_tools_are_counted_before_their_check(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(client_tools, "safe_schema", lambda *given: checked.append(given))
    given = {"type": "function", **function("f")}
    for kind, tool in ((ChatRequest, {"type": "function", "function": function("f")}), (ResponseRequest, given)):
        with pytest.raises(ApiError, match="more than 128 tools"):
            await asked(kind, tools=[tool] * (MOST_TOOLS + 1)).form(ANN)
    assert not checked


def test_tools_share_one_room_and_no_name() -> None:
    """The texts of all tools count together, and so do the parts of their schemas."""
    full = "the tools have more than 100,000 characters, or 5,000 parts"
    schema: Any = {"properties": {f"p{n}": {} for n in range(900)}}
    for named in ({"description": "x" * 30_000}, {"parameters": schema}):
        with pytest.raises(ApiError, match=full):
            tools_of(({"name": f"t{n}", **named}, None, "tools") for n in range(6))
    with pytest.raises(ApiError, match="two tools are called"):
        tools_of((function(name), None, "tools") for name in ("a-b", "a_b"))


def test_ignored_fields_are_named() -> None:
    """Fields without effect are named, unless they are neutral, or say nothing about the answer."""
    common: Any = {"top_k": 4, "stop": ["x"], "keep_alive": "5m", "user": "u", "presence_penalty": 0, "seed": None}
    hosted = [{"type": "web_search", "external_web_access": True}, {"type": "mcp"}, {"type": "mcp"}]
    messages = [{**user("x"), "id": "1", "timestamp": 5}, {"role": "assistant", "content": "y", "opts": 1}, user("z")]
    chat = asked(ChatRequest, **common, tools=hosted, messages=messages, temperature=0.5, max_tokens=-1)
    chat.require_supported()
    assert chat.ignored() == [
        "top_k", "stop", "keep_alive", "temperature", "tools.web_search", "tools.mcp", "messages.id", "messages.timestamp",
    ]  # fmt: skip
    assert chat.limits() is None
    items = [{"type": "mcp_call", "id": "x"}, {"type": "reasoning", "id": "y"}, user("x")]
    response = asked(ResponseRequest, **common, input=items, temperature=0.5, truncation="auto", store=True)
    assert response.ignored() == ["top_k", "stop", "keep_alive", "temperature", "input.mcp_call"]


def test_what_changes_the_meaning_is_refused() -> None:
    refused = {"n": 2, "logprobs": True, "top_logprobs": 1, "audio": {"voice": "x"}, "modalities": ["text", "audio"]}
    refused |= {
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
        "conversation": "c",
        "prompt": {"id": "p"},
    }
    for kind in (ChatRequest, ResponseRequest):
        for name, value in refused.items():
            with pytest.raises(ApiError, match=f"{name} is not supported: ") as error:
                asked(kind, **{name: value}).require_supported()
            assert error.value.param == name
        neutral: Any = {"n": 1, "logprobs": False, "modalities": ["text"], "functions": [], "function_call": "none"}
        asked(kind, **neutral, audio=None).require_supported()


# -- the form of the answer ------------------------------------------------------------------------------------------

SHIP = function("ship", properties={"name": {"$ref": "#/$defs/name"}}, **{"$defs": {"name": {"type": "string"}}})
SINK = function("sink", properties={"depth": {"type": "integer"}, "$schema": {"type": "string"}}, required=["depth"])
POINT = function("point", properties={"at": {"const": {"$ref": "#/x"}}, "const": {"$ref": "#/properties/at"}})
"""A function with a value that looks like a reference, and a property whose name is a keyword for values."""

ODD = {"name": "sink", "arguments": {"depth": 3, "$schema": 5}}
"""A call with a property whose name is a keyword at the root of a schema."""


async def form_of(kind: type[DialectRequest], choice: Any, *functions: Any) -> AnswerForm:
    tools = [{"type": "function", "function": each} for each in functions]
    flat = [{"type": "function", **each} for each in functions]
    return await asked(kind, tools=tools if kind is ChatRequest else flat, tool_choice=choice).form(ANN)


async def test_forced_function_is_the_type_of_the_answer() -> None:
    """A function that is named, or alone, is not for code: the answer is its arguments."""
    named: Any = {"type": "function", "function": {"name": "sink"}}
    for kind, choice in ((ChatRequest, named), (ResponseRequest, {"type": "function", "name": "sink"})):
        form = await form_of(kind, choice, SHIP, SINK)
        assert (form.tools, [tool.name for tool in form.forced]) == ((), ["sink"])
        assert form.output_type is not None
        assert form.output_type["required"] == ["depth"]
        assert form.output_type["description"] == "arguments of sink: Does sink."
        call = forced_call(form.forced, {"depth": 3})
        assert (call.name, call.arguments, call.result) == ("sink", '{"depth": 3}', None)
        assert (await form_of(kind, "required", SINK)).forced == form.forced


async def test_one_of_several_functions_is_a_call_by_name() -> None:
    """Code may call them, too, and references within their schemas hold where these are parts of the type."""
    form = await form_of(ChatRequest, "required", SHIP, SINK, POINT)
    assert [tool.name for tool in form.tools] == ["ship", "sink", "point"]
    checked = form.output_type.checked  # type: ignore[union-attr]
    place = {"$ref": "#/x"}
    for right in ({"name": "ship", "arguments": {"name": "Rhea"}}, {"name": "point", "arguments": {"at": place}}):
        checked.require(right, "answer")
    elsewhere = {"name": "point", "arguments": {"const": 1}}
    wrongs = ({"name": "ship", "arguments": {"name": 5}}, {"name": "sink", "arguments": {}}, ODD, elsewhere)
    for wrong in (*wrongs, {"name": "x"}):
        with pytest.raises(ValueError, match="not valid under any"):
            checked.require(wrong, "answer")
    call = forced_call(form.forced, {"name": "sink", "arguments": {"depth": 3}})
    assert (call.name, call.arguments) == ("sink", '{"depth": 3}')


async def test_choice_among_the_functions() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "ship"}]}
    nested = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "ship"}}]}}
    for choice, tools, forced in (
        (None, ["ship", "sink"], []),
        ("auto", ["ship", "sink"], []),
        ("none", [], []),
        ({"type": "code_interpreter"}, ["ship", "sink"], []),
        (allowed, ["ship"], []),
        (nested, [], ["ship"]),
    ):
        form = await form_of(ResponseRequest, choice, SHIP, SINK)
        assert ([tool.name for tool in form.tools], [tool.name for tool in form.forced]) == (tools, forced), choice
    for choice in ({"type": "function", "name": "fly"}, {"type": "web_search_preview"}, "any", {"type": "mcp"}):
        with pytest.raises(ApiError) as error:
            await form_of(ResponseRequest, choice, SHIP, SINK)
        assert (error.value.status, error.value.param) == (400, "tool_choice"), choice
    with pytest.raises(ApiError, match="there is no function"):
        await asked(ChatRequest, tool_choice="required").form(ANN)


# -- checks of schemas -----------------------------------------------------------------------------------------------


async def test_key_with_many_checks_that_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another key is not, and the first one is not when its checks are done."""
    monkeypatch.setattr(client_tools, "MOST_WAITING", 3)
    eve, goes_on = Owner("eve"), threading.Event()

    async def checked(owner: Owner) -> bool:
        return await checked_in_turn(owner, lambda: goes_on.wait(WAIT_S))

    begun = [asyncio.create_task(checked(eve)) for _ in range(2 + 3)]
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="3 requests of this key wait"):
        await checked(eve)
    honest = asyncio.create_task(checked(ANN))
    await asyncio.sleep(0)
    goes_on.set()
    assert all(await asyncio.gather(*begun, honest))
    assert await checked(eve)


async def test_schema_belongs_to_its_key() -> None:
    """Later checks by it take the turns of the key, and its error names the place in the request."""
    made = await checked_in_turn(ANN, lambda: safe_schema({}, "here"))
    assert made.checked.whose == "ann"
    with pytest.raises(ApiError, match="here is not a JSON Schema") as error:
        safe_schema({"type": "nothing"}, "here")
    assert (error.value.status, error.value.param) == (400, "here")
