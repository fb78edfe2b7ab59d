"""Children as handles: started in the background, waited for, cancelled, and asked again.

A started child is a query in the background. Its reply comes when it ends, in this block or between two later ones, and
the channel has it until its handle takes it. The handle asks the orchestrator whether its query was answered. So the
orchestrator knows when code waits for a child, and the clock of the block's computing stands still.
"""

import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NoReturn, cast

import msgspec

from sandbox_worker.repl.channel import ONLY_HERE, CannotAsk, Channel
from sandbox_worker.repl.child_contexts import ContextNotGiven
from sandbox_worker.repl.objects import class_name, is_a
from sandbox_worker.repl.queries import CHILD_ATTEMPTS, AnswerSchema, ChildrenCall, Queries, check_task, rendered
from sandbox_worker.wire import names
from sandbox_worker.wire.errors import FrameTooLarge, QueryTooLarge
from sandbox_worker.wire.messages import Query

SHOWN = "<child of rlm_start, "
"""Beginning of the text of a child."""


class Handles:
    """The function `rlm_start` of one REPL, and the background queries of its children.

    Args:
        channel: Connection to the orchestrator.
        queries: Makes the query of a child.
    """

    def __init__(self, channel: Channel, queries: Queries) -> None:
        self._channel = channel
        self._queries = queries
        self._held: dict[str, contextlib.ExitStack] = {}

    def rlm_start(
        self,
        task: str,
        model: str | None = None,
        *,
        context: Any = ...,
        repl: bool | None = None,
        output_type: Any = None,
        keep: bool = False,
    ) -> "Child":
        """Start a child run as `rlm_query` does, and return at once. The child lives in later blocks of this run, too.

        Args:
            task: As all arguments below, see `rlm_query`.
            keep: Whether the child's REPL stays when it has answered, so that `child.ask(task)` finds its variables.

        Returns:
            The child, with `done`, `result(timeout_s=None)`, `cancel()` and `ask(task)`.
        """
        if type(keep) is not bool or (keep and repl is False):
            raise TypeError("rlm_start() argument 'keep' must be True or False, and True needs a REPL")
        check_task(names.RLM_START, task)
        given = None if context is ... else [context]
        call = ChildrenCall(names.RLM_START, model, given, True if keep else repl, output_type)
        return Child(self, task, call, KeptRepl(self) if keep else None, is_first=True)

    def start(self, task: str, call: ChildrenCall, kept: "KeptRepl | None") -> str:
        """Start one child in the background, and return the id of its query.

        Raises:
            ContextNotGiven: The child was not started. The message is one sentence.
        """
        for id in [*self._held]:
            if self._channel.reply(id) is not None:
                self._let_go(id)
        with contextlib.ExitStack() as held:
            query = self._queries.children_query([task], call, held)
            query = msgspec.structs.replace(query, background=True, child=None if kept is None else kept.id())
            try:
                id = self._queries.sent(call.name, query, self._channel.start)
            except FrameTooLarge as error:
                raise ContextNotGiven(str(QueryTooLarge("", error.frame_bytes, error.limit_bytes))) from None
            self._held[id] = held.pop_all()  # the orchestrator reads a context when its child has a place
        return id

    def keep(self) -> str:
        """Ask for a REPL that several children use, one after the other; return the id of the query that keeps it."""
        return self._channel.start(Query(id="", want="keep", prompts=[""], background=True))

    def ask(
        self, want: Literal["wait", "cancel"], ids: Sequence[str], count: int = 0, timeout_s: float | None = None
    ) -> list[bool]:
        """Wait for background queries, or end them; return which of them were answered."""
        query = Query(id="", want=want, prompts=ids, count=count, timeout_s=timeout_s)
        slots = self._queries.sent(want, query, self._channel.ask).slots
        if (why := slots[0].error) is not None:
            raise RuntimeError(why)
        return [bool(slot.text) for slot in slots]

    def answer(self, id: str) -> str | None:
        """Return the answer of a background query; None before it has come."""
        if (reply := self._channel.reply(id)) is None:
            return None
        return rendered(reply.slots[0]) if reply.slots else "Error: there is not enough memory for the answer"

    def forget(self, id: str) -> None:
        """Drop the answer of a background query, and the files of its context."""
        self._channel.forget(id)
        self._let_go(id)

    def _let_go(self, id: str) -> None:
        if (held := self._held.pop(id, None)) is not None:
            held.close()


class KeptRepl:
    """A REPL that stays for several tasks of one child.

    Attributes:
        ids: Ids of the query that keeps it, and of the queries with its tasks.
    """

    def __init__(self, handles: Handles) -> None:
        self._handles = handles
        self.ids: list[str] = []

    def id(self) -> str:
        """Return the id of the query that keeps it. The first call sends that."""
        if not self.ids:
            self.ids.append(self._handles.keep())
        return self.ids[0]


