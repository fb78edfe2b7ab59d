"""One block in a worker: its start, its clock, its interrupt, and the reason why its REPL must be killed.

One loop (`_ends`) waits on one event (`_wake`). Each fact that may end the block sets it: its result, news from init,
used CPU time, an answered query, a wish to interrupt, or the time of the clock's next verdict.
"""

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable

import msgspec

from rlm_broker.broker.transport.connection import Connection, refuse_fields
from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.errors import ConfigurationError, ContextRefused, ProtocolViolation, SandboxFailed
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.blocks import block_result
from rlm_broker.sandbox.blocks.block_clock import BlockClock
from rlm_broker.sandbox.blocks.block_result import BlockSpec
from rlm_broker.sandbox.blocks.query_contexts import QueryContexts
from rlm_broker.sandbox.workers.worker import Worker
from sandbox_worker.wire.control import Exceeded
from sandbox_worker.wire.messages import Query, Result, Slot, Submit

LEFT_RUNNING_S = 2.0
"""CPU seconds beyond those of a block until the processes it left running are killed. The margin is needed because init
samples CPU time."""
DEATH_NEWS_S = 1.0
"""Seconds until init has reported how a REPL died, after its connection was lost. Beyond them, the REPL lives and has
closed the connection itself."""
SHORT_S = 0.005
"""Seconds of a block, below which init need not hear of it if it has just heard of another one. A message to init wakes
it, on a CPU that the REPL could have."""
PIECE_BYTES = 1 << 16
"""Bytes of stdin in one reply, at most; see `BlockInput`."""
BYTE_CHARS = 8
"""Characters of a reply for each byte of stdin, with a margin: JSON writes a control character as six."""


