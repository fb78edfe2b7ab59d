"""The work of the tools: blocks in held REPLs, and runs waited for.

Theory of operation
-------------------
The SDK cancels a call by an anyio scope, again at each `await`. So the work of a call is a task
of its own (`_begun`): it is cancelled once, and may then end its block in order. The handler of the call waits
for it, and reports its progress. The next block of the same REPL waits for a block being interrupted.

A run outlives its call only once its handle was sent. A cancelled `ask_large_context` ends the run,
because no client knows of it; a cancelled `get_run` ends the wait alone. So does a cancelled `execute_python` end the
REPL it has begun.
"""

import asyncio
import base64
import binascii
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from mcp_types import CallToolResult

from rlm_broker import RLM, ConfigurationError, Paths, ReplBusy, RunFailed
from rlm_broker.concurrency.threads import in_thread
from rlm_broker.context.files import Root
from rlm_broker.serve.hosting.owner import Owner, UnknownHandle
from rlm_broker.serve.hosting.repls import HeldRepl, HeldRepls
from rlm_broker.serve.hosting.runs import HostedRun, HostedRuns
from rlm_broker.serve.mcp import forms, outcomes
from rlm_broker.serve.mcp.server import ToolCall

T = TypeVar("T")

PROGRESS_S: Final = 2.0
"""Seconds between two notifications of progress."""
LEFT_ALONE_S: Final = 3_600.0
"""Seconds until a run without a client ends."""
STOPPED_S: Final = 10.0
"""Seconds that `stop_run` waits for the best answer of a run."""
READ_BYTES: Final = 1 << 20
"""Maximum bytes of a file that `repl_files` reads."""


