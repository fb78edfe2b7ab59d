"""Chat completions over HTTP, as OpenAI's own client and raw sockets use them."""

import concurrent.futures
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient
from rlm_broker.events.event import BlockPrinted
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
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


async def test_asynchronous_client_gets_the_answer(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=served.key, max_retries=0) as client:
        answer = await client.chat.completions.create(model="obedient", messages=HELLO)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "hello"


def test_parsed_answer_is_of_the_type(client: openai.OpenAI) -> None:
    code = "import json; FINAL('```json\\n' + json.dumps({'name': 'Bern', 'people': 134_000}) + '\\n```')"
    messages: Any = [{"role": "user", "content": f"DO: {code}"}]
    answer = client.chat.completions.parse(model="obedient", messages=messages, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Bern", people=134_000)


def test_json_object_is_json(client: openai.OpenAI) -> None:
    answer = asked(client, "DO: FINAL({'a': [1, None]})", response_format={"type": "json_object"})
    assert json.loads(answer.choices[0].message.content) == {"a": [1, None]}


def test_wrong_type_is_an_error_and_not_retried(client: openai.OpenAI) -> None:
    """An answer that stays of another type is 422, and the client is told not to pay again."""
    with pytest.raises(openai.UnprocessableEntityError) as error:
        asked(client, "DO: FINAL('no')", response_format={"type": "json_object"})
    assert error.value.response.headers["x-should-retry"] == "false"
    assert error.value.code == "output"


def test_offline_model_refuses_types(open_sandbox: Sandbox) -> None:
    """The model "offline" answers in text: its sentence comes through."""
    with (
        serving(RLM("offline", sandbox=open_sandbox)) as offline,
        client_of(offline) as client,
        pytest.raises(openai.BadRequestError) as error,
    ):
        asked(client, "Which?", model="offline", response_format={"type": "json_object"})
    assert "answers in text: leave out output_type" in error.value.message


def test_limit_ends_with_length_and_partial_answer(client: openai.OpenAI) -> None:
    """A limit is the finish reason "length", with the best answer so far."""
    answer = asked(client, "DO: answer['content'] = 'so far'", extra_body={"rlm": {"max_iterations": 1}})
    told = answer.model_extra["rlm"]
    assert (answer.choices[0].finish_reason, told["limit"]) == ("length", "max_iterations")
    assert answer.choices[0].message.content
    answer = asked(
        client,
        "DO: answer['content'] = 'so far'; import time; time.sleep(60)",
        extra_body={"rlm": {"run_timeout_s": 0.5}},
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.model_extra["rlm"]["limit"] == "run_timeout_s"


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


def test_max_tokens_reach_the_calls(open_sandbox: Sandbox) -> None:
    scripted = obedient()
    with serving(RLM(scripted, sandbox=open_sandbox)) as own, client_of(own) as client:
        asked(client, "Say hello.", max_tokens=77)
        asked(client, "Say hello.", max_tokens=99, max_completion_tokens=55)
    assert [request.max_completion_tokens for request in scripted.requests] == [77, 55]


# -- what is context -------------------------------------------------------------------------------------------------


def test_earlier_turns_are_a_variable(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "The word is xyzzy."},
        {"role": "assistant", "content": "Understood."},
        {"role": "user", "content": "DO: FINAL(str([(m['role'], m['content']) for m in conversation]))"},
    ]
    answer = client.chat.completions.create(model="obedient", messages=messages)
    assert answer.choices[0].message.content == str([("user", "The word is xyzzy."), ("assistant", "Understood.")])


def test_system_text_stands_beside_our_prompt(open_sandbox: Sandbox) -> None:
    """System and developer texts reach the model, and our own prompt stays whole."""
    scripted = obedient()
    with serving(RLM(scripted, sandbox=open_sandbox)) as own, client_of(own) as client:
        messages: Any = [
            {"role": "system", "content": "Speak like a pirate."},
            {"role": "developer", "content": "Never say ahoy."},
            *HELLO,
        ]
        client.chat.completions.create(model="obedient", messages=messages)
        asked(client, "Say hello.")
    (system, opening), (bare, _) = (request.messages for request in scripted.requests)
    assert system.content == bare.content
    assert "Speak like a pirate.\n\nNever say ahoy." in opening.content


def test_model_at_context_asks_about_a_folder(client: openai.OpenAI) -> None:
    """The model NAME@logs answers about a folder of the server's, also beside a file of the request."""
    about = "DO: FINAL(str(sorted(context)))"
    assert "obedient@logs" in [model.id for model in client.models.list()]
    alone = asked(client, about, model="obedient@logs")
    assert alone.choices[0].message.content == "['a.log', 'b.log']"
    both = do("FINAL(context['logs']['a.log'] + context['attached'])")
    beside = asked(client, DOCUMENT, both, model="obedient@logs")
    assert beside.choices[0].message.content == "one\na\nb\nc"


def test_uploaded_file_is_the_context(client: openai.OpenAI) -> None:
    file = client.files.create(file=("book.txt", b"once upon a time"), purpose="user_data")
    answer = asked(client, {"type": "file", "file": {"file_id": file.id}}, do("FINAL(context.upper())"))
    assert answer.choices[0].message.content == "ONCE UPON A TIME"


def test_explicit_question_and_context(client: openai.OpenAI) -> None:
    """`rlm` says question and context in words, where structure does not."""
    said = {"question": "DO: FINAL(context)"}
    answer = asked(client, DOCUMENT["text"], extra_body={"rlm": said})
    assert answer.choices[0].message.content == "a\nb\nc"
    answer = asked(client, "DO: FINAL(context['rows'][1])", extra_body={"rlm": {"context": {"rows": [1, 2]}}})
    assert answer.choices[0].message.content == "2"


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


async def test_asynchronous_stream_of_a_type(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=served.key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "DO: FINAL({'name': 'Rome', 'people': 1})"}]
        async with client.chat.completions.stream(model="obedient", messages=messages, response_format=City) as stream:
            answer = await stream.get_final_completion()
    assert answer.choices[0].message.parsed == City(name="Rome", people=1)


