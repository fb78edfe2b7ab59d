"""Chat completions over HTTP, as OpenAI's own client and raw sockets use them."""

import concurrent.futures
import json
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from rlm_broker import (
    RLM,
    BlockPrinted,
    Limits,
    LMReply,
    LMRequest,
    ModelFailed,
    OpenAICompatibleClient,
    Sandbox,
    ScriptedClient,
    Usage,
)
from rlm_broker.serve.settings import ServeSettings
from tests.support.fake_openai import Answer, FakeOpenAI, streamed
from tests.support.obedient import obedient
from tests.support.service import Served, serving
from tests.support.waiting import until_now

WAIT_S = 60
DOCUMENT = {"type": "text", "text": "a\nb\nc"}
HELLO = [{"role": "user", "content": "Say hello."}]


class City(pydantic.BaseModel):
    name: str
    people: int


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    logs = tmp_path_factory.mktemp("logs")
    (logs / "a.log").write_text("one\n")
    (logs / "b.log").write_text("two\n")
    settings = ServeSettings(contexts={"logs": str(logs)}, inline_chars=200)
    rlm = RLM(obedient(), limits=Limits(max_iterations=3, max_budget_usd=5))
    with serving(rlm, settings, keys={"alice": {}, "bob": {}}) as served:
        yield served


def client_of(served: Served, key: str | None = None, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.base_url, api_key=key or served.key, max_retries=0, **options)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served) as client:
        yield client


def asked(client: openai.OpenAI, *content: Any, model: str = "obedient", **more: Any) -> Any:
    said = content[0] if len(content) == 1 else list(content)
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": said}], **more)


def said(answer: Any) -> str:
    text: str = answer.choices[0].message.content
    return text


def do(code: str) -> dict[str, str]:
    return {"type": "text", "text": f"DO: {code}"}


# -- whole answers -------------------------------------------------------------------------------------------------


def test_completion_has_answer_usage_and_run(client: openai.OpenAI, served: Served) -> None:
    """A completion has the answer, the tree's usage, and what the run took."""
    answer = asked(client, DOCUMENT, do("FINAL(context.count(chr(10)) + 1)"))
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "3", "stop")
    assert answer.model == "obedient"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0
    told = answer.model_extra["rlm"]
    assert (told["cost_usd"], told["calls"], told["turns"], told["limit"]) == (0.25, 1, 1, None)
    assert told["isolation"] in ("strict", "standard", "process")
    assert answer.id == f"chatcmpl-{told['run']}"
    assert [run.id for run in served.parts.runs.all() if run.id == told["run"]]


