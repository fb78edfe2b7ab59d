"""The loop of one run at one depth: prompt, code, REPL, observation, until there is an answer.

Theory of operation. A turn (`_turn`) is one reply of the model and the work on it:

1. `Conversation.fit` shortens the messages to what the model reads.
2. `TreeCalls.turn` makes the call.
3. `ReplyActions.act` runs the blocks of the reply, one after the other, and looks for an answer.
4. `_doubt` judges the answer. If it is taken, the run ends. Otherwise the next user message is the observation:
   outputs, skipped code, and faults of the answer.

A run ends in one of these ways, distinguished by `kind` and `limit` of its event `RunEnded`:

- An answer was taken. A guess is doubted once: the model wrote it before it saw the output beside it, or before it
  looked at the context. The same text again is taken, since a second doubt would only cost a turn.
- `max_iterations` or `max_blocks` is used up. One more call asks for the best answer (`_last_answer`); its code is not
  run, and `Completion.limit` names the limit. To raise an error instead would throw away all work of the run.
- `stop` was called. The best answer so far is returned, and no further call is made.
- A time limit, another limit, a failure or a cancellation. The error carries the partial results (`hand_to`).

All ends pass through one `within`: it cancels the task of the loop once and awaits its end. So a REPL of the run's own
is closed, and its processes are dead, when `run` returns. `stop` resolves a future watched by `within`. A cancellation
could not be distinguished from the caller's.

The loop is one class on purpose. A state machine or a class for each phase was rejected: the phases share nearly all of
their state (`Progress`, `Messages`, `Conversation`), and a reader would have to put the story together again. Judgement
without that state is in other modules: `reply`, `conversation`, `output_type`.
"""

import asyncio
import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from rlm_broker.broker.clients.base import BaseClient
from rlm_broker.broker.transport.connection import QueryHandler
from rlm_broker.concurrency.deadline import Late, StopRequested, T, within
from rlm_broker.context.stored_context import StoredContext, beginning
from rlm_broker.errors import LimitReached, ModelFailed, RunFailed, UnknownModel, ValueTooLarge
from rlm_broker.events.event import IterationStarted, ReplReady, RunEnded
from rlm_broker.results import Block, ChatMessage, Completion, ContextInfo, Isolation, Iteration
from rlm_broker.run.calls import Caller, in_words
from rlm_broker.run.conversation import FEWEST_OLDER_CHARS, Conversation
from rlm_broker.run.ledger import CAUTIOUS_CHARS_PER_TOKEN, Ledger
from rlm_broker.run.output_type import OutputType
from rlm_broker.run.persistent_repl import PersistentRepl, as_values
from rlm_broker.run.prompts.instructions import messages_to_send
from rlm_broker.run.prompts.messages import (
    ALL_FAILED,
    CUT,
    EMPTY_REPLY,
    FIRST_OF_MANY,
    SHOWN_WHOLE_CHARS,
    SUMMARISE,
    Messages,
    after_summary,
    not_replayed,
    typed_task,
    without_repl,
)
from rlm_broker.run.prompts.observation import first_of_many, most_shown, observation
from rlm_broker.run.prompts.system import MEANS, Facts, fitting, rounded_down, system_prompt
from rlm_broker.run.reply import ReplyActions, ReplyAnswer, blocks_not_run, read_reply
from rlm_broker.run.tree import Progress, Tree
from rlm_broker.sandbox.blocks.record import ReplRecord
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.tools import Tools
from rlm_broker.sandbox.workers.python_paths import WORTH_TELLING
from rlm_broker.values.parsing.finals import FinalVar
from rlm_broker.values.parsing.notes import NotRun
from sandbox_worker.wire.names import CONTEXT, HISTORY, TASK, numbered

MOST_EMPTY: Final = 3
"""Turns in a row without a word of the model, after which the run ends."""
MOST_HINTS: Final = 3
"""Times that a run is told of the same mistake."""
SCARCE: Final = 0.25
"""Share of a limit that is left, at which the model is told of it in each turn."""
MOST_MODELS: Final = 20
"""Maximum models in a prompt; further ones are left out."""


