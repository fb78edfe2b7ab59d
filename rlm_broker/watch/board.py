"""The board of this process: the runs and REPLs it has, for `ps`, `stop` and the viewer.

Runs and REPLs put themselves on it. A server adds what only it knows: runs waiting in its queue (`add_run`), names of
keys (`set_owner`), and REPLs with an id and an end of its own, for example containers (`add_repl`). All methods may be
called from any thread.

Example, in a server:

    waiting = BOARD.add_run("ask_7", question, "gpt-5", owner="key 1", cancel=leave_the_queue)
    ...
    waiting.remove()                       # its turn has come
    run = rlm.start(context, question)     # is on the board by itself
    BOARD.set_owner(run.id, "key 1")
"""

import concurrent.futures
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from rlm_broker.errors import RlmBrokerError
from rlm_broker.events.log import EventLog
from rlm_broker.events.observers import OBSERVERS, ObservedRepl, ReplState, SandboxObserver
from rlm_broker.events.progress import NAME_CHARS, RunProgress
from rlm_broker.events.redaction import LONGEST_CHARS, redacted
from rlm_broker.watch.messages import ReplStatus, RunStatus

QUESTION_CHARS = 300
"""Characters of a question that are reported."""
MOST_ENDED = 4
"""Ended runs that stay on the board, so that a follower can read their last events. Each keeps its events."""
ENDED_S = 60.0
"""Seconds for which an ended run stays on the board. It goes when the board is next used."""


class BoardRun(Protocol):
    """The part of `Run` that the board uses."""

    id: str
    log: EventLog | None

    def stop(self) -> None:
        """End the run with its best answer so far."""

    def cancel(self) -> None:
        """End the run without an answer."""

    def on_end(self, call: Callable[[BaseException | None], object]) -> None:
        """Call a function when the run has ended, with the error that ended it."""


class RunEntry:
    """A run on the board.

    Attributes:
        id: Id of the run.
        owner: Name of the key that asked over HTTP; empty for a run of the process itself.
        progress: State of the run; None for one that waits in a queue.
        log: Events of the run; None for one that waits in a queue.
        is_queued: Whether the run waits for its place in a server.
        is_done: Resolved when the run has left the board's list of live runs.
    """

    def __init__(
        self,
        board: "Board",
        id: str,
        question: str | None,
        model: str,
        owner: str,
        stop: Callable[[], object] | None,
        cancel: Callable[[], object] | None,
    ) -> None:
        self.id = id
        self.owner = owner
        self.is_queued = False
        self.progress: RunProgress | None = None
        self.log: EventLog | None = None
        self.is_done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._board = board
        self._question = question if question is None else redacted(question[:LONGEST_CHARS], LONGEST_CHARS)
        self._model = model
        self._stop, self._cancel = stop or cancel, cancel or stop
        self._started = time.time()
        self._ended: float | None = None
        self._failed: str = ""

    def stop(self, *, now: bool) -> None:
        """Have the run end, or leave its queue. Does not wait for that."""
        end = self._cancel if now else self._stop
        if end is not None and not self.is_done.done():
            end()

    def end(self, error: BaseException | None = None) -> None:
        """Take the end of the run. It stays on the board for a while, with its events."""
        if self._ended is None:
            self._ended = time.time()
            if error is not None:
                self._failed = error.kind if isinstance(error, RlmBrokerError) else "cancelled"
            self._board.ended(self)
            self.is_done.set_result(None)

    def remove(self) -> None:
        """Take the run off the board."""
        self._board.remove_run(self)
        if not self.is_done.done():
            self.is_done.set_result(None)

    @property
    def state(self) -> str:
        """State of the run, as in `RunStatus`."""
        if self.progress is None:
            return "queued" if self._ended is None else self._failed or "ended"
        if self._ended is None:
            return "queued" if self.is_queued else "running"
        return self.progress.ended.kind if self.progress.ended is not None else self._failed or "ended"

    @property
    def ended(self) -> float | None:
        """Unix time in seconds of its end, or None."""
        return self._ended

    def status(self) -> RunStatus:
        """Return what is reported of the run."""
        progress = self.progress
        question = self._question if progress is None or progress.question is None else progress.question
        is_live = self._ended is None
        doing = "waits for its turn" if progress is None or self.is_queued else progress.doing
        return RunStatus(
            id=self.id,
            pid=os.getpid(),
            question=None if question is None else question[:QUESTION_CHARS],
            model=(progress.model if progress is not None else "") or self._model[:NAME_CHARS],
            state=self.state,
            turn=0 if progress is None else progress.turn,
            doing=doing if is_live else "",
            doing_since=self._ended or (self._started if progress is None else progress.since),
            started=self._started,
            ended=self._ended,
            runs=max(1, progress.runs) if progress is not None and is_live else int(is_live),
            tokens=0 if progress is None else progress.tokens,
            cost_usd=0.0 if progress is None else progress.cost_usd,
            owner=self.owner,
        )