class Work:
    """The tools of one server, on the runs and the REPLs of a process.

    Args:
        rlm: The open `RLM` with the sandbox of the REPLs.
        runs: Runs of all owners.
        repls: REPLs of all owners.
        root: Folder whose files a question may name; None where the tools name none.
    """

    def __init__(self, rlm: RLM, runs: HostedRuns, repls: HeldRepls, root: Root | None = None) -> None:
        self._rlm = rlm
        self._runs = runs
        self._repls = repls
        self._root = root
        self._blocks: dict[str, asyncio.Task[CallToolResult]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def done(self, call: ToolCall, arguments: forms.Arguments) -> CallToolResult:
        """Do what a tool is asked for. The type of its arguments says which tool it is.

        Raises:
            RlmBrokerError: It cannot be done. The message is a sentence for the client.
        """
        match arguments:
            case forms.Code():
                return await self._execute(call, arguments)
            case forms.Question():
                return await self._ask(call, arguments)
            case forms.Wait(run=run, wait_s=wait_s):
                return await self._waited(call, self._runs.get(call.owner, run), wait_s)
            case forms.OneRun(run=run):
                hosted = self._runs.get(call.owner, run)
                hosted.stop()
                return await self._waited(call, hosted, STOPPED_S)
            case forms.FileWork():
                return await _awaited(call, self._begun(self._file_work(call.owner, arguments)), lambda: "copies")
            case forms.OneRepl(repl=repl):
                closing = self._begun(self._repls.close(call.owner, repl))
                await _awaited(call, closing, lambda: "closes the REPL")
                return outcomes.tool_outcome(forms.Closed(repl=repl), "The REPL is closed.")
        raise ConfigurationError(f"there is no tool with {type(arguments).__name__}")

    # -- blocks ------------------------------------------------------------------------------------------------------

    async def _execute(self, call: ToolCall, asked: forms.Code) -> CallToolResult:
        if asked.repl is not None:
            return await self._executed(call, self._repls.get(call.owner, asked.repl), asked.code)
        opening = self._begun(self._opened(call.owner))
        try:
            held = await _awaited(call, opening, lambda: "starts a REPL")
            return await self._executed(call, held, asked.code)
        except BaseException:
            opening.add_done_callback(self._end_unheard)
            raise

    async def _executed(self, call: ToolCall, held: HeldRepl, code: str) -> CallToolResult:
        if (last := self._blocks.get(held.id)) is not None:
            if not last.cancelling():
                raise ReplBusy(f"the REPL {held.id} runs a block already: wait for it, or leave out repl for a new one")
            await asyncio.wait({last})
        block = asyncio.get_running_loop().create_task(self._block(held, code))
        self._blocks[held.id] = block
        block.add_done_callback(lambda ended: self._forget(held.id, ended))
        return await _awaited(call, block, lambda: "runs the block")

    def _forget(self, repl: str, ended: "asyncio.Task[CallToolResult]") -> None:
        if self._blocks.get(repl) is ended:
            del self._blocks[repl]

    async def _block(self, held: HeldRepl, code: str) -> CallToolResult:
        async with self._repls.used(held.owner, held.id):
            block = await held.repl.aexecute(code, variables=True)
        return outcomes.block_outcome(block, None if held.repl.is_closed else held.id)

    async def _opened(self, owner: Owner) -> HeldRepl:
        async with self._repls.room(owner):
            repl = self._rlm.sandbox.repl()
            await repl.__aenter__()
            return self._repls.hold(owner, repl, repl.aclose)

    def _end_unheard(self, opening: "asyncio.Task[HeldRepl]") -> None:
        """End a REPL whose id its client has never heard."""
        if not opening.cancelled() and opening.exception() is None:
            held = opening.result()
            with contextlib.suppress(UnknownHandle):
                self._repls.end(held.owner, held.id)

    # -- runs --------------------------------------------------------------------------------------------------------

    async def _ask(self, call: ToolCall, asked: forms.Question) -> CallToolResult:
        root, paths = self._root, getattr(asked, "paths", None)
        if (paths is None) == (asked.context is None):
            raise ConfigurationError("context is missing" if root is None else "give either paths or context")
        if not asked.question.strip():
            raise ConfigurationError("question is empty: say what to find out")
        context: object = asked.context
        if root is not None and paths is not None:
            context = Paths(await in_thread(lambda _: root.resolved(paths)))
        hosted = self._runs.begin(call.owner, context, asked.question)
        return await self._waited(call, hosted, asked.wait_s)

    async def _waited(self, call: ToolCall, hosted: HostedRun, wait_s: float) -> CallToolResult:
        """Wait for a run, and return its outcome or, after `wait_s` seconds, its handle."""
        return await _awaited(call, self._begun(self._joined(hosted, wait_s)), lambda: hosted.doing)

    async def _joined(self, hosted: HostedRun, wait_s: float) -> CallToolResult:
        async with hosted.joined():
            outcome = asyncio.ensure_future(hosted.completion())
            try:
                await asyncio.wait({outcome}, timeout=wait_s)
                if not outcome.done():
                    hosted.outlive(LEFT_ALONE_S)
                    return outcomes.waiting_outcome(hosted)
                return outcomes.answer_outcome(hosted.id, outcome.result())
            except RunFailed as failed:
                return outcomes.failure_outcome(hosted.id, failed)
            finally:
                outcome.cancel()

    # -- files -------------------------------------------------------------------------------------------------------

    async def _file_work(self, owner: Owner, asked: forms.FileWork) -> CallToolResult:
        if asked.action != "write" and (asked.text is not None or asked.base64 is not None):
            raise ConfigurationError(f"text and base64 are for write, and not for {asked.action}")
        async with self._repls.used(owner, asked.repl) as held:
            files = held.repl.files
            if asked.action == "list":
                return outcomes.entries_outcome(asked.path, await files.alist(asked.path))
            if asked.action == "read":
                return outcomes.file_outcome(asked.path, await files.aread(asked.path, READ_BYTES))
            if asked.action == "delete":
                await files.aremove(asked.path)
                return outcomes.tool_outcome(forms.FilesDone(action="delete", path=asked.path), "The file is deleted.")
            data = _content(asked)
            await files.awrite(asked.path, data)
            result = forms.FilesDone(action="write", path=asked.path, bytes=len(data))
            return outcomes.tool_outcome(result, f"{len(data):,} bytes are written.")

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _begun(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _awaited(call: ToolCall, task: "asyncio.Task[T]", doing: Callable[[], str]) -> T:
    """Wait for a task, and report to the client every few seconds. A cancellation reaches the task once."""
    try:
        while not (await asyncio.wait({task}, timeout=PROGRESS_S))[0]:
            await call.tell(doing())
        return task.result()
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_retrieve)
        raise


def _retrieve(task: "asyncio.Task[Any]") -> None:
    """Read the exception, or asyncio would report it: its caller has left."""
    if not task.cancelled():
        task.exception()


def _content(asked: forms.FileWork) -> bytes:
    if (asked.text is None) == (asked.base64 is None):
        raise ConfigurationError("give either text or base64 to write")
    if asked.text is not None:
        return asked.text.encode("utf-8", "surrogatepass")
    try:
        return base64.b64decode(asked.base64 or "", validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigurationError(f"base64 cannot be decoded: {error}") from None
