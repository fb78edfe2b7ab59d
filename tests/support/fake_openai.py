"""An OpenAI-compatible server on loopback that says what a test tells it to. Real HTTP, no provider."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Answer:
    """One scripted HTTP answer.

    Attributes:
        body: Sent as it is if bytes, else as JSON.
        never: No answer: the connection stays open until the client leaves.
        breaks: The connection ends after so many bytes of the body; 0 is before any answer at all.
        delay_s: Seconds until it comes.
        together: It comes when so many requests wait at the same time.
        parts: In place of a body, server-sent events: bytes as they are, else as JSON.
    """

    status: int = 200
    body: Any = field(default_factory=dict)
    never: bool = False
    breaks: int | None = None
    delay_s: float = 0
    together: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)
    parts: Sequence[Any] | None = None


Script = Answer | Callable[[dict[str, Any]], Answer]


def completion(
    content: Any, input_tokens: int = 3, output_tokens: int = 5, finish_reason: str = "stop", delay_s: float = 0
) -> Answer:
    """A chat completion with one choice."""
    message = {"role": "assistant", "content": content}
    choices = [{"index": 0, "message": message, "finish_reason": finish_reason}]
    return Answer(body=_completion_body(choices, input_tokens, output_tokens), delay_s=delay_s)


def streamed(*texts: Any, ends: bool = True) -> Answer:
    """A chat completion in pieces; unless it `ends`, the connection does before its last ones."""
    chunk = {"id": "chatcmpl-test", "object": "chat.completion.chunk", "created": 1, "model": "test-model"}
    parts: list[Any] = [
        {**chunk, "choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}]}
        for text in texts
    ]
    if ends:
        parts.append({**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 3, "completion_tokens": len(texts), "total_tokens": 3 + len(texts)}
        parts.append({**chunk, "choices": [], "usage": usage})
        parts.append(b"[DONE]")
    return Answer(parts=parts)


def without_choices() -> Answer:
    """A chat completion whose list of choices is empty."""
    return Answer(body=_completion_body([], 3, 0))


def failure(status: int, message: str, **headers: str) -> Answer:
    """An error in the shape of OpenAI's API."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, {"error": {"message": message, "type": "test", "code": None}}, headers=named)


class FakeOpenAI:
    """The server, for the length of a `with`. Answers are given in order, the last one again and again.

    Args:
        models: Ids that it lists; None has no list.

    Attributes:
        requests: The body of each request.
        headers: Those of each request, with names in lower case.
        connections: Connections accepted so far.
        at_once: Requests that waited for their answers at the same time, the most so far.
        arrived: A request has been read.
        disconnected: A client left while it waited for its answer.
    """

    def __init__(self, *answers: Script, models: Sequence[str] | None = None) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections = self.at_once = 0
        self.arrived = threading.Event()
        self.disconnected = threading.Event()
        self.port = 0
        self._answers = list(answers)
        self._models = models
        self._waiting = 0
        self._gathered = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._clients: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def base_url(self) -> str:
        """The address that a client takes as `api_base`."""
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=2048)

    async def _end(self) -> None:
        self._server.close()
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            self._clients.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether there may be another."""
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if first.startswith("GET"):
            self.headers.append(headers)
            answer = Answer(404) if self._models is None else Answer(body={"data": [{"id": id} for id in self._models]})
        else:
            answer = self._next(json.loads(body), headers)
        self._waiting += first.startswith("POST")
        self.at_once = max(self.at_once, self._waiting)
        left = asyncio.ensure_future(reader.read(1))  # nothing more is due from the client before it has its answer
        may_come = asyncio.ensure_future(self._may_come(answer))
        try:
            await asyncio.wait({left, may_come}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting -= first.startswith("POST")
            may_come.cancel()
        if left.done():
            self.disconnected.set()
            return False
        left.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await left
        return await self._send(writer, answer)

    async def _may_come(self, answer: Answer) -> None:
        if answer.together > 1:
            gathered = self._gathered
            if self._waiting >= answer.together:
                gathered.set()
                self._gathered = asyncio.Event()
            await gathered.wait()
        await (asyncio.Event().wait() if answer.never else asyncio.sleep(answer.delay_s))

    def _next(self, request: dict[str, Any], headers: dict[str, str]) -> Answer:
        self.requests.append(request)
        self.headers.append(headers)
        self.arrived.set()
        script = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return script if isinstance(script, Answer) else script(request)

    async def _send(self, writer: asyncio.StreamWriter, answer: Answer) -> bool:
        if answer.breaks == 0:
            return False
        if answer.parts is not None:
            parts = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in answer.parts]
            body = b"".join(b"data: %s\n\n" % part for part in parts)
            answer = replace(answer, headers={**answer.headers, "content-type": "text/event-stream"})
            is_whole = bool(parts) and parts[-1] == b"[DONE]"
        else:
            body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            is_whole = answer.breaks is None
        headers = {"content-type": "application/json", **answer.headers}
        length = len(body) if is_whole else len(body) + 100
        head = "".join(f"{name}: {value}\r\n" for name, value in {**headers, "content-length": str(length)}.items())
        writer.write(f"HTTP/1.1 {answer.status} Scripted\r\n{head}\r\n".encode() + body[: answer.breaks])
        await writer.drain()
        return is_whole


def _completion_body(choices: list[dict[str, Any]], input_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {
        "id": "chatcmpl-test",
        "object": "chat.completion",
        "created": 1,
        "model": "test-model",
        "choices": choices,
        "usage": {
            "prompt_tokens": input_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens,
        },
    }
