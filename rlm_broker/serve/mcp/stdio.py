"""A server on stdin and stdout, for one client. It has one owner, and ends with its client.

The client waits for the list of tools first, and the sandbox is needed later. So all imports of the sandbox are
imported in a thread once the client has listed the tools, or calls one.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn

import anyio
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server.stdio import stdio_server
from mcp.shared._stream_protocols import ReadStream, WriteStream
from mcp.shared.message import SessionMessage

from rlm_broker.errors import RlmBrokerError
from rlm_broker.serve.guard import ServerKey
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.mcp.server import ToolCall, server_of
from rlm_broker.serve.settings import RIGHTS

if TYPE_CHECKING:
    from rlm_broker import RLM, Emit
    from rlm_broker.serve.mcp.work import Work

    Around = Callable[[], contextlib.AbstractAsyncContextManager[Emit | None]]

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the server. A second one ends it without waiting for its processes, which then end by themselves."""
SIGNALLED: Final = 128
"""Exit code of a process ended by a signal, less the number of the signal."""
ANSWERED_S: Final = 2.0
"""Seconds after the end of stdin in which earlier requests are answered, also if the sandbox must start."""
LISTED_S: Final = 0.05
"""Seconds after the list of tools at which the sandbox is opened: the client has the list by then."""
PROGRESS_S: Final = 2.0
"""Seconds between two notifications of progress while the sandbox is started."""
_NO_MESSAGE: Final = SessionMessage(
    types.JSONRPCError(
        jsonrpc="2.0", id=None, error=types.ErrorData(code=types.PARSE_ERROR, message="the line is no JSON-RPC message")
    )
)
Read = MemoryObjectReceiveStream[SessionMessage | Exception]
Write = MemoryObjectSendStream[SessionMessage]


class _Opening:
    """The work of the tools, opened once in the background.

    Args:
        rlm: Makes the `RLM`, in a thread.
        root: Folder whose files a question may name.
        around: Makes a context manager around all work, with the receiver of all events as its value.
    """

    def __init__(self, rlm: "Callable[[], RLM]", root: str, around: "Around") -> None:
        self._rlm = rlm
        self._root = root
        self._around = around
        self._stack = contextlib.AsyncExitStack()
        self._task: asyncio.Task[Work] | None = None

    def begin(self) -> "asyncio.Task[Work]":
        """Begin to open it; after a failure, begin again."""
        if self._task is None or (self._task.done() and self._task.exception() is not None):
            self._task = asyncio.get_running_loop().create_task(self._opened())
            self._task.add_done_callback(_say_failure)
        return self._task

    async def work(self, call: ToolCall) -> "Work":
        """Return it when it is open, and inform the client what the call waits for."""
        task = self.begin()
        while not task.done():
            await asyncio.wait({task}, timeout=PROGRESS_S)
            if not task.done():
                await call.tell("starts the sandbox")
        return task.result()

    async def close(self) -> None:
        """End all REPLs and runs, with all their processes."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._stack.aclose()

    async def _opened(self) -> "Work":
        def made() -> "tuple[Any, Any, Any, Any, RLM]":
            from rlm_broker.context.files import Root
            from rlm_broker.serve.hosting.repls import HeldRepls
            from rlm_broker.serve.hosting.runs import HostedRuns
            from rlm_broker.serve.mcp.work import Work

            return Work, HeldRepls, HostedRuns, Root(self._root), self._rlm()

        work, held_repls, hosted_runs, root, made_rlm = await asyncio.to_thread(made)
        on_event = await self._stack.enter_async_context(self._around())
        rlm = await self._stack.enter_async_context(made_rlm)
        repls = await self._stack.enter_async_context(held_repls())
        opened: Work = work(rlm, hosted_runs(rlm, on_event=on_event), repls, root)
        return opened


def serve_stdio(rlm: "Callable[[], RLM]", *, root: str, block_timeout_s: float, around: "Around") -> None:
    """Serve one client until stdin ends, or a signal comes.

    Args:
        rlm: Makes the `RLM`. It is called in a thread.
        root: Folder whose files a question may name.
        block_timeout_s: Compute time of a block in seconds, for the tool's description.
        around: Makes a context manager around all work, with the receiver of all events as its value, or None.
    """
    asyncio.run(_served(_Opening(rlm, root, around), block_timeout_s))


async def _served(opening: _Opening, block_timeout_s: float) -> None:
    key = ServerKey(Owner("mcp"), RIGHTS)
    loop = asyncio.get_running_loop()
    server = server_of(
        opening.work,
        lambda _: key,
        with_paths=True,
        block_timeout_s=block_timeout_s,
        on_listed=lambda: loop.call_later(LISTED_S, opening.begin),
    )

    async def answered() -> None:
        async with _lines() as (read, write):
            try:
                await server.run(read, write, server.create_initialization_options())
            except asyncio.CancelledError:  # by the SDK: its writer has failed
                _set(ended, 0)
                raise

    ended: asyncio.Future[int] = loop.create_future()
    _listen(ended)
    serving = loop.create_task(answered())
    serving.add_done_callback(lambda _: _set(ended, 0))
    exit_code = await ended
    await opening.close()
    if not serving.done():
        # A thread of the SDK reads stdin. A cancellation would wait for its end, and so for the client's.
        _leave(exit_code)
    try:
        serving.result()
    except* (BrokenPipeError, ConnectionResetError):  # the client has left, and reads no answer
        pass


@contextlib.asynccontextmanager
async def _lines() -> AsyncIterator[tuple[Read, Write]]:
    """Yield the SDK's streams of stdin and stdout with two mends.

    A line that is no message is answered with an error. The end of stdin is passed on once the requests before it are
    answered, or after `ANSWERED_S`: the SDK would drop their answers.
    """
    under_way, is_idle = set[types.RequestId](), asyncio.Event()
    is_idle.set()
    to_server, read = anyio.create_memory_object_stream[SessionMessage | Exception]()
    write, from_server = anyio.create_memory_object_stream[SessionMessage]()

    async def ask(lines: ReadStream[SessionMessage | Exception], answers: WriteStream[SessionMessage]) -> None:
        async with to_server:
            async for line in lines:
                if isinstance(line, Exception):
                    await answers.send(_NO_MESSAGE)
                    continue
                if isinstance(line.message, types.JSONRPCRequest):
                    under_way.add(line.message.id)
                    is_idle.clear()
                await to_server.send(line)
            with anyio.move_on_after(ANSWERED_S):
                await is_idle.wait()

    async def answer(answers: WriteStream[SessionMessage]) -> None:
        async with answers:
            async for each in from_server:
                await answers.send(each)
                if isinstance(each.message, types.JSONRPCResponse | types.JSONRPCError) and each.message.id is not None:
                    under_way.discard(each.message.id)
                    if not under_way:
                        is_idle.set()

    async with stdio_server() as (lines, answers), anyio.create_task_group() as tasks:
        tasks.start_soon(ask, lines, answers)
        tasks.start_soon(answer, answers)
        yield read, write


def _listen(ended: "asyncio.Future[int]") -> None:
    def end(number: int) -> None:
        if ended.done():
            _leave(SIGNALLED + number)
        ended.set_result(SIGNALLED + number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, end, number)


def _leave(exit_code: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(exit_code)


def _set(ended: "asyncio.Future[int]", exit_code: int) -> None:
    if not ended.done():
        ended.set_result(exit_code)


def _say_failure(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and isinstance(error := task.exception(), RlmBrokerError):
        with contextlib.suppress(OSError, ValueError):
            print(f"rlm-broker mcp: {error}", file=sys.stderr, flush=True)
