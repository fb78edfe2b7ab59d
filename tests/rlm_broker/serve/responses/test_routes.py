"""Responses over HTTP, by OpenAI's own client."""

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.broker.clients.scripted import ScriptedClient
from rlm_broker.rlm import RLM
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.responses import answers as answering
from rlm_broker.serve.settings import ServeSettings
from tests.support.response_types import check_body, check_events, check_items
from tests.support.service import Served, serving

MODEL = "scripted"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


def reply(request: LMRequest) -> str:
    """Run the code that the question has between two bars. Without bars, the answer says so."""
    asked = str(request.messages[1].content) + str(request.messages[-1].content)
    code = re.findall(r"\|([^|]+)\|", asked)
    return f"I look.\n```repl\n{code[-1]}\n```" if code else "FINAL(no code)"


class Gated(ScriptedClient):
    """Answers `llm_query` once the gate is open."""

    def __init__(self) -> None:
        super().__init__(reply, cost_per_call=0.5)
        self.gate = asyncio.Event()

    async def complete(self, request: LMRequest) -> LMReply:
        if not request.is_loop:
            await self.gate.wait()
        return await super().complete(request)


@pytest.fixture(scope="module")
def gated() -> Gated:
    return Gated()


@pytest.fixture(scope="module")
def served(gated: Gated) -> Iterator[Served]:
    rlm = RLM(gated, instructions="You answer.")
    keys = {"alice": {}, "bob": {}, "watcher": {"rights": ("watch",)}}
    with serving(rlm, ServeSettings(heartbeat_s=0.2), keys=keys) as it:
        yield it


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key=served.keys["alice"], max_retries=0) as it:
        yield it


def code(text: str) -> str:
    return f"Run this: |{text}|"


