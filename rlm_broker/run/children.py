"""Children of a run: `rlm_query` as runs with REPLs of their own, or as plain completions.

Theory of operation. A query of a thousand prompts must not take the memory of a thousand runs. A parent must not wait
for a child that waits for the parent's place. Five rules follow.

1. A child run, a plain completion or an error answers each prompt. A completion serves a prompt at the greatest depth,
   with `repl=False`, or with the parent's own task, which divides no work. It also serves a prompt that
   `recursion="auto"` judges to need no REPL. Errors name the limit: `max_children_per_batch`, `max_children_total`.
2. Equal prompts with equal contexts are answered once, unless the query wants samples.
3. A prompt stays data until it has a place (`bounded_map`). One task for each of 65,000 prompts took 17 s to cancel.
4. Places are per depth (`Tree.child_places`). With one pool for all depths, parents that wait for their children would
   hold the places that those need: a deadlock.
5. The context of a child is opened when it has its place, not when the query comes: as many contexts are in memory as
   there are places.

A failure of a child, also one in the user's own functions, fills its slot and leaves its siblings alone.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import cast

import msgspec

from rlm_broker.concurrency.turns import bounded_map
from rlm_broker.context.store import store_as_it_is
from rlm_broker.context.stored import StoredContext, beginning, whole_text
from rlm_broker.errors import LimitReached, RlmBrokerError
from rlm_broker.events.event import PREVIEW_CHARS, RunStarted
from rlm_broker.results import ChildTrace
from rlm_broker.run.calls import Caller, in_words
from rlm_broker.run.recursion import divided, needs_repl
from rlm_broker.run.runner import Runner
from rlm_broker.run.tree import ChildPlaces, Tree
from rlm_broker.sandbox.blocks.query_contexts import GivenContext, QueryWithContexts
from sandbox_worker.wire.messages import Query, Slot
from sandbox_worker.wire.names import CONTEXT
from sandbox_worker.wire.prompts import LONG_TASK_CHARS, beginning_and_end

TOO_MANY_CHILDREN = Slot(error="max_children_total exceeded")
"""Answer to each prompt whose child run would exceed `max_children_total`."""
MAX_PROMPT_BYTES = 8 << 20
"""Maximum bytes of a context that is read for the prompt of a completion; a larger one is refused. 8 MiB are about two
million tokens, more than models read."""
OWN_TASK = "rlm_query: this is the task that this run has itself, so a plain completion answered it: divide it"
"""Note beside the answer to a prompt that is its run's own task. The REPL prints it to stderr."""


@dataclass(frozen=True, slots=True)
class _Child:
    """One child of a query.

    Attributes:
        place: Its place among the children of the query.
        prompt: Its task.
        given: Its context; None if the prompt is the context.
        is_echo: Whether its task is the parent's own.
    """

    place: int
    prompt: str
    given: GivenContext | None
    is_echo: bool = False


