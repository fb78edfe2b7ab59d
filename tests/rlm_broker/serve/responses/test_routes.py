"""Responses over HTTP, by OpenAI's own client."""

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from rlm_broker import RLM, LMReply, LMRequest, ScriptedClient
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.responses import routes as answering
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


def asked(client: openai.OpenAI, text: str, **more: Any) -> Any:
    """Ask for a response of a run with this code."""
    return client.responses.create(**{"model": MODEL, "input": code(text), **more})


def call_in(made: Any) -> Any:
    """Return the only call of a function in a response."""
    [call] = [item for item in made.output if item.type == "function_call"]
    return call


def output(made: Any, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_in(made).call_id, "output": text}


def raw_events(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Events of a stream as they come over the wire, which fit both schemas."""
    body = {"model": MODEL, **body, "stream": True}
    with httpx.stream("POST", f"{served.base_url}/responses", json=body, headers=served.headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    check_events(events)
    return events


def rest_of(client: openai.OpenAI, id: str, first: Any = (), **more: Any) -> list[Any]:
    """Events of a response that is followed again, behind those that are known; together they fit both schemas."""
    with client.responses.retrieve(id, stream=True, **more) as stream:
        events: list[Any] = [*first, *(event.to_dict() for event in stream)]
    check_events(events)
    return events


class City(BaseModel):
    name: str
    people: int


# -- whole responses and streams -------------------------------------------------------------------------------------


def test_response_answers_and_is_typed(client: openai.OpenAI) -> None:
    made = asked(client, "FINAL(6 * 7)", metadata={"a": "b"})
    check_body(made.to_dict())
    assert (made.output_text, made.status, made.metadata) == ("42", "completed", {"a": "b"})
    assert made.usage.total_tokens > 0
    told = made.to_dict()["rlm"]
    assert (told["cost_usd"], told["limit"], told["repl"]) == (0.5, None, "new")
    city = code("FINAL({'name': 'Bonn', 'people': 330_000})")
    parsed = client.responses.parse(model=MODEL, input=city, text_format=City)
    assert parsed.output_parsed == City(name="Bonn", people=330_000)
    check_body(client.responses.retrieve(parsed.id).to_dict())


def test_stream_has_events_of_both_schemas(served: Served, client: openai.OpenAI) -> None:
    kinds = [event["type"] for event in raw_events(served, {"input": code("FINAL('yes')")})]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert "response.reasoning_summary_text.delta" in kinds
    assert kinds[-1] == "response.completed"
    with client.responses.stream(model=MODEL, input=code("FINAL('yes')")) as stream:
        assert next(iter(stream)).type == "response.created"
        assert stream.get_final_response().output_text == "yes"


def test_blocks_are_shown_where_the_tool_is_named(served: Served, client: openai.OpenAI) -> None:
    text, tools = "print('hello'); FINAL('yes')", [{"type": "code_interpreter", "container": {"type": "auto"}}]
    events = raw_events(served, {"input": code(text), "tools": tools, "include": ["code_interpreter_call.outputs"]})
    [block] = [item for item in events[-1]["response"]["output"] if item["type"] == "code_interpreter_call"]
    assert (block["code"], block["outputs"]) == (text, [{"type": "logs", "logs": "hello"}])
    made = asked(client, text, tools=tools, store=False)
    assert {item.type for item in made.output} == {"reasoning", "code_interpreter_call", "message"}


def test_parts_before_the_question_are_context(client: openai.OpenAI) -> None:
    parts = [
        {"type": "input_text", "text": "x" * 5_000},
        {"type": "input_file", "filename": "a.txt", "file_data": base64.b64encode(b"hello").decode()},
        {"type": "input_text", "text": code("FINAL([len(context['text_1']), context['a.txt']])")},
    ]
    made = asked(client, "", input=[{"role": "user", "content": parts}], store=False)
    assert made.output_text == '[5000, "hello"]'


def test_background_is_queued_and_ends(client: openai.OpenAI) -> None:
    made = asked(client, "FINAL('yes')", background=True)
    check_body(made.to_dict())
    assert (made.status, made.background) == ("queued", True)
    events = rest_of(client, made.id)
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    ended = client.responses.retrieve(made.id)
    assert (ended.status, ended.output_text) == ("completed", "yes")
    assert ended.to_dict() == events[-1]["response"]


def test_stream_goes_on_after_a_lost_connection(served: Served, client: openai.OpenAI, gated: Gated) -> None:
    """The run in the background outlives its connection, and its events keep their numbers."""
    stream = asked(client, "llm_query('wait'); FINAL('yes')", background=True, stream=True)
    first = [next(stream).to_dict() for _ in range(4)]
    stream.close()
    served.call(gated.gate.set)
    id = first[0]["response"]["id"]
    events = rest_of(client, id, first, starting_after=first[-1]["sequence_number"])
    assert events[-1]["response"]["output"][-1]["content"][0]["text"] == "yes"
    assert rest_of(client, id) == events


def test_stream_that_is_left_ends_its_run(served: Served, client: openai.OpenAI) -> None:
    stream = asked(client, "import time; time.sleep(60)", stream=True)
    first = next(stream).to_dict()["response"]
    run = served.call(lambda: served.parts.runs.get(Owner("alice"), first["rlm"]["run"]).run)
    stream.close()
    served.run(run.ended())
    assert rest_of(client, first["id"])[-1]["response"]["status"] == "cancelled"
    assert run.id not in served.call(lambda: [held.run for held in served.parts.repls.all()])


def test_cancelled_deleted_and_unstored_responses(client: openai.OpenAI) -> None:
    """A second cancellation changes nothing; what was deleted, or never stored, is not found."""
    made = asked(client, "import time; time.sleep(60)", background=True)
    for _ in range(2):
        cancelled = client.responses.cancel(made.id)
        check_body(cancelled.to_dict())
        assert cancelled.status == "cancelled"
    client.responses.delete(made.id)
    for id in (made.id, asked(client, "FINAL('yes')", store=False).id):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.responses.retrieve(id)


def test_other_key_sees_no_response(served: Served, client: openai.OpenAI) -> None:
    made = asked(client, "FINAL('yes')", background=True)
    path = f"{served.base_url}/responses"
    after = {"model": MODEL, "input": "?", "previous_response_id": made.id}
    with httpx.Client(headers=served.headers_of("bob")) as bob:
        answers = [
            bob.get(f"{path}/{made.id}"),
            bob.get(f"{path}/{made.id}", params={"stream": True}),
            bob.post(f"{path}/{made.id}/cancel"),
            bob.delete(f"{path}/{made.id}"),
            bob.get(f"{path}/{made.id}/input_items"),
            bob.post(path, json=after),
        ]
        watcher = bob.post(path, json={"model": MODEL, "input": "?"}, headers=served.headers_of("watcher"))
    assert [answer.status_code for answer in answers] == [404] * len(answers)
    assert all(answer.json()["error"]["code"] == "not_found" for answer in answers)
    assert watcher.status_code == 403
    assert client.responses.retrieve(made.id).id == made.id


# -- conversations ---------------------------------------------------------------------------------------------------


def test_next_response_finds_variables(client: openai.OpenAI) -> None:
    """Also after a request between them that was refused."""
    first = asked(client, "x = 41; FINAL('kept')")
    with pytest.raises(openai.BadRequestError):
        asked(client, "?", previous_response_id=first.id, extra_body={"rlm": {"max_iterations": 1_000_000}})
    then = asked(client, "FINAL(x + 1)", previous_response_id=first.id)
    assert (then.output_text, then.to_dict()["rlm"]["repl"]) == ("42", "kept")
    last = asked(client, "FINAL([message['role'] for message in conversation])", previous_response_id=then.id)
    assert last.output_text == '["user", "assistant", "user", "assistant"]'


def test_response_without_the_repl_begins_with_the_conversation(served: Served, client: openai.OpenAI) -> None:
    """The REPL has gone on with another response, or was closed: messages are known, variables not."""
    parts = [{"type": "input_text", "text": "y" * 20_000}, {"type": "input_text", "text": code("x = 1; FINAL('kept')")}]
    first = asked(client, "", input=[{"role": "user", "content": parts}])
    other = asked(client, "x = 2; FINAL(x)", previous_response_id=first.id)
    text = "FINAL(['x' in globals(), len(context), len(conversation)])"
    branch = asked(client, text, previous_response_id=first.id)
    assert (branch.output_text, branch.to_dict()["rlm"]["repl"]) == ("[false, 20000, 2]", "new")

    async def close_all() -> None:
        for held in served.parts.repls.all():
            await served.parts.repls.close(held.owner, held.id)

    served.run(close_all())
    assert asked(client, text, previous_response_id=other.id).output_text == "[false, 20000, 4]"


async def test_two_responses_at_once_after_the_same_one(served: Served) -> None:
    """One of them gets the REPL, and the other one a new REPL: neither fails."""
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=served.keys["alice"], max_retries=0) as client:
        first = await client.responses.create(model=MODEL, input=code("x = 1; FINAL('kept')"))
        text = code("FINAL('x' in globals())")
        both = [client.responses.create(model=MODEL, input=text, previous_response_id=first.id) for _ in range(2)]
        assert {made.output_text for made in await asyncio.gather(*both)} == {"True", "False"}


def test_input_items_are_listed(client: openai.OpenAI) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello!"}]},
        {"role": "user", "content": code("FINAL('yes')")},
    ]
    made = asked(client, "", input=items)
    listed: list[Any] = list(client.responses.input_items.list(made.id, limit=3, order="asc"))
    check_items(item.to_dict() for item in listed)
    assert [item.role for item in listed] == ["developer", "user", "assistant", "user"]
    assert [item.id for item in client.responses.input_items.list(made.id)] == [item.id for item in listed[::-1]]


def test_same_idempotency_key_joins_the_response(client: openai.OpenAI) -> None:
    same = {"extra_headers": {"Idempotency-Key": "k1"}}
    one, other = (asked(client, "import os; FINAL(os.urandom(8).hex())", **same) for _ in range(2))
    assert one.to_dict() == other.to_dict()


# -- functions -------------------------------------------------------------------------------------------------------


def test_function_of_the_client_resumes_the_run(client: openai.OpenAI) -> None:
    """The response ends with the call; the request with its result resumes the same block, with or without a store."""
    question = {"role": "user", "content": code("a = 40; b = weather(city='Bonn'); FINAL(f'{a} {b}')")}
    for is_stored in (True, False):
        first = asked(client, "", input=[question], tools=[WEATHER], store=is_stored)
        check_body(first.to_dict())
        call, result = call_in(first), output(first, "sunny")
        assert (call.name, json.loads(call.arguments), first.status) == ("weather", {"city": "Bonn"}, "completed")
        whole = [question, *(item.to_dict() for item in first.output), result]
        more = {"input": [result], "previous_response_id": first.id} if is_stored else {"input": whole, "store": False}
        then = asked(client, "", tools=[WEATHER], **more)
        check_body(then.to_dict())
        assert then.output_text == "40 sunny"
        assert first.to_dict()["rlm"]["run"] == then.to_dict()["rlm"]["run"]


def test_functions_in_a_namespace_are_called(client: openai.OpenAI) -> None:
    """Code has the namespace before the name; the item has both, so that the client finds its function."""
    tools = [{"type": "namespace", "name": "earth", "description": "Facts.", "tools": [WEATHER]}]
    first = asked(client, "FINAL(earth__weather(city='Ulm'))", tools=tools)
    check_items(item.to_dict() for item in first.output)
    assert (call_in(first).namespace, call_in(first).name) == ("earth", "weather")
    then = asked(client, "", input=[output(first, "rain")], tools=tools, previous_response_id=first.id)
    assert then.output_text == "rain"


def test_result_for_a_chat_completion_resumes_its_run(client: openai.OpenAI) -> None:
    function: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER["parameters"]}}
    messages: Any = [{"role": "user", "content": code("FINAL(weather(city='Ulm'))")}]
    chat: Any = client.chat.completions.create(model=MODEL, messages=messages, tools=[function])
    (call,) = chat.choices[0].message.tool_calls
    result = {"type": "function_call_output", "call_id": call.id, "output": "rain"}
    assert asked(client, "", input=[result], tools=[WEATHER]).output_text == "rain"


def test_late_result_begins_a_new_run(client: openai.OpenAI) -> None:
    """A call without a result is named. If no run waits any more, the result is a message of the conversation."""
    text = "FINAL(conversation[-1] if 'conversation' in globals() else weather(city=''))"
    first = asked(client, text, tools=[WEATHER])
    with pytest.raises(openai.BadRequestError, match="waits for its result"):
        asked(client, "1", previous_response_id=first.id)
    assert client.responses.cancel(first.id).status == "completed"
    then = asked(client, "", input=[output(first, "sunny")], tools=[WEATHER], previous_response_id=first.id)
    assert "sunny" in then.output_text


def test_items_can_be_referred_to(served: Served, client: openai.OpenAI) -> None:
    """As the AI SDK sends its tool loops: items of an earlier response by their ids, of the key alone."""
    question = {"role": "user", "content": code("FINAL(weather(city='Ulm'))")}
    first = asked(client, "", input=[question], tools=[WEATHER])
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    then = asked(client, "", input=[question, *references, output(first, "rain")], tools=[WEATHER])
    assert then.output_text == "rain"
    [given, *_] = client.responses.input_items.list(first.id)
    more = [{"type": "item_reference", "id": id} for id in (given.id, then.output[-1].id)]
    last = {"role": "user", "content": code("FINAL([m['role'] for m in conversation])")}
    assert asked(client, "", input=[*more, last]).output_text == '["user", "assistant"]'
    bob = openai.OpenAI(base_url=served.base_url, api_key=served.keys["bob"], max_retries=0)
    with bob, pytest.raises(openai.NotFoundError, match="there is no item"):
        asked(bob, "", input=[*more, last])


def test_forced_function_is_the_answer(served: Served, client: openai.OpenAI) -> None:
    """Hosted tools beside it are named; the one that is forced is called, and its result begins a new run."""
    tools = [{"type": "web_search", "external_web_access": True}, WEATHER]
    text, forced = "FINAL({'city': 'Ulm'})", {"tools": tools, "tool_choice": "required"}
    ended = raw_events(served, {"input": code(text), **forced, "top_k": 5})[-1]["response"]
    assert (ended["status"], ended["rlm"]["ignored"]) == ("completed", ["top_k", "tools.web_search"])
    made = asked(client, text, **forced)
    assert (call_in(made).name, call_in(made).arguments) == ("weather", '{"city": "Ulm"}')
    question = {"role": "user", "content": code("FINAL(conversation[-1]['content'])")}
    then = asked(client, "", input=[output(made, "rain"), question], previous_response_id=made.id)
    assert then.output_text == "rain"


# -- refusals and ends -----------------------------------------------------------------------------------------------


def said(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


BAD: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "nothing"}, 404, "model"),
    ({"model": f"{MODEL}@nothing"}, 404, "model"),
    ({"previous_response_id": "resp_0"}, 404, "previous_response_id"),
    ({"input": []}, 400, "input"),
    ({"input": 5}, 400, "input"),
    ({"input": ["?"]}, 400, "input"),
    ({"stream": "yes"}, 400, "stream"),
    ({"background": "yes"}, 400, "background"),
    ({"input": [{"role": "king", "content": "I"}]}, 400, "input.0.role"),
    ({"input": [{"type": "mcp_call", "id": "x"}]}, 400, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "call_0", "output": "x"}]}, 404, "input"),
    (said({"type": "input_file", "file_id": "file-0"}), 404, "file_id"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, 400, "tools.0.tools.0"),
    ({"tools": [{"type": "code_interpreter", "container": "cntr_0"}]}, 400, "tools.0.container"),
    ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, 400, "tool_choice"),
    ({"text": {"format": {"type": "grammar"}}}, 400, "text.format.type"),
    ({"background": True, "store": False}, 400, "store"),
    ({"stream_options": {}}, 400, "stream_options"),
    ({"include": ["message.output_text.logprobs"]}, 400, "include"),
    ({"conversation": "conv_0"}, 400, "conversation"),
    ({"metadata": {"a": "x" * 513}}, 400, "metadata"),
    ({"rlm": {"max_iterations": 1_000_000}}, 400, None),
    ({"rlm": {"nonsense": 1}}, 400, "rlm.nonsense"),
]


def test_bad_request_is_one_sentence(served: Served) -> None:
    for fields, status, param in BAD:
        body = {"model": MODEL, "input": "?", **fields}
        answer = httpx.post(f"{served.base_url}/responses", json=body, headers=served.headers)
        error = answer.json()["error"]
        assert answer.status_code == status, (fields, error)
        assert param is None or param in error["param"], (fields, error)
        assert error["message"].count("\n") == 0
        if fields.get("input") in ([], 5):
            assert error["message"] == "input must be text or a list of at least 1 item"


def test_bad_query_is_one_sentence(served: Served, client: openai.OpenAI) -> None:
    path = f"{served.base_url}/responses/{asked(client, 'FINAL(1)').id}"
    for query, status, param in (
        ("?stream=true&starting_after=1000", 400, "starting_after"),
        ("?stream=true&starting_after=-1", 400, "starting_after"),
        ("?stream=perhaps", 400, "stream"),
        ("/input_items?limit=0", 400, "limit"),
        ("/input_items?after=msg_9", 404, "after"),
    ):
        answer = httpx.get(path + query, headers=served.headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_conversation_is_bounded(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    first = asked(client, "FINAL(1)")
    monkeypatch.setattr(answering, "MOST_CONVERSATION_BYTES", 1_000)
    with pytest.raises(openai.APIStatusError, match="more than 1,000 bytes") as refused:
        asked(client, "FINAL(2)", previous_response_id=first.id)
    assert refused.value.status_code == 413


def test_server_that_ends_tells_the_last_event() -> None:
    """A drain stops runs with their best answers: followers get a proper last event."""
    own = serving(RLM(ScriptedClient(reply)), ServeSettings(drain_s=0.0))
    with own as served, openai.OpenAI(base_url=served.base_url, api_key=served.key, max_retries=0) as client:
        stream = asked(client, "import time; time.sleep(60)", background=True, stream=True)
        first = [next(stream).to_dict() for _ in range(5)]
        served.run(served.service.drain())
        events = [*first, *(event.to_dict() for event in stream)]
    check_events(events)
    assert (events[-1]["type"], events[-1]["response"]["rlm"]["stopped"]) == ("response.incomplete", True)


def test_failed_run_is_an_error_or_a_failed_response() -> None:
    """A plain request gets the status of the failure, and a stream an event that tells it."""
    own = serving(RLM(ScriptedClient([])))
    with own as served, openai.OpenAI(base_url=served.base_url, api_key=served.key, max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as failed:
            asked(client, "1")
        assert failed.value.response.headers["x-should-retry"] == "false"
        last = raw_events(served, {"input": "?"})[-1]
    assert last["type"] == "response.failed"
    assert "script" in last["response"]["error"]["message"]
