"""Children of a run: `rlm_query` as runs with REPLs of their own, or as plain completions.

Theory of operation. A query of a thousand prompts must not take the memory of a thousand runs. A parent must not wait
for a child waiting for the parent's place. Six rules follow.

1. A child run, a plain completion or an error answers each prompt. A completion serves a prompt at the greatest depth,
   with `repl=False`, or with the parent's own task, which divides no work. It also serves a prompt that
   `recursion="auto"` judges to need no REPL. Errors name the limit: `max_children_per_batch`, `max_children_total`.
2. Equal prompts with equal contexts are answered once, unless the query wants samples.
3. A prompt stays data until it has a place (`bounded_map`). One task for each of 65,000 prompts took 17 s to cancel.
4. Places are per depth (`Tree.child_places`). With one pool for all depths, parents waiting for their children would
   hold the places that those need: a deadlock.
5. The context of a child is opened when it has its place, not when the query comes: as many contexts are in memory as
   there are places.
6. A child in the background is a query like any other here. Its connection cancels it, at the latest when that ends. A
   kept child is one more such query, which has the REPL until it is cancelled.

A failure of a child, also one in the user's own functions, fills its slot and leaves its siblings alone.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Final, NamedTuple, cast

import msgspec
from msgspec.structs import replace

from rlm_broker.broker.clients.base import estimate_tokens
from rlm_broker.concurrency.turns import bounded_map
from rlm_broker.context.store import store_as_it_is
from rlm_broker.context.stored_context import StoredContext, beginning, whole_text
from rlm_broker.errors import LimitReached, RlmBrokerError
from rlm_broker.events.event import PREVIEW_CHARS, RunStarted
from rlm_broker.results import ChildTrace
from rlm_broker.run.calls import Caller, in_words
from rlm_broker.run.persistent_repl import PersistentRepl
from rlm_broker.run.runner import Runner
from rlm_broker.run.tree import Tree
from rlm_broker.sandbox.blocks.query_contexts import GivenContext, QueryWithContexts
from sandbox_worker.wire.messages import Query, Slot
from sandbox_worker.wire.names import CONTEXT
from sandbox_worker.wire.prompts import LONG_TASK_CHARS, beginning_and_end

TOO_MANY_CHILDREN = Slot(error="max_children_total exceeded")
"""Answer to each prompt whose child run would exceed `max_children_total`."""
MAX_PROMPT_BYTES = 4 << 20
"""Maximum bytes of a context read for the prompt of a completion; a larger one is refused, as a query is. 4 MiB
are about a million tokens."""
NOT_KEPT = "this child is not kept: it was cancelled, or {} children are kept already (max_concurrent_children)"
"""Error of a child whose REPL is not kept."""
OWN_TASK = "rlm_query: this is the task that this run has itself, so a plain completion answered it: divide it"
"""Note beside the answer to a prompt that is its run's own task. The REPL prints it to stderr."""

INSTRUCTION_CHARS: Final = 300
"""Characters at the beginning, and at the end, of a prompt taken for the instruction. Between them is the
data."""
LOOKED_AT_CHARS: Final = 20_000
"""Characters of the data looked at."""
MOST_DIGITS: Final = 0.25
"""Share of digits among the characters other than spaces, above which a text is data. Prose with many dates and amounts
has a tenth."""
FEWEST_LINES: Final = 8
"""Lines that a table or a list has at least."""
MOST_LINES_APART: Final = 0.2
"""Share of the lines of a table that may have another number of separators than the rest."""
LIST_LINE_CHARS: Final = 40
"""Largest mean length, in characters, of the lines of a list. Lines of prose are longer, or a paragraph is one long
line."""
_SEPARATORS: Final = ",;\t|"
_JSON: Final = re.compile(r"""\s*[\[{]\s*(["\d{\[\-\]}]|true|false|null)""")
"""Beginning of a JSON object or array. A bracket alone may begin a Markdown link or a citation."""


class _Child(msgspec.Struct, frozen=True):
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


class KeptChild(NamedTuple):
    """A child that stays for further tasks: its REPL, and the turn of its tasks."""

    repl: PersistentRepl
    turn: asyncio.Lock