class ReplEntry:
    """A REPL on the board.

    Attributes:
        id: Id of the REPL.
        owner: As of `RunEntry`.
        end: Called instead of the REPL's own `ainterrupt` and `aclose`, with whether it ends now. None calls these.
    """

    def __init__(self, board: "Board", repl: ObservedRepl, id: str) -> None:
        self.id = id
        self.owner = ""
        self.end: Callable[[bool], Awaitable[object]] | None = None
        self._board = board
        self._repl = repl
        self._state: ReplState = "starting"
        self._since = time.time()
        self._waiting: list[concurrent.futures.Future[None]] = []

    def became(self, state: ReplState) -> None:
        """Take a new state."""
        self._state, self._since = state, time.time()
        if self._waiting:
            self._wake()

    def remove(self) -> None:
        """Take the REPL off the board. Has no effect when repeated."""
        self._board.repl_closed(self._repl)

    @property
    def state(self) -> str:
        """State of the REPL as in `ReplStatus`, or "closed"."""
        return self._state if self._board.has_repl(self._repl) else "closed"

    @property
    def run(self) -> str | None:
        """Id of the run that has it; None if no run does, or has it no more."""
        return self._repl.tree if self._board.has_run(self._repl.tree) else None

    @property
    def pid(self) -> int | None:
        """Process id of its init, or None."""
        return self._repl.pid

    async def stop(self, *, now: bool) -> None:
        """Have the block end. `now` closes the REPL with all its processes."""
        if self.end is not None:
            await self.end(now)
        elif now:
            await self._repl.aclose()
        else:
            await self._repl.ainterrupt()

    def rests(self) -> concurrent.futures.Future[None]:
        """Return a future that is resolved when no block runs any more."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._waiting.append(future)
        if self._state != "busy":
            self._wake()
        return future

    def status(self, memory_bytes: int = 0) -> ReplStatus:
        """Return what is reported of the REPL."""
        return ReplStatus(
            id=self.id,
            pid=os.getpid(),
            run=self.run,
            state=self._state,
            since=self._since,
            memory_bytes=memory_bytes,
            owner=self.owner,
        )

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class Board(SandboxObserver):
    """Runs and REPLs of one process.

    Attributes:
        is_on: Whether the process has a control socket. If not, runs are not put on the board.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._live: dict[str, RunEntry] = {}
        self._ended: dict[str, RunEntry] = {}
        self._repls: dict[ObservedRepl, ReplEntry] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def add(self, run: BoardRun, question: str | None) -> None:
        """Put a run on the board that begins now, if the process has a control socket. It ends there by itself.

        Args:
            run: The run.
            question: Its question.
        """
        if not self.is_on:
            return
        entry = RunEntry(self, run.id, question, "", "", run.stop, run.cancel)
        entry.progress, entry.log = RunProgress(), run.log
        self._live[run.id] = entry
        run.on_end(entry.end)

    def receivers(self, run: str) -> tuple[RunProgress, ...]:
        """Return what receives the events of a run; empty if it is not on the board."""
        entry = self._live.get(run)
        return () if entry is None or entry.progress is None else (entry.progress,)

    def add_run(
        self,
        id: str,
        question: str | None,
        model: str = "",
        *,
        owner: str = "",
        stop: Callable[[], object] | None = None,
        cancel: Callable[[], object] | None = None,
    ) -> RunEntry:
        """Put a run on the board that waits in a queue.

        Args:
            id: Id under which it is listed and stopped.
            question: Its question.
            model: Name of its model.
            owner: Name of the key that asked.
            stop, cancel: Take it out of the queue. They are called on the loop of the control socket, may not block,
                and should be followed by `RunEntry.remove`. If one is None, the other is called.

        Returns:
            The entry. Call its `remove` when the run leaves the queue.
        """
        entry = self._live[id] = RunEntry(self, id, question, model, owner, stop, cancel)
        return entry

    def repl_opens(self, repl: ObservedRepl) -> None:
        """Put a REPL on the board."""
        self.add_repl(repl)

    def repl_became(self, repl: ObservedRepl, state: ReplState) -> None:
        """Take the new state of a REPL."""
        if (entry := self._repls.get(repl)) is not None:
            entry.became(state)

    def set_queued(self, run: str, is_queued: bool) -> None:
        """Say whether a run on the board waits for its place in a server. Has no effect for other runs."""
        if (entry := self._live.get(run)) is not None:
            entry.is_queued = is_queued

    def set_owner(self, run: str, owner: str, task: str | None = None) -> None:
        """Name the key that a run on the board was asked for with, and its task if that is not its question."""
        if (entry := self._live.get(run)) is not None:
            entry.owner, entry._question = owner, entry._question or (task and redacted(task, LONGEST_CHARS))

    def add_repl(
        self,
        repl: ObservedRepl,
        *,
        id: str | None = None,
        owner: str = "",
        end: Callable[[bool], Awaitable[object]] | None = None,
    ) -> ReplEntry:
        """Put a REPL on the board. One that is there keeps its entry, and gets the id, owner and end.

        Args:
            repl: The REPL. One that is opened is there already.
            id: Id under which it is listed and stopped; None makes one.
            owner: Name of the key it belongs to.
            end: Called to stop it, with whether it ends now; see `ReplEntry.end`.
        """
        entry = self._repls.get(repl)
        if entry is None:
            entry = self._repls[repl] = ReplEntry(self, repl, id or f"repl-{os.getpid()}-{next(self._numbers)}")
        entry.id = id or entry.id
        entry.owner = owner or entry.owner
        entry.end = end or entry.end
        return entry

    @property
    def runs(self) -> list[RunEntry]:
        """The last runs that ended, then those that go on or wait, the oldest first."""
        self._drop_ended()
        return [*self._ended.values(), *self._live.values()]

    @property
    def repls(self) -> list[ReplEntry]:
        """REPLs that are open."""
        return list(self._repls.values())

    def has_run(self, run: str | None) -> bool:
        """Whether a run goes on."""
        return run in self._live

    def has_repl(self, repl: ObservedRepl) -> bool:
        """Whether a REPL is open."""
        return repl in self._repls

    def remove_run(self, entry: RunEntry) -> None:
        """Take a run off the board."""
        self._live.pop(entry.id, None)
        self._ended.pop(entry.id, None)

    def repl_closed(self, repl: ObservedRepl) -> None:
        """Take a REPL off the board. Has no effect when repeated."""
        if (entry := self._repls.pop(repl, None)) is not None:
            entry.became("idle")

    def ended(self, entry: RunEntry) -> None:
        """Keep a run that has ended for a while."""
        if self._live.pop(entry.id, None) is not None:
            self._ended[entry.id] = entry
        self._drop_ended()

    def clear(self) -> None:
        """Forget all, in a process forked from the one that has them."""
        self.is_on = False
        self._live, self._ended, self._repls, self._lock = {}, {}, {}, threading.Lock()

    def _drop_ended(self) -> None:
        with self._lock:
            first_kept = time.time() - ENDED_S
            for entry in list(self._ended.values())[:-MOST_ENDED]:
                del self._ended[entry.id]
            for entry in list(self._ended.values()):
                if (entry.ended or 0.0) < first_kept:
                    del self._ended[entry.id]


BOARD = Board()
"""The board of this process."""
OBSERVERS.append(BOARD)