class Runner:
    """Asks the model, runs its code and shows it the outcome, until it answers or its turns are used up.

    Args:
        caller: The run: its name, depth and question.
        began: `time.monotonic()` at the beginning of its time.
        answer: Answers the queries of its REPL.
        progress: Progress of the run, shared with `answer`.
        tools: Functions and values for its model code.
        output_type: Type of its answer; None takes any text.
        persistent_repl: A REPL for several runs; None opens one for this run.

    Attributes:
        context: Facts about its context, once it runs.
    """

    context: ContextInfo
    _repl: SandboxedRepl | None = None

    def __init__(
        self,
        tree: Tree,
        caller: Caller,
        began: float,
        answer: QueryHandler,
        progress: Progress,
        tools: Tools,
        output_type: OutputType | None = None,
        persistent_repl: PersistentRepl | None = None,
    ) -> None:
        self._tree = tree
        self._caller = caller
        self._emit = tree.events.of(caller.run, caller.depth)
        self._began = began
        self._answer = answer
        self._tools = tools
        self._output_type = output_type
        self._persistent_repl = persistent_repl
        question = typed_task(caller.question, output_type.schema) if output_type else caller.question
        self._question = question
        self._window = tree.calls.known_window(caller)
        self._profile = fitting(tree.instructions.profile, self._window)
        self._task_name = TASK
        if caller.whole_task and (TASK in tools.functions or TASK in tools.values):
            self._task_name = f"_{TASK}"
        whole_in = self._task_name if caller.whole_task else ""
        self._says = Messages(question, self._profile, caller.has_task_as_context, whole_in)
        count = partial(tree.calls.count_tokens, caller)
        self._conversation = Conversation(progress, tree.calls.limit_tokens(caller), count)
        self._may_answer_unseen = True
        self._asked_about: str | None = None
        self._opening = ""
        self._context_name, self._parts = CONTEXT, 0
        self._extra: Mapping[str, Any] | None = None
        self._hinted = Counter[str]()
        self._actions: ReplyActions
        self._isolation: Isolation | None = None
        self._parsed: Any = None
        self._corrected = 0
        self._limit: str | None = None
        self._kind = "answered"
        self._stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._earlier_turns = len(progress.trajectory)
        self.progress = progress

    async def run(self, context: StoredContext) -> Completion:
        """Answer the question about `context`, within `run_timeout_s`, or within `child_timeout_s` for a child.

        Raises:
            LimitReached: A limit ended the run; the error carries the partial answer.
            ModelFailed: The model failed.
            OutputInvalid: The answer was not of the wanted type, after `max_output_retries` corrections.
            SandboxFailed: The sandbox itself broke.
        """
        self.context = context.info
        limits, name = self._tree.limits, self._caller.time_limit
        limit_s: float | None = getattr(limits, name)
        left_s = None if limit_s is None else self._began + limit_s - time.monotonic()
        has_repl = self._caller.depth < limits.max_depth
        work = self._with_repl(context) if has_repl else self._without_repl(context)
        try:
            response = await within(left_s, work, self._stop)
        except StopRequested:
            self._kind, response = "stopped", self.progress.partial_answer
        except Late:
            assert limit_s is not None
            late = LimitReached(name, limit_s, limit_s)
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

    @property
    def record(self) -> ReplRecord | None:
        """Blocks that its REPL has run so far, also after its end; None before it has a REPL."""
        return None if self._repl is None else self._repl.record

    @property
    def ledger(self) -> Ledger:
        """Ledger of the tree."""
        return self._tree.ledger

    def stop(self) -> None:
        """End the run with the best answer so far. Harmless after its end."""
        if not self._stop.done():
            self._stop.set_result(None)

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The whole conversation so far, with what a summary replaced."""
        return (*self.progress.replaced, *self.progress.messages)

    def hand_to(self, failure: RunFailed) -> None:
        """Put the partial results of the run into its error."""
        failure.take(self._completion(None), self.progress.partial_answer)

    async def _in_turn_time(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a part of the run in a task of its own, since a client may catch its cancellation and go on: the run's
        own task, cancelled once, would go on as well."""
        limit_s = self._tree.limits.iteration_timeout_s
        try:
            return await within(limit_s, work)
        except Late:
            assert limit_s is not None
            raise LimitReached("iteration_timeout_s", limit_s, limit_s) from None

    # -- a plain completion ------------------------------------------------------------------------------------------

    async def _without_repl(self, context: StoredContext) -> str | None:
        value = await asyncio.to_thread(context.value)
        self.progress.messages += without_repl(value, self._question)
        while True:
            reply = await self._called(is_loop=False)
            if (problem := await self._problem_with(reply)) is None:
                return reply if reply.strip() else None
            self.progress.messages.append(ChatMessage("user", problem))

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def _with_repl(self, context: StoredContext) -> str | None:
        started, persistent = time.monotonic(), self._persistent_repl
        sandbox, tools, values = self._tree.sandbox, self._tools.names, self._tools.values
        if self._caller.whole_task is not None:
            values = {**values, self._task_name: self._caller.whole_task}
        if persistent is None:
            assert sandbox is not None
            more: Any = {"values": values, "limits": self._tree.limits, "record": self.progress.record}
            opened: Any = sandbox.repl(context, self._answer, tools=tools, **more)
            opened.tree = self._tree.events.tree
        else:
            opened = persistent.repl(context, self._answer, tools, values)
        async with opened as repl:
            repl.kills_when_cancelled = persistent is None
            repl.tree = self._tree.events.tree
            name = CONTEXT if persistent is None else persistent.context_name
            self._context_name, self._parts = name, context.info.parts_total
            start = beginning(context, SHOWN_WHOLE_CHARS)
            if name != CONTEXT:
                self._says = replace(self._says, context=name)
            opening = self._says.opening(context.info, start, name)
            goes_on = bool(self.progress.trajectory)
            self._may_answer_unseen = self._caller.has_task_as_context or start.is_whole or goes_on
            if self._tree.instructions.prologue and not self._caller.depth:
                opening = f"{self._tree.instructions.prologue}\n\n{opening}"
            self._opening = opening
            if not goes_on:
                self.progress.messages += [ChatMessage("system", self._system(name)), ChatMessage("user", opening)]
            self._isolation, self._repl = repl.isolation, repl
            self._emit(ReplReady, repl.isolation, time.monotonic() - started)
            paid, run = self._tree.calls.paid, self._caller.run
            self._actions = ReplyActions(repl, self._tree.limits, self._emit, self.progress, paid, run)
            try:
                if goes_on:
                    await self._go_on(repl)
                return await self._converse(repl)
            finally:
                if persistent is not None:
                    persistent.remember(self.messages)

    def _system(self, context_name: str) -> str:
        said = self._tree.instructions.system
        if said is not None:
            return said if isinstance(said, str) else said(self._caller.depth)
        return system_prompt(facts_of(self._tree, self._caller, self._tools, context_name), self._profile)

    async def _go_on(self, repl: SandboxedRepl) -> None:
        """Take up the conversation of earlier turns. A trace lacks the observation of the last turn of a limit."""
        messages, last = self.progress.messages, self.progress.trajectory[-1]
        if messages[-1].role == "assistant":
            parsed = await read_reply(last.reply)
            self._observe(last.number, last.blocks, (*parsed.not_run, *blocks_not_run(parsed, last.blocks)), None)
        if self.progress.replaced:
            self._provide_history(repl)
        if (problem := repl.replayed.problem) is not None:
            told = not_replayed(repl.replayed.blocks, self.progress.blocks, problem)
            messages[-1] = ChatMessage("user", f"{messages[-1].content}\n\n{told}")

    async def _converse(self, repl: SandboxedRepl) -> str | None:
        turns = self._tree.limits.iterations(self._caller.depth)
        for number in range(len(self.progress.trajectory) + 1, turns + 1):
            self.progress.turns_left = turns - number
            answer, blocks, not_run = await self._in_turn_time(self._turn(repl, number))
            self._require_words()
            problem = None if answer is None else await self._doubt(answer, blocks, number < turns)
            if answer is not None and problem is None:
                return answer.text
            if self._actions.blocks_left() == 0:
                self._limit = "max_blocks"
            elif number == turns:
                self._limit = "max_iterations"
            self._observe(number, blocks, not_run, problem)
            self._count_errors(blocks)
            if self._limit is not None:
                break
        return await self._last_answer(repl)

    def _observe(self, number: int, blocks: Sequence[Block], not_run: Sequence[NotRun], problem: str | None) -> None:
        """Tell the model the outcome of a turn, and why its answer is not taken."""
        limits = self._tree.limits
        if self._limit is None:
            then = self._says.reminder(limits.iterations(self._caller.depth) - number, self._scarce())
        else:
            then = self._says.last_request()
        then = then if problem is None else f"{problem}\n\n{then}"
        most = most_shown(limits.max_observation_chars, self._window)
        if hints := self._hints_on(blocks, most):
            then = "\n\n".join([*hints, then])
        told = observation(blocks, not_run, most, then, has_answer=problem is not None)
        self.progress.messages.append(ChatMessage("user", told))
        if self._limit is None:
            self.progress.mark(number)

    async def _turn(self, repl: SandboxedRepl, number: int) -> tuple[ReplyAnswer | None, list[Block], Sequence[NotRun]]:
        self._emit(IterationStarted, number)
        reply = await self._reply(repl)
        self.progress.failures.clear()
        self.progress.failed_batch = 0
        self.progress.asked.clear()
        blocks: list[Block] = []
        try:
            answer, not_run = await self._actions.act(number, reply, blocks)
        finally:  # also of a turn that is cut short: its blocks belong to the partial results
            self.progress.trajectory.append(Iteration(number, reply, tuple(blocks), self._extra))
        return answer, blocks, not_run

    async def _reply(self, repl: SandboxedRepl) -> str:
        """Return one reply of a loop. As long as the provider refuses the request as too long, and it can be shortened,
        shorten it and ask again."""
        summarise = partial(self._summarise, repl)
        while True:
            try:
                await self._conversation.fit(summarise)
                return await self._called()
            except ModelFailed as failed:
                if not await self._conversation.takes_refusal(failed):
                    raise

    async def _called(self, *, is_loop: bool = True) -> str:
        messages: Sequence[ChatMessage] = self.progress.messages
        if is_loop and self._tree.instructions.messages is not None:
            messages = messages_to_send(self._tree.instructions, self._caller.depth, messages)
        is_whole = messages is self.progress.messages
        call = await self._tree.calls.turn(
            self._caller,
            messages,
            block=self.progress.blocks,
            is_loop=is_loop,
            has_own_prompt=is_loop and self._tree.instructions.system is None,
        )
        self._extra = call.extra
        said = call.response if call.response.strip() else EMPTY_REPLY
        self.progress.messages.append(ChatMessage("assistant", said))
        if is_loop:
            await self._conversation.learn(
                0 if self._tree.calls.is_recorded or not is_whole else call.usage.total_input_tokens
            )
        return call.response

    async def _summarise(self, repl: SandboxedRepl) -> None:
        """Replace all messages but the last by the model's own summary. `history` in the REPL keeps all of them."""
        last = self.progress.messages[-1]
        self.progress.messages = [*self.progress.messages[:-1], ChatMessage("user", SUMMARISE)]
        try:
            await self._conversation.shorten(range(2, len(self.progress.messages) - 1), FEWEST_OLDER_CHARS)
            summary = await self._called()
        except BaseException:
            self.progress.messages[-1] = last
            raise
        self.progress.replaced += self.progress.messages
        name = self._provide_history(repl)
        started_again = ChatMessage("user", after_summary(self._opening, name))
        notes = ChatMessage("assistant", summary if summary.strip() else EMPTY_REPLY)
        self.progress.messages = [self.progress.messages[0], started_again, notes, last]

    def _provide_history(self, repl: SandboxedRepl) -> str:
        """Give code the messages that a summary has replaced; return the name of their variable."""
        name = HISTORY if self._persistent_repl is None else numbered(HISTORY, self._persistent_repl.runs - 1)
        with contextlib.suppress(ValueTooLarge):  # the run goes on with the summary alone
            repl.provide_known({name: as_values(self.progress.replaced)})
        return name

    async def _last_answer(self, repl: SandboxedRepl) -> str | None:
        """Ask for the best answer without running code. An answer of a type may take several calls."""
        while True:
            try:
                reply = await self._in_turn_time(self._reply(repl))
                parsed = await read_reply(reply)
                if isinstance(parsed.final, FinalVar):
                    found = await self._actions.look_up(len(self.progress.trajectory), parsed.final, [])
                    answer = found or self.progress.partial_answer
                elif parsed.final is not None:
                    answer = parsed.final.text
                else:
                    answer = parsed.prose or self.progress.partial_answer
            except (ModelFailed, LimitReached):
                if self._output_type is not None:  # the partial answer was never validated
                    raise
                return self.progress.partial_answer
            if (problem := await self._problem_with(answer or "")) is None:
                return answer
            self.progress.messages.append(ChatMessage("user", problem))

    # -- what ends it ------------------------------------------------------------------------------------------------

    async def _doubt(self, answer: ReplyAnswer, blocks: Sequence[Block], can_ask: bool) -> str | None:
        """Return why an answer is not taken, as a message for the model; None takes it. The model may repeat a guess.

        Args:
            can_ask: Whether another turn is left.
        """
        if answer.is_guess and can_ask and answer.text != self._asked_about:
            if blocks:
                self.progress.said = self._asked_about = answer.text
                return self._says.unseen(answer.text)
            if not self._may_answer_unseen and not self.progress.blocks:
                self._may_answer_unseen = True
                self.progress.said = self._asked_about = answer.text
                return self._says.not_looked()
        failures = self.progress.failures | self.progress.late_failures
        is_failure = any(map(answer.text.startswith, failures))
        if is_failure and can_ask and answer.text != self._asked_about:
            self._asked_about = answer.text
            return self._says.failed(answer.text)
        return await self._problem_with(answer.text)

    def _hints_on(self, blocks: Sequence[Block], most_chars: int) -> Sequence[str]:
        """Return a sentence on each known mistake of a turn, each at most `MOST_HINTS` times in a run."""
        printed = 0
        for block in blocks:
            printed += len(block.stdout) + len(block.stderr)
        made = dict[str, str]()
        if self.progress.failed_batch:
            made["failed"] = ALL_FAILED.format(self.progress.failed_batch)
        if printed > most_chars:
            made["cut"] = CUT
        if self.progress.asked and (found := first_of_many(blocks, self.progress.asked, self._size_of)):
            made["first"] = FIRST_OF_MANY.format(*found)
        if not made:
            return ()
        hints = [hint for kind, hint in made.items() if self._hinted[kind] < MOST_HINTS]
        self._hinted.update(made.keys())
        return hints

    def _size_of(self, name: str) -> int | None:
        """Return the number of items in a variable, as the last block that changed it said; None for a text."""
        for turn in reversed(self.progress.trajectory):
            for block in reversed(turn.blocks):
                for variable in block.variables:
                    if variable.name == name:
                        return variable.size if isinstance(variable.size, int) and variable.type != "str" else None
        return self._parts if name == self._context_name else None

    def _scarce(self) -> str:
        """Return the means of the tree of which a quarter or less is left, in words."""
        limits, began, now = self._tree.limits, self._began, time.monotonic()
        ends_in_s = None if self._caller.depth else limits.run_timeout_s
        is_late = ends_in_s is not None and began + ends_in_s * (1 - SCARCE) <= now
        if not is_late and not self._tree.ledger.is_scarce(SCARCE):
            return ""
        left = {**self._tree.ledger.left(), "run_timeout_s": max(0.0, began + (ends_in_s or math.inf) - now)}
        told = []
        for name, words in MEANS.items():
            allowed, rest = getattr(limits, name), left.get(name)
            if allowed is not None and rest is not None and rest <= allowed * SCARCE:
                told.append(words.format(rest if isinstance(allowed, float) else int(rest)))
        return ", ".join(told)

    async def _problem_with(self, answer: str) -> str | None:
        """Return why an answer is not of the wanted type, as a message for the model; None if it is.

        Raises:
            OutputInvalid: The model was corrected `max_output_retries` times already.
        """
        if self._output_type is None:
            return None
        retries_left = self._tree.limits.max_output_retries - self._corrected
        problem, self._parsed = await self._output_type.judged(answer, retries_left)
        self._corrected += problem is not None
        return problem

    def _require_words(self) -> None:
        """Raise ModelFailed after `MOST_EMPTY` turns in a row without a reply: a further one would be no other."""
        last = self.progress.trajectory[-MOST_EMPTY:]
        if len(last) == MOST_EMPTY and not any(turn.reply.strip() for turn in last):
            name = self._tree.calls.model_name(self._caller.depth, self._caller.model)
            raise ModelFailed(f"{name} replied with nothing {MOST_EMPTY} times in a row: name another model")

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
            execution_time=time.monotonic() - self._began,
            usage_summary=self._tree.ledger.summary(self._caller.run),
            usage_by_depth=self._tree.ledger.by_depth(self._caller.run),
            parsed=self._parsed,
            limit=self._limit,
            is_stopped=self._kind == "stopped",
            isolation=self._isolation,
            messages=self.messages,
            trajectory=tuple(self.progress.trajectory),
            child_traces=tuple(self.progress.child_traces),
            earlier_turns=self._earlier_turns,
        )

    def _emit_ended(self, response: str | None, error: str | None = None, limit: str | None = None) -> None:
        if not self._emit.is_wanted:
            return
        usage = self._tree.ledger.summary(self._caller.run)
        self._emit(
            RunEnded,
            response,
            error,
            len(self.progress.trajectory),
            time.monotonic() - self._began,
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


# -- the facts of the system prompt: read from the tree, so that no number is configured twice ------------------------


def facts_of(tree: Tree, caller: Caller, tools: Tools, context_name: str = CONTEXT) -> Facts:
    """Return the facts of a run, whose context is in the variable `context_name`."""
    routing, below = tree.calls.routing, caller.depth + 1
    sandbox = tree.sandbox
    return Facts(
        tree.limits,
        caller.depth,
        reads_chars(routing.pick_for_code(None, below)),
        tree.calls.known_window(caller),
        [] if routing.policy == "pinned" else _models(tree, below),
        () if sandbox is None else sandbox.importable(WORTH_TELLING),
        f"{sys.version_info.major}.{sys.version_info.minor}",
        tools.documentation(),
        [*tools.names, *tools.values],
        context_name,
    )


def reads_chars(client: BaseClient) -> int | None:
    """Return the least window of a model in characters, as a round number; None if its window is not known."""
    window = client.context_tokens
    return None if window is None else rounded_down(int(window * CAUTIOUS_CHARS_PER_TOKEN), 2)


def _models(tree: Tree, depth: int) -> list[tuple[str, str]]:
    found = []
    for name in tree.calls.routing.names[:MOST_MODELS]:
        try:
            client = tree.calls.routing.pick_for_code(name, depth)
        except UnknownModel:
            continue
        chars = reads_chars(client)
        reads = "" if chars is None else f"reads {chars:,} characters"
        is_known = client.model_name == name
        found.append((name, ", ".join(each for each in ("" if is_known else client.model_name, reads) if each)))
    return [(name, what or "of the user's") for name, what in found]