class Children:
    """The children of one run.

    Args:
        caller: The run.
        traces: List for the traces of the children, in the order of their ends.
        begin: Makes the loop of a child from its caller, and from the REPL that is kept for it.
    """

    def __init__(
        self,
        tree: Tree,
        caller: Caller,
        traces: list[ChildTrace],
        begin: Callable[[Caller, PersistentRepl | None], Runner],
    ) -> None:
        self._tree = tree
        self._caller = caller
        self._traces = traces
        self._begin = begin
        self._started = 0
        self._kept: dict[str, KeptChild] = {}

    async def keep(self, id: str, depth: int) -> Slot:
        """Keep a REPL for queries that name this id, until the caller is cancelled. The first of them opens it."""
        kept, sandbox = self._tree.child_places(depth).kept, self._tree.sandbox
        if depth >= self._tree.limits.max_depth:
            return Slot()
        if not kept.take():
            return Slot(error=NOT_KEPT.format(kept.taken))
        assert sandbox is not None
        repl = PersistentRepl(sandbox, self._tree.limits)
        self._kept[id] = KeptChild(repl, asyncio.Lock())  # now: the query behind this one has the child's first task
        try:
            async with repl:
                await asyncio.Event().wait()
        finally:
            del self._kept[id]
            kept.release()
        return Slot()

    async def slots(self, query: Query, below: Caller) -> list[Slot]:
        """Answer each prompt of a query, as far as the limits allow. A kept child does one task after the other."""
        if query.child is None or below.depth >= self._tree.limits.max_depth:
            return await self._slots(query, below, None)
        kept = self._kept.get(query.child)
        if kept is None:
            return [Slot(error=NOT_KEPT.format(self._tree.limits.max_concurrent_children))] * len(query.prompts)
        async with kept.turn:
            return await self._slots(query, below, kept.repl)

    async def _slots(self, query: Query, below: Caller, kept: PersistentRepl | None) -> list[Slot]:
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
        room = self._tree.child_places(below.depth)
        async with asyncio.TaskGroup() as group:
            completing = group.create_task(
                bounded_map(
                    completions,
                    lambda child: self._completion(query, child, below),
                    limits.max_concurrent_calls,
                    places=room.completions,
                    session=self._caller.run,
                )
            )
            children = await bounded_map(
                runs[:allowed],
                lambda child: self._begun(query, child, below, served_by, kept),
                limits.max_concurrent_children,
                places=room.runs,
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

    async def _completion(self, query: Query, child: _Child, below: Caller) -> Slot:
        text, given = child.prompt, child.given
        try:
            if given is not None:
                async with given.opened(MAX_PROMPT_BYTES) as context:
                    text = _one_text(text, context, given.is_task)
        except RlmBrokerError as problem:
            return Slot(error=in_words(problem))
        slot = await self._asked(query, text, below)
        return msgspec.structs.replace(slot, note=OWN_TASK) if child.is_echo else slot

    async def _asked(self, query: Query, text: str, below: Caller) -> Slot:
        plain = Query(id=query.id, want="llm", prompts=[text], model=query.model)
        (slot,) = await self._tree.calls.slots(below, plain)
        return slot

    # -- runs --------------------------------------------------------------------------------------------------------

    async def _begun(
        self, query: Query, child: _Child, below: Caller, served_by: str, kept: PersistentRepl | None
    ) -> Slot:
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
                is_long = len(prompt) > LONG_TASK_CHARS
                shown = beginning_and_end(prompt) if is_long else prompt
                whole = prompt if is_long and not has_task else None
                caller = replace(below, question=shown, model=query.model, has_task_as_context=has_task)
                return await self._run(replace(caller, whole_task=whole), context, served_by, kept)
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

    async def _run(self, caller: Caller, context: StoredContext, served_by: str, kept: PersistentRepl | None) -> Slot:
        try:
            self._tree.ledger.charge_child()
        except LimitReached:
            return TOO_MANY_CHILDREN
        self._started += 1
        caller = replace(caller, run=f"{self._caller.run}.{self._started}", block=0, asked_in=caller.block)
        started = time.monotonic()
        slot, runner = Slot(error="cancelled"), None
        try:
            runner = self._begin(caller, kept)
            slot = await self._answered(runner, caller, context, served_by)
        except asyncio.CancelledError:
            self._tree.calls.record_news(caller.run)
            raise
        except Exception as error:  # noqa: BLE001 - the user's functions may raise anything: the siblings go on
            slot = Slot(error=f"{type(error).__name__}: {error}")
        finally:
            self._traces.append(
                ChildTrace(
                    depth=caller.depth,
                    duration_s=time.monotonic() - started,
                    prompt_preview=(caller.question or "")[:PREVIEW_CHARS],
                    result_preview=slot.text[:PREVIEW_CHARS] or None,
                    error=slot.error,
                    messages=() if runner is None else runner.messages,
                    trajectory=() if runner is None else tuple(runner.progress.trajectory),
                )
            )
        return slot

    async def _answered(self, runner: Runner, caller: Caller, context: StoredContext, served_by: str) -> Slot:
        started = time.monotonic()
        try:
            emit = self._tree.events.of(caller.run, caller.depth)
            emit(RunStarted, caller.question, served_by, {}, caller.asked_in)
            completion = await runner.run(context)
        except RlmBrokerError as error:
            is_late = isinstance(error, LimitReached) and error.limit == "child_timeout_s"
            why = f"child timeout after {time.monotonic() - started:.3f}s" if is_late else in_words(error)
            return Slot(text=runner.progress.partial_answer or "", error=why)
        if completion.response is None:
            at = f" at the limit {completion.limit}" if completion.limit else ""
            return Slot(error=f"the child ended{at} without an answer")
        return Slot(text=completion.response)


def _one_text(prompt: str, context: StoredContext, is_task: bool) -> str:
    """Return the prompt of a completion about a context.

    Raises:
        ContextRefused: The context is too long for a prompt.
    """
    text = whole_text(context, MAX_PROMPT_BYTES)
    return text if is_task else f"{text}\n\n{prompt}"


# -- judgement of a prompt by size and form, since a task may be in any language ---------------------------------------


def needs_repl(task: str, document: str, chars: int, window_tokens: int) -> bool:
    """Whether a child gets a REPL: its context is long for its model, or is data that code reads better than a model.

    Args:
        task: Instruction. A code fence in it asks for code.
        document: Data that the instruction is about, or its beginning.
        chars: Characters of all the data.
        window_tokens: Tokens that the child's model reads.
    """
    return estimate_tokens(chars) > window_tokens / 2 or "```" in task or looks_like_data(document[:LOOKED_AT_CHARS])


def divided(prompt: str) -> tuple[str, str]:
    """Return the instruction and the data of a prompt: the first and the last line, and what is between them.

    Both lines are taken from `INSTRUCTION_CHARS` characters. A prompt shorter than two of these is all instruction.
    """
    if len(prompt) <= 2 * INSTRUCTION_CHARS:
        return prompt, ""
    first = prompt[:INSTRUCTION_CHARS].partition("\n")[0]
    last = prompt[-INSTRUCTION_CHARS:].rpartition("\n")[2]
    return f"{first}\n{last}", prompt[len(first) : len(prompt) - len(last)]


def looks_like_data(text: str) -> bool:
    """Whether a text is numbers, a table, a list or JSON, rather than prose."""
    if _JSON.match(text):
        return True
    solid = sum(not each.isspace() for each in text)
    if solid >= INSTRUCTION_CHARS and sum(map(str.isdigit, text)) > MOST_DIGITS * solid:
        return True
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < FEWEST_LINES:
        return False
    return sum(map(len, lines)) <= LIST_LINE_CHARS * len(lines) or any(_is_table(lines, each) for each in _SEPARATORS)


def _is_table(lines: list[str], separator: str) -> bool:
    """Whether nearly all lines have the same number of separators: two at least, since a sentence often has one."""
    counts = Counter(line.count(separator) for line in lines)
    number, times = counts.most_common(1)[0]
    return number >= 2 and times >= (1 - MOST_LINES_APART) * len(lines)
