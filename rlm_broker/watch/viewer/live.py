"""The viewer of live runs: an ASGI app with the page, the list of runs, their rows as they come, and a stop."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from rlm_broker.errors import RlmBrokerError
from rlm_broker.watch.messages import RunStatus
from rlm_broker.watch.viewer.page import ViewerPage, document_head, document_script, policy
from rlm_broker.watch.viewer.rows import Row, Rows, encoded

ROWS_IN_MESSAGE = 500
MOST_MESSAGE_BYTES = 1 << 20
"""Bounds of one message to the page, but for a single larger event."""
GATHER_S = 0.05
"""Seconds to gather events into one message while more come."""
IDLE_S = 10.0
"""Seconds until a blank line is sent: it shows whether the reader has left."""
REFUSED_S = 0.05
"""Seconds for a source to refuse an unknown run. Later the refusal is part of the stream."""
MOST_WAITING = 100
"""Events read ahead of a slow reader; then their source waits, too."""
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class LiveSource(Protocol):
    """The runs that a reader of the viewer may see.

    Example:
        ```python
        class OneTrace:  # the run in a file
            async def runs(self): return [status]
            async def lines(self, run, after):
                for line in path.read_bytes().splitlines()[after:]: yield line
            async def stop(self, run, now): return False
        ```
    """

    async def runs(self) -> Sequence[RunStatus]:
        """Return the runs at this moment, also some that ended lately."""
        ...

    def lines(self, run: str, after: int) -> AsyncIterator[bytes]:
        """Yield the events of a run with numbers above `after`, each as a line of a trace, until the run ends.

        Raises:
            LookupError: There is no such run.
        """
        ...

    async def stop(self, run: str, now: bool) -> bool:
        """Stop a run, at once or with its best answer, and return whether it was there."""
        ...


def live_app(source: LiveSource | Callable[[Scope], LiveSource]) -> ASGIApp:
    """Return the viewer as an ASGI app, to be mounted at any path of a server of your own.

    The server checks keys and origins, and bounds bodies. The page itself shows no run. It sends the key in the
    fragment of its own address (`#key=...`) with each request for data, as `Authorization: Bearer`.

    Example:
        ```python
        from starlette.applications import Starlette
        from starlette.routing import Mount

        app = Starlette(routes=[Mount("/viewer", live_app(source))])
        ```

    Args:
        source: Source of the runs. For several readers with different rights, a function from the scope of a request to
            the source of its sender.
    """

    def of_sender(handler: Callable[[Request, LiveSource], Awaitable[Response]]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            return await handler(request, source(request.scope) if callable(source) else source)

        return answer

    async def page(request: Request) -> Response:
        if not request.url.path.endswith("/"):  # the page asks for its data beside itself
            return RedirectResponse(f"{request.url.path}/", headers=HEADERS)
        headers = {**HEADERS, "Content-Security-Policy": f"{policy(CONNECT)}; frame-ancestors 'none'"}
        return Response(_page(), media_type="text/html; charset=utf-8", headers=headers)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/api/runs", of_sender(_runs)),
            Route("/api/rows", of_sender(_rows)),
            Route("/api/stop", of_sender(_stop), methods=["POST"]),
        ]
    )


CONNECT = "'self'"


@cache
def _page() -> bytes:
    return document_head(ViewerPage(form="live"), CONNECT) + document_script() + b"</html>\n"


async def _runs(_: Request, source: LiveSource) -> Response:
    return Response(msgspec.json.encode(list(await source.runs())), media_type="application/json", headers=HEADERS)


async def _stop(request: Request, source: LiveSource) -> Response:
    if not request.headers.get("content-type", "").startswith("application/json"):
        return _sentence("the body must be JSON", 415)
    try:
        asked = msgspec.json.decode(await request.body(), type=_Stop)
        is_there = await source.stop(asked.run, asked.now)
    except (msgspec.DecodeError, ClientDisconnect):
        return _sentence('the body must be {"run": "ID", "now": false}', 400)
    except RlmBrokerError as error:
        return _sentence(str(error), 502)
    if not is_there:
        return _sentence("there is no such run", 404)
    return Response(msgspec.json.encode({"stopped": asked.run}), media_type="application/json", headers=HEADERS)


class _Stop(msgspec.Struct, forbid_unknown_fields=True):
    run: str
    now: bool = False


async def _rows(request: Request, source: LiveSource) -> Response:
    run, after = request.query_params.get("run", ""), request.query_params.get("after", "0")
    if not run or not after.isascii() or not after.isdigit() or len(after) > 15:
        return _sentence("give the run, and after which event", 400)
    following = _Following(source.lines(run, int(after)))
    if problem := await following.refusal():
        await following.close()
        return _sentence(problem, 404)
    return StreamingResponse(_messages(following), media_type="application/x-ndjson", headers=HEADERS)


class _Following:
    """Reads the lines of a run ahead of a reader, on a task, up to `MOST_WAITING`.

    Attributes:
        queue: Waiting lines, and None behind the last.
        problem: Why the lines ended before their run did; empty if they did not.
    """

    def __init__(self, lines: AsyncIterator[bytes]) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_WAITING)
        self.problem = ""
        self._lines = lines
        self._task = asyncio.create_task(self._read())

    async def refusal(self) -> str:
        """Return why there is no line at all, as far as that shows at once; empty if it does not."""
        await asyncio.wait([self._task], timeout=REFUSED_S)
        return self.problem if self._task.done() and self.queue.qsize() == 1 else ""

    async def close(self) -> None:
        """End the reading."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if (close := getattr(self._lines, "aclose", None)) is not None:
            await close()

    async def _read(self) -> None:
        try:
            async for line in self._lines:
                await self.queue.put(line)
        except LookupError:
            self.problem = "There is no such run."
        except RlmBrokerError as error:
            self.problem = str(error)
        await self.queue.put(None)


async def _messages(following: _Following) -> AsyncIterator[bytes]:
    """Yield JSON lines for the page: rows with the new texts, and at last that the run is over."""
    rows = Rows()
    try:
        while True:
            try:
                line = await asyncio.wait_for(following.queue.get(), IDLE_S)
            except TimeoutError:
                yield b"\n"
                continue
            if line is None:
                break
            await asyncio.sleep(GATHER_S if following.queue.empty() else 0)
            yield _message(line, following.queue, rows)
        note = {"note": following.problem} if following.problem else {}
        yield msgspec.json.encode({"end": True, **note}) + b"\n"
    finally:
        await following.close()


def _message(line: bytes, queue: "asyncio.Queue[bytes | None]", rows: Rows) -> bytes:
    """Return one message of a line and the waiting lines behind it."""
    taken: list[Row] = []
    problem = ""
    begin = rows.end
    while True:
        try:
            event = json.loads(line)
            if isinstance(event, dict) and (row := rows.take(event)) is not None:
                taken.append(row)
        except (ValueError, RecursionError):
            problem = "An event of the run could not be read, and is left out."
        if len(taken) >= ROWS_IN_MESSAGE or rows.end - begin >= MOST_MESSAGE_BYTES or queue.empty():
            break
        if (following := queue.get_nowait()) is None:
            queue.put_nowait(None)  # there is room: it has just been taken
            break
        line = following
    note = {"note": problem} if problem else {}
    texts = msgspec.json.encode({"text": rows.fresh().decode(), **note})
    return b'{"rows":%s,%s\n' % (encoded(taken), texts[1:])


def _sentence(text: str, status: int) -> Response:
    return PlainTextResponse(f"{text}\n", status, HEADERS)
