"""Tools of a client: calls of code end a response, and results in the next request resume the run."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from rlm_broker.rlm import RLM
from rlm_broker.serve.questions import client_tools
from rlm_broker.serve.questions.client_tools import ClientCall, ClientTools
from rlm_broker.serve.settings import ServeSettings
from tests.support.obedient import obedient
from tests.support.service import Served, serving
from tests.support.waiting import until, until_now


def shout(word: str) -> str:
    """A tool of the server's own, which stays there beside those of clients."""
    return word.upper()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    rlm = RLM(obedient(), tools={"shout": shout})
    with serving(rlm, ServeSettings(), keys={"alice": {}, "bob": {}}) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key=served.key, max_retries=0) as client:
        yield client


def tool(name: str, /, **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}


WEATHER = tool("get-weather", city="string")


def asked(client: openai.OpenAI, code: str, *tools: dict[str, Any], **more: Any) -> tuple[Any, list[Any]]:
    """Ask, and return the answer and the messages for the next request."""
    messages: list[Any] = [{"role": "user", "content": f"DO: {code}"}]
    answer = resumed(client, messages, tools or (WEATHER,), **more)
    return answer, [*messages, answer.choices[0].message.model_dump(exclude_none=True)]


def results(answer: Any, *texts: str) -> list[dict[str, Any]]:
    calls = answer.choices[0].message.tool_calls
    return [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text in zip(calls, texts, strict=True)]


def resumed(client: openai.OpenAI, messages: list[Any], tools: Sequence[Any] = (WEATHER,), **more: Any) -> Any:
    completions: Any = client.chat.completions
    return completions.create(model="obedient", messages=messages, tools=tools, **more)


def test_one_call_suspends_and_resumes(client: openai.OpenAI) -> None:
    """A call ends the response; its result resumes the same run, whose usage is told in two parts."""
    answer, messages = asked(client, "print(1); w = get_weather('Bern'); FINAL(shout(w))")
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.function.name, call.function.arguments) == ("get-weather", '{"city": "Bern"}')
    end = resumed(client, messages + results(answer, "snow"))
    assert (end.choices[0].message.content, end.choices[0].finish_reason) == ("SNOW", "stop")
    assert end.model_extra["rlm"]["run"] == answer.model_extra["rlm"]["run"]
    assert end.id != answer.id
    assert answer.usage.prompt_tokens > 0
    assert end.usage.prompt_tokens == 0


def come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return calls when there are three, not after a pause: the threads of a busy machine are slow."""
    wanted = ClientTools.wanted

    async def three(tools: ClientTools) -> list[ClientCall]:
        await until(lambda: len(tools._open) == 3)
        return await wanted(tools)

    monkeypatch.setattr(ClientTools, "wanted", three)


THREADS = "from concurrent.futures import ThreadPoolExecutor as P; FINAL(' '.join(P().map(get_weather, 'abc')))"


def test_calls_of_threads_come_together(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that are made at once are one response; each result reaches its own call."""
    come_together(monkeypatch)
    answer, messages = asked(client, THREADS)
    cities = [call.function.arguments[-3] for call in answer.choices[0].message.tool_calls]
    assert sorted(cities) == ["a", "b", "c"]
    end = resumed(client, messages + results(answer, *(city * 2 for city in cities)))
    assert end.choices[0].message.content == "aa bb cc"


def test_parallel_calls_can_be_refused(client: openai.OpenAI) -> None:
    """With `parallel_tool_calls=False` each response has one call."""
    answer, messages = asked(client, THREADS, parallel_tool_calls=False)
    for _ in "abc":
        (call,) = answer.choices[0].message.tool_calls
        messages += results(answer, call.function.arguments[-3])
        answer = resumed(client, messages, parallel_tool_calls=False)
    assert answer.choices[0].message.content == "a b c"


