"""Slow answers: a stream of events, or a plain body. Both send signs of life, and end with their client.

Theory of operation
-------------------
A run may take an hour. Proxies cut a silent connection after 60 s, and OpenAI's clients give up after 600 s and send
the request again, which would be paid twice. So a stream gets a comment, and a plain body a blank line before its JSON,
after each `heartbeat_s` of silence. A plain answer keeps its status open until the first sign of life, which it delays:
an error before it has its own status; a later one is reported in a body of status 200, in the form of the interface.

The work runs in a task of its own, beside a task reading from the client. `http.disconnect` cancels the work, whose
`finally` blocks end the run (`HostedRun.joined`). Starlette's `BaseHTTPMiddleware` would hide the disconnect. The task
that waits for both of them has one timer for the signs of life, however many pieces are sent. A task and a timer for
each piece cost a stream a tenth of its run.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from rlm_broker import RlmBrokerError
from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.serve.errors import ApiError, api_error_of

SSE_HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # nginx would gather the events otherwise
}
PATIENCE = 4
"""Heartbeats of silence before a plain answer sends its status: proxies wait for 60 s, and an error may come first."""
LONGEST_TURN_S = 0.01
"""Seconds for which a stream whose pieces never wait keeps the event loop from others."""
_COMMENT = b": the run goes on\n\n"
_log = logging.getLogger("rlm_broker")


def sse(data: object, event: str | None = None) -> bytes:
    """Return one server-sent event with JSON as its data. Text given as `data` is sent as it is."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    name = f"event: {event}\n" if event is not None else ""
    return f"{name}data: {text}\n\n".encode()


class _SlowAnswer:
    """An answer whose client waits: it is sent by `_sent`, with a sign of life where that is silent."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._turns = asyncio.Lock()
        """Taken while a message is on its way: a sign stands between two pieces."""
        self._sent_at = 0.0
        self._is_whole = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        """Send the answer, and end its work when the client leaves. Its `finally` blocks have run at the return."""
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        working = asyncio.ensure_future(self._sent(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        signing: asyncio.Future[None] | None = None
        try:
            while not (working.done() or leaving.done()):
                left_s = self._sent_at + self._heartbeat_s - loop.time()
                if left_s <= 0:
                    left_s = self._heartbeat_s
                    if not self._turns.locked():  # else the client does not read
                        self._sent_at = loop.time()
                        signing = asyncio.ensure_future(self._signed(send))
                await asyncio.wait({working, leaving}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if signing is not None:
                signing.cancel()
            if not working.done():
                working.cancel()
                await to_its_end(lambda: asyncio.wait({working}))
        if not working.cancelled():
            with contextlib.suppress(OSError):  # the client has left while a piece was sent
                working.result()

    async def _sent(self, send: Send) -> None:
        """Send the whole answer."""
        raise NotImplementedError

    async def _sign(self, send: Send) -> None:
        """Send a sign of life."""
        raise NotImplementedError

    async def _signed(self, send: Send) -> None:
        """Send a sign of life, unless the last piece was sent meanwhile."""
        async with self._turns:
            if not self._is_whole:
                with contextlib.suppress(OSError):  # as for a piece
                    await self._sign(send)


class EventStream(_SlowAnswer):
    """An answer of server-sent events.

    Args:
        events: Makes the stream of encoded events, as of `sse`. It is closed when the client leaves.
        heartbeat_s: Seconds of silence before a comment is sent.
        headers: Further headers.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], heartbeat_s: float, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(heartbeat_s)
        self._turn_ends_at = 0.0
        self._events = events
        self._headers = {**SSE_HEADERS, **(headers or {})}

    async def _sent(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _raw(self._headers)})
        try:
            async with contextlib.aclosing(self._events) as pieces:
                async for piece in pieces:
                    await self._piece(send, piece)
        except Exception as error:  # noqa: BLE001 - the status is sent: the last event tells it
            await self._piece(send, sse(_failed(error).body(), "error"))
        async with self._turns:
            self._is_whole = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _sign(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})

    async def _piece(self, send: Send, piece: bytes) -> None:
        async with self._turns:
            self._sent_at = asyncio.get_running_loop().time()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        # Neither events that are there already nor a send to a client that has left wait for the loop.
        if self._sent_at >= self._turn_ends_at:
            await asyncio.sleep(0)
            self._turn_ends_at = self._sent_at + LONGEST_TURN_S


class SlowJson(_SlowAnswer):
    """A slow answer of one JSON value.

    Args:
        value: Makes the value: its status, its headers, and what becomes JSON; text is JSON already. Its error
            is answered with its own status, if none is sent yet. It is cancelled when the client leaves.
        heartbeat_s: Seconds of silence before a blank line is sent, the first one with status 200.
        late: Makes the value of a later error; None sends the envelope of errors. With it, the first
            blank line comes after `PATIENCE` times as many seconds.
    """

    def __init__(
        self,
        value: Callable[[], Awaitable[tuple[int, Mapping[str, str], Any]]],
        heartbeat_s: float,
        late: Callable[[Exception], Any] | None = None,
    ) -> None:
        super().__init__(heartbeat_s)
        self._value = value
        self._late = late
        self._beats = 0
        self._is_begun = False

    async def _sent(self, send: Send) -> None:
        status, headers, body = await self._answer()
        async with self._turns:
            if not self._is_begun:
                self._is_begun = True
                length = {"content-length": str(len(body))}
                await send(_start(status, {"content-type": "application/json", **headers, **length}))
            self._is_whole = True
            await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _sign(self, send: Send) -> None:
        self._beats += 1
        if self._late is not None and self._beats < PATIENCE:
            return
        if not self._is_begun:
            self._is_begun = True
            await send(_start(200, {"content-type": "application/json", "cache-control": "no-store"}))
        await send({"type": "http.response.body", "body": b"\n", "more_body": True})

    async def _answer(self) -> tuple[int, dict[str, str], bytes]:
        try:
            status, headers, value = await self._value()
        except Exception as error:  # noqa: BLE001 - each becomes an answer
            failed = _failed(error)
            status, headers, value = failed.status, failed.headers, failed.body()
            if self._is_begun and self._late is not None:
                value = self._late(error)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True, separators=(",", ":"))
        return status, dict(headers), text.encode()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": _raw(headers)}


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]


def _failed(error: Exception) -> ApiError:
    """Return what the client learns of an error. One that no client can cause is logged."""
    if not isinstance(error, ApiError | RlmBrokerError):
        _log.error("a request failed", exc_info=error)
    return api_error_of(error)