def test_reply_streams_as_it_is_written(open_sandbox: Sandbox) -> None:
    """Pieces of a reply are sent as they come from the provider, and not again when it is whole."""
    with FakeOpenAI(streamed("I think: ", "\n```repl\nFINAL(4", "2)\n```")) as provider:
        rlm = RLM(OpenAICompatibleClient(provider.base_url, "test-model", api_key="x"), sandbox=open_sandbox)
        with serving(rlm) as own, client_of(own) as client:
            chunks = list(asked(client, "What?", model="test-model", stream=True))
    thoughts = [getattr(chunk.choices[0].delta, "reasoning", None) for chunk in chunks]
    assert "".join(thought or "" for thought in thoughts).strip() == "I think: \n```repl\nFINAL(42)\n```"


def test_error_in_a_stream_is_told(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError) as error:
        list(asked(client, "DO: FINAL('no')", stream=True, response_format={"type": "json_object"}))
    assert "not of the wanted type" in error.value.message


def test_heartbeats_keep_both_answers_alive(open_sandbox: Sandbox) -> None:
    """A silent run sends comments in a stream, and blank lines before a plain body."""
    with serving(RLM(obedient(), sandbox=open_sandbox), ServeSettings(heartbeat_s=0.05)) as own:
        body: dict[str, Any] = {"model": "obedient", "messages": [{"role": "user", "content": SLOW}]}
        plain = httpx.post(f"{own.base_url}/chat/completions", json=body, headers=own.headers, timeout=WAIT_S)
        assert plain.content.startswith(b"\n{") or plain.content.startswith(b"\n\n")
        assert plain.json()["choices"][0]["message"]["content"] == "late"
        stream = httpx.post(
            f"{own.base_url}/chat/completions", json={**body, "stream": True}, headers=own.headers, timeout=WAIT_S
        )
        assert b": the run goes on\n\n" in stream.content
        assert stream.content.endswith(b"data: [DONE]\n\n")
        with client_of(own) as client:
            assert asked(client, SLOW).choices[0].message.content == "late"


SLOW = "DO: import time; time.sleep(0.3); FINAL('late')"


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
    """A client that leaves ends its run, and the connection to the provider."""
    with FakeOpenAI(Answer(never=True)) as provider:
        rlm = RLM(OpenAICompatibleClient(provider.base_url, "test-model", api_key="x"), sandbox=open_sandbox)
        with serving(rlm) as own:
            connection = left_request(own, {"model": "test-model", "stream": stream, "messages": HELLO})
            assert provider.arrived.wait(WAIT_S)
            connection.close()
            assert provider.disconnected.wait(WAIT_S)
            until_now(lambda: own.parts.runs.running == 0)
            (run,) = own.parts.runs.all()
            assert run.run.is_done
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
            async for event in run.events():
                if isinstance(event, BlockPrinted):
                    return

        own.run(printed())
        connection.close()
        until_now(lambda: run.run.is_done)
        assert run.run.was_cancelled
        stats = own.call(lambda: rlm.sandbox.stats())
        assert stats.workers == stats.ready


def test_leaving_client_ends_a_queued_run(open_sandbox: Sandbox) -> None:
    """A client that leaves while its run waits for a place takes it out of the queue, before any call."""
    with FakeOpenAI(Answer(never=True)) as provider:
        rlm = RLM(OpenAICompatibleClient(provider.base_url, "test-model", api_key="x"), sandbox=open_sandbox)
        with serving(rlm, ServeSettings(max_runs=1)) as own:
            body = {"model": "test-model", "messages": HELLO}
            first = left_request(own, body)
            assert provider.arrived.wait(WAIT_S)
            second = left_request(own, {**body, "stream": True})
            until_now(lambda: own.parts.runs.queued == 1)
            second.close()
            until_now(lambda: own.parts.runs.queued == 0)
            assert (own.parts.runs.running, len(provider.requests)) == (1, 1)
            first.close()
            assert provider.disconnected.wait(WAIT_S)


def test_full_queue_is_busy(open_sandbox: Sandbox) -> None:
    with FakeOpenAI(Answer(never=True)) as provider:
        rlm = RLM(OpenAICompatibleClient(provider.base_url, "test-model", api_key="x"), sandbox=open_sandbox)
        with serving(rlm, ServeSettings(max_runs=1, max_queue=0)) as own, client_of(own) as client:
            first = left_request(own, {"model": "test-model", "messages": HELLO})
            assert provider.arrived.wait(WAIT_S)
            with pytest.raises(openai.RateLimitError) as error:
                asked(client, "Say hello.", model="test-model")
            assert int(error.value.response.headers["retry-after"]) > 0
            assert "x-should-retry" not in error.value.response.headers
            first.close()
            assert provider.disconnected.wait(WAIT_S)


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