def test_answer_of_a_type_is_json(client: openai.OpenAI) -> None:
    """An answer that stays of another type is 422, and the client is told not to pay again."""
    code = "import json; FINAL('```json\\n' + json.dumps({'name': 'Bern', 'people': 134_000}) + '\\n```')"
    messages: Any = [{"role": "user", "content": f"DO: {code}"}]
    answer = client.chat.completions.parse(model="obedient", messages=messages, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Bern", people=134_000)
    form: Any = {"response_format": {"type": "json_object"}}
    assert json.loads(said(asked(client, "DO: FINAL({'a': [1, None]})", **form))) == {"a": [1, None]}
    with pytest.raises(openai.UnprocessableEntityError) as error:
        asked(client, "DO: FINAL('no')", **form)
    assert error.value.response.headers["x-should-retry"] == "false"
    assert error.value.code == "output"
    with pytest.raises(openai.APIError, match="not of the wanted type"):
        list(asked(client, "DO: FINAL('no')", stream=True, **form))


def test_limit_ends_with_length_and_partial_answer(client: openai.OpenAI) -> None:
    """A limit is the finish reason "length", with the best answer so far."""
    code = "DO: answer['content'] = 'so far'"
    for limit, value, more in (("max_iterations", 1, ""), ("run_timeout_s", 0.5, "; import time; time.sleep(60)")):
        answer = asked(client, code + more, extra_body={"rlm": {limit: value}})
        assert (answer.choices[0].finish_reason, answer.model_extra["rlm"]["limit"]) == ("length", limit)
        assert said(answer)


def test_limit_before_an_answer_is_told(open_sandbox: Sandbox) -> None:
    """A limit that ends a run during its first reply is the content: a chat window shows no empty bubble."""
    with FakeOpenAI(Answer(never=True)) as provider:
        rlm = RLM(OpenAICompatibleClient(provider.base_url, "test-model", api_key="x"), sandbox=open_sandbox)
        with serving(rlm) as own, client_of(own) as client:
            limit: Any = {"model": "test-model", "extra_body": {"rlm": {"run_timeout_s": 0.5}}}
            with concurrent.futures.ThreadPoolExecutor() as pool:
                asking = pool.submit(asked, client, "What?", **limit)
                streaming = pool.submit(lambda: list(asked(client, "What?", stream=True, **limit)))
                response = client.responses.create(input="What?", **limit)
            whole, chunks = asking.result().choices[0], streaming.result()
    said = "the limit run_timeout_s = 0.5 was reached before there was an answer"
    assert (whole.message.content, whole.finish_reason) == (said, "length")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
    assert (response.output_text, response.status) == (said, "incomplete")


def test_what_the_model_gets(open_sandbox: Sandbox) -> None:
    """Output tokens bound its calls; instructions of the caller stand beside our prompt, which stays whole."""
    scripted = obedient()
    with serving(RLM(scripted, sandbox=open_sandbox)) as own, client_of(own) as client:
        asked(client, "Say hello.", max_tokens=77)
        asked(client, "Say hello.", max_tokens=99, max_completion_tokens=55)
        pirate = [{"role": "system", "content": "Speak like a pirate."}, {"role": "developer", "content": "No ahoy."}]
        messages: Any = [*pirate, *HELLO]
        client.chat.completions.create(model="obedient", messages=messages)
    assert [request.max_completion_tokens for request in scripted.requests] == [77, 55, None]
    bare, _, (system, opening) = (request.messages for request in scripted.requests)
    assert system.content == bare[0].content
    assert "Speak like a pirate.\n\nNo ahoy." in opening.content


# -- what is context -------------------------------------------------------------------------------------------------


def test_earlier_turns_are_a_variable(client: openai.OpenAI) -> None:
    """A picture in one of them, or instructions behind the last one, do not end the conversation."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "The word is xyzzy."}, picture]},
        {"role": "assistant", "content": "Understood."},
        {"role": "user", "content": "DO: FINAL(str([m['content'] for m in conversation]))"},
        {"role": "system", "content": "Be brief."},
    ]
    answer = client.chat.completions.create(model="obedient", messages=messages)
    assert said(answer) == str([["The word is xyzzy.", "[image]"], "Understood."])


def test_context_is_a_folder_a_file_or_what_rlm_says(client: openai.OpenAI) -> None:
    """The model NAME@logs answers about a folder of the server's, also beside a file of the request."""
    alone = asked(client, "DO: FINAL(str(sorted(context)))", model="obedient@logs")
    assert said(alone) == "['a.log', 'b.log']"
    both = do("FINAL(context['logs']['a.log'] + context['attached'])")
    assert said(asked(client, DOCUMENT, both, model="obedient@logs")) == "one\na\nb\nc"
    file = client.files.create(file=("book.txt", b"once upon a time"), purpose="user_data")
    book = {"type": "file", "file": {"file_id": file.id}}
    assert said(asked(client, book, do("FINAL(context.upper())"))) == "ONCE UPON A TIME"
    explicit = {"rlm": {"question": "DO: FINAL(context)"}}
    assert said(asked(client, DOCUMENT["text"], extra_body=explicit)) == "a\nb\nc"
    rows = {"rlm": {"context": {"rows": [1, 2]}}}
    assert said(asked(client, "DO: FINAL(context['rows'][1])", extra_body=rows)) == "2"


# -- streams ---------------------------------------------------------------------------------------------------------


def test_stream_has_turns_answer_and_usage(client: openai.OpenAI) -> None:
    """A stream has the role, the turns as reasoning, the answer, the reason of its end, and the usage."""
    stream = asked(
        client, DOCUMENT, do("print(len(context)); FINAL('x')"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
    assert "I run it." in thought
    assert "```text\n5\n```" in thought
    assert "".join(delta.content or "" for delta in deltas) == "x"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens > 0
    assert chunks[-1].model_extra["rlm"]["calls"] == 1
    assert len({chunk.id for chunk in chunks}) == 1


def test_reply_streams_as_it_is_written(open_sandbox: Sandbox) -> None:
    """Pieces of a reply are sent as they come from the provider, and not again when it is whole."""
    with FakeOpenAI(streamed("I think: ", "\n```repl\nFINAL(4", "2)\n```")) as provider:
        rlm = RLM(OpenAICompatibleClient(provider.base_url, "test-model", api_key="x"), sandbox=open_sandbox)
        with serving(rlm) as own, client_of(own) as client:
            chunks = list(asked(client, "What?", model="test-model", stream=True))
    thoughts = [getattr(chunk.choices[0].delta, "reasoning", None) for chunk in chunks]
    assert "".join(thought or "" for thought in thoughts).strip() == "I think: \n```repl\nFINAL(42)\n```"


SLOW = "DO: import time; time.sleep(0.3); FINAL('late')"


def test_late_failure_has_the_form_of_the_interface(open_sandbox: Sandbox) -> None:
    """After the status is sent, a failed run is a completion or a response that says so, with its partial answer."""

    def reply(request: LMRequest) -> str:
        if len(request.messages) > 2:
            raise ModelFailed("the model is gone")
        return "```repl\nanswer['content'] = 'so far'; import time; time.sleep(0.3)\n```"

    replies = ScriptedClient(reply, model_name="m")
    with serving(RLM(replies, sandbox=open_sandbox), ServeSettings(heartbeat_s=0.01)) as own, client_of(own) as client:
        failed = asked(client, "What?", model="m")
        response: Any = client.responses.create(model="m", input="What?")
    (choice,) = failed.choices
    assert (choice.finish_reason, choice.message.content) == ("length", "so far")
    assert "the model is gone" in choice.message.refusal
    assert failed.model_extra["error"]["message"] == choice.message.refusal
    assert failed.model_extra["rlm"]["error"] == "provider"
    assert (response.status, response.output_text) == ("failed", "so far")
    assert "the model is gone" in response.error.message


class Cached:
    """A client of one model whose provider has most of the input in its cache."""

    model_name = "cached"

    async def complete(self, request: LMRequest) -> LMReply:
        return LMReply(f"FINAL({request.messages[-1].role})", Usage(1, 100, 5, 0.1, cached_input_tokens=80))

    async def aclose(self) -> None:
        """Close no resource: there is none."""


def test_cached_tokens_are_told(open_sandbox: Sandbox) -> None:
    with serving(RLM(Cached(), sandbox=open_sandbox)) as own, client_of(own) as client:
        chat = asked(client, "What?", model="cached").usage
        response: Any = client.responses.create(model="cached", input="What?").usage
    assert (chat.prompt_tokens, chat.prompt_tokens_details.cached_tokens) == (100, 80)
    assert (response.input_tokens, response.input_tokens_details.cached_tokens) == (100, 80)


def test_plain_model_gets_the_messages(open_sandbox: Sandbox) -> None:
    """NAME@plain is one call without a REPL: what chat windows ask for titles and tags of a conversation."""
    scripted = ScriptedClient(["A title", '{"name": "Rome", "people": 1}'], model_name="m")
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [DOCUMENT, {"type": "text", "text": "A title?"}]},
    ]
    tool: Any = {"type": "function", "function": {"name": "f"}}
    with serving(RLM(scripted, sandbox=open_sandbox)) as own, client_of(own) as client:
        answer: Any = client.chat.completions.create(model="m@plain", messages=messages, tools=[tool])
        typed = client.chat.completions.parse(model="m@plain", messages=messages[:2], response_format=City)
        models = [model.id for model in client.models.list()]
    assert (answer.choices[0].message.content, answer.model) == ("A title", "m@plain")
    assert (answer.model_extra["rlm"]["isolation"], answer.model_extra["rlm"]["ignored"]) == (None, ["tools"])
    said = [(message.role, message.content) for message in scripted.requests[0].messages]
    assert said == [*((m["role"], m["content"]) for m in messages[:3]), ("user", "a\nb\nc\n\nA title?")]
    assert typed.choices[0].message.parsed == City(name="Rome", people=1)
    assert models == ["m", "m@plain"]


def test_question_of_a_chat_is_its_task(client: openai.OpenAI, served: Served) -> None:
    """A viewer of the run sees the question, although the lone text is the context."""
    run = asked(client, "Say hello.").model_extra["rlm"]["run"]

    async def started() -> Any:
        (hosted,) = [hosted for hosted in served.parts.runs.all() if hosted.id == run]
        return await anext(hosted.run.events())

    assert served.run(started()).question == "Say hello."


def test_request_costs_the_same_after_many_runs(open_sandbox: Sandbox) -> None:
    """The functions that a request calls are counted: no clock is read. Threads that wake the loop add a few."""
    rlm = RLM(ScriptedClient(lambda _: "hello", model_name="m"), sandbox=open_sandbox)
    counted = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal counted
        counted += event == "call"

    with serving(rlm) as own, client_of(own) as client:

        def calls() -> int:
            nonlocal counted
            costs = []
            for _ in range(5):
                counted = 0
                asked(client, "What?", model="m@plain")
                client.responses.create(model="m@plain", input="What?")
                costs.append(counted)
            return min(costs)

        own.call(lambda: sys.setprofile(count))
        fresh = calls()
        own.call(lambda: sys.setprofile(None))
        for _ in range(200):
            asked(client, "What?", model="m@plain")
            client.responses.create(model="m@plain", input="What?")
        own.call(lambda: sys.setprofile(count))
        assert calls() < fresh * 1.1  # one more for each of 400 runs would be 1.15 times as many
        own.call(lambda: sys.setprofile(None))


# -- the same request again, and clients that leave ------------------------------------------------------------------


def test_idempotency_key_joins_the_run(client: openai.OpenAI, served: Served) -> None:
    """A request that is sent twice, also at the same time, is one run; another request under its key is refused."""
    before = len(served.parts.runs.all())
    same: dict[str, Any] = {"extra_headers": {"Idempotency-Key": "k-1"}}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda _: asked(client, SLOW, **same), range(3)))
    answers.append(asked(client, SLOW, **same))
    assert len({answer.model_extra["rlm"]["run"] for answer in answers}) == 1
    assert len(served.parts.runs.all()) == before + 1
    with pytest.raises(openai.BadRequestError, match="another request"):
        asked(client, "Say hello.", **same)
    with client_of(served, served.keys["bob"]) as bob:
        assert asked(bob, "Say hello.", **same).choices[0].message.content == "hello"