class Child:
    """A child that works beside the code which started it. `rlm_start` and `ask` make it.

    Example:
        ```python
        async def answer(query: Query) -> list[Slot]:
            return [Slot("3")]

        with sandbox.repl("a b c", answer) as repl:
            print(repl.execute("print(rlm_start('How many words?', context=context).result())").stdout)  # 3
        ```
    """

    def __init__(self, handles: Handles, task: str, call: ChildrenCall, kept: KeptRepl | None, is_first: bool) -> None:
        self._handles = handles
        self._task = task
        self._call = call
        self._kept = kept
        self._is_first = is_first
        self._wanted = None if call.output_type is None else AnswerSchema(call.name, call.output_type)
        self._attempts = CHILD_ATTEMPTS
        self._taking = threading.RLock()
        self._id = ""
        self._answer: Any = None
        self._has_ended = False
        self._start(task if self._wanted is None else cast("str", self._wanted.asked(task)))

    def __repr__(self) -> str:
        state = "done; result() has" if self._has_ended else "not known to be done; result() waits for"
        return f"{SHOWN}{state} its answer>"

    def __reduce__(self) -> NoReturn:
        """Refuse pickling: another process has no connection to the orchestrator."""
        raise CannotAsk(ONLY_HERE)

    @property
    def done(self) -> bool:
        """Whether the answer is there. It does not wait."""
        _wait_for([self], 1, 0)
        return self._has_ended

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the answer and return it, as `rlm_query` does. A failure is a text that starts with `Error:`.

        Args:
            timeout_s: Maximum seconds of the wait; None waits until the child ends.

        Raises:
            TimeoutError: The child has not ended by then. It goes on.
        """
        if timeout_s is not None and (type(timeout_s) is bool or not is_a(timeout_s, int, float) or not timeout_s >= 0):
            raise TypeError(f"result() argument 'timeout_s' must be a number of seconds or None, not {timeout_s!r:.60}")
        _wait_for([self], 1, timeout_s)
        if not self._has_ended:
            raise TimeoutError(f"the child has not answered within {timeout_s:g} s, and goes on")
        return self._answer

    def cancel(self) -> None:
        """End the child with all that it has started, and wait until it has ended. A kept child loses its REPL.

        Without an answer, `result` is then a text that starts with `Error:`.
        """
        _cancel([self])

    def ask(self, task: str, *, context: Any = ..., output_type: Any = None) -> "Child":
        """Give a kept child another task, for after those that it has. It finds the variables of its earlier tasks.

        Args:
            task: Task of the child.
            context: As in `rlm_query`. The child is told the name of the variable that has it.
            output_type: As in `rlm_query`.

        Returns:
            A handle of the answer. Cancelling it ends this task alone.

        Raises:
            ValueError: The child was started without `keep=True`.
        """
        if self._kept is None:
            raise ValueError("ask() needs a child that was started with keep=True")
        check_task("ask", task)
        given = None if context is ... else [context]
        call = self._call._replace(name="ask", contexts=given, output_type=output_type)
        return Child(self._handles, task, call, self._kept, is_first=False)

    def _take(self) -> None:
        """Take the answer if it has come. After a wrong one the child is asked once more."""
        with self._taking:
            if self._has_ended or (text := self._handles.answer(self._id)) is None:
                return
            id, corrected = self._id, None
            if self._wanted is None:
                self._answer = text
            else:
                self._answer, corrected = self._wanted.judged(self._task, text)
            self._attempts -= 1
            if corrected is None or not self._attempts:
                self._has_ended = True
            else:
                self._start(cast("str", corrected))
            self._handles.forget(id)

    def _start(self, task: str) -> None:
        try:
            self._id = self._handles.start(task, self._call, self._kept)
        except ContextNotGiven as problem:
            self._answer, self._has_ended = f"Error: {problem}", True
            return
        if self._kept is not None:
            self._kept.ids.append(self._id)


def first(k: int, children: Iterable[Child], *, cancel_rest: bool = False) -> list[Child]:
    """Wait until `k` children of `rlm_start` are done, and return those, in the order of `children`.

    Args:
        k: Number of children.
        children: Children to wait for.
        cancel_rest: Whether the other children are cancelled. If not, they go on.
    """
    if not is_a(k, int) or type(k) is bool or is_a(children, str) or not isinstance(children, Iterable):
        raise TypeError("first() takes a number, and a list of children of rlm_start")
    given = list(children)
    if (wrong := next((each for each in given if not is_a(each, Child)), None)) is not None:
        raise TypeError(f"first() takes children of rlm_start, not a {class_name(wrong)}")
    given = list(dict.fromkeys(given))
    if not 0 <= k <= len(given):
        raise ValueError(f"first() argument 'k' is {k}, and there are {len(given):,} children")
    _wait_for(given, k, None)
    done = [child for child in given if child._has_ended][:k]
    if cancel_rest:
        _cancel([child for child in given if child not in done])
    return done


def _wait_for(children: Sequence[Child], k: int, timeout_s: float | None) -> None:
    """Wait until `k` of the children have ended, or the time is over, and take the answers that have come."""
    ends_at = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        pending = [child for child in children if not child._has_ended]
        missing = k - (len(children) - len(pending))
        if missing <= 0:
            return
        left_s = None if ends_at is None else ends_at - time.monotonic()
        if left_s is not None and left_s <= 0:
            count, left_s = 0, None
        else:
            count = missing
        answered = pending[0]._handles.ask("wait", [child._id for child in pending], count, left_s)
        for child, is_answered in zip(pending, answered, strict=True):
            if is_answered:
                child._take()
        if sum(answered) < missing:  # the time is over, as the orchestrator's clock says: that of a replay stands still
            return


def _cancel(children: Sequence[Child]) -> None:
    """End children, and wait until they have ended."""
    ids: list[str] = []
    for child in children:
        child._attempts = 1  # a wrong answer is not asked for again
        if not child._has_ended:
            ids.append(child._id)
        if child._kept is not None and child._is_first:
            ids += child._kept.ids
    if ids:
        children[0]._handles.ask("cancel", ids)
        _wait_for(children, len(children), 0)
