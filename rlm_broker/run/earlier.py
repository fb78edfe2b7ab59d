"""Earlier turns: what a run takes over from another one, so that it goes on where that one was after some turn.

Theory of operation. A run's state after a turn is its conversation, its turns, and the variables of its REPL. The first
two are values (`Progress`), and the third comes back by running the blocks again (`ReplRecord`). There are two sources:

- The run itself, in memory (`first_turns`), for `Run.branch`. `Progress.marks` has the end of each turn. It costs a run
  six words for each turn: the list of messages only grows, and is copied where it is cut.
- The trace of a run (`from_trace`), for `resume`. The prompts and replies of the calls of the run's own loop are the
  conversation, and the events of its blocks are its turns. Outputs that were cut in later requests are whole there: the
  new run cuts them again if they do not fit.

A turn counts if the run has gone on after it. So neither a turn that was under way nor the one with the answer is taken
over. After the last turn that a limit allowed, a run is asked for its answer. From there it may go on with a higher
limit, and the loop makes the observation of that turn anew.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from rlm_broker.broker.models.models import FilePath
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.events.event import (
    BlockEnded,
    BlockPrinted,
    CallEnded,
    CallRetried,
    CallStarted,
    Event,
    IterationStarted,
    Replied,
    ReplReady,
    RunEnded,
    RunStarted,
    ToolEnded,
    ToolStarted,
)
from rlm_broker.events.redaction import LONGEST_CHARS, REDACTED, redacted
from rlm_broker.events.trace import events
from rlm_broker.results import Block, ChatMessage, ContextInfo, Iteration
from rlm_broker.run.ledger import Ledger, Spent
from rlm_broker.run.prompts.messages import EMPTY_REPLY, SUMMARISE, after_summary
from rlm_broker.run.reply import SHORT_REPLY_CHARS
from rlm_broker.run.tree import Progress
from rlm_broker.sandbox.blocks.record import ANY_MODEL, Gap, RecordedBlock, ReplRecord, asked, outcome_of
from rlm_broker.usage import Usage
from rlm_broker.values.parsing import parse_reply
from rlm_broker.values.text import printable
from rlm_broker.values.words import counted
from sandbox_worker.wire.messages import Slot
from sandbox_worker.wire.names import HISTORY

_NOT_WHOLE = re.compile(rf"{re.escape(REDACTED)}|\.\.\. \[[\d,]{{1,20}} characters cut\]")
"""Mark of a text that a trace does not have whole: a secret was replaced, or its middle was left out."""
MOST_ID_CHARS = 40
"""Characters of the id of a run in an error."""


class _TracedContext(Struct, frozen=True):
    """Facts about a context, as the first event of a run has them."""

    type: str
    chars: int
    parts: int
    is_task: bool = False
    is_in_kept_repl: bool = False


def context_facts(type_name: str, chars: int, parts: int) -> str:
    """Return what a context has in common with that of the earlier turns. A text is the same from its file."""
    in_parts = f" in {counted(parts, 'part')}" if parts and type_name != "str" else ""
    return f"a {type_name} of {counted(chars, 'character')}{in_parts}"


class Earlier(Struct, frozen=True):
    """The first turns of a run, from which other runs go on.

    Attributes:
        tree: Id of the run.
        progress: Its progress at the end of these turns. Each run that goes on takes a copy.
        context: Facts about its context, see `context_facts`; None before it has begun.
        question: Its question, of its trace; None: the task is in the context.
        spent: What it had used, if the run that goes on takes its place; nothing for a branch.
        metadata: Its settings, as its trace has them; empty for a branch.
        sample: Number of a branch among all that have come of the run, from 1: a cache answers each of them anew. 0 for
            a run that takes its place.
        samples: Gives these numbers.
        ledger: Ledger of the run, in which the means of a branch count, too; None before it has begun.
    """

    tree: str
    progress: Progress
    context: str | None
    question: str | None = None
    spent: Spent = field(default_factory=Spent)
    metadata: Mapping[str, Any] = {}
    sample: int = 0
    samples: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    ledger: Ledger | None = None

    @property
    def turns(self) -> int:
        """Number of the turns."""
        return len(self.progress.trajectory)

    def taken_over(self) -> Progress:
        """Return the progress with which a run goes on."""
        return first_turns(self.progress, self.turns, self.progress.record)

    def its_question(self, given: str | None) -> str | None:
        """Return the question of the run. A given one must be the same: the conversation is about it."""
        if given is not None and redacted(given, LONGEST_CHARS) != self.question:
            raise ConfigurationError("a run that goes on from a trace has the question there: leave the question out")
        return self.question if given is None else given

    def require_context(self, info: ContextInfo) -> None:
        """Raise `ConfigurationError` for a context other than that of the earlier turns."""
        given = context_facts(info.type_name, info.total_chars, info.parts_total)
        if self.context not in (None, given):
            raise ConfigurationError(
                f"the context is {given}, and the run to go on from was about {self.context}: give it the same context"
            )

    def require_turns(self, most: int, most_blocks: int | None) -> None:
        """Raise `ConfigurationError` if the limits leave no turn or no block for a run that goes on."""
        if self.turns >= most:
            raise ConfigurationError(f"max_iterations = {most} leaves no turn, the run has taken as many: give more")
        if most_blocks is not None and self.progress.blocks >= most_blocks:
            raise ConfigurationError(f"max_blocks = {most_blocks} leaves no block, the run has run as many: give more")


def first_turns(progress: Progress, turns: int, record: ReplRecord | None) -> Progress:
    """Return a copy of the progress that a run had made after its first `turns` turns.

    Args:
        record: Blocks that its REPL has run, with those of later turns.
    """
    if not turns:
        return Progress()
    mark = progress.marks[turns]
    return Progress(
        mark.messages[: mark.length],
        progress.replaced[: mark.replaced],
        {turn: mark for turn, mark in progress.marks.items() if turn <= turns},
        None if record is None else _record_of(record, progress.trajectory, turns),
        progress.trajectory[:turns],
        said=mark.said,
        draft=mark.draft,
        blocks=mark.blocks,
    )


def _record_of(record: ReplRecord, trajectory: Sequence[Iteration], turns: int) -> ReplRecord:
    """Return the record of the first turns. A later kill may have cost blocks of them, which are not in the record."""
    kept = at_turn = left = 0
    for turn in trajectory:
        for block in turn.blocks:
            kept = kept + 1 if block.status != "killed" else max(0, kept + 1 - (block.blocks_undone or kept + 1))
            left = min(left, kept)
        if turn.number <= turns:
            at_turn = left = kept
    first = record.until(left)
    if first.blocks < at_turn and first.problem is None:
        first.entries.append(Gap("a later block was killed, and has cost the other blocks their variables"))
    return first


# -- traces ------------------------------------------------------------------------------------------------------------


class _Retold:
    """The turns of one root run, rebuilt from its events in their order.

    Attributes:
        progress: Progress of the run: at first that of the turns which it has taken over itself.
        record: Blocks that its REPL has run, with the answers that they got.
        spent: Means that the run has used, with those that were used before and count for it.
        is_whole: Whether the events have all of its turns and of their conversation.
    """

    def __init__(self, progress: Progress, spent: Spent) -> None:
        self.progress, self.spent = progress, spent
        self.is_whole = True
        self.record = progress.record or ReplRecord()
        self._answers = defaultdict[int, list[tuple[bytes, Slot]]](list)
        self._asking: dict[int | str, tuple[int, bytes]] = {}
        self._since = self._waited_s = 0.0
        self._prompts: dict[int, str] = {}
        self._reply: str | None = None
        self._blocks: list[Block] = []
        self._is_over = False

    def take(self, event: Event) -> None:
        """Take the next event of the tree."""
        self._take_answer(event)
        match event:
            case CallStarted():
                self._asked(event)
            case CallEnded():
                self._answered(event)
            case RunStarted(depth=depth):
                self.spent.children += depth > 0
            case Replied(depth=0):
                self._reply = event.text
                is_short = len(event.text) < SHORT_REPLY_CHARS
                self.progress.said = (is_short and parse_reply(event.text).prose) or self.progress.said
            case BlockEnded(depth=0) if not self._is_over:
                self.progress.blocks += 1
                self.progress.take_draft(event.outcome)
                self._blocks.append(event.outcome)
                self._record(event)
            case IterationStarted(depth=0):
                self._end_turn()
                self.is_whole &= event.number == len(self.progress.trajectory) + 1 and self._has_conversation()
            case RunEnded(depth=0, limit="max_consecutive_errors"):
                self._end_turn()

    def _asked(self, event: CallStarted) -> None:
        """Count a call. Take the last message of a request of the run's loop: it is new."""
        self.spent.calls += 1
        if event.depth or self._is_over:
            return
        if self._reply is not None:  # no turn has begun since the reply: the run is asked for its best answer
            self._end_turn()
            self._is_over = True
            return
        prompt, progress = str(event.prompt), self.progress
        self._prompts[event.call] = prompt
        if event.system is not None and not progress.messages:
            progress.messages = [ChatMessage("system", event.system)]
        if progress.messages and progress.messages[-1].role == "user":  # it was too long, and is sent again, shorter
            progress.messages = progress.messages[:-1]
        if prompt == SUMMARISE:
            return
        progress.messages.append(ChatMessage("user", prompt))
        if progress.trajectory:
            progress.mark(len(progress.trajectory))

    def _answered(self, event: CallEnded) -> None:
        used_by = event.model or "", event.depth
        self.spent.usage[used_by] = self.spent.usage.get(used_by, Usage()) + event.usage
        prompt, progress = self._prompts.pop(event.call, None), self.progress
        if prompt is None or event.error is not None:
            return
        said = ChatMessage("assistant", event.response if event.response.strip() else EMPTY_REPLY)
        if prompt != SUMMARISE or len(progress.messages) < 2:
            progress.messages.append(said)
            return
        opening = (progress.replaced or progress.messages)[1].content
        progress.replaced += [*progress.messages, ChatMessage("user", SUMMARISE), said]
        again = ChatMessage("user", after_summary(str(opening), HISTORY))
        progress.messages = [progress.messages[0], again, said]

    # -- what its REPL ran -------------------------------------------------------------------------------------------

    def _record(self, event: BlockEnded) -> None:
        outcome, entries, answers = event.outcome, self.record.entries, self._answers[event.block]
        waited_s, self._waited_s, self._since = self._waited_s, 0.0, event.time
        if outcome.status == "killed":
            undone = outcome.blocks_undone
            del entries[0 if undone is None else len(entries) + 1 - undone :]
            return
        texts = (outcome.code, *(slot.text for _, slot in answers))
        problem = "was interrupted" if outcome.status == "interrupted" else None
        problem = "has a text that is not whole in the trace" if any(map(_NOT_WHOLE.search, texts)) else problem
        seconds = max(0.0, outcome.execution_time - waited_s)
        entries.append(RecordedBlock(outcome.code, outcome_of(outcome), seconds, answers, event.block, problem))

    def _take_answer(self, event: Event) -> None:
        """Take what code of the run asks, and what it gets: of a model, a child run or a tool."""
        match event:
            case CallStarted(run="1", depth=1):
                key = asked("llm", event.prompt, model=event.requested_model, system=event.system)
                self._asks(event, event.call, key)
            case CallEnded(run="1", depth=1):
                is_whole = event.error is not None or event.response
                self._got(event, event.call, Slot(event.response, event.error) if is_whole else None)
            case RunStarted(depth=1):
                self._asks(event, event.run, asked("rlm", event.question, model=ANY_MODEL))
            case RunEnded(depth=1):
                at = f" at the limit {event.limit}" if event.limit else ""
                why = f"the child ended{at} without an answer" if event.response is None else None
                told = event.response if event.error is None else event.partial_answer
                self._got(event, event.run, Slot(told or "", event.error or why))
            case ToolStarted(depth=0):
                self._asks(event, -event.call, asked("tool", event.arguments, tool=event.tool))
            case ToolEnded(depth=0):
                self._got(event, -event.call, Slot(event.result, event.error))

    def _asks(self, event: CallStarted | RunStarted | ToolStarted, name: int | str, key: bytes) -> None:
        self._since = self._since if self._asking else event.time
        self._asking[name] = (event.block, key)

    def _got(self, event: Event, name: int | str, slot: Slot | None) -> None:
        block, key = self._asking.pop(name, (0, b""))
        self._waited_s += 0.0 if self._asking else event.time - self._since
        if slot is not None:
            self._answers[block].append((key, slot))

    def _has_conversation(self) -> bool:
        roles = [message.role for message in self.progress.messages]
        wanted = ["system", *["user", "assistant"] * len(roles)][: len(roles)]
        replies = roles.count("assistant") + sum(message.role == "assistant" for message in self.progress.replaced)
        return roles == wanted and replies >= len(self.progress.trajectory)

    def _end_turn(self) -> None:
        if self._reply is not None:
            progress = self.progress
            progress.trajectory.append(Iteration(len(progress.trajectory) + 1, self._reply, tuple(self._blocks)))
            progress.mark(len(progress.trajectory))
        self._reply, self._blocks = None, []


