"""One run at one depth: prompt, code, REPL, observation, until there is an answer."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import rlm_broker.run.prompts as prompts
from rlm_broker.clients.base import estimate_tokens
from rlm_broker.concurrency.deadline import Late, StopRequested, T, within
from rlm_broker.context.store import StoredContext
from rlm_broker.errors import LimitReached, ModelFailed, ReplClosed, RunFailed, ValueTooLarge
from rlm_broker.parsing import FinalVar, NotRun, ParsedReply, parse_reply
from rlm_broker.results import Block, ChatMessage, ChildTrace, Completion, Isolation, Iteration, without_displays
from rlm_broker.run.calls import Caller, in_words
from rlm_broker.run.output_type import OutputType
from rlm_broker.run.persistent_repl import PersistentRepl, as_values
from rlm_broker.run.tools import Tools
from rlm_broker.run.tree import Progress, Tree
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.trace.events import (
    BlockEnded,
    BlockPrinted,
    BlockStarted,
    IterationStarted,
    Replied,
    ReplReady,
    RunEnded,
)
from rlm_broker.transport.connection import QueryHandler
from sandbox_worker.wire.names import CONTEXT, HISTORY, numbered

MAX_DISPLAYS_BYTES = 64 << 20
"""Of what the blocks of one run show, in memory. Beyond, displays are only counted, as omitted."""


class Runner:
    """Asks the model, runs its code, shows it the outcome, until it answers or its turns are used up.

    Args:
        caller: Which run this is, at which depth, about which question.
        answer: Answers what its REPL asks.
        child_traces: Filled by what answers.
        progress: How far the run has come; shared with what answers.
        tools: What its code may call.
        output_type: What its answer has to be; None is any text.
        persistent_repl: The REPL of several runs; None is one of its own.
    """

    def __init__(
        self,
        tree: Tree,
        caller: Caller,
        answer: QueryHandler,
        child_traces: list[ChildTrace],
        progress: Progress,
        tools: Tools,
        output_type: OutputType | None = None,
        persistent_repl: PersistentRepl | None = None,
    ) -> None:
        self._tree = tree
        self._caller = caller
        self._emit = tree.events.of(caller.run, caller.depth)
        self._answer = answer
        self._child_traces = child_traces
        self._tools = tools
        self._output_type = output_type
        self._persistent_repl = persistent_repl
        self._question = output_type.task(caller.question) if output_type else caller.question
        self._isolation: Isolation | None = None
        self._parsed: Any = None
        self._limit: str | None = None
        self._kind = "answered"
        self._stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tokens: float = 0
        self._display_bytes = 0
        self._started = time.monotonic()
        self._earlier: list[ChatMessage] = []
        self.progress = progress

    async def run(self, context: StoredContext) -> Completion:
        """Answer the question about `context`, within `run_timeout_s`, or for a child `child_timeout_s`.

        Raises:
            LimitReached: A limit ended the run; it carries the partial answer.
            ModelFailed: The model failed.
            OutputInvalid: The answer was not of the type that was asked for, as often as it was asked.
            SandboxFailed: The sandbox itself broke.
        """
        self._started = time.monotonic()
        limits, depth = self._tree.limits, self._caller.depth
        limit_s = limits.child_timeout_s if depth else limits.run_timeout_s
        work = self._with_repl(context) if depth < limits.max_depth else self._without_repl(context)
        try:
            response = await within(limit_s, work, self._stop)
        except StopRequested:
            self._kind, response = "stopped", self.progress.partial_answer
        except Late:
            assert limit_s is not None
            late = LimitReached("child_timeout_s" if depth else "run_timeout_s", limit_s, limit_s)
            self._emit_failed(late)
            self.hand_to(late)
            raise late from None
        except BaseException as failure:
            self._emit_failed(failure)
            if isinstance(failure, RunFailed):
                self.hand_to(failure)
            raise
        completion = self._completion(response)
        self._emit_ended(response)
        return completion

    def stop(self) -> None:
        """End the run with the best answer that it has so far. Harmless when it has ended."""
        if not self._stop.done():
            self._stop.set_result(None)

    def hand_to(self, failure: RunFailed) -> None:
        """Put what the run has into the error that ends it."""
        failure.take(self._completion(None), self.progress.partial_answer)

    async def _in_turn_time(self, work: Coroutine[Any, Any, T]) -> T:
        limit_s = self._tree.limits.iteration_timeout_s
        try:
            return await within(limit_s, work)
        except Late:
            assert limit_s is not None
            raise LimitReached("iteration_timeout_s", limit_s, limit_s) from None

    # -- a plain completion ------------------------------------------------------------------------------------------

    async def _without_repl(self, context: StoredContext) -> str | None:
        value = await asyncio.to_thread(context.value)
        self.progress.messages += prompts.without_repl(value, self._question)
        while True:
            reply = await self._reply(is_loop=False)
            if (problem := self._problem_with(reply)) is None:
                return reply if reply.strip() else None
            self.progress.messages.append(ChatMessage("user", problem))

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def _with_repl(self, context: StoredContext) -> str | None:
        started, persistent = time.monotonic(), self._persistent_repl
        sandbox = self._tree.sandbox
        if persistent is None:
            assert sandbox is not None
            tools, values = self._tools.names, self._tools.values
            opened: Any = sandbox.repl(context, self._answer, tools=tools, values=values, limits=self._tree.limits)
        else:
            opened = persistent.repl(context, self._answer, self._tools)
        async with opened as repl:
            repl.kills_when_cancelled = persistent is None
            name = CONTEXT if persistent is None else persistent.context_name
            opening = prompts.opening(self._question, context.info, name)
            if self._tree.instructions.prologue and not self._caller.depth:
                opening = f"{self._tree.instructions.prologue}\n\n{opening}"
            self.progress.messages += [ChatMessage("system", self._system()), ChatMessage("user", opening)]
            self._isolation = repl.isolation
            self._emit(ReplReady, repl.isolation, time.monotonic() - started)
            try:
                return await self._converse(repl)
            finally:
                if persistent is not None:
                    persistent.remember([*self._earlier, *self.progress.messages])

    def _system(self) -> str:
        tools = self._tools.documentation()
        return self._tree.instructions.system_prompt(self._tree.limits, self._caller.depth, tools)

    async def _converse(self, repl: SandboxedRepl) -> str | None:
        limits, question = self._tree.limits, self._question
        turns = limits.iterations(self._caller.depth)
        for number in range(1, turns + 1):
            answer, blocks, not_run = await self._in_turn_time(self._turn(repl, number))
            problem = None if answer is None else self._problem_with(answer)
            if answer is not None and problem is None:
                return answer
            if self._blocks_left() == 0:
                self._limit = "max_blocks"
            elif number == turns:
                self._limit = "max_iterations"
            is_last = self._limit is not None
            then = prompts.last_request(question) if is_last else prompts.reminder(question, turns - number)
            then = then if problem is None else f"{problem}\n\n{then}"
            self.progress.messages.append(ChatMessage("user", prompts.observation(blocks, not_run, limits, then)))
            self._count_errors(blocks)
            if is_last:
                break
            await self._compact(repl, then)
        return await self._last_answer(repl)

    async def _turn(self, repl: SandboxedRepl, number: int) -> tuple[str | None, list[Block], Sequence[NotRun]]:
        self._emit(IterationStarted, number)
        reply = await self._reply()
        blocks: list[Block] = []
        try:
            answer, not_run = await self._act(repl, number, reply, blocks)
        finally:  # a turn that is cut short is part of what the run had
            self.progress.trajectory.append(Iteration(number, reply, tuple(blocks)))
        return answer, blocks, not_run

    async def _reply(self, *, is_loop: bool = True) -> str:
        call = await self._tree.calls.turn(
            self._caller, self.progress.messages, block=self.progress.blocks, is_loop=is_loop
        )
        said = call.response if call.response.strip() else prompts.EMPTY_REPLY
        self.progress.messages.append(ChatMessage("assistant", said))
        counted = call.usage.total_input_tokens + call.usage.total_output_tokens
        self._tokens = counted or estimate_tokens(sum(len(str(each.content)) for each in self.progress.messages))
        return call.response

    async def _act(
        self, repl: SandboxedRepl, number: int, reply: str, blocks: list[Block]
    ) -> tuple[str | None, Sequence[NotRun]]:
        """Do what the reply says; add each block that ran to `blocks`. Return the answer, and what was not run."""
        parsed = parse_reply(reply)
        not_run = tuple(f"{item.what}: {item.reason}" for item in parsed.not_run)
        self._emit(Replied, number, reply, not_run)
        self.progress.said = parsed.prose or self.progress.said
        for code in parsed.code[: self._blocks_left()]:
            blocks.append(await self._execute(repl, number, code))
            if blocks[-1].final_answer is not None:
                return blocks[-1].final_answer, ()
            if blocks[-1].status == "killed":
                break
        skipped = _skipped(parsed, blocks)
        if not isinstance(parsed.final, FinalVar):
            answer = None if parsed.final is None else parsed.final.text
        elif skipped:
            answer = None
        else:
            blocks.append(await self._execute(repl, number, _lookup(parsed.final)))
            answer = blocks[-1].final_answer
        return answer, (*parsed.not_run, *skipped)

    async def _execute(self, repl: SandboxedRepl, iteration: int, code: str) -> Block:
        self.progress.blocks += 1
        number = self.progress.blocks
        self._emit(BlockStarted, iteration, number, code)
        try:
            block = await repl.aexecute(
                code,
                self._tree.limits.block_timeout_s,
                lambda stream, text: self._emit(BlockPrinted, number, stream, text),
            )
        except ReplClosed as closed:
            if repl.is_closed:
                raise
            allowed = self._tree.limits.max_repl_restarts
            raise LimitReached("max_repl_restarts", allowed, allowed) from closed
        self._emit(BlockEnded, number, without_displays(block), tuple(each.sizes for each in block.displays))
        self._display_bytes += sum(sys.getsizeof(data) for each in block.displays for data in each.data.values())
        if self._display_bytes > MAX_DISPLAYS_BYTES:
            block = without_displays(block, omitted=len(block.displays))
        if block.draft is not None or block.status in ("ok", "error", "exited"):
            self.progress.draft = block.draft
        return block

    async def _compact(self, repl: SandboxedRepl, then: str) -> None:
        """Put a summary in the place of a conversation that fills too much of the model's window."""
        share = self._tree.limits.compaction_threshold
        if share is None or self._tokens < share * self._tree.calls.window_tokens(self._caller):
            return
        system, opening = self.progress.messages[:2]
        observed = self.progress.messages.pop()  # not two messages of one role in a row: some providers refuse that
        self.progress.messages.append(ChatMessage("user", f"{observed.content}\n\n{prompts.SUMMARISE}"))
        summary = await self._reply()
        self._earlier += self.progress.messages
        name = HISTORY if self._persistent_repl is None else numbered(HISTORY, self._persistent_repl.runs - 1)
        with contextlib.suppress(ValueTooLarge):  # then the notes have to do
            repl.provide_known({name: as_values(self._earlier)})
        started_again = prompts.after_summary(str(opening.content), summary, name, then)
        self.progress.messages = [system, ChatMessage("user", started_again)]

    async def _last_answer(self, repl: SandboxedRepl) -> str | None:
        """The turns are used up: one more call, or some for an answer of a type. Their code is not run."""
        while True:
            try:
                reply = await self._in_turn_time(self._reply())
                parsed = parse_reply(reply)
                if isinstance(parsed.final, FinalVar):
                    block = await self._execute(repl, len(self.progress.trajectory), _lookup(parsed.final))
                    answer = block.final_answer or self.progress.partial_answer
                elif parsed.final is not None:
                    answer = parsed.final.text
                else:
                    answer = parsed.prose or self.progress.partial_answer
            except (ModelFailed, LimitReached):
                if self._output_type is not None:  # what was said on the way is of no type
                    raise
                return self.progress.partial_answer
            if (problem := self._problem_with(answer or "")) is None:
                return answer
            self.progress.messages.append(ChatMessage("user", problem))

    # -- what ends it ------------------------------------------------------------------------------------------------

    def _problem_with(self, answer: str) -> str | None:
        """What to tell the model if its answer is not of the type that is wanted.

        Raises:
            OutputInvalid: It was told often enough.
        """
        if self._output_type is None:
            return None
        problem, self._parsed = self._output_type.judge(answer, self._tree.limits.max_output_retries)
        return problem

    def _blocks_left(self) -> int | None:
        most = self._tree.limits.max_blocks
        return None if most is None else max(0, most - self.progress.blocks)

    def _count_errors(self, blocks: Sequence[Block]) -> None:
        failed = any(block.status not in ("ok", "exited") for block in blocks)
        self.progress.errors_in_a_row = self.progress.errors_in_a_row + 1 if failed else 0
        allowed = self._tree.limits.max_consecutive_errors
        if allowed is not None and self.progress.errors_in_a_row >= allowed:
            raise LimitReached("max_consecutive_errors", self.progress.errors_in_a_row, allowed)

    def _completion(self, response: str | None) -> Completion:
        return Completion(
            response=response,
            root_model=self._tree.calls.model_name(self._caller.depth, self._caller.model),
            depth=self._caller.depth,
            iterations=len(self.progress.trajectory),
            execution_time=time.monotonic() - self._started,
            usage_summary=self._tree.ledger.summary(self._caller.run),
            usage_by_depth=self._tree.ledger.by_depth(self._caller.run),
            parsed=self._parsed,
            limit=self._limit,
            is_stopped=self._kind == "stopped",
            isolation=self._isolation,
            messages=(*self._earlier, *self.progress.messages),
            trajectory=tuple(self.progress.trajectory),
            child_traces=tuple(self._child_traces),
        )

    def _emit_ended(self, response: str | None, error: str | None = None, limit: str | None = None) -> None:
        usage = self._tree.ledger.summary(self._caller.run)
        self._emit(
            RunEnded,
            response,
            error,
            len(self.progress.trajectory),
            time.monotonic() - self._started,
            usage,
            self._kind,
            limit or self._limit,
            self.progress.partial_answer,
            usage.total.total_cost,
        )

    def _emit_failed(self, failure: BaseException) -> None:
        is_cancelled = isinstance(failure, asyncio.CancelledError)
        self._kind = "cancelled" if is_cancelled else getattr(failure, "kind", "failed")
        self._emit_ended(None, in_words(failure), getattr(failure, "limit", None))


def _lookup(final: FinalVar) -> str:
    """Whether there is such a variable the REPL knows; it tells the model if not."""
    return f"FINAL_VAR({final.name!r})"


def _skipped(parsed: ParsedReply, blocks: Sequence[Block]) -> list[NotRun]:
    """What came after a block that was killed, for whose variables it was written, or after the last that may run."""
    was_killed = bool(blocks) and blocks[-1].status == "killed"
    names = [f"block {number}" for number in range(len(blocks) + 1, len(parsed.code) + 1)]
    if isinstance(parsed.final, FinalVar) and (was_killed or names):
        names.append(_lookup(parsed.final))
    if not names:
        return []
    why = f"Block {len(blocks)} was killed." if was_killed else "As many blocks were run as this run may have."
    return [NotRun(", ".join(names), why)]