def raw_events(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Events of a stream as they come over the wire."""
    with httpx.stream(
        "POST", f"{served.base_url}/responses", json={**body, "stream": True}, headers=served.headers, timeout=60
    ) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


def test_response_answers(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=code("FINAL(6 * 7)"), metadata={"a": "b"})
    check_body(made.to_dict())
    assert made.output_text == "42"
    assert (made.status, made.metadata) == ("completed", {"a": "b"})
    assert made.usage is not None
    assert made.usage.total_tokens > 0
    told: Any = made.to_dict()["rlm"]
    assert (told["cost_usd"], told["limit"], told["repl"]) == (0.5, None, "new")


async def test_async_client_answers(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=served.keys["alice"], max_retries=0) as client:
        made = await client.responses.create(model=MODEL, input=code("FINAL('yes')"), store=False)
    assert made.output_text == "yes"


def test_stream_has_events_of_both_schemas(served: Served) -> None:
    events = raw_events(served, {"model": MODEL, "input": code("FINAL('yes')")})
    check_events(events)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert "response.reasoning_summary_text.delta" in kinds
    assert kinds[-1] == "response.completed"


def test_stream_shows_blocks_where_the_tool_is_named(served: Served, client: openai.OpenAI) -> None:
    tools: Any = [{"type": "code_interpreter", "container": {"type": "auto"}}]
    asked = {"model": MODEL, "input": code("print('hello'); FINAL('yes')"), "tools": tools}
    events = raw_events(served, {**asked, "include": ["code_interpreter_call.outputs"]})
    check_events(events)
    [block] = [item for item in events[-1]["response"]["output"] if item["type"] == "code_interpreter_call"]
    assert block["code"] == "print('hello'); FINAL('yes')"
    assert block["outputs"] == [{"type": "logs", "logs": "hello"}]
    made = client.responses.create(**asked, store=False)
    assert {item.type for item in made.output} == {"reasoning", "code_interpreter_call", "message"}


def test_helper_of_the_client_streams(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=code("FINAL('yes')")) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "yes"
    assert kinds[0] == "response.created"


class City(BaseModel):
    name: str
    people: int


def test_parse_returns_a_model(client: openai.OpenAI) -> None:
    asked = code("FINAL({'name': 'Bonn', 'people': 330_000})")
    made = client.responses.parse(model=MODEL, input=asked, text_format=City)
    assert made.output_parsed == City(name="Bonn", people=330_000)
    check_body(client.responses.retrieve(made.id).to_dict())


def test_parts_before_the_question_are_context(client: openai.OpenAI) -> None:
    parts = [
        {"type": "input_text", "text": "x" * 5_000},
        {"type": "input_file", "filename": "a.txt", "file_data": base64.b64encode(b"hello").decode()},
        {"type": "input_text", "text": code("FINAL([len(context['text_1']), context['a.txt']])")},
    ]
    asked: Any = [{"role": "user", "content": parts}]
    made = client.responses.create(model=MODEL, input=asked, store=False)
    assert made.output_text == '[5000, "hello"]'


def test_background_is_queued_and_ends(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=code("FINAL('yes')"), background=True)
    check_body(made.to_dict())
    assert (made.status, made.background) == ("queued", True)
    with client.responses.retrieve(made.id, stream=True) as stream:
        events = [event.to_dict() for event in stream]
    check_events(events)
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    ended = client.responses.retrieve(made.id)
    assert (ended.status, ended.output_text) == ("completed", "yes")
    assert ended.to_dict() == events[-1]["response"]


def test_stream_goes_on_after_a_lost_connection(served: Served, client: openai.OpenAI, gated: Gated) -> None:
    """The run in the background outlives its connection, and its events keep their numbers."""
    asked = code("llm_query('wait'); FINAL('yes')")
    stream = client.responses.create(model=MODEL, input=asked, background=True, stream=True)
    first: Any = [next(stream).to_dict() for _ in range(4)]
    stream.close()
    id, last = first[0]["response"]["id"], first[-1]["sequence_number"]
    with client.responses.retrieve(id, stream=True, starting_after=last) as rest:
        served.call(gated.gate.set)
        events = [*first, *(event.to_dict() for event in rest)]
    check_events(events)
    assert events[-1]["response"]["output"][-1]["content"][0]["text"] == "yes"
    with client.responses.retrieve(id, stream=True) as again:
        assert [event.to_dict() for event in again] == events


def test_stream_that_is_left_ends_its_run(served: Served, client: openai.OpenAI) -> None:
    stream = client.responses.create(model=MODEL, input=code("import time; time.sleep(60)"), stream=True)
    first: Any = next(stream).to_dict()
    run = served.call(lambda: served.parts.runs.get(Owner("alice"), first["response"]["rlm"]["run"]).run)
    stream.close()
    served.run(run.ended())
    with client.responses.retrieve(first["response"]["id"], stream=True) as rest:
        events: Any = [event.to_dict() for event in rest]
    check_events(events)
    assert events[-1]["response"]["status"] == "cancelled"
    assert run.id not in served.call(lambda: [held.run for held in served.parts.repls.all()])


def test_cancel_is_idempotent(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=code("import time; time.sleep(60)"), background=True)
    for _ in range(2):
        cancelled = client.responses.cancel(made.id)
        check_body(cancelled.to_dict())
        assert cancelled.status == "cancelled"


def test_deleted_response_is_gone(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=code("FINAL('yes')"))
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(made.id)


def test_response_is_not_stored_if_unwanted(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=code("FINAL('yes')"), store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_other_key_sees_no_response(served: Served, client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=code("FINAL('yes')"), background=True)
    path = f"{served.base_url}/responses/{made.id}"
    with httpx.Client(headers=served.headers_of("bob")) as bob:
        answers = [
            bob.get(path),
            bob.get(path, params={"stream": True}),
            bob.post(f"{path}/cancel"),
            bob.delete(path),
            bob.get(f"{path}/input_items"),
            bob.post(
                f"{served.base_url}/responses", json={"model": MODEL, "input": "?", "previous_response_id": made.id}
            ),
        ]
    assert [answer.status_code for answer in answers] == [404] * len(answers)
    assert all(answer.json()["error"]["code"] == "not_found" for answer in answers)
    assert client.responses.retrieve(made.id).id == made.id


def test_next_response_finds_variables(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=code("x = 41; FINAL('kept')"))
    then = client.responses.create(model=MODEL, input=code("FINAL(x + 1)"), previous_response_id=first.id)
    assert then.output_text == "42"
    assert then.to_dict()["rlm"]["repl"] == "kept"  # type: ignore[index]
    asked = code("FINAL([message['role'] for message in conversation])")
    last = client.responses.create(model=MODEL, input=asked, previous_response_id=then.id)
    assert last.output_text == '["user", "assistant", "user", "assistant"]'


def test_second_branch_begins_with_the_conversation(client: openai.OpenAI) -> None:
    """A REPL that has gone on with another response is not this conversation's: messages are known, variables not."""
    parts = [{"type": "input_text", "text": "y" * 20_000}, {"type": "input_text", "text": code("x = 1; FINAL('kept')")}]
    asked: Any = [{"role": "user", "content": parts}]
    first = client.responses.create(model=MODEL, input=asked)
    client.responses.create(model=MODEL, input=code("x = 2; FINAL(x)"), previous_response_id=first.id)
    text = code("FINAL(['x' in globals(), len(context), len(conversation)])")
    branch = client.responses.create(model=MODEL, input=text, previous_response_id=first.id)
    assert branch.output_text == "[false, 20000, 2]"
    assert branch.to_dict()["rlm"]["repl"] == "new"  # type: ignore[index]


async def test_two_responses_at_once_after_the_same_one(served: Served) -> None:
    """One of them gets the REPL, and the other one a new REPL: neither fails."""
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=served.keys["alice"], max_retries=0) as client:
        first = await client.responses.create(model=MODEL, input=code("x = 1; FINAL('kept')"))
        asked = code("FINAL('x' in globals())")
        both = [client.responses.create(model=MODEL, input=asked, previous_response_id=first.id) for _ in range(2)]
        assert {made.output_text for made in await asyncio.gather(*both)} == {"True", "False"}


