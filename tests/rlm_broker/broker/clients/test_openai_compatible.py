"""The direct client alone. `test_faults.py` has what both clients must do alike."""

import asyncio
import gc
import socket
import subprocess
import sys
import traceback
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from rlm_broker.broker.clients import openai_compatible
from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient
from rlm_broker.errors import ConfigurationError, ModelFailed, UnknownModel
from rlm_broker.results import ChatMessage
from rlm_broker.usage import Usage
from tests.support.fake_openai import Answer, FakeOpenAI, completion, failure, streamed
from tests.support.tables import table

WAIT_S = 60
REQUEST = LMRequest((ChatMessage("system", "be brief"), ChatMessage("user", "hello")), max_completion_tokens=7)


def client(server: FakeOpenAI, **options: Any) -> OpenAICompatibleClient:
    return OpenAICompatibleClient(server.base_url, "test-model", **options)


async def test_key_is_sent_only_if_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-somebody-elses-account")
    with FakeOpenAI(completion("hi")) as server:
        for key in ({"api_key": "sk-of-the-test"}, {}):
            await client(server, **key).complete(REQUEST)
    assert [sent.get("authorization") for sent in server.headers] == ["Bearer sk-of-the-test", None]


async def test_tokens_of_the_providers_cache_are_told() -> None:
    cases: list[tuple[Any, int]] = [
        ({"cached_tokens": 2}, 2),
        ({"cached_tokens": 10**9}, 3),
        ({"cached_tokens": "x"}, 0),
        (None, 0),
        ([1], 0),
    ]
    for details, cached in cases:
        said = completion("hi", 3, 5)
        said.body["usage"]["prompt_tokens_details"] = details
        with FakeOpenAI(said) as server:
            reply = await client(server).complete(REQUEST)
        assert reply.usage == Usage(1, 3, 5, None, cached_input_tokens=cached)


async def test_connections_are_reused() -> None:
    with FakeOpenAI(*[replace(completion("hi"), together=5)] * 15, completion("hi")) as server:
        named = client(server)
        for _ in range(3):
            await asyncio.gather(*(named.complete(REQUEST) for _ in range(5)))
        assert server.connections == 5
        await named.aclose()
        await named.aclose()
        await named.complete(REQUEST)


async def test_prices_make_a_cost_where_the_server_counted() -> None:
    with FakeOpenAI(completion("hi", 1000, 100), completion("hi", 0, 0)) as server:
        priced = client(server, usd_per_million_tokens=(2, 10))
        costs = [(await priced.complete(REQUEST)).usage.total_cost for _ in range(2)]
        free = await client(server, usd_per_million_tokens=(0, 0)).complete(REQUEST)
    assert costs == [pytest.approx(0.003), None]
    assert free.usage.total_cost == 0


async def test_content_parts_pass_through_untouched() -> None:
    parts = [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    ]
    with FakeOpenAI(completion("a cat")) as server:
        reply = await client(server).complete(LMRequest((ChatMessage("user", parts),)))
    assert server.requests[0]["messages"] == [{"role": "user", "content": parts}]
    assert reply.text == "a cat"


async def test_text_parts_of_a_reply_are_lines() -> None:
    parts = [{"type": "text", "text": text} for text in ("one", "", "two")]
    with FakeOpenAI(completion([*parts, {"type": "thinking"}])) as server:
        assert (await client(server).complete(REQUEST)).text == "one\ntwo"
    told: list[str] = []
    with FakeOpenAI(streamed(parts, "!")) as server:
        reply = await client(server).complete(msgspec.structs.replace(REQUEST, on_text=told.append))
    assert (reply.text, told) == ("onetwo!", ["onetwo", "!"])


async def test_text_with_half_a_character_is_sent() -> None:
    with FakeOpenAI(completion("hi")) as server:
        await client(server).complete(LMRequest((ChatMessage("user", "a\ud800b"),)))
    assert server.requests[0]["messages"][0]["content"] == "a\\ud800b"


async def test_a_redirect_is_not_followed() -> None:
    with FakeOpenAI(completion("elsewhere")) as other:
        moved = Answer(307, headers={"location": f"{other.base_url}/chat/completions"})
        with FakeOpenAI(moved) as server, pytest.raises(ModelFailed, match="redirects to") as refused:
            await client(server, api_key="sk-of-the-test").complete(REQUEST)
    assert other.requests == []
    assert refused.value.cause == "provider"


async def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_compatible, "MAX_REPLY_BYTES", 1000)
    for answer in (completion("x" * 2000), streamed("x" * 2000)):
        with FakeOpenAI(answer) as server, pytest.raises(ModelFailed, match="longer than 1,000 bytes"):
            await client(server).complete(LMRequest(REQUEST.messages, on_text=lambda _: None))