def from_trace(trace: FilePath | Sequence[FilePath]) -> Earlier:
    """Return the turns of the last run in traces that has not answered.

    Args:
        trace: A trace; or several, before it those of the runs from which its run goes on itself.

    Raises:
        ConfigurationError: A file cannot be read or is not a trace, each of its runs has answered, or it lacks what is
            needed to go on.
    """
    paths = _paths(trace)
    where = paths[-1]
    trees = defaultdict[str, list[Event]](list)
    for event in itertools.chain.from_iterable(map(events, paths)):
        if isinstance(event, CallEnded) and not event.usage.is_possible:
            raise ConfigurationError(f"{where} is not a trace: the usage of a call in it is negative, or no number")
        if not isinstance(event, BlockPrinted | ReplReady | CallRetried):
            trees[event.tree].append(event)
    roots = {tree: each[0] for tree, each in trees.items() if isinstance(each[0], RunStarted)}
    done = _done(trees, roots)
    left = [tree for tree in roots if tree not in done]
    if not left:
        why = "its run has answered" if roots else "it has the beginning of none"
        raise ConfigurationError(f"there is no run to go on from in {where}: {why}")
    started = roots[left[-1]]
    try:
        traced = msgspec.convert(started.metadata.get("context"), _TracedContext)
    except msgspec.ValidationError:
        raise ConfigurationError(f"{where} does not say what its run was about: it is of an earlier release") from None
    if traced.is_in_kept_repl:
        raise ConfigurationError(
            f"the run of {where} was in a persistent REPL: its trace lacks the variables before it"
        )
    retold = _retold(left[-1], trees, roots)
    if not retold.is_whole:
        raise ConfigurationError(f"{where} is not whole: it lacks lines of its run, which so cannot go on")
    progress = first_turns(retold.progress, len(retold.progress.trajectory), retold.record)
    context = context_facts(traced.type, traced.chars, traced.parts)
    question = None if traced.is_task else started.question
    return Earlier(started.tree, progress, context, question, retold.spent, started.metadata)


