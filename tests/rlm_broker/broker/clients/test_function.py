"""Functions as models: their signatures, threads and errors."""

import asyncio
import contextvars
import functools
import gc
import threading
from typing import Any

import pytest

from rlm_broker.broker.clients import function
from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.errors import ConfigurationError, ModelFailed
from rlm_broker.results import ChatMessage
from rlm_broker.usage import Usage
from tests.support.forked_python import python

WAIT_S = 60


def request(text: str = "hello", model: str | None = None) -> LMRequest:
    return LMRequest((ChatMessage("user", text),), model=model)


class Methods:
    def __call__(self, messages: list[dict[str, Any]], model: str | None) -> str:
        return f"{messages[0]['content']} {model}"

    async def later(self, messages: list[dict[str, Any]]) -> str:
        return f"{messages[0]['content']} later"


class AsyncCallable:
    async def __call__(self, messages: list[dict[str, Any]]) -> str:
        return f"{messages[0]['content']} from {threading.current_thread().name}"


async def async_with_model(messages: list[dict[str, Any]], model: str | None = None) -> str:
    return f"{messages[0]['content']} {model}"


def keyword_only(messages: list[dict[str, Any]], *, model: str | None) -> str:
    return f"{messages[0]['content']} {model}"


async def test_function_of_messages_is_a_client() -> None:
    functions: list[tuple[Any, str]] = [
        (lambda messages: messages[0]["content"], "hello"),
        (lambda messages, name: f"{messages[0]['role']} {name}", "user m"),
        (lambda *args: f"{len(args)} arguments", "2 arguments"),
        (lambda messages, **options: f"{len(messages)} {options}", "1 {}"),
        (keyword_only, "hello m"),
        (async_with_model, "hello m"),
        (functools.partial(async_with_model, model="bound"), "hello m"),
        (lambda messages: async_with_model(messages), "hello None"),
        (Methods(), "hello m"),
        (Methods().later, "hello later"),
        (AsyncCallable(), "hello from MainThread"),
    ]
    for fn, text in functions:
        reply = await FunctionClient(fn).complete(request(model="m"))
        assert reply == LMReply(text, Usage(total_calls=1, total_cost=None))
    others: list[Any] = [lambda: "", lambda a, b, c: a + b + c, "a name", max]
    for fn in others:
        with pytest.raises(ConfigurationError):
            FunctionClient(fn)


async def test_function_may_report_its_usage() -> None:
    known = LMReply("text", Usage(1, 7, 11, 0.5))
    assert await FunctionClient(lambda _: known).complete(request()) == known


def returning(answer: Any) -> Any:
    return lambda _messages: answer


async def test_none_is_an_empty_text_and_no_other_type_is_one() -> None:
    empty: list[Any] = [None, LMReply(None, Usage(1, 2, 3))]  # type: ignore[arg-type]
    for answer in empty:
        reply = await FunctionClient(returning(answer)).complete(request())
        assert reply.text == ""
        assert reply.usage == (Usage(total_calls=1) if answer is None else answer.usage)
    others: list[Any] = [5, b"bytes", ["a"]]
    for answer in others:
        said = f"mine: the function returned {type(answer).__name__}; it must return str"
        with pytest.raises(ModelFailed, match=said):
            await FunctionClient(returning(answer), "mine").complete(request())


async def test_sync_function_error_is_a_failed_call() -> None:
    for error in (TypeError("odd"), StopIteration("odd"), SystemExit("odd")):
        calls: list[str | None] = []

        def fail(_messages: Any, model: str | None) -> str:
            calls.append(model)  # noqa: B023 - called in this turn of the loop
            raise error  # noqa: B023

        with pytest.raises(ModelFailed) as failed:
            await asyncio.wait_for(FunctionClient(fail, "mine").complete(request(model="m")), WAIT_S)
        assert str(failed.value) == f"mine: {type(error).__name__}: odd"
        assert failed.value.__cause__ is error
        assert calls == ["m"]


async def test_a_function_may_say_itself_that_the_model_failed() -> None:
    def fail(_messages: Any) -> str:
        raise ModelFailed("in its own words")

    with pytest.raises(ModelFailed, match=r"^in its own words$"):
        await FunctionClient(fail).complete(request())


