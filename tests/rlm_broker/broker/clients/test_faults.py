"""Calls and faults of providers, over real HTTP, with equal outcomes of both clients that call them."""

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

import pytest

from rlm_broker.broker import client_queue
from rlm_broker.broker.client_queue import Serving
from rlm_broker.broker.clients.base import Client, LMReply, LMRequest, call_headers
from rlm_broker.broker.clients.litellm import LiteLLMClient
from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient
from rlm_broker.errors import FailureCause, ModelFailed
from rlm_broker.events.event import TreeEvents
from rlm_broker.limits import Limits
from rlm_broker.results import ChatMessage
from rlm_broker.run.calls import Caller, TreeCalls
from rlm_broker.run.ledger import Ledger
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.usage import Usage
from sandbox_worker.wire.messages import Query
from tests.support.fake_openai import Answer, FakeOpenAI, completion, failure, streamed, without_choices
from tests.support.waiting import LONGER_AND_LONGER, WAIT_S

REQUEST = LMRequest((ChatMessage("user", "hello"),))
Make = Callable[..., Client]


@pytest.fixture(scope="module", autouse=True)
def _litellm_is_imported() -> None:
    """Import it before any test waits for an answer: on a busy machine that alone takes a minute."""
    importlib.import_module("litellm")


def direct(server: FakeOpenAI, headers: dict[str, str] | None = None, **options: Any) -> Client:
    return OpenAICompatibleClient(
        server.base_url, "test-model", api_key="sk-of-the-test", headers=headers, options=options
    )


def litellm(server: FakeOpenAI, headers: dict[str, str] | None = None, **options: Any) -> Client:
    options |= {} if headers is None else {"extra_headers": headers}
    return LiteLLMClient("openai/test-model", api_base=server.base_url, api_key="sk-of-the-test", **options)


both = pytest.mark.parametrize("make", [direct, litellm])


@both
async def test_call_sends_the_conversation_once(make: Make) -> None:
    asked = LMRequest((ChatMessage("system", "be brief"), ChatMessage("user", "hello")), max_completion_tokens=7)
    said = completion("hi", 3, 5)
    said.body["usage"]["prompt_tokens_details"] = {"cached_tokens": 2}
    with FakeOpenAI(said) as server:
        reply = await make(server, temperature=0.5).complete(asked)
    assert reply == LMReply("hi", Usage(1, 3, 5, None, cached_input_tokens=2))
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert server.requests == [{"model": "test-model", "messages": messages, "max_tokens": 7, "temperature": 0.5}]
    assert server.connections == 1


@both
async def test_headers_of_the_call_are_sent(make: Make) -> None:
    """They are those of the call alone, and the client's own headers win."""
    with FakeOpenAI(completion("hi")) as server:
        client = make(server, headers={"X-Team": "blue"})
        token = call_headers.set({"traceparent": "00-ab-cd-01", "x-team": "red"})
        await client.complete(REQUEST)
        call_headers.reset(token)
        await client.complete(REQUEST)
    first, second = server.headers
    assert (first["traceparent"], first["x-team"]) == ("00-ab-cd-01", "blue")
    assert ("traceparent" in second, second["x-team"]) == (False, "blue")


@both
@pytest.mark.parametrize(
    ("answer", "cause", "words"),
    [
        (failure(400, "malformed"), "request", "malformed"),
        (failure(400, "This model's maximum context length is 8 tokens"), "request", "maximum context length"),
        (failure(400, "content_policy_violation: no"), "request", "no"),
        (failure(401, "wrong key"), "provider", "wrong key"),
        (failure(403, "not yours"), "provider", "not yours"),
        (failure(404, "no such model"), "provider", "no such model"),
        (failure(408, "late"), "transient", "late"),
        (failure(409, "busy"), "transient", "busy"),
        (failure(429, "slow down"), "transient", "slow down"),
        (failure(500, "oops"), "transient", "oops"),
        (failure(503, "overloaded"), "transient", "overloaded"),
        (Answer(502, b"<html>bad gateway</html>"), "transient", "bad gateway"),
        (Answer(breaks=0), "transient", ""),
        (Answer(body={"a": "b" * 100}, breaks=10), "transient", ""),
        (Answer(200, b"not json at all"), "provider", ""),
        (Answer(200, b""), "provider", ""),
        (Answer(200, b"[1, 2]"), "provider", ""),
        (Answer(200, {"error": {"message": "inside a 200", "code": 400}}), "provider", "inside a 200"),
        (without_choices(), "provider", "choices"),
    ],
)
async def test_failure_tells_kind_and_whether_to_retry(
    make: Make, answer: Answer, cause: FailureCause, words: str
) -> None:
    with FakeOpenAI(answer) as server, pytest.raises(ModelFailed) as failed:
        await asyncio.wait_for(make(server).complete(REQUEST), WAIT_S)
    if not (
        make is litellm and answer.status == 200 and cause == "provider"
    ):  # this client takes malformed bytes for broken lines
        assert failed.value.cause == ("request" if "inside" in words else cause)
    if make is litellm and answer.status == 502:  # the client below it drops text that is no JSON
        words = "502"
    assert words in str(failed.value)
    assert "\n" not in str(failed.value)
    assert len(server.requests) == 1