def test_refused_request_leaves_the_repl(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=code("x = 1; FINAL('kept')"))
    with pytest.raises(openai.BadRequestError):
        client.responses.create(
            model=MODEL, input="?", previous_response_id=first.id, extra_body={"rlm": {"max_iterations": 1_000_000}}
        )
    then = client.responses.create(model=MODEL, input=code("FINAL(x)"), previous_response_id=first.id)
    assert then.to_dict()["rlm"]["repl"] == "kept"  # type: ignore[index]


def test_conversation_goes_on_without_its_repl(served: Served, client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=code("x = 1; FINAL('kept')"))

    async def close_all() -> None:
        for held in served.parts.repls.all():
            await served.parts.repls.close(held.owner, held.id)

    served.run(close_all())
    then = client.responses.create(
        model=MODEL, input=code("FINAL(['x' in globals(), len(conversation)])"), previous_response_id=first.id
    )
    assert then.output_text == "[false, 2]"


@pytest.mark.parametrize("is_stored", [True, False])
def test_function_of_the_client_resumes_the_run(client: openai.OpenAI, *, is_stored: bool) -> None:
    """The response ends with the call; the request with its result resumes the same block, with or without a store."""
    asked: Any = [{"role": "user", "content": code("a = 40; b = weather(city='Bonn'); FINAL(f'{a} {b}')")}]
    first = client.responses.create(model=MODEL, input=asked, tools=[WEATHER], store=is_stored)
    check_body(first.to_dict())
    [call] = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments), first.status) == ("weather", {"city": "Bonn"}, "completed")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    more: Any = {"input": [result], "previous_response_id": first.id} if is_stored else {}
    more = more or {"input": [*asked, *(item.to_dict() for item in first.output), result], "store": False}
    then = client.responses.create(model=MODEL, tools=[WEATHER], **more)
    check_body(then.to_dict())
    assert then.output_text == "40 sunny"
    told: tuple[Any, Any] = first.to_dict()["rlm"], then.to_dict()["rlm"]
    assert told[0]["run"] == told[1]["run"]


