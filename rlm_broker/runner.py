"""One run at one depth: prompt, code, REPL, observation, until there is an answer."""

import asyncio
import time
from dataclasses import dataclass, field

import rlm_broker.prompts as prompts
from rlm_broker.context import StoredContext
from rlm_broker.errors import LimitReached, ModelFailed, ReplClosed, RlmBrokerError
from rlm_broker.handler.calls import Caller, RunCalls
from rlm_broker.ledger import Ledger
from rlm_broker.limits import Limits
from rlm_broker.parsing import FinalVar, NotRun, parse_reply
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.trace.events import (
    BlockEnded,
    BlockPrinted,
    BlockStarted,
    Emit,
    IterationStarted,
    Replied,
    ReplReady,
    RunEnded,
)
from rlm_broker.transport.connection import QueryHandler
from rlm_broker.types import Block, ChatMessage, ChildTrace, Completion, Isolation, Iteration


@dataclass(frozen=True, slots=True)
class Tree:
    """What all runs of one tree share."""

    calls: RunCalls
    ledger: Ledger
    sandbox: Sandbox
    emit: Emit
    system_prompt: str | None = None

    @property
    def limits(self) -> Limits:
        """The bounds of the tree."""
        return self.ledger.limits


@dataclass(slots=True)
class Progress:
    """How far a run has come; what is left of it when it is ended from outside."""

    messages: list[ChatMessage]
    trajectory: list[Iteration] = field(default_factory=list)
    partial_answer: str | None = None
    blocks: int = 0


class Runner:
    """Asks the model, runs its code, shows it the outcome, until it answers or its turns are used up.

    Args:
        caller: Which run this is, at which depth, about which question.
        answer: Answers what its REPL asks.
        child_traces: Filled by whoever answers.
    """

    def __init__(self, tree: Tree, caller: Caller, answer: QueryHandler, child_traces: list[ChildTrace]) -> None:
        self._tree = tree
        self._caller = caller
        self._answer = answer
        self._child_traces = child_traces
        self._isolation: Isolation | None = None
        self.progress = Progress([])

    async def run(self, context: StoredContext) -> Completion:
        """Answer the question about `context`.

        Raises:
            LimitReached: A limit ended the run; it carries the partial answer.
            ModelFailed: The model failed.
            SandboxFailed: The sandbox itself broke.
        """
        started = time.monotonic()
        system = self._tree.system_prompt or prompts.system(self._tree.limits, self._caller.depth)
        opening = prompts.opening(self._caller.question, context.info)
        self.progress = Progress([ChatMessage("system", system), ChatMessage("user", opening)])
        response: str | None = None
        error: str | None = None
        try:
            async with self._tree.sandbox.repl(context, self._answer) as repl:
                self._isolation = repl.isolation
                self._emit_ready(time.monotonic() - started)
                response = await self._converse(repl)
            return self._completion(response, time.monotonic() - started)
        except LimitReached as limit:
            error, limit.partial_answer = str(limit), limit.partial_answer or self.progress.partial_answer
            raise
        except (RlmBrokerError, asyncio.CancelledError) as failure:
            error = str(failure) or "cancelled"
            raise
        finally:
            self._emit_ended(response, error, time.monotonic() - started)

    async def _converse(self, repl: SandboxedRepl) -> str | None:
        for number in range(1, self._tree.limits.max_iterations + 1):
            reply = await self._ask(number)
            answer, blocks, not_run = await self._act(repl, number, reply)
            self.progress.trajectory.append(Iteration(number, reply, tuple(blocks)))
            if answer is not None:
                return answer
            seen = prompts.observation(blocks, not_run, self._tree.limits, self._caller.question)
            self.progress.messages += [ChatMessage("assistant", reply), ChatMessage("user", seen)]
        return await self._last_answer(repl)

    async def _ask(self, number: int) -> str:
        run, depth = self._caller.run, self._caller.depth
        self._tree.emit(IterationStarted(run, depth, number))
        call = await self._tree.calls.turn(self._caller, self.progress.messages)
        if call.response.strip():
            self.progress.partial_answer = call.response
        return call.response

    async def _act(
        self, repl: SandboxedRepl, number: int, reply: str
    ) -> tuple[str | None, list[Block], tuple[NotRun, ...]]:
        """Do what the reply says: the answer if there is one, what its code did, and what of it was not run."""
        parsed = parse_reply(reply)
        not_run = tuple(f"{item.what}: {item.reason}" for item in parsed.not_run)
        self._tree.emit(Replied(self._caller.run, self._caller.depth, number, reply, not_run))
        blocks: list[Block] = []
        for code in parsed.code:
            blocks.append(await self._execute(repl, number, code))
            if blocks[-1].final_answer is not None:
                return blocks[-1].final_answer, blocks, ()
            if blocks[-1].status == "killed":
                break  # the blocks after it were written for variables that are gone
        skipped = len(parsed.code) - len(blocks)
        left_out = (NotRun(f"the last {skipped} of your blocks", "The block before was killed."),) if skipped else ()
        if isinstance(parsed.final, FinalVar) and not skipped:
            blocks.append(await self._execute(repl, number, f"FINAL_VAR({parsed.final.name!r})"))
            return blocks[-1].final_answer, blocks, parsed.not_run
        text = None if parsed.final is None or isinstance(parsed.final, FinalVar) else parsed.final.text
        return text, blocks, (*parsed.not_run, *left_out)

    async def _execute(self, repl: SandboxedRepl, iteration: int, code: str) -> Block:
        run, depth = self._caller.run, self._caller.depth
        self.progress.blocks += 1
        number = self.progress.blocks
        self._tree.emit(BlockStarted(run, depth, iteration, number, code))
        block = await repl.aexecute(
            code, on_output=lambda stream, text: self._tree.emit(BlockPrinted(run, depth, number, stream, text))
        )
        self._tree.emit(BlockEnded(run, depth, number, block))
        return block

    async def _last_answer(self, repl: SandboxedRepl) -> str | None:
        """The turns are used up: one more call, in the user role, which newer providers insist on."""
        self.progress.messages.append(ChatMessage("user", prompts.last_request(self._caller.question)))
        try:
            reply = (await self._tree.calls.turn(self._caller, self.progress.messages)).response
            final = parse_reply(reply).final
            if isinstance(final, FinalVar):
                block = await self._execute(repl, self._tree.limits.max_iterations, f"FINAL_VAR({final.name!r})")
                return block.final_answer or self.progress.partial_answer
        except (ModelFailed, LimitReached, ReplClosed):
            return self.progress.partial_answer
        if final is not None:
            return final.text
        return reply.strip() or self.progress.partial_answer

    def _completion(self, response: str | None, duration_s: float) -> Completion:
        return Completion(
            response=response,
            root_model=self._tree.calls.model_name(self._caller.depth),
            depth=self._caller.depth,
            iterations=len(self.progress.trajectory),
            execution_time=duration_s,
            usage_summary=self._tree.ledger.summary(),
            isolation=self._isolation,
            messages=tuple(self.progress.messages),
            trajectory=tuple(self.progress.trajectory),
            child_traces=tuple(self._child_traces),
        )

    def _emit_ready(self, duration_s: float) -> None:
        assert self._isolation is not None
        self._tree.emit(ReplReady(self._caller.run, self._caller.depth, self._isolation, duration_s))

    def _emit_ended(self, response: str | None, error: str | None, duration_s: float) -> None:
        usage = self._tree.ledger.summary() if self._caller.depth == 0 else None
        iterations = len(self.progress.trajectory)
        self._tree.emit(RunEnded(self._caller.run, self._caller.depth, response, error, iterations, duration_s, usage))