class BlockInput:
    """Bytes for `sys.stdin` that come from a function of the caller's, when code asks for them.

    Args:
        read: Returns the next text or bytes, and nothing at the end. It is not called again after that.
        max_frame_bytes: Maximum bytes of a reply. Longer pieces of the caller's are cut.
    """

    def __init__(self, read: Callable[[], Awaitable[str | bytes]], max_frame_bytes: int) -> None:
        self._read = read
        self._most_bytes = min(PIECE_BYTES, max_frame_bytes // BYTE_CHARS)
        self._rest = memoryview(b"")  # a slice of it is no copy
        self._is_over = False
        self._turn = asyncio.Lock()

    async def piece(self) -> bytes:
        """Return the next bytes.

        Raises:
            ConfigurationError: The function returned neither text nor bytes.
        """
        async with self._turn:  # threads of a block may ask at the same time
            if not self._rest and not self._is_over:
                asked = self._read()
                if not inspect.isawaitable(asked):
                    raise ConfigurationError("stdin must be an async function, and this one is none")
                given = await asked
                if not isinstance(given, str | bytes):
                    raise ConfigurationError(f"stdin must return text or bytes, not {type(given).__name__}")
                self._rest = memoryview(given.encode() if isinstance(given, str) else given)
                self._is_over = not given
            piece, self._rest = self._rest[: self._most_bytes], self._rest[self._most_bytes :]
            return bytes(piece)


class BlockRun:
    """One block, from its start to its result or to the reason why its REPL must be killed.

    Args:
        contexts: Contexts for children of the block's queries.

    Attributes:
        killed_because: Reason why the REPL must be killed, as one clause; None while it can go on.
        clock: The clock of the block.
    """

    def __init__(
        self,
        worker: Worker,
        connection: Connection,
        limits: ReplLimits,
        contexts: QueryContexts,
        spec: BlockSpec,
    ) -> None:
        self.killed_because: str | None = None
        self._worker = worker
        self._connection = connection
        self._contexts = contexts
        self._spec = spec
        self._input: BlockInput | None = None
        if spec.wanted.stdin is not None and not isinstance(spec.wanted.stdin, str):
            self._input = BlockInput(spec.wanted.stdin, limits.max_frame_bytes)
        cpus, timeout_s, grace_s = min(worker.cpus, limits.max_processes), spec.timeout_s, limits.interrupt_grace_s
        self._may_begin_late = limits.cpu_s is None  # else init would count CPU time of earlier blocks against it
        self._cpu_s = (timeout_s + grace_s) * cpus + LEFT_RUNNING_S
        self.clock = BlockClock(timeout_s, spec.wall_timeout_s, grace_s, time.monotonic(), cpus)
        self._wake = asyncio.Event()
        self._begins_at = self._looks_at = math.inf
        self._block: asyncio.Future[Result] | None = None

    @property
    def limit(self) -> str | None:
        """Name of the limit that was reached; None if none was."""
        died = self._worker.died
        return self.clock.limit or (died.limit if isinstance(died, Exceeded) else None)

    def interrupt(self, over: str) -> None:
        """Interrupt the block, as at a limit. `over` is the reason, as the rest of a sentence about the block."""
        self.clock.wish(over)
        self._wake.set()

    async def result(self) -> Result | None:
        """Run the block, and return its result. If the caller is cancelled, the block goes on until `end` is called.

        Returns:
            The result; None if the REPL must be killed, or is dead already. `killed_because` then has the reason.
        """
        self._worker.on_written, self._worker.on_change = self._spec.output.written, self._wake.set
        self._worker.on_burned = _ignore
        return await self._rest()

    async def end(self, over: str) -> bool:
        """Interrupt a block whose `result` was cancelled, and return whether its REPL can go on."""
        self.interrupt(over)
        return self._block is not None and await self._rest() is not None

    def _begun(self) -> "asyncio.Future[Result]":
        if self._worker.is_begun and self._may_begin_late:
            self._begins_at = time.monotonic() + SHORT_S
        else:
            self._begin()
        asked, spec, wake = self._off_the_clock, self._spec, self._wake.set
        self._block = self._connection.execute(spec.code, asked, spec.output.shown, spec.wanted, wake, asked)
        return self._block

    def _begin(self, is_late: bool = False) -> None:
        self._begins_at = math.inf
        self._worker.on_burned = self._burned
        # The clock interrupts a running block. This bound is for processes left by an ended one.
        self._worker.begin(self._cpu_s, is_late)

    async def _rest(self) -> Result | None:
        """Begin the block, unless it has begun. Wait for its end, and for the end of all answering of its queries."""
        result: Result | None = None
        try:
            result = await self._outcome(self._block or self._begun())
        except ProtocolViolation as violation:
            self.killed_because = f"it broke the protocol of its connection to the broker: {violation}"
        except SandboxFailed as failure:
            self.killed_because = await self._reason_of_its_end() or str(failure)
        await self._connection.settle()
        return result

    async def _outcome(self, block: "asyncio.Future[Result]") -> Result | None:
        if not await self._ends(block):
            return None
        if self._worker.is_past_its_groups_limit():
            self.killed_because = self._death()
            return None
        result = block.result()
        if result.descriptor_output:
            await self._worker.drain()
        if result.status == "interrupted":  # the REPL cannot tell our SIGINT from a KeyboardInterrupt of the code's
            over = self.clock.over
            result = msgspec.structs.replace(
                result, status="interrupted" if over else "error", error=f"it {over}" if over else result.error
            )
        return result

    async def _ends(self, block: "asyncio.Future[Result]") -> bool:
        """Wait for the block, interrupt it at its limit, and return whether it ended, or the REPL must be killed."""
        loop = asyncio.get_running_loop()
        while not block.done():
            if (why := self._death()) is not None:
                # A result from before the REPL's end counts, and may still be on its way.
                await asyncio.wait({block}, timeout=DEATH_NEWS_S)
                self.killed_because = why
                return block.done() and block.exception() is None
            match self.clock.verdict(time.monotonic()):
                case "interrupt":
                    await to_its_end(self._interrupted)
                case "kill":
                    self.killed_because = f"it {self.clock.over}, and did not react to the interrupt"
                    return False
            now = time.monotonic()
            if now >= self._begins_at:
                self._begin(is_late=True)
            self._looks_at = min(self._begins_at, now + self.clock.wait_s(now))
            timer = loop.call_later(self._looks_at - now, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
            self._wake.clear()
        return True

    async def _interrupted(self) -> None:
        await self._worker.interrupt(self._connection.block)
        self._connection.let_go()

    async def _off_the_clock(self, query: Query | Submit) -> list[Slot]:
        if isinstance(query, Query) and query.background:  # the block goes on meanwhile
            return await self._answered(query)
        self.clock.query_opened(time.monotonic())
        try:
            if isinstance(query, Submit):
                return await self._checked(query)
            if query.want == "stdin":
                return [await self._more_input(query)] * len(query.prompts)
            return await self._answered(query)
        finally:
            now = time.monotonic()
            self.clock.query_closed(now)
            if now + self.clock.wait_s(now) < self._looks_at:  # the timer was set while the clock stood still
                self._wake.set()

    async def _answered(self, query: Query) -> list[Slot]:
        if query.want == "wait":
            recorded, wait = getattr(self._spec.answer, "waited", None), self._connection.answered
            return await (wait(query) if recorded is None else recorded(query, wait))
        if query.want == "cancel":
            await self._connection.end_background(query.texts)
            return [Slot()] * len(query.prompts)
        if not query.contexts:
            return await self._spec.answer(query)
        try:
            asked = self._contexts.of(query)
        except ContextRefused as refused:
            return [Slot(error=str(refused))] * len(query.prompts)
        return await self._spec.answer(asked)

    async def _checked(self, submitted: Submit) -> list[Slot]:
        if self._spec.fields is None:
            return await refuse_fields(submitted)
        return [Slot(error=await self._spec.fields.check(submitted))]

    async def _more_input(self, query: Query) -> Slot:
        if self._input is None or len(query.prompts) > 1:
            return Slot(error="this block has no stdin to ask for")
        return Slot((await self._input.piece()).decode("latin-1"))

    def _burned(self, cpu_s: float) -> None:
        self.clock.burned(cpu_s)
        self._wake.set()

    def _death(self) -> str | None:
        if self._worker.gone.is_set():
            return self._worker.why_gone
        died = self._worker.died
        return None if died is None else block_result.reason_of_death(died)

    async def _reason_of_its_end(self) -> str | None:
        """Return how the REPL died, if init says so in time: the connection is lost a moment before init's message."""
        try:
            async with asyncio.timeout(DEATH_NEWS_S):
                while (why := self._death()) is None:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return None
        return why


def _ignore(_cpu_s: float) -> None:
    """Ignore CPU time of which init has told before it heard of the block: it may be an earlier block's."""
