"""Blocks and REPLs as requests describe them: the code, its bounds, its context, and its outcome as JSON.

`POST /v1/execute` runs one block in a REPL of its own, ready before the request and ended with it.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from rlm_broker import (
    Block,
    ConfigurationError,
    OnOutput,
    ReplLimits,
    SandboxedRepl,
    StoredContext,
    store_as_it_is,
)
from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.guard import key_of
from rlm_broker.serve.hosting.files import UploadedFile
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.hosting.runs import require_within
from rlm_broker.serve.materials import stored_of
from rlm_broker.serve.parts import Parts
from rlm_broker.serve.replies import EventStream, SlowJson, sse
from rlm_broker.values.text import jsonable

ITEMS_AT_ONCE: Final = 1_000
"""Items of a list written as JSON in one step."""
_dumps = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Work = Callable[[OnOutput | None], Awaitable[str]]
"""Runs a block, passes its output on as it comes, and returns what is reported of it at its end, as JSON text."""


_OWN_NAMES = {"block_timeout_s": "timeout_s", "block_wall_timeout_s": "wall_timeout_s"}
"""Limit → field of a request that sets it for one block."""


class BlockRequest(BaseModel):
    """A block to run.

    Attributes:
        code: Python source.
        timeout_s: Seconds of computing; None takes the server's `block_timeout_s`, also the most.
        wall_timeout_s: Seconds, waits included; None takes the server's `block_wall_timeout_s`, also the most.
        stdin: Text for `input()` and `sys.stdin`.
        value: Whether the outcome has the value of the last statement, if it is an expression.
        variables: Whether the outcome names new and changed variables.
        stream: Whether output is sent as it comes, as server-sent events.
    """

    model_config = ConfigDict(extra="forbid")

    code: str
    timeout_s: Seconds | None = None
    wall_timeout_s: Seconds | None = None
    stdin: str | None = None
    value: bool = False
    variables: bool = False
    stream: bool = False

    def require_within(self, limits: ReplLimits) -> None:
        """Refuse times beyond the server's.

        Raises:
            ApiError: 400.
        """
        for limit, name in _OWN_NAMES.items():
            asked, most = getattr(self, name), getattr(limits, limit)
            if asked is not None and asked > most:
                raise ApiError(400, f"{name} = {asked:g} is above the {most:g} of this server", param=name)


class ReplRequest(BaseModel):
    """A REPL to make.

    Attributes:
        context: Value of the variable `context`: text, or what else JSON can hold.
        context_files: Ids of uploaded files whose texts are the context, in place of `context`.
        limits: Limits of the REPL by name. None may be beyond the server's.
        env: Variables in `os.environ` of code.
    """

    model_config = ConfigDict(extra="forbid")

    context: Any = None
    context_files: tuple[str, ...] = ()
    limits: dict[str, Any] = {}
    env: dict[str, str] = {}

    def own_limits(self, servers: ReplLimits) -> ReplLimits | None:
        """Return the limits of the REPL; None for the server's, with which REPLs are ready.

        Raises:
            ApiError: 400: there is no such limit, or one is beyond the server's.
        """
        return tightened(servers, self.limits) if self.limits else None


def tightened(servers: ReplLimits, asked: dict[str, Any]) -> ReplLimits:
    """Return the server's limits with a request's.

    Raises:
        ApiError: 400: there is no such limit, or one is beyond the server's.
    """
    try:
        wanted = ReplLimits.from_dict(asked)
        require_within({name: getattr(wanted, name) for name in asked}, servers.to_dict())
    except ConfigurationError as error:
        raise ApiError(400, str(error), param="limits") from None
    return servers.replace(**wanted.given)


@contextlib.asynccontextmanager
async def opened(
    parts: Parts, owner: Owner, asked: ReplRequest, files: Sequence[UploadedFile], limits: ReplLimits | None
) -> AsyncIterator[SandboxedRepl]:
    """Open a REPL with the context and the files of a request.

    Args:
        parts: Parts of the server.
        owner: Owner of the REPL.
        asked: The request.
        files: Files put into the scratch folder, by their names.
        limits: Limits of the REPL; None takes the server's.
    """
    async with contextlib.AsyncExitStack() as stack:
        context = await _context_of(parts, owner, asked)
        if context is not None:
            stack.enter_context(context)
        made = parts.rlm.sandbox.repl(context, limits=limits, env=asked.env or None)
        repl = await stack.enter_async_context(made)
        names = [file.name for file in files]
        if len(set(names)) < len(names):
            raise ApiError(400, "two of the files have the same name", param="files")
        for file in files:
            await put(repl, file)
        yield repl


async def put(repl: SandboxedRepl, file: UploadedFile) -> None:
    """Put an uploaded file into the scratch folder of a REPL, under its name.

    Raises:
        FileRefused: There is no room for it.
        UnknownHandle: It was deleted meanwhile.
    """
    fd = file.opened()
    try:
        await repl.files.awrite(file.name, Path(f"/proc/self/fd/{fd}"))
    finally:
        os.close(fd)


async def executed(repl: SandboxedRepl, asked: BlockRequest, on_output: OnOutput | None) -> str:
    """Run the code of a request in a REPL, and return the block as JSON text; see `_told`.

    A block with a value or displays becomes text in a thread: it may have 64 MB, and decoding may import a package.
    """
    block = await repl.aexecute(
        asked.code,
        asked.timeout_s,
        on_output,
        value=asked.value,
        wall_timeout_s=asked.wall_timeout_s,
        stdin=asked.stdin,
        variables=asked.variables,
    )
    if not asked.value and not block.displays:
        return _dumps(_told(block, asked))
    return await asyncio.to_thread(lambda: _in_pieces(_told(block, asked)))


def _told(block: Block, asked: BlockRequest) -> dict[str, Any]:
    """Return a block as JSON has it: the fields of `rlm-broker exec --json`, displays as base64 by MIME type."""
    shown: dict[str, Any] = jsonable(block)
    if asked.value:
        shown |= {"value": jsonable(block.value), "value_problem": block.value_problem}
    own = _OWN_NAMES.get(block.limit or "")
    if block.limit and block.error and own and getattr(asked, own) is not None:
        shown["error"] = block.error.replace(block.limit, own)
    return shown


def _in_pieces(value: Any) -> str:
    """Return a value as JSON text. `json.dumps` would hold the interpreter's lock, and so the loop, until its end."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_dumps(key)}:{_in_pieces(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list) and any(isinstance(each, list | dict) for each in value):
        return "[" + ",".join(map(_in_pieces, value)) + "]"
    if isinstance(value, list):
        pieces = (value[start : start + ITEMS_AT_ONCE] for start in range(0, len(value), ITEMS_AT_ONCE))
        return "[" + ",".join(_dumps(piece)[1:-1] for piece in pieces) + "]"
    return _dumps(value)


