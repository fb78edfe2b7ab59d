"""A run that is brought to one phase, and meets a fault there."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import psutil

from rlm_broker import RLM, Limits
from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.errors import ModelFailed, RlmBrokerError
from rlm_broker.events.event import BlockPrinted, Event, RunEnded
from rlm_broker.events.trace import TraceWriter
from rlm_broker.results import Block, Completion
from rlm_broker.usage import Usage
from scripts.faults import leftovers
from scripts.faults.cell import (
    ANSWER,
    BATCH,
    BLOCK,
    CLOSING,
    DEEP,
    IDLE,
    NEXT_RUN,
    QUERY,
    RESULT,
    STARTING,
    VARIABLES,
    Phase,
    Report,
)

STRIKE_S = 60.0
"""Time in seconds that the injection of a fault may take."""
LIMITS: Final = Limits(
    max_depth=3,
    block_timeout_s=2,
    block_wall_timeout_s=30,
    interrupt_grace_s=0.5,
    call_timeout_s=20,
    tool_timeout_s=1,
    start_timeout_s=10,
    run_timeout_s=60,
)
KEEP = "kept = 7"
NOTHING_ASKED = "got = 'nothing asked'"
RUNNING = "import time\nprint('running', flush=True)\ntime.sleep(0.4)\ngot = 'slept'"
HALVES = "got = llm_query_batched([f'{pace} {n}' for n in range(4) for pace in ('fast', 'slow')])"
FINAL = "FINAL(f\"kept={globals().get('kept')} got={globals().get('got')}\")"
CAREFUL = "try:\n    said = {asks}\nexcept Exception as error:\n    said = f'Error: {{error}}'\nFINAL(said)"
SLOW = "llm_query('slow')"
RESULTS: Final[Mapping[Phase, str]] = {
    BLOCK: "slept",
    QUERY: "answered",
    DEEP: "answered",
    BATCH: str(["answered"] * 8),
}

Strike = Callable[["Stage"], Callable[[], None] | None]
"""Injects a fault; what it returns takes it back when the run has ended."""


class Stage:
    """One run in one phase. Plain calls: it is the caller's own thread that signals meet.

    Attributes:
        arrived: The run is in its phase.
        at_gate: Awaited by the model at the phase; by default until the fault has come.
        asks: What the code asks in the phases that ask.
        options: Further arguments of the RLM.
        on_event: Called with each event, as a user's function is.
        is_armed: The run that meets the fault is under way, and not the one after it.
        code: Block of the phase, in place of the usual one.
        kept: What the fault keeps from its preparation to its strike.
        said: What was said beside the answer, such as warnings.
        notes: What went wrong with the fault itself; the cell fails.
        undone: Called when the first run has ended, before the next.
        at_end: Called when all is closed.
    """

    def __init__(self, phase: Phase, folder: Path) -> None:
        self.phase = phase
        self.folder = folder
        self.arrived = threading.Event()
        self.released = threading.Event()
        self.at_gate: Callable[[LMRequest], Awaitable[object]] = self._wait
        self.asks = SLOW
        self.options: dict[str, Any] = {}
        self.limits = LIMITS
        self.on_event: Callable[[Event], None] = lambda _event: None
        self.trace_path: Path | None = None
        self.model: Any = Script(self)
        self.is_armed = True
        self.code: str | None = None
        self.rlm: RLM | None = None
        self.kept: dict[str, int] = {}
        self.said: list[str] = []
        self.notes: list[str] = []
        self.undone: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []

    def play(self, strike: Strike) -> Report:
        """Bring a run to the phase, inject the fault there, and look at what comes of it."""
        EventLoopRef.background().run(asyncio.sleep(0))  # its descriptors are not leftovers
        with contextlib.suppress(OSError):
            EventLoopRef.background().run(asyncio.to_thread(int))
        before = leftovers.descriptors()
        report = Report()
        striker = threading.Thread(target=self._strike, args=(strike,), daemon=True)
        striker.start()
        try:
            self._run(report, striker)
        except KeyboardInterrupt:
            report.told, report.is_sensible = f"{report.told}; KeyboardInterrupt".lstrip("; "), True
            if not report.told.startswith("answer"):
                report.lost.append(ANSWER)
        except BaseException as error:  # noqa: BLE001 - any error that the caller gets is the report
            _tell_error(report, error)
        self._undo(striker)
        for end in self.at_end:
            end()
        report.lost += self.notes
        report.told += "".join(f"; {said}" for said in self.said)
        report.left += leftovers.after_a_while(
            lambda: [
                *leftovers.processes(),
                *leftovers.tasks(),
                *leftovers.more(leftovers.descriptors(), before, "descriptor"),
            ]
        )
        return report

    def _undo(self, striker: threading.Thread) -> None:
        """Take the fault back, once it has come."""
        if not self.arrived.is_set():
            self.notes.append("the phase was never reached")
            self.arrived.set()
        striker.join(STRIKE_S)
        while self.undone:
            self.undone.pop(0)()

    def _run(self, report: Report, striker: threading.Thread) -> None:
        with contextlib.ExitStack() as stack:
            trace = stack.enter_context(TraceWriter(self.trace_path)) if self.trace_path else None

            def on_event(event: Event) -> None:
                if trace is not None:
                    trace(event)
                self._arrive_at(event)
                self.on_event(event)

            rlm = self.rlm = RLM(self.model, limits=self.limits, on_event=on_event, **self.options)
            with rlm:
                try:
                    completion = rlm.completion("the context", "the question")
                except RlmBrokerError as error:
                    _tell_error(report, error)
                else:
                    self._tell_answer(report, completion)
                if self.phase == CLOSING:
                    return
                self._undo(striker)
                self.is_armed = False
                self._try_next(report, rlm)
            if trace is not None and trace.lost:
                report.told += f"; trace: {trace.lost}"

    def _try_next(self, report: Report, rlm: RLM) -> None:
        try:
            answer = rlm.completion("the context", "the next question").response  # another one, for what is cached
        except RlmBrokerError as error:
            report.lost.append(NEXT_RUN)
            report.told += f"; the next run: {type(error).__name__}: {error}"
        else:
            if answer != "kept=7 got=nothing asked":
                report.lost.append(NEXT_RUN)
                report.told += f"; the next run: {answer}"

    # -- the phase ---------------------------------------------------------------------------------------------------

    def reach(self, phase: Phase) -> bool:
        """Whether the run is now where the fault is to come."""
        if self.is_armed and phase == self.phase:
            self.arrived.set()
            return True
        return False

    def _arrive_at(self, event: Event) -> None:
        if isinstance(event, BlockPrinted) and "running" in event.text:
            self.reach(BLOCK)
        if isinstance(event, RunEnded) and event.depth == 0:
            self.reach(CLOSING)

    def _strike(self, strike: Strike) -> None:
        while not self.arrived.wait(0.001):
            if self.phase == STARTING and psutil.Process().children():
                self.arrived.set()
        if self.notes:
            return
        try:
            taken_back = strike(self)
            if taken_back is not None:
                self.undone.append(taken_back)
        except Exception as error:  # noqa: BLE001 - a fault that could not be injected shows in its cell
            self.notes.append(f"the fault itself failed: {type(error).__name__}: {error}")
        self.released.set()

    async def _wait(self, _request: LMRequest) -> None:
        while not self.released.is_set():
            await asyncio.sleep(0.005)

    # -- what came of it ---------------------------------------------------------------------------------------------

    def _tell_answer(self, report: Report, completion: Completion) -> None:
        blocks = [block for turn in completion.trajectory for block in turn.blocks]
        statuses = " ".join(block.status for block in blocks)
        report.told = f"answer: {completion.response} (blocks: {statuses})"
        report.is_sensible = True
        kept, _, got = (completion.response or "").partition(" got=")
        if kept != "kept=7":
            report.lost.append(VARIABLES)
        if got != RESULTS.get(self.phase, "nothing asked"):
            report.lost.append(RESULT)
        if report.lost and not _explains(blocks, got):
            report.is_sensible = False
        failed = [block.error for block in blocks if block.status != "ok" and block.error]
        report.told += "".join(f"; {error}" for error in failed)[:300]


class Script:
    """A model that brings its run to the stage's phase."""

    model_name = "script"
    fingerprint: str | None = None

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._batch = 0

    async def complete(self, request: LMRequest) -> LMReply:
        """Answer one request."""
        text, is_at_gate = self.said(request)
        if is_at_gate:
            other = await self._stage.at_gate(request)
            if other is not None:
                return cast("LMReply", other)  # what a faulty client returns
        return LMReply(text, Usage(1, 10, 5, 0.01))

    async def aclose(self) -> None:
        """Close no resource: there is none."""

    def said(self, request: LMRequest) -> tuple[str, bool]:
        """The answer to a request, and whether the fault comes before it."""
        return self._turn(request) if request.is_loop else self._plain(request)

    def _turn(self, request: LMRequest) -> tuple[str, bool]:
        stage = self._stage
        if request.depth == 1:
            return _block("FINAL(rlm_query('grandchild'))"), False
        if request.depth == 2:
            return _block(CAREFUL.format(asks=stage.asks)), False
        turn = sum(message.role == "assistant" for message in request.messages)
        if turn == 0:
            return _block(KEEP), False
        if turn == 1:
            return _block(self._code() if stage.is_armed else NOTHING_ASKED), stage.reach(IDLE)
        return _block(FINAL), False

    def _code(self) -> str:
        stage = self._stage
        return stage.code or {
            BLOCK: RUNNING,
            QUERY: f"got = {stage.asks}",
            BATCH: HALVES,
            DEEP: "got = rlm_query('child')",
        }.get(stage.phase, NOTHING_ASKED)

    def _plain(self, request: LMRequest) -> tuple[str, bool]:
        stage = self._stage
        if not str(request.messages[-1].content).startswith("slow"):
            return "answered", False
        if stage.phase == BATCH:
            self._batch += 1
            if self._batch == 4:
                stage.reach(BATCH)
        else:
            stage.reach(QUERY)
            stage.reach(DEEP)
        return "answered", True


def _block(code: str) -> str:
    return f"```repl\n{code}\n```"


def _explains(blocks: list[Block], got: str) -> bool:
    """Whether model and caller could see that something was lost."""
    return any(block.status != "ok" for block in blocks) or "rror" in got


def _tell_error(report: Report, error: BaseException) -> None:
    told = f"{type(error).__name__}: {error}"
    report.told = f"{report.told}; {told}".lstrip("; ")
    report.is_sensible = isinstance(error, RlmBrokerError) and bool(str(error)) and "\n" not in str(error).strip()
    if isinstance(error, ModelFailed):
        report.is_sensible = bool(str(error))
    if ANSWER not in report.lost:
        report.lost.append(ANSWER)
