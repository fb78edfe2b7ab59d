"""The REPL of a kernel.

Its sandbox opens in a thread while the packages of Jupyter are imported, so this module imports none of them.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from rlm_broker.results import Block
from rlm_broker.sandbox.blocks.block_result import OnDisplay, OnOutput
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.wire.errors import ValueInvalid
from sandbox_worker.wire.messages import Query, Slot
from sandbox_worker.wire.values import decode

FUNCTION: Final = "__kernel__"
"""Name of the kernel's function in code."""
GUEST: Final = "__import__('sandbox_worker.repl.notebook', None, None, ['begin'])"
"""Expression for the module that serves the kernel within the REPL. It binds no name of code's."""
HELP_S: Final = 2.0
"""Seconds for completion and help. They look at objects of code's, which may take any time."""
_BLOCK: Final = re.compile(r'File "<block ([1-9]\d{0,8})>"')


class KernelRepl:
    """A REPL that knows which cell each of its blocks was.

    Args:
        sandbox: A sandbox that is not open yet.

    Attributes:
        answer: Answers a call of the kernel's function by code, which may call it with anything. An error that it
            raises is for code.
        back_to: Number of the first cell that the last kill has undone; None if it has undone all.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.answer: Callable[..., Awaitable[Any]] | None = None
        self.back_to: int | None = None
        self._sandbox = sandbox
        self._repl: SandboxedRepl | None = None
        self._cells: list[int | None] = []
        self._has_begun = True
        self._thread = ThreadPoolExecutor(1)
        self._opening = self._thread.submit(self._open)

    def _open(self) -> SandboxedRepl:
        repl = self._sandbox.__enter__().repl(None, self._answered, tools=[FUNCTION], scaffold=False)
        self._repl = repl.__enter__()
        self._cells.append(None)
        repl.execute(f"{GUEST}.begin({FUNCTION})", echo=False)
        return repl

    async def close(self) -> None:
        """End the REPL and the sandbox, with all their processes."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self._sandbox.aclose()

    def interrupt(self, *_: object) -> None:
        """Interrupt the block that runs. Its variables stay."""
        if self._repl is not None:
            self._repl.interrupt()

    async def execute(
        self,
        code: str,
        cell: int | None,
        on_output: OnOutput | None = None,
        on_display: OnDisplay | None = None,
        timeout_s: float | None = None,
    ) -> Block:
        """Run a block of a cell, or one of the kernel's own. After a kill the REPL is made ready first.

        Args:
            code: Source of the block.
            cell: Number of the cell, for tracebacks; None for a block of the kernel's own.
            on_output, on_display: As for `SandboxedRepl.execute`.
            timeout_s: Seconds of computing, and of waiting; None takes the limits of the sandbox.

        Raises:
            RlmBrokerError: There is no sandbox, or it broke.
        """
        repl = await asyncio.wrap_future(self._opening)
        repl.renew()  # a person decides how often
        if not self._has_begun:
            self._has_begun = True
            self._cells.append(None)
            await repl.aexecute(f"{GUEST}.begin({FUNCTION})", echo=False)
        self._cells.append(cell)
        block = await repl.aexecute(
            code, timeout_s, on_output, on_display=on_display, wall_timeout_s=timeout_s, echo=False
        )
        if block.status == "killed":
            if (undone := block.blocks_undone) is None:  # a fresh REPL counts from the start
                self.back_to, self._has_begun = None, False
                self._cells.clear()
            else:
                self.back_to = next((each for each in self._cells[-undone:] if each is not None), None)
                self._has_begun = undone < len(self._cells)
        return block

    async def look_up(self, call: str) -> None:
        """Call a function of the guest's module. It answers by the kernel's function."""
        await self.execute(f"{GUEST}.{call}", None, timeout_s=HELP_S)

    def named(self, traceback: str) -> str:
        """Return a traceback with the number of each cell, in place of its block's."""

        def name(found: re.Match[str]) -> str:
            number = int(found[1]) - 1
            cell = self._cells[number] if number < len(self._cells) else None
            return found[0] if cell is None else f'File "<cell {cell}>"'

        return _BLOCK.sub(name, traceback)

    async def _answered(self, query: Query) -> list[Slot]:
        """Answer a query. Code can send any."""
        if query.want != "tool" or self.answer is None:
            return [Slot(error="there is no model in a notebook")] * len(query.prompts)
        try:
            given = decode(query.texts[0].encode())
            return [Slot(text=json.dumps(await self.answer(*given["args"])))]
        except (ValueInvalid, ValueError, TypeError, LookupError) as error:
            return [Slot(error=str(error))]
