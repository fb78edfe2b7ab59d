"""Runs over HTTP, by counting: clients that leave, keys that queue, a server that ends, a server that is killed."""

import asyncio
import contextlib
import http.client
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from rlm_broker import RLM, LMReply, LMRequest, Usage
from rlm_broker.serve.settings import ServeSettings
from tests.support.command import WAIT_S, started
from tests.support.service import Served, serving
from tests.support.stand_ins import Gate
from tests.support.waiting import until_now

GUESS = "A first guess: 7.\n```repl\nprint(len(context))\n```"


def question(text: str = "How long is it?", **more: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": "some context"}, {"type": "text", "text": text}]
    return {"model": "gate", "messages": [{"role": "user", "content": parts}], **more}


class Guesser(Gate):
    """Guesses in its first turn, and waits in the second."""

    async def complete(self, request: LMRequest) -> LMReply:
        if not any(message.role == "assistant" for message in request.messages):
            return LMReply(GUESS, Usage(1, 1, 1, 0.0))
        return await super().complete(request)


@pytest.fixture(scope="module")
def guessing() -> Iterator[tuple[Served, Guesser]]:
    model = Guesser()
    with serving(RLM(model)) as served:
        yield served, model


def alive(served: Served) -> int:
    """Return the number of live workers that are not kept ready."""

    def count() -> int:
        stats = served.parts.rlm.sandbox.stats()
        return stats.workers - stats.ready

    return served.call(count)


def test_client_that_leaves_after_any_event_leaves_no_run(guessing: tuple[Served, Guesser]) -> None:
    """The run ends with its REPL and its call, after the first byte as after the last event before the answer."""
    served, model = guessing
    url = f"{served.base_url}/chat/completions"
    for moment in range(6):
        asked = len(model.asked)
        with httpx.stream("POST", url, json=question(stream=True), headers=served.headers, timeout=WAIT_S) as answer:
            seen, lines = 0, answer.iter_lines()
            while seen < moment and "7." not in (line := next(lines)):
                seen += line.startswith("data: ")
            if moment == 5:
                until_now(lambda before=asked: len(model.asked) > before)  # type: ignore[misc]
        until_now(lambda: served.call(lambda: served.parts.runs.running + served.parts.runs.queued) == 0)
        until_now(lambda: alive(served) == 0)
    assert model.cancelled == len(model.asked) > 0


def test_plain_request_that_is_given_up_ends_its_run(guessing: tuple[Served, Guesser]) -> None:
    served, model = guessing
    asked = len(model.asked)

    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=WAIT_S)) as client:
        headers = {**served.headers, "content-type": "application/json"}
        client.request("POST", "/v1/chat/completions", json.dumps(question()), headers)
        until_now(lambda: len(model.asked) > asked)
    until_now(lambda: served.call(lambda: served.parts.runs.running) == 0)
    until_now(lambda: alive(served) == 0)
    assert len(model.asked) == asked + 1
    assert model.cancelled == len(model.asked)


def test_key_with_many_requests_delays_no_other_key() -> None:
    model = Gate()
    settings = ServeSettings(max_runs=1)
    with serving(RLM(model), settings, keys={"ann": {}, "bob": {}}) as served, ThreadPoolExecutor(8) as threads:

        def ask(name: str, text: str) -> str:
            answer = httpx.post(
                f"{served.base_url}/chat/completions",
                json=question(text),
                headers=served.headers_of(name),
                timeout=WAIT_S,
            )
            content: str = answer.json()["choices"][0]["message"]["content"]
            return content

        def queued() -> int:
            return served.call(lambda: served.parts.runs.queued)

        anns = [threads.submit(ask, "ann", f"ann {number}") for number in range(6)]
        until_now(lambda: model.asked and queued() == 5)
        bobs = threads.submit(ask, "bob", "bob")
        until_now(lambda: queued() == 6)
        served.call(model.is_open.set)
        assert [each.result() for each in (*anns, bobs)] == ["yes"] * 7
        assert model.asked.index("bob") <= 2


def test_drained_stream_ends_with_the_best_answer() -> None:
    model = Guesser()
    with serving(RLM(model)) as served:
        with httpx.stream(
            "POST", f"{served.base_url}/chat/completions", json=question(stream=True), headers=served.headers
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            until_now(lambda: model.asked)
            draining = asyncio.run_coroutine_threadsafe(served.service.drain(3_600), served.loop)
            until_now(lambda: httpx.get(f"{served.url}/ready").status_code == 503)
            refused = httpx.post(f"{served.base_url}/chat/completions", json=question(), headers=served.headers)
            assert refused.status_code == 429
            assert "retry-after" in refused.headers
            served.run(served.service.drain(0))
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        draining.result(WAIT_S)
    assert events[-1] == "[DONE]"
    said = [json.loads(event) for event in events[:-1]]
    text = "".join(choice["delta"].get("content") or "" for event in said for choice in event["choices"])
    assert "A first guess: 7." in text
    assert any(choice.get("finish_reason") for event in said for choice in event["choices"])


def test_killed_server_leaves_no_process() -> None:
    """SIGKILL ends its fork server, its containers and the block that one of them runs."""
    with started("serve", "--port", "0") as server:
        assert server.stdout is not None
        base, key = server.stdout.readline().strip(), server.stdout.readline().removeprefix("key: ").strip()
        headers = {"authorization": f"Bearer {key}"}
        made = httpx.post(f"{base}/containers", json={"name": "a"}, headers=headers, timeout=WAIT_S).json()
        body = {"code": "print('begun', flush=True)\nimport time; time.sleep(1000)", "stream": True}
        url = f"{base}/containers/{made['id']}/execute"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=WAIT_S) as answer:
            seen = ""
            for piece in answer.iter_text():
                seen += piece
                if "begun" in seen:
                    break
            below = psutil.Process(server.pid).children(recursive=True)
            assert below
            server.send_signal(signal.SIGKILL)
        server.wait(WAIT_S)
    until_now(lambda: not any(each.is_running() for each in below))