def _paths(trace: FilePath | Sequence[FilePath]) -> list[Path]:
    require_kind("trace", trace, str, PathLike, Sequence)
    paths = [trace] if isinstance(trace, str | PathLike) else trace
    if not paths:
        raise ConfigurationError("name a trace to go on from: the list of traces is empty")
    for each in paths:
        require_kind("trace", each, str, PathLike)
        if (path := Path(each)).exists() and not path.is_file():  # a pipe waits for its writer, and can be read once
            raise ConfigurationError(f"{path} is not a regular file: write the trace to one")
    return [*map(Path, paths)]


def _done(trees: Mapping[str, Sequence[Event]], roots: Mapping[str, RunStarted]) -> set[str]:
    """Return the runs that have answered, and those that such a run has gone on from."""
    done = set[str]()
    for tree, started in reversed([*roots.items()]):
        last = trees[tree][-1]
        if isinstance(last, RunEnded) and last.how == "answered" and last.limit is None:
            done.add(tree)
        if tree in done and started.is_resumed and started.branch_of is not None:
            done.add(started.branch_of)
    return done


def _retold(tree: str, trees: Mapping[str, Sequence[Event]], roots: Mapping[str, RunStarted]) -> "_Retold":
    """Rebuild a run, and before it those from which it goes on itself."""
    chain = [roots[tree]]
    while before := chain[-1].branch_of:
        if before not in roots or any(each.tree == before for each in chain):
            name = printable(before)[:MOST_ID_CHARS]
            raise ConfigurationError(f"the run goes on from the run {name}: give the trace of that one before its own")
        chain.append(roots[before])
    retold = _Retold(Progress(), Spent())
    for started in reversed(chain):
        if started.branch_of:
            if started.after_turn not in (0, *retold.progress.marks):
                raise ConfigurationError(f"the trace has no turn {started.after_turn}, from which its run goes on")
            progress = first_turns(retold.progress, started.after_turn, retold.record)
            retold = _Retold(progress, retold.spent if started.is_resumed else Spent())
        for event in trees[started.tree]:
            retold.take(event)
    return retold