async def test_calls_share_at_most_64_threads() -> None:
    names: list[str] = []
    full, release = threading.Event(), threading.Event()

    def block(_messages: Any) -> str:
        names.append(threading.current_thread().name)
        if len(names) >= 64:
            full.set()
        release.wait(WAIT_S)
        return "ok"

    client = FunctionClient(block)
    calls = [asyncio.create_task(client.complete(request())) for _ in range(100)]
    assert await asyncio.to_thread(full.wait, WAIT_S)
    release.set()
    await asyncio.gather(*calls)
    assert len(names) == 100
    assert len(set(names)) == 64

    other = FunctionClient(block)
    names.clear()
    await other.complete(request())
    await asyncio.to_thread(other._threads._idle.acquire, timeout=WAIT_S)  # its thread has put itself back
    other._threads._idle.release()
    await other.complete(request())
    assert len(set(names)) == 1
    await client.aclose()
    await other.aclose()


async def test_closed_client_fails_waiting_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "MAX_THREADS", 1)
    started, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def block(messages: Any) -> str:
        loop.call_soon_threadsafe(started.set)
        release.wait(WAIT_S)
        return str(messages[0]["content"])

    client = FunctionClient(block, "mine")
    running = asyncio.create_task(client.complete(request("first")))
    await asyncio.wait_for(started.wait(), WAIT_S)
    waiting = asyncio.create_task(client.complete(request("second")))
    await asyncio.sleep(0)
    await client.aclose()
    with pytest.raises(ModelFailed, match="mine: the client was closed before the call began"):
        await asyncio.wait_for(waiting, WAIT_S)
    release.set()
    assert (await running).text == "first"
    await client.aclose()
    assert (await client.complete(request("third"))).text == "third"


async def test_cancelled_call_waiting_for_a_thread_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "MAX_THREADS", 1)
    seen: list[str] = []
    started, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def block(messages: Any) -> str:
        seen.append(messages[0]["content"])
        loop.call_soon_threadsafe(started.set)
        release.wait(WAIT_S)
        return "ok"

    client = FunctionClient(block)
    calls = [asyncio.create_task(client.complete(request(text))) for text in ("first", "second", "third")]
    await asyncio.wait_for(started.wait(), WAIT_S)
    calls[1].cancel()
    await asyncio.wait(calls[1:2])
    assert calls[1].cancelled()
    release.set()
    await asyncio.gather(calls[0], calls[2])
    assert seen == ["first", "third"]


async def test_sync_function_sees_its_callers_context_variables() -> None:
    run_name: contextvars.ContextVar[str] = contextvars.ContextVar("run_name")
    run_name.set("the run")
    assert (await FunctionClient(lambda _: run_name.get()).complete(request())).text == "the run"


STUCK = """
import asyncio, threading
from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.results import ChatMessage

async def main():
    started = asyncio.Event()
    loop = asyncio.get_running_loop()
    def stuck(messages):
        loop.call_soon_threadsafe(started.set)
        threading.Event().wait()
    client = FunctionClient(stuck)
    call = asyncio.create_task(client.complete(LMRequest((ChatMessage("user", "x"),))))
    await started.wait()
    call.cancel()
    await asyncio.wait({call})
    await client.aclose()
    print("closed")

asyncio.run(main())
"""


def test_a_program_ends_although_a_function_is_stuck() -> None:
    ended = python("-c", STUCK, takes_down=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "closed\n", "")


async def test_a_client_that_is_dropped_lets_its_threads_go() -> None:
    used: list[threading.Thread] = []

    def fn(messages: list[dict[str, Any]]) -> str:
        del messages
        used.append(threading.current_thread())
        return "ok"

    client = FunctionClient(fn)
    await client.complete(request())
    del client
    gc.collect()
    used[0].join(timeout=WAIT_S)
    assert not used[0].is_alive()


async def test_function_error_is_told_without_secrets() -> None:
    def fails(_messages: list[dict[str, Any]]) -> str:
        raise ConnectionError("401 for https://host/v1?api_key=abcdefgh12345")

    with pytest.raises(
        ModelFailed, match=r"^function: ConnectionError: 401 for https://host/v1\?api_key=\[redacted\]$"
    ):
        await FunctionClient(fails).complete(request())