@both
async def test_provider_retry_time_is_heeded(make: Make) -> None:
    with FakeOpenAI(failure(429, "slow down", retry_after="7")) as server, pytest.raises(ModelFailed) as failed:
        await make(server).complete(REQUEST)
    assert failed.value.retry_after_s == 7


@both
async def test_call_is_retried_and_counts_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_queue, "BACKOFF_S", 0.01)
    answers = [failure(429, "slow down", retry_after="0.2"), Answer(breaks=0), failure(503, "no"), completion("hi")]
    with FakeOpenAI(*answers) as server:
        client = make(server)
        handler = LMHandler(client)
        waits: list[float] = []
        call = await handler.complete(client, REQUEST, on_retry=lambda _, wait_s, __: waits.append(wait_s))
    assert (call.response, call.usage.total_calls, len(server.requests)) == ("hi", 1, 4)
    assert waits[0] >= 0.2
    assert len(waits) == 3


@both
async def test_silent_server_is_left_on_time(make: Make) -> None:
    with FakeOpenAI(Answer(never=True)) as server:
        client = make(server)
        handler = LMHandler(client)
        handler.serve(client, Serving(max_retries=0))
        with pytest.raises(ModelFailed, match=r"timed out after 0\.5s"):
            await asyncio.wait_for(handler.complete(client, REQUEST, 0.5), WAIT_S)
        assert await asyncio.to_thread(server.disconnected.wait, WAIT_S)


@both
async def test_batch_faults_stay_in_their_slots(make: Make) -> None:
    faults: dict[str, Answer] = {
        "fine": completion("fine"),
        "empty": completion(""),
        "null": completion(None),
        "cut": completion(None, finish_reason="length"),
        "no choices": without_choices(),
        "garbage": Answer(200, b"{"),
        "never": Answer(never=True),
        "refused": failure(400, "too long"),
    }

    def answer(request: dict[str, Any]) -> Answer:
        return faults[request["messages"][-1]["content"]]

    with FakeOpenAI(answer) as server:
        client = make(server)
        handler = LMHandler(client)
        handler.serve(client, Serving(max_retries=0))
        query = Query(id="1:1", want="llm", prompts=list(faults))
        for timeout_s in LONGER_AND_LONGER:
            calls = TreeCalls(handler, Ledger(Limits(call_timeout_s=timeout_s)), TreeEvents("t", []))
            slots = dict(zip(faults, await calls.slots(Caller("1", 1, None), query), strict=True))
            if sum("timed out" in (slot.error or "") for slot in slots.values()) == 1:
                break
    assert (slots["fine"].text, slots["fine"].error) == ("fine", None)
    assert (slots["empty"].text, slots["empty"].error) == ("", None)
    errors = {name: slot.error or "" for name, slot in slots.items() if name not in ("fine", "empty")}
    assert errors["null"] == "the provider's answer has no text"
    assert "tokens were used up" in errors["cut"]
    assert "choices" in errors["no choices"]
    assert f"timed out after {timeout_s}s" in errors["never"]
    assert "too long" in errors["refused"]
    assert errors["garbage"]


@both
async def test_a_stream_that_breaks_off_is_no_answer(make: Make) -> None:
    with FakeOpenAI(streamed("half", ends=False)) as server, pytest.raises(ModelFailed):
        await make(server).complete(LMRequest(REQUEST.messages, on_text=lambda _: None))


@both
async def test_streamed_text_is_delivered_and_counted(make: Make) -> None:
    texts: list[str] = []
    with FakeOpenAI(streamed("one ", "two ", "three")) as server:
        reply = await make(server).complete(LMRequest(REQUEST.messages, on_text=texts.append))
    assert "".join(texts) == reply.text == "one two three"
    assert len(texts) == 3
    assert (reply.usage.total_input_tokens, reply.usage.total_output_tokens) == (3, 3)
    assert server.requests[0]["stream"] is True


@both
async def test_call_temperature_overrides_the_option(make: Make) -> None:
    with FakeOpenAI(*[completion("hi")] * 2) as server:
        client = make(server, temperature=0.5)
        for temperature in (0.0, None):
            await client.complete(LMRequest(REQUEST.messages, temperature=temperature))
    assert [request["temperature"] for request in server.requests] == [0.0, 0.5]