def answer(is_streamed: bool, work: Work, heartbeat_s: float) -> ASGIApp:
    """Return the answer that runs a block: its outcome as JSON, or events of its output and then of its outcome."""
    if is_streamed:
        return EventStream(_events(work), heartbeat_s)

    async def value() -> tuple[int, Mapping[str, str], Any]:
        return 200, {}, await work(None)

    return SlowJson(value, heartbeat_s)


async def _events(work: Work) -> AsyncGenerator[bytes, None]:
    pieces: asyncio.Queue[tuple[str, str] | None] = asyncio.Queue()  # its length is bounded by what a block may print
    working = asyncio.ensure_future(work(lambda stream, text: pieces.put_nowait((stream, text))))
    working.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            stream, text = piece
            yield sse({"type": "output", "stream": stream, "text": text}, "output")
        yield sse(f'{{"type":"block","block":{working.result()}}}', "block")
    finally:
        working.cancel()
        await to_its_end(lambda: asyncio.wait({working}))


async def _context_of(parts: Parts, owner: Owner, asked: ReplRequest) -> StoredContext | None:
    if not asked.context_files:
        # The value itself, and never a path: a client must not learn which files the server has.
        return None if asked.context is None else await asyncio.to_thread(store_as_it_is, asked.context)
    if asked.context is not None:
        raise ApiError(400, "give either context or context_files", param="context_files")
    return await stored_of(parts.files_of(owner, asked.context_files, "context_files"))


class ExecuteRequest(BlockRequest, ReplRequest):
    """A block, and the REPL it runs in.

    Attributes:
        files: Ids of uploaded files, which code finds in its current folder by their names.
    """

    files: tuple[str, ...] = ()


def routes(parts: Parts) -> list[Route]:
    """Return the route of one-shot execution."""

    async def execute(request: Request) -> ASGIApp:
        owner = key_of(request).require("execute")
        asked, _ = await parts.parsed(request, ExecuteRequest)
        servers = parts.rlm.sandbox.limits
        asked.require_within(servers)
        limits = asked.own_limits(servers)
        files = parts.files_of(owner, asked.files, "files")

        async def work(on_output: OnOutput | None) -> str:
            async with parts.places.place(owner), opened(parts, owner, asked, files, limits) as repl:
                repl.kills_when_cancelled = True
                return await executed(repl, asked, on_output)

        return answer(asked.stream, work, parts.settings.heartbeat_s)

    return [Route("/v1/execute", execute, methods=["POST"])]
