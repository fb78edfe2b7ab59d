"""Answers that take long: signs of life, late errors, and the end of their work with the client."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import pytest

from rlm_broker import ConfigurationError
from rlm_broker.serve.replies import EventStream, SlowJson, sse
from tests.support.waiting import WAIT_S

OFTEN_S = 0.01


class Client:
    """The other side of an ASGI application, which can leave."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.messages: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self.sent: list[MutableMapping[str, Any]] = []

    async def receive(self) -> MutableMapping[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)
        self.messages.put_nowait(message)

    async def body(self, application: Callable[..., Awaitable[None]]) -> bytes:
        async with asyncio.timeout(WAIT_S):
            await application({"type": "http"}, self.receive, self.send)
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status


async def events_after(client: Client, beats: int) -> AsyncGenerator[bytes, None]:
    """Yield an event, and another one once the client has got so many signs of life."""
    yield sse({"n": 1})
    async with asyncio.timeout(WAIT_S):
        while beats > len([each for each in client.sent if each.get("body", b"").startswith(b":")]):
            await asyncio.sleep(0)
    yield sse("[DONE]")


@pytest.fixture
def client() -> Client:
    return Client()


async def test_stream_sends_comments_while_it_is_silent(client: Client) -> None:
    body = await client.body(EventStream(events_after(client, 2), OFTEN_S, {"x-run": "1"}))
    assert body.startswith(b'data: {"n":1}\n\n: ')
    assert body.endswith(b"data: [DONE]\n\n")
    assert (b"x-run", b"1") in client.sent[0]["headers"]
    assert (b"content-type", b"text/event-stream; charset=utf-8") in client.sent[0]["headers"]


async def test_late_error_is_the_last_event(client: Client) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield sse({"n": 1})
        raise ConfigurationError("it is wrong")

    body = await client.body(EventStream(events(), 60))
    name, data = body.split(b"\n\n")[1].split(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: "))["error"]["message"] == "it is wrong"


Value = tuple[int, Mapping[str, str], Any]


def value(outcome: Any, client: Client | None = None, beats: int = 0) -> Callable[[], Awaitable[Value]]:
    """Make a value, or raise it, once the client has got so many messages."""

    async def made() -> Value:
        async with asyncio.timeout(WAIT_S):
            while client is not None and len(client.sent) < beats:
                await asyncio.sleep(0)
        if isinstance(outcome, Exception):
            raise outcome
        return 200, {}, outcome

    return made


async def test_unknown_error_tells_its_text_to_the_log_alone(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    body = await client.body(SlowJson(value(RuntimeError("a secret detail")), 60))
    assert client.status == 500
    assert b"secret" not in body
    assert "a secret detail" in caplog.text


async def test_plain_body_has_blank_lines_before_it(client: Client) -> None:
    body = await client.body(SlowJson(value({"answer": "é"}, client, 3), OFTEN_S))
    assert body.startswith(b"\n\n")
    assert json.loads(body) == {"answer": "é"}
    assert client.status == 200


async def test_error_has_its_own_status_until_that_is_sent(client: Client) -> None:
    """Later it is told in the form of the interface, or else by the envelope of errors."""
    wrong = ConfigurationError("it is wrong")
    body = await client.body(SlowJson(value(wrong), 60, lambda error: {"failed": str(error)}))
    assert (client.status, json.loads(body)["error"]["message"]) == (400, "it is wrong")
    late = Client()
    body = await late.body(SlowJson(value(wrong, late, 2), OFTEN_S, lambda error: {"failed": str(error)}))
    assert (late.status, json.loads(body)) == (200, {"failed": "it is wrong"})
    late = Client()
    body = await late.body(SlowJson(value(wrong, late, 2), OFTEN_S))
    assert (late.status, json.loads(body)["error"]["message"]) == (200, "it is wrong")


@pytest.mark.parametrize("is_stream", [True, False])
async def test_client_that_leaves_cancels_the_work_to_its_end(client: Client, is_stream: bool) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # clean-up that awaits
            ended.set()

    async def events() -> AsyncGenerator[bytes, None]:
        await work()
        yield b""

    async def never() -> Value:
        await work()
        raise AssertionError

    application = EventStream(events(), 60) if is_stream else SlowJson(never, 60)
    answering = asyncio.ensure_future(client.body(application))
    await begun.wait()
    client.left.set()
    await answering
    assert ended.is_set()


async def test_client_that_leaves_a_stream_that_never_waits_ends_it(client: Client) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(1_000_000):
            yield b": more\n\n"
            client.left.set()
        raise AssertionError

    await client.body(EventStream(events(), 60))
    assert client.sent[-1]["more_body"]


async def test_client_that_does_not_read_gets_no_further_sign(client: Client) -> None:
    reads = asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        await client.send(message)
        await (reads.wait() if message.get("body") else asyncio.sleep(0))

    answering = asyncio.ensure_future(EventStream(events_after(client, 0), OFTEN_S)({}, client.receive, send))
    while len(client.sent) < 2:
        await client.messages.get()
    await asyncio.sleep(3 * OFTEN_S)
    reads.set()
    await answering
    assert not [message for message in client.sent if message.get("body", b"").startswith(b":")]