class Children:
    """The children of one run.

    Args:
        caller: The run.
        ends_at: `time.monotonic()` at which the run's time is up; None is never.
        begin: Makes the loop of a child, from its caller and the time at which it must end.

    Attributes:
        traces: Traces of the children, in the order of their ends.
    """

    def __init__(
        self, tree: Tree, caller: Caller, ends_at: float | None, begin: Callable[[Caller, float | None], Runner]
    ) -> None:
        self.traces: list[ChildTrace] = []
        self._tree = tree
        self._caller = caller
        self._ends_at = ends_at
        self._begin = begin
        self._started = 0

    async def slots(self, query: Query, below: Caller) -> list[Slot]:
        """Answer each prompt of a query, as far as the limits allow.

        Equal prompts share one answer, unless the query wants samples. A prompt stays data until there is a place for
        its child, so prompts beyond a limit never become more.

        Args:
            below: Caller of the queries of this run's REPL.
        """
        limits, count = self._tree.limits, len(query.prompts)
        try:
            served_by = self._tree.calls.model_name(below.depth, query.model)
        except RlmBrokerError as refused:
            return [Slot(error=in_words(refused))] * count
        most = limits.max_children_per_batch or count
        todo, places = self._different(query, min(count, most))
        runs, completions = list[_Child](), list[_Child]()
        for child in todo:
            (runs if self._has_repl(query, child, below) else completions).append(child)
        left = self._tree.ledger.left()["max_children_total"]
        # With "auto" some of `runs` will become completions, which are not counted: each run is counted as it begins.
        allowed = len(runs) if left is None or self._decides(query) else int(left)
        room = self._tree.child_places[below.depth]
        async with asyncio.TaskGroup() as group:
            completing = group.create_task(self._completions(query, completions, below, room))
            children = await bounded_map(
                runs[:allowed],
                lambda child: self._begun(query, child, below, served_by),
                limits.max_concurrent_children,
                places=room.places,
                session=self._caller.run,
            )
        answers = [*children, *[TOO_MANY_CHILDREN] * (len(runs) - len(children)), *completing.result()]
        slots = [Slot()] * len(todo)
        for child, slot in zip([*runs, *completions], answers, strict=True):
            assert slot is not None  # `bounded_map` gives None only for work beyond a time limit, and there is none
            slots[child.place] = slot
        beyond = Slot(error=f"max_children_per_batch exceeded: {count} > {most}")
        return [*(slots[place] for place in places), *[beyond] * (count - len(places))]

    def _different(self, query: Query, count: int) -> tuple[list[_Child], list[int]]:
        """Return the first `count` prompts without repetitions, and for each of them the place of its child there."""
        given = query.given if isinstance(query, QueryWithContexts) else ()
        found: dict[object, int] = {}
        todo: list[_Child] = []
        places: list[int] = []
        for index, prompt in enumerate(cast("Sequence[str]", query.prompts[:count])):  # `QueryAnswers` refuses others
            part = given[index] if given else None
            key = (index if query.samples else None, prompt, None if part is None else part.key)
            place = found.setdefault(key, len(todo))
            if place == len(todo):
                todo.append(_Child(place, prompt, part, self._is_echo(prompt, part)))
            places.append(place)
        return todo, places

    def _is_echo(self, prompt: object, given: GivenContext | None) -> bool:
        """Whether a child of a child run would get the task of its parent. A root's REPL has no task of its own to pass
        on."""
        if not self._caller.depth:
            return False
        if given is None:
            return self._caller.has_task_as_context and prompt == self._caller.question
        if given.name != CONTEXT:  # `GivenContext.name` is the first name of a context, and the REPL's own has this one
            return False
        return self._caller.has_task_as_context if given.is_task else prompt == self._caller.question

    # -- a REPL or none ----------------------------------------------------------------------------------------------

    def _decides(self, query: Query) -> bool:
        return self._tree.is_auto and query.repl is None

    def _has_repl(self, query: Query, child: _Child, below: Caller) -> bool:
        """Whether a child is a run. A given context is judged only when it is opened, see `_begun`."""
        if query.repl is False or below.depth >= self._tree.limits.max_depth or child.is_echo:
            return False
        if child.given is not None or not self._decides(query):
            return True
        return needs_repl(*divided(child.prompt), len(child.prompt), self._window(query, below))

    def _window(self, query: Query, below: Caller) -> int:
        return self._tree.calls.window_tokens(replace(below, model=query.model))

    # -- completions -------------------------------------------------------------------------------------------------

    async def _completions(
        self, query: Query, children: Sequence[_Child], below: Caller, room: ChildPlaces
    ) -> list[Slot | None]:
        most = self._tree.limits.max_concurrent_calls
        return await bounded_map(children, lambda child: self._completion(query, child, below, room), most)

    async def _completion(self, query: Query, child: _Child, below: Caller, room: ChildPlaces) -> Slot:
        async with AsyncExitStack() as held:
            try:
                text = child.prompt
                if child.given is not None:
                    text = await self._with_context(text, child.given, room, held)
            except RlmBrokerError as problem:
                return Slot(error=in_words(problem))
            slot = await self._asked(query, text, below)
        return msgspec.structs.replace(slot, note=OWN_TASK) if child.is_echo else slot

    async def _with_context(self, prompt: str, given: GivenContext, room: ChildPlaces, held: AsyncExitStack) -> str:
        """Return the prompt of a completion about a context. Its memory is accounted for until `held` is left.

        Raises:
            ContextRefused: The context cannot be read, or is too long for a prompt.
        """
        async with room.reading, given.opened(MAX_PROMPT_BYTES) as context:
            size_bytes = min(context.size_bytes, MAX_PROMPT_BYTES)  # `_one_text` refuses a longer context
            # A stored byte may become a character of 4 bytes: one wide character makes all of its text as wide.
            await held.enter_async_context(room.memory.held(4 * size_bytes))
            return _one_text(prompt, context, given.is_task)

    async def _asked(self, query: Query, text: str, below: Caller) -> Slot:
        plain = Query(id=query.id, want="llm", prompts=[text], model=query.model)
        (slot,) = await self._tree.calls.slots(below, plain)
        return slot

    # -- runs --------------------------------------------------------------------------------------------------------

    async def _begun(self, query: Query, child: _Child, below: Caller, served_by: str) -> Slot:
        prompt, given = child.prompt, child.given
        try:
            async with AsyncExitStack() as held:
                if given is None:
                    context = held.enter_context(store_as_it_is(prompt))
                else:
                    context = await held.enter_async_context(given.opened())
                    if self._decides(query) and not self._is_for_a_repl(query, prompt, given, context, below):
                        return await self._asked(query, _one_text(prompt, context, given.is_task), below)
                has_task = given is None or given.is_task
                shown = beginning_and_end(prompt) if given is None and len(prompt) > LONG_TASK_CHARS else prompt
                return await self._run(
                    replace(below, question=shown, model=query.model, has_task_as_context=has_task), context, served_by
                )
        except RlmBrokerError as problem:  # the context cannot be opened
            return Slot(error=in_words(problem))

    def _is_for_a_repl(
        self, query: Query, prompt: str, given: GivenContext, context: StoredContext, below: Caller
    ) -> bool:
        info = context.info
        if info.type_name != "str":
            return True
        start = beginning(context).text
        task, document = divided(start) if given.is_task else (prompt, start)
        return needs_repl(task, document, info.total_chars, self._window(query, below))

    async def _run(self, caller: Caller, context: StoredContext, served_by: str) -> Slot:
        try:
            self._tree.ledger.charge_child()
        except LimitReached:
            return TOO_MANY_CHILDREN
        self._started += 1
        caller = replace(caller, run=f"{self._caller.run}.{self._started}", block=0, asked_in=caller.block)
        started = time.monotonic()
        slot = Slot(error="cancelled")
        try:
            slot = await self._answered(caller, context, served_by)
        except Exception as error:  # noqa: BLE001 - the user's functions may raise anything: the siblings go on
            slot = Slot(error=f"{type(error).__name__}: {error}")
        finally:
            self.traces.append(
                ChildTrace(
                    depth=caller.depth,
                    duration_s=time.monotonic() - started,
                    prompt_preview=(caller.question or "")[:PREVIEW_CHARS],
                    result_preview=slot.text[:PREVIEW_CHARS] or None,
                    error=slot.error,
                )
            )
        return slot

    async def _answered(self, caller: Caller, context: StoredContext, served_by: str) -> Slot:
        started = time.monotonic()
        ends = [self._ends_at, _after(started, self._tree.limits.child_timeout_s)]
        runner = self._begin(caller, min((end for end in ends if end is not None), default=None))
        try:
            emit = self._tree.events.of(caller.run, caller.depth)
            emit(RunStarted, caller.question, served_by, {}, caller.asked_in)
            completion = await runner.run(context)
        except RlmBrokerError as error:
            is_late = isinstance(error, LimitReached) and error.limit == "child_timeout_s"
            why = f"child timeout after {time.monotonic() - started:.3f}s" if is_late else in_words(error)
            return Slot(text=runner.progress.partial_answer or "", error=why)
        return Slot(text=completion.response or "")


def _one_text(prompt: str, context: StoredContext, is_task: bool) -> str:
    """Return the prompt of a completion about a context.

    Raises:
        ContextRefused: The context is too long for a prompt.
    """
    text = whole_text(context, MAX_PROMPT_BYTES)
    return text if is_task else f"{text}\n\n{prompt}"


def _after(started: float, seconds: float | None) -> float | None:
    return None if seconds is None else started + seconds