def test_functions_in_a_namespace_are_called(client: openai.OpenAI) -> None:
    """Code has the namespace before the name; the item has both, so that the client finds its function."""
    tools: Any = [{"type": "namespace", "name": "earth", "description": "Facts.", "tools": [WEATHER]}]
    first = client.responses.create(model=MODEL, input=code("FINAL(earth__weather(city='Ulm'))"), tools=tools)
    check_items(item.to_dict() for item in first.output)
    [call] = [item for item in first.output if item.type == "function_call"]
    assert (call.namespace, call.name) == ("earth", "weather")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    then = client.responses.create(model=MODEL, input=[result], tools=tools, previous_response_id=first.id)
    assert then.output_text == "rain"


def test_result_for_a_chat_completion_resumes_its_run(client: openai.OpenAI) -> None:
    function: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER["parameters"]}}
    asked: Any = {"role": "user", "content": code("FINAL(weather(city='Ulm'))")}
    chat = client.chat.completions.create(model=MODEL, messages=[asked], tools=[function])
    calls = chat.choices[0].message.tool_calls
    assert calls
    result: Any = {"type": "function_call_output", "call_id": calls[0].id, "output": "rain"}
    assert client.responses.create(model=MODEL, input=[result], tools=[WEATHER]).output_text == "rain"


def test_call_without_result_is_named(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=code("FINAL(weather(city='Bonn'))"), tools=[WEATHER])
    with pytest.raises(openai.BadRequestError, match="waits for its result"):
        client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
    assert client.responses.cancel(first.id).status == "completed"


def test_late_result_begins_a_new_run(client: openai.OpenAI) -> None:
    """No run waits for the result any more: the conversation goes on, and the result is one of its messages."""
    first = client.responses.create(
        model=MODEL,
        input=code("FINAL(conversation[-1] if 'conversation' in globals() else weather(city=''))"),
        tools=[WEATHER],
    )
    [call] = [item for item in first.output if item.type == "function_call"]
    client.responses.cancel(first.id)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    then = client.responses.create(model=MODEL, input=[result], tools=[WEATHER], previous_response_id=first.id)
    assert "sunny" in then.output_text


def test_input_items_are_listed(client: openai.OpenAI) -> None:
    asked: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello!"}]},
        {"role": "user", "content": code("FINAL('yes')")},
    ]
    made = client.responses.create(model=MODEL, input=asked)
    listed = list(client.responses.input_items.list(made.id, limit=3, order="asc"))
    check_items(item.to_dict() for item in listed)
    assert [item.role for item in listed] == ["developer", "user", "assistant", "user"]  # type: ignore[union-attr]
    assert [item.id for item in client.responses.input_items.list(made.id)] == [item.id for item in listed[::-1]]


def test_same_idempotency_key_joins_the_response(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": code("import os; FINAL(os.urandom(8).hex())")}
    one, other = (client.responses.create(**asked, extra_headers={"Idempotency-Key": "k1"}) for _ in range(2))
    assert one.to_dict() == other.to_dict()


def test_limit_makes_an_incomplete_response(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=code("1"), extra_body={"rlm": {"max_iterations": 1}})
    check_body(made.to_dict())
    assert (made.status, made.to_dict()["rlm"]["limit"]) == ("incomplete", "max_iterations")  # type: ignore[index]


def test_key_needs_the_right_to_run(served: Served) -> None:
    body = {"model": MODEL, "input": "?"}
    answer = httpx.post(f"{served.base_url}/responses", json=body, headers=served.headers_of("watcher"))
    assert answer.status_code == 403


BAD: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "nothing"}, 404, "model"),
    ({"model": f"{MODEL}@nothing"}, 404, "model"),
    ({"previous_response_id": "resp_0"}, 404, "previous_response_id"),
    ({"input": []}, 400, "input"),
    ({"input": 5}, 400, "input"),
    ({"stream": "yes"}, 400, "stream"),
    ({"background": "yes"}, 400, "background"),
    ({"input": [{"role": "assistant", "content": "I"}]}, 400, "input.0.role"),
    ({"input": [{"role": "developer", "content": "I"}]}, 400, "input"),
    ({"input": [{"type": "mcp_call", "id": "x"}]}, 400, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "call_0", "output": "x"}]}, 404, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "http://x"}]}]}, 400, "file_url"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file-0"}]}]}, 404, "file_id"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "?"}]}]}, 400, "file_data"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400, "type"),
    ({"tools": [{"type": "web_search"}]}, 400, "tools.0.type"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, 400, "tools.0.tools.0"),
    ({"tools": [{"type": "code_interpreter", "container": "cntr_0"}]}, 400, "tools.0.container"),
    ({"tools": [WEATHER], "tool_choice": "required"}, 400, "tool_choice"),
    ({"text": {"format": {"type": "grammar"}}}, 400, "text.format.type"),
    ({"background": True, "store": False}, 400, "store"),
    ({"stream_options": {}}, 400, "stream_options"),
    ({"include": ["message.output_text.logprobs"]}, 400, "include"),
    ({"top_logprobs": 3}, 400, "top_logprobs"),
    ({"conversation": "conv_0"}, 400, "conversation"),
    ({"prompt": {"id": "x"}}, 400, "prompt"),
    ({"nonsense": 1}, 400, "nonsense"),
    ({"metadata": {"a": "x" * 513}}, 400, "metadata"),
    ({"rlm": {"max_iterations": 1_000_000}}, 400, None),
    ({"rlm": {"nonsense": 1}}, 400, "rlm.nonsense"),
]