async def test_errors_of_all_shapes_are_read() -> None:
    shapes: list[tuple[Any, str]] = [
        ({"error": "plain"}, "plain"),
        ({"detail": "of a framework"}, "of a framework"),
        ({"detail": [{"loc": ["x"]}]}, '[{"loc": ["x"]}]'),
        ({"object": "error", "message": "older"}, "older"),
        (b"<html>\n teapot", "<html> teapot"),
        (b"\xff", "\ufffd"),
    ]
    for body, said in shapes:
        with FakeOpenAI(Answer(418, body)) as server, pytest.raises(ModelFailed) as failed:
            await client(server).complete(REQUEST)
        assert str(failed.value) == f"test-model: HTTP status 418: {said}"


BEGUN = "the connection to ADDRESS broke: the server closed it in the middle of the head of its answer"
WRONG = "the answer of ADDRESS is malformed: "


@table(
    "sent said",
    [
        (b"", "the connection to ADDRESS broke: Server disconnected"),
        (b"HTTP", BEGUN),
        (b"HTTP/1.1 200 OK\r\nContent-Le", BEGUN),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "the server broke off in the middle of its answer"),
        (b"\x16\x03\x01\x00\x05", WRONG),
        (b"HTTP/1.1 \x1b[2J 200 OK\r\n\r\n", WRONG),
        (b"HTTP/1.1 200 OK\r\n: x\r\n\r\n", WRONG),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", WRONG),
    ],
)
async def test_broken_answer_is_told_in_one_sentence(sent: bytes, said: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        asked = OpenAICompatibleClient(address, "test-model")
        with pytest.raises(ModelFailed) as failed:
            await asked.complete(REQUEST)
        await asked.aclose()
    told = str(failed.value)
    assert told.startswith(f"test-model: {said.replace('ADDRESS', address)}")
    assert told.isprintable()
    assert not any(word in told for word in ("Error", "Raw", "^", "\\n", "<"))


async def test_preflight_finds_what_every_call_would() -> None:
    with FakeOpenAI(completion("hi"), models=["llama3:latest", "other"]) as server:
        await OpenAICompatibleClient(server.base_url, "llama3").preflight()
        await OpenAICompatibleClient(server.base_url, "other").preflight()
        with pytest.raises(UnknownModel, match=r"has no model 'third'; it has: llama3:latest, other$"):
            await OpenAICompatibleClient(server.base_url, "third").preflight()
        gone = OpenAICompatibleClient(server.base_url, "other")
    with pytest.raises(ModelFailed, match=r"^other: cannot connect to http://127.0.0.1:\d+/v1: Connection refused$"):
        await gone.preflight()
    assert server.requests == []


def test_invalid_address_is_refused() -> None:
    urls = "localhost:8000 ftp://host/v1 http:// http://user:secret@host/v1 http://[ http://host:x/ http://a..b/v1"
    odd = ["", "http://host/v1?key=secret", "http://host/v1#secret", "http://exa mple/v1", "http://%zz/v1"]
    for url in (*urls.split(), *odd):
        with pytest.raises(ConfigurationError) as refused:
            OpenAICompatibleClient(url, "m")
        assert "secret" not in str(refused.value)
    for given in ({"model": ""}, {"options": {"stream": True}}):
        with pytest.raises(ConfigurationError):
            OpenAICompatibleClient(**{"base_url": "http://host/v1", "model": "m", **given})  # type: ignore[arg-type]


def test_the_whole_address_of_the_calls_is_taken_too() -> None:
    long, short = (OpenAICompatibleClient(f"http://host/v1{end}", "m") for end in ("/chat/completions", "/"))
    assert long.fingerprint == short.fingerprint


async def test_a_client_that_is_forgotten_closes_its_connections() -> None:
    with FakeOpenAI(completion("hi"), Answer(never=True)) as server:
        named = client(server)
        await named.complete(REQUEST)
        connector = next(iter(named._sessions.values())).connector
        assert connector is not None
        del named
        gc.collect()
        while not connector.closed:
            await asyncio.sleep(0)


ALONE = """
import asyncio, sys
from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient
from rlm_broker.results import ChatMessage
client = OpenAICompatibleClient(sys.argv[1], "test-model")
print(asyncio.run(client.complete(LMRequest((ChatMessage("user", "hello"),)))).text, "litellm" in sys.modules)
"""


def test_client_needs_no_litellm_and_no_closing() -> None:
    with FakeOpenAI(completion("hi")) as server:
        ended = subprocess.run(
            [sys.executable, "-c", ALONE, server.base_url],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env={"PYTHONPATH": ":".join(sys.path)},
        )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "hi False\n", "")


async def test_odd_counts_do_not_discard_the_text() -> None:
    choice = {"message": {"role": "assistant", "content": "good", "refusal": {}}, "finish_reason": 5}
    odd: tuple[Any, ...] = (
        {"prompt_tokens": "3", "completion_tokens": True},
        {"prompt_tokens": -5, "completion_tokens": -0.5},
        [],
        7,
    )
    for usage in odd:
        with FakeOpenAI(Answer(body={"choices": [choice], "usage": usage})) as server:
            reply = await client(server, usd_per_million_tokens=(1, 1)).complete(REQUEST)
        assert (reply.text, reply.usage) == ("good", Usage(1, 0, 0, None))