def test_stream_suspends_and_resumes(client: openai.OpenAI) -> None:
    """A stream ends with the calls; the next one goes on with events that are new."""
    messages: list[Any] = [{"role": "user", "content": "DO: print('before'); print(get_weather('Bern')); FINAL('x')"}]
    more: Any = {"model": "obedient", "tools": [WEATHER], "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(messages=messages, **more) as stream:
        first = stream.get_final_completion()
    (choice,) = first.choices
    assert (choice.finish_reason, choice.message.model_extra["reasoning"][:9]) == ("tool_calls", "I run it.")  # type: ignore[index]
    messages += [choice.message.model_dump(exclude_none=True), *results(first, "snow")]
    with client.chat.completions.stream(messages=messages, **more) as stream:
        end = stream.get_final_completion()
    assert end.choices[0].message.content == "x"
    thought = (end.choices[0].message.model_extra or {})["reasoning"]
    assert "before\nsnow" in thought
    assert "I run it." not in thought


def test_arguments_are_checked_by_the_schema(client: openai.OpenAI) -> None:
    """A call with wrong arguments fails in the REPL, and the client never sees it."""
    code = "\\ntry: get_weather(7)\\nexcept RuntimeError as error: FINAL(str(error))"
    answer, _ = asked(client, f"exec({code!r})".replace("\\\\n", "\\n"))
    assert answer.choices[0].message.content == "get_weather(): city: 7 is not of type 'string'"


def test_names_that_python_lacks_are_changed(client: openai.OpenAI) -> None:
    """Names of builtins and keywords, and of properties that are none of Python's, have another way to be called."""
    tools = [tool("open", path="string"), tool("send", **{"from": "string"}), tool("2nd"), tool("conversation")]
    code = "FINAL(open_('a') + send({'from': 'b'}) + tool_2nd() + conversation_())"
    answer, messages = asked(client, code, *tools)
    said = []
    for text in "wxyz":
        (call,) = answer.choices[0].message.tool_calls
        said.append((call.function.name, call.function.arguments))
        messages += results(answer, text)
        answer = resumed(client, messages)
    assert answer.choices[0].message.content == "wxyz"
    assert said == [("open", '{"path": "a"}'), ("send", '{"from": "b"}'), ("2nd", "{}"), ("conversation", "{}")]


def test_results_that_no_run_waits_for_begin_a_new_run(
    client: openai.OpenAI, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id that never was, and one of another key's run, are messages of the history; a missing result is 400."""
    come_together(monkeypatch)
    answer, messages = asked(client, THREADS)
    bob = openai.OpenAI(base_url=served.base_url, api_key=served.keys["bob"], max_retries=0)
    with bob:
        others = resumed(bob, messages + results(answer, "x", "y", "z"))
    unknown = resumed(client, [*messages, {"role": "tool", "tool_call_id": "call_0", "content": "x"}])
    assert len({each.model_extra["rlm"]["run"] for each in (answer, others, unknown)}) == 3
    assert [each.choices[0].finish_reason for each in (others, unknown)] == ["tool_calls"] * 2
    with pytest.raises(openai.BadRequestError, match="send the results of all calls"):
        resumed(client, messages + results(answer, "x", "y", "z")[:2])
    assert resumed(client, messages + results(answer, "x", "y", "z")).choices[0].finish_reason == "stop"


def test_results_sent_twice_join_the_run(client: openai.OpenAI) -> None:
    answer, messages = asked(client, "FINAL(get_weather('Bern'))")
    ends = [resumed(client, messages + results(answer, text)) for text in ("snow", "rain")]
    assert [end.choices[0].message.content for end in ends] == ["snow", "snow"]
    assert ends[0].usage == ends[1].usage


def test_conversation_goes_on_after_its_run_has_ended() -> None:
    """A run whose client comes back too late has ended: a new one finds the call and its result."""
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(serving(RLM(obedient()), ServeSettings(tool_wait_s=0.3)))
        client = stack.enter_context(openai.OpenAI(base_url=own.base_url, api_key=own.key, max_retries=0))
        code = "FINAL(conversation[-1]['content'] if 'conversation' in globals() else get_weather('Bern'))"
        answer, messages = asked(client, code)
        until_now(lambda: own.parts.runs.running == 0)
        end = resumed(client, messages + results(answer, "snow"))
    assert end.choices[0].message.content == "snow"
    assert end.model_extra["rlm"]["run"] != answer.model_extra["rlm"]["run"]


def test_limit_while_suspended_is_told(client: openai.OpenAI, served: Served) -> None:
    """A run that a limit ends while it waits answers the results with its best."""
    limits = {"rlm": {"run_timeout_s": 1}}
    answer, messages = asked(client, "answer['content'] = 'so far'; get_weather('Bern')", extra_body=limits)
    run = answer.model_extra["rlm"]["run"]
    until_now(lambda: next(each for each in served.parts.runs.all() if each.id == run).run.is_done)
    end = resumed(client, messages + results(answer, "snow"))
    assert end.choices[0].finish_reason == "length"
    assert end.model_extra["rlm"]["limit"] == "run_timeout_s"


def test_tool_of_the_server_keeps_its_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="there is a tool 'shout' already") as error:
        asked(client, "pass", tool("shout"))
    assert error.value.param == "tools"


SHIP = tool("final-result", name="string")


def test_forced_call_is_the_answer(client: openai.OpenAI) -> None:
    """As agents ask for typed answers: the call has the arguments, and its result begins a new run."""
    named = {"type": "function", "function": {"name": "final-result"}}
    for choice, tools, answered in (
        (named, (SHIP, WEATHER), {"name": "Rhea"}),
        ("required", (SHIP,), {"name": "Rhea"}),
        ("required", (SHIP, WEATHER), {"name": "final-result", "arguments": {"name": "Rhea"}}),
    ):
        answer, messages = asked(client, f"FINAL({answered!r})", *tools, tool_choice=choice)
        (made,) = answer.choices
        (call,) = made.message.tool_calls
        assert (made.finish_reason, made.message.content) == ("tool_calls", None)
        assert (call.function.name, call.function.arguments) == ("final-result", '{"name": "Rhea"}')
    messages += [*results(answer, "ok"), {"role": "user", "content": "DO: FINAL(len(conversation))"}]
    messages[0] = {"role": "user", "content": "Which ship?"}
    assert resumed(client, messages).choices[0].message.content == "3"


def test_code_may_call_while_a_call_is_required(client: openai.OpenAI) -> None:
    """The answer that is a call is streamed as a call, and only a call is an answer."""
    code = "FINAL({'name': 'final-result', 'arguments': {'name': get_weather('Bern')}})"
    answer, messages = asked(client, code, SHIP, WEATHER, tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.name == "get-weather"
    more: Any = {"model": "obedient", "tools": [SHIP, WEATHER], "tool_choice": "required"}
    with client.chat.completions.stream(messages=messages + results(answer, "snow"), **more) as stream:
        (made,) = stream.get_final_completion().choices
    assert made.message.tool_calls
    assert (made.finish_reason, made.message.tool_calls[0].function.arguments) == ("tool_calls", '{"name": "snow"}')
    with pytest.raises(openai.UnprocessableEntityError):
        asked(client, "FINAL('no call')", SHIP, tool_choice="required")


def test_open_calls_are_bounded(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code cannot collect more open calls than the bound: each further one fails."""
    monkeypatch.setattr(client_tools, "MOST_OPEN", 3)
    come_together(monkeypatch)
    code = (
        "import threading; said = []; "
        "exec('def one(n):\\n try: said.append(get_weather(str(n)))\\n except Exception as e: said.append(str(e))'); "
        "ts = [threading.Thread(target=one, args=(n,)) for n in range(5)]; [t.start() for t in ts]; "
        "[t.join() for t in ts]; FINAL(str(sum('make fewer at a time' in each for each in said)))"
    )
    answer, messages = asked(client, code)
    assert len(answer.choices[0].message.tool_calls) == 3
    end = resumed(client, messages + results(answer, "x", "x", "x"))
    assert end.choices[0].message.content == "2"