@pytest.mark.parametrize(("fields", "status", "param"), BAD, ids=lambda given: json.dumps(given)[:40])
def test_bad_request_is_one_sentence(served: Served, fields: dict[str, Any], status: int, param: str | None) -> None:
    body = {"model": MODEL, "input": "?", **fields}
    answer = httpx.post(f"{served.base_url}/responses", json=body, headers=served.headers)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert param is None or param in error["param"]
    assert error["message"].count("\n") == 0
    if param == "input" and fields["input"] in ([], 5):
        assert error["message"] == "input must be text or a list of at least 1 item"


@pytest.mark.parametrize(
    "query", ["stream=true&starting_after=1000", "stream=true&starting_after=-1", "stream=perhaps"]
)
def test_bad_query_is_one_sentence(served: Served, client: openai.OpenAI, query: str) -> None:
    made = client.responses.create(model=MODEL, input=code("FINAL('yes')"))
    answer = httpx.get(f"{served.base_url}/responses/{made.id}?{query}", headers=served.headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.rpartition("&")[2].partition("=")[0]


def test_conversation_is_bounded(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    first = client.responses.create(model=MODEL, input=code("FINAL(1)"))
    monkeypatch.setattr(answering, "MOST_CONVERSATION_BYTES", 1_000)
    with pytest.raises(openai.APIStatusError, match="more than 1,000 bytes") as refused:
        client.responses.create(model=MODEL, input=code("FINAL(2)"), previous_response_id=first.id)
    assert refused.value.status_code == 413


def test_server_that_ends_tells_the_last_event() -> None:
    """A drain stops runs with their best answers: followers get a proper last event."""
    with serving(RLM(ScriptedClient(reply)), ServeSettings(drain_s=0.0)) as served, contextlib.ExitStack() as stack:
        client = stack.enter_context(openai.OpenAI(base_url=served.base_url, api_key=served.key, max_retries=0))
        asked = code("import time; time.sleep(60)")
        stream = client.responses.create(model=MODEL, input=asked, background=True, stream=True)
        first: Any = [next(stream).to_dict() for _ in range(5)]
        served.run(served.service.drain())
        events = [*first, *(event.to_dict() for event in stream)]
    check_events(events)
    assert (events[-1]["type"], events[-1]["response"]["rlm"]["stopped"]) == ("response.incomplete", True)


def test_failed_run_is_an_error_or_a_failed_response() -> None:
    """A plain request gets the status of the failure, and a stream an event that tells it."""
    with serving(RLM(ScriptedClient([]))) as served, contextlib.ExitStack() as stack:
        client = stack.enter_context(openai.OpenAI(base_url=served.base_url, api_key=served.key, max_retries=0))
        with pytest.raises(openai.APIStatusError) as failed:
            client.responses.create(model=MODEL, input="?")
        assert failed.value.response.headers["x-should-retry"] == "false"
        events = raw_events(served, {"model": MODEL, "input": "?"})
        check_events(events)
        assert events[-1]["type"] == "response.failed"
        assert "script" in events[-1]["response"]["error"]["message"]