async def test_token_ids_and_log_probabilities_are_told_as_they_came() -> None:
    given = {"logprobs": {"content": [{"logprob": -0.1}]}, "token_ids": [7], "finish_reason": "stop"}
    body = {"choices": [{"message": {"content": "good"}, **given}], "prompt_token_ids": [1, 2, 3]}
    cut = {"choices": [{"message": {"content": "goo"}, "finish_reason": "length"}]}
    with FakeOpenAI(Answer(body=body), completion("plain"), Answer(body=cut)) as server:
        named = client(server)
        first, second, third = [await named.complete(REQUEST) for _ in range(3)]
    assert first.extra == {**given, "prompt_token_ids": [1, 2, 3]}
    assert (second.extra, third.extra) == (None, {"finish_reason": "length"})


async def test_token_ids_of_a_streamed_reply_are_joined() -> None:
    pieces = [
        {
            "prompt_token_ids": [1],
            "choices": [{"delta": {"content": "go"}, "token_ids": [7], "logprobs": {"content": [1]}}],
        },
        {
            "choices": [
                {"delta": {"content": "od"}, "token_ids": [8], "logprobs": {"content": [2]}, "finish_reason": "stop"}
            ]
        },
    ]
    with FakeOpenAI(Answer(parts=[*pieces, b"[DONE]"])) as server:
        reply = await client(server).complete(msgspec.structs.replace(REQUEST, on_text=lambda _: None))
    extra = {"prompt_token_ids": [1], "token_ids": [7, 8], "logprobs": {"content": [1, 2]}, "finish_reason": "stop"}
    assert (reply.text, reply.extra) == ("good", extra)


async def test_each_sample_has_a_seed_of_its_own() -> None:
    with FakeOpenAI(completion("a"), completion("b")) as server:
        named = client(server, options={"seed": 7})
        for sample in (0, 3):
            await named.complete(msgspec.structs.replace(REQUEST, sample=sample))
    assert [request["seed"] for request in server.requests] == [7, 10]


async def test_failures_that_every_call_would_meet_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for status in (400, 401, 403, 404, 429, 500):
        with FakeOpenAI(failure(status, "no")) as server, pytest.raises(ModelFailed) as failed:
            await client(server).complete(REQUEST)
        found[status] = failed.value.is_lasting
    assert [status for status, is_lasting in found.items() if is_lasting] == [401, 403, 404]

    def unresolved(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    for address, is_lasting in (("http://no-such-host.test/v1", True), (server.base_url, False)):
        with pytest.raises(ModelFailed, match="cannot connect to") as failed:
            await OpenAICompatibleClient(address, "m").complete(REQUEST)
        assert failed.value.is_lasting is is_lasting


async def test_the_smaller_of_two_limits_of_tokens_is_sent() -> None:
    with FakeOpenAI(completion("x")) as server:
        await client(server, options={"max_tokens": 99_999}).complete(REQUEST)
        await client(server, options={"max_tokens": 2}).complete(REQUEST)
    assert [request["max_tokens"] for request in server.requests] == [7, 2]


def test_loops_that_have_ended_leave_no_connections() -> None:
    with FakeOpenAI(completion("hi")) as server:
        named = client(server)
        for _ in range(5):
            asyncio.run(named.complete(REQUEST))
        assert len(named._sessions) == 1


async def test_key_without_right_to_list_models_is_accepted() -> None:
    class NoList(FakeOpenAI):
        async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            await reader.readuntil(b"\r\n\r\n")
            return await self._send(writer, failure(403, "missing scope"))

    with NoList(completion("x")) as server:
        await client(server).preflight()


async def test_server_may_list_its_models() -> None:
    listed: tuple[list[str] | None, ...] = (None, [], ["openai/*"])  # no list, an empty one, patterns
    for models in listed:
        with FakeOpenAI(Answer(), models=models) as server:
            await client(server).preflight()
            assert await client(server).models() == (models or [])


async def test_listed_model_names_are_lines_without_the_key() -> None:
    listed = ["m\nproviders whose key is set: all", "Bearer hunter2hunter2zz", "x" * 10_000]
    with FakeOpenAI(Answer(), models=listed) as server:
        keyed = OpenAICompatibleClient(server.base_url, "m", api_key="hunter2hunter2zz")
        forged, echoed, long = await keyed.models()
    assert forged == "m providers whose key is set: all"
    assert "hunter2" not in echoed
    assert len(long) < 1_000


async def test_no_secret_is_in_an_error_or_its_traceback() -> None:
    told = "no: Bearer sk-of-the-test, x-api-key hidden-header-value"
    with FakeOpenAI(failure(401, told)) as server:
        named = client(server, api_key="sk-of-the-test", headers={"x-api-key": "hidden-header-value"})
        with pytest.raises(ModelFailed) as failed:
            await named.complete(REQUEST)
    printed = "".join(traceback.format_exception(failed.value)) + repr(named)
    assert "sk-of-the-test" not in printed
    assert "hidden-header-value" not in printed
    assert "sk-of-the-test" not in named.fingerprint