def left_request(served: Served, body: dict[str, Any]) -> socket.socket:
    """Send a request by a raw socket, which the test closes."""
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {served.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.sendall(head.encode() + raw)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_client_ends_run_and_socket(stream: bool, open_sandbox: Sandbox) -> None:
    """Also a run that waits for its place, before any call. Beyond the queue a request is told to come again."""
    with FakeOpenAI(Answer(never=True)) as provider:
        rlm = RLM(OpenAICompatibleClient(provider.base_url, "test-model", api_key="x"), sandbox=open_sandbox)
        with serving(rlm, ServeSettings(max_runs=1, max_queue=1)) as own, client_of(own) as client:
            runs, body = own.parts.runs, {"model": "test-model", "stream": stream, "messages": HELLO}
            first = left_request(own, body)
            assert provider.arrived.wait(WAIT_S)
            second = left_request(own, body)
            until_now(lambda: runs.queued == 1)
            with pytest.raises(openai.RateLimitError) as error:
                asked(client, "Say hello.", model="test-model")
            assert int(error.value.response.headers["retry-after"]) > 0
            assert "x-should-retry" not in error.value.response.headers
            second.close()
            until_now(lambda: runs.queued == 0)
            assert (runs.running, len(provider.requests)) == (1, 1)
            first.close()
            assert provider.disconnected.wait(WAIT_S)
            until_now(lambda: all(hosted.run.is_done for hosted in runs.all()))
            stats = own.call(lambda: rlm.sandbox.stats())
            assert stats.workers == stats.ready


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_client_ends_a_running_block(stream: bool, open_sandbox: Sandbox) -> None:
    """A client that leaves while code runs ends the REPL at once, with what the code has started."""
    rlm = RLM(obedient(), limits=Limits(max_depth=1), sandbox=open_sandbox)
    with serving(rlm) as own:
        code = "DO: import subprocess; subprocess.Popen(['sleep', '600']); print('here', flush=True)"
        body = {"model": "obedient", "messages": [{"role": "user", "content": code + "; exec('while 1: pass')"}]}
        connection = left_request(own, {**body, "stream": stream})
        until_now(own.parts.runs.all)
        (run,) = own.parts.runs.all()

        async def printed() -> None:
            async for event in run.run.events():
                if isinstance(event, BlockPrinted):
                    return

        own.run(printed())
        connection.close()
        until_now(lambda: run.run.is_done)
        assert run.run.was_cancelled
        stats = own.call(lambda: rlm.sandbox.stats())
        assert stats.workers == stats.ready


def test_stopped_run_answers_with_its_best(served: Served, client: openai.OpenAI) -> None:
    """A run that is stopped from elsewhere answers with what it has."""
    known = {run.id for run in served.parts.runs.all()}
    answers: list[Any] = []
    code = "DO: answer['content'] = 'so far'; print('x'); import time; time.sleep(60)"
    asking = threading.Thread(target=lambda: answers.append(asked(client, code)))
    asking.start()
    until_now(lambda: [run for run in served.parts.runs.all() if run.id not in known and run.is_paid])
    (run,) = [run for run in served.parts.runs.all() if run.id not in known]
    served.call(run.stop)
    asking.join()
    assert answers[0].choices[0].finish_reason == "length"
    assert answers[0].model_extra["rlm"]["stopped"] is True
