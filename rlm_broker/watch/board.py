"""The board of this process: the runs and REPLs it has, for `ps`, `stop` and the viewer.

Runs and REPLs put themselves on it. A server adds the names of keys, the runs in its queue, and REPLs with an id and an
end of its own, for example containers. All methods may be called from any thread.

Example, in a server:

    run = rlm.start(context, question)     # is on the board by itself
    BOARD.set_owner(run.id, "key 1")
    BOARD.add_repl(repl, id="cntr_1", owner="key 1", end=close_container)
"""

import atexit
import concurrent.futures
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

from rlm_broker.errors import ConfigurationError, RlmBrokerError
from rlm_broker.events.log import EventLog
from rlm_broker.events.observers import OBSERVERS, ObservedRepl, ReplState, SandboxObserver
from rlm_broker.events.progress import RunProgress
from rlm_broker.events.redaction import LONGEST_CHARS, redacted
from rlm_broker.watch.messages import ReplStatus, RunStatus

VARIABLE = "RLM_BROKER_CONTROL"
"""Environment variable: 1 gives library processes a control socket, 0 takes it from commands."""
QUESTION_CHARS = 300
"""Characters of a question in a status; the rest is cut."""
MOST_ENDED = 4
"""Ended runs on the board, so that a follower can read their last events. Each keeps its events."""
ENDED_S = 60.0
"""Seconds for which an ended run stays on the board. It goes when the board is next used."""


class BoardRun(Protocol):
    """The methods of `Run` for the board."""

    id: str
    log: EventLog | None

    def stop(self) -> None:
        """End the run with its best answer so far."""

    def cancel(self) -> None:
        """End the run without an answer."""

    def on_end(self, call: Callable[[BaseException | None], object]) -> None:
        """Call a function at the end of the run, with its error or None."""


class RunEntry:
    """A run on the board.

    Attributes:
        id: Id of the run.
        log: Events of the run.
        progress: State of the run.
        question: Question or task, without secrets, until the first event has it.
        owner: Name of the key that asked over HTTP; empty for a run of the process itself.
        is_queued: Whether the run waits for its place in a server.
        ended: Unix time in seconds of its end, or None.
        is_done: Resolved at its end.
    """

    def __init__(self, board: "Board", run: BoardRun, question: str | None) -> None:
        self.id = run.id
        self.log = run.log
        self.progress = RunProgress()
        self.question = _shown(question)
        self.owner = ""
        self.is_queued = False
        self.ended: float | None = None
        self.is_done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._board = board
        self._run = run
        self._started = time.time()
        self._failed = ""

    def stop(self, *, now: bool) -> None:
        """Begin to end the run: `now` cancels it, else it ends with its best answer. Does not wait for the end."""
        if self.ended is None:
            (self._run.cancel if now else self._run.stop)()

    @property
    def state(self) -> str:
        """State of the run, as in `RunStatus`."""
        if self.ended is None:
            return "queued" if self.is_queued else "running"
        return self.progress.ended.kind if self.progress.ended is not None else self._failed or "ended"

    def status(self) -> RunStatus:
        """Return the state of the run for other processes."""
        times = self._started, self.ended
        return self._board.run_status(self.id, self.progress, self.question, self.state, times, self.owner)

    def end(self, error: BaseException | None) -> None:
        """Take the end of the run. It stays on the board for a while, with its events."""
        self.ended = time.time()
        if error is not None:
            self._failed = error.kind if isinstance(error, RlmBrokerError) else "cancelled"
        self._board.run_ended(self)
        self.is_done.set_result(None)


class ReplEntry:
    """A REPL on the board.

    Attributes:
        id: Id of the REPL.
        owner: As of `RunEntry`.
        end: Called instead of the REPL's own `ainterrupt` and `aclose`, with whether it ends now. None calls these.
        state: As in `ReplStatus`, or "closed".
    """

    def __init__(self, board: "Board", repl: ObservedRepl, id: str) -> None:
        self.id = id
        self.owner = ""
        self.end: Callable[[bool], Awaitable[object]] | None = None
        self.state: ReplState | Literal["closed"] = "starting"
        self._board = board
        self._repl = repl
        self._since = time.time()
        self._waiting: list[concurrent.futures.Future[str]] = []

    def become(self, state: ReplState | Literal["closed"]) -> None:
        """Take a new state."""
        self.state, self._since = state, time.time()
        if self._waiting:
            self._wake()

    @property
    def run(self) -> str | None:
        """Id of the run with this REPL; None if it has none, or the run has ended."""
        return self._repl.tree if self._board.has_run(self._repl.tree) else None

    @property
    def pid(self) -> int | None:
        """Process id of its init, or None."""
        return self._repl.pid

    async def stop(self, *, now: bool) -> None:
        """Interrupt the block. `now` closes the REPL with all its processes."""
        if self.end is not None:
            await self.end(now)
        elif now:
            await self._repl.aclose()
        else:
            await self._repl.ainterrupt()

    def rests(self) -> concurrent.futures.Future[str]:
        """Return a future of the state in which no block runs: another block may begin at once, and be busy."""
        future: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._waiting.append(future)
        if self.state != "busy":
            self._wake()
        return future

    def status(self, memory_bytes: int = 0) -> ReplStatus:
        """Return the state of the REPL for other processes."""
        return ReplStatus(
            id=self.id,
            pid=os.getpid(),
            run=self.run,
            state=self.state,
            since=self._since,
            memory_bytes=memory_bytes,
            owner=self.owner,
        )

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(self.state)


class Board(SandboxObserver):
    """Runs and REPLs of one process.

    Attributes:
        is_on: Whether the process has a control socket. If not, runs are not put on the board.
    """

    def __init__(self) -> None:
        self.clear()

    def sandbox_opens(self) -> None:
        """Give the process its control socket, if it is to have one."""
        start_if_wanted()

    def clear(self) -> None:
        """Forget all: a forked process has none of them."""
        self.is_on = False
        self._live: dict[str, RunEntry] = {}
        self._ended: dict[str, RunEntry] = {}
        self._repls: dict[ObservedRepl, ReplEntry] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    # -- runs --------------------------------------------------------------------------------------------------------

    def add(self, run: BoardRun, question: str | None) -> None:
        """Put a run on the board at its beginning, if the process has a control socket. It ends there by itself."""
        if self.is_on:
            entry = self._live[run.id] = RunEntry(self, run, question)
            run.on_end(entry.end)

    def receivers(self, run: str) -> tuple[RunProgress, ...]:
        """Return the receivers of a run's events; none if it is not on the board."""
        entry = self._live.get(run)
        return () if entry is None else (entry.progress,)

    def set_queued(self, run: str, is_queued: bool) -> None:
        """Set whether a run waits for its place in a server. Ignores runs that are not on the board."""
        if (entry := self._live.get(run)) is not None:
            entry.is_queued = is_queued

    def set_owner(self, run: str, owner: str, task: str | None = None) -> None:
        """Name the key of a run on the board, and its task if that is not its question."""
        if (entry := self._live.get(run)) is not None:
            entry.owner, entry.question = owner, entry.question or _shown(task)

    @property
    def runs(self) -> list[RunEntry]:
        """The last ended runs, then the live ones, the oldest first."""
        self._drop_ended()
        return [*self._ended.values(), *self._live.values()]

    @staticmethod
    def run_status(
        id: str, progress: RunProgress, task: str | None, state: str, times: tuple[float, float | None], owner: str
    ) -> RunStatus:
        """Return the report of a run. Its task counts until an event has a question. `times` are the Unix times of its
        start and of its end, which is None while it runs."""
        question = progress.question or task
        is_live = state in ("queued", "running")
        doing = "waits for its turn" if state == "queued" else progress.doing
        return RunStatus(
            id=id,
            pid=os.getpid(),
            question=None if question is None else question[:QUESTION_CHARS],
            model=progress.model,
            state=state,
            turn=progress.turn,
            doing=doing if is_live else "",
            doing_since=times[1] or progress.since,
            started=times[0],
            ended=times[1],
            runs=max(1, progress.runs) if is_live else 0,
            tokens=progress.tokens,
            cost_usd=progress.cost_usd,
            owner=owner,
        )

    def has_run(self, run: str | None) -> bool:
        """Whether a run goes on."""
        return run in self._live

    def run_ended(self, entry: RunEntry) -> None:
        """Keep a run for a while after its end."""
        if self._live.pop(entry.id, None) is not None:
            self._ended[entry.id] = entry
        self._drop_ended()

    def _drop_ended(self) -> None:
        with self._lock:
            first_kept = time.time() - ENDED_S
            for place, entry in enumerate(reversed(list(self._ended.values()))):
                if place >= MOST_ENDED or (entry.ended or 0.0) < first_kept:
                    del self._ended[entry.id]

    # -- REPLs -------------------------------------------------------------------------------------------------------

    def add_repl(
        self,
        repl: ObservedRepl,
        *,
        id: str | None = None,
        owner: str = "",
        end: Callable[[bool], Awaitable[object]] | None = None,
    ) -> ReplEntry:
        """Put a REPL on the board, or give the one there an id, an owner and an end.

        Args:
            repl: The REPL.
            id: Id for the list and for `stop`; None makes one.
            owner: Name of its key.
            end: Called to stop it, with whether it ends now; see `ReplEntry.end`.
        """
        entry = self._repls.get(repl)
        if entry is None:
            entry = self._repls[repl] = ReplEntry(self, repl, id or f"repl-{os.getpid()}-{next(self._numbers)}")
        entry.id = id or entry.id
        entry.owner = owner or entry.owner
        entry.end = end or entry.end
        return entry

    def repl_opens(self, repl: ObservedRepl) -> None:
        """Put a REPL on the board."""
        self.add_repl(repl)

    def repl_became(self, repl: ObservedRepl, state: ReplState) -> None:
        """Take the new state of a REPL."""
        if (entry := self._repls.get(repl)) is not None:
            entry.become(state)

    def repl_closed(self, repl: ObservedRepl) -> None:
        """Take a REPL off the board. Has no effect when repeated."""
        if (entry := self._repls.pop(repl, None)) is not None:
            entry.become("closed")

    @property
    def repls(self) -> list[ReplEntry]:
        """Open REPLs."""
        return list(self._repls.values())


def _shown(question: str | None) -> str | None:
    """Return a question without secrets, also where it is cut."""
    return question if question is None else redacted(question[:LONGEST_CHARS], LONGEST_CHARS)


BOARD = Board()
"""The board of this process."""
OBSERVERS.append(BOARD)


_started_in = 0
"""Process that was given its control socket. A forked one is given its own."""


def start_if_wanted() -> bool:
    """Give a library process its control socket, if RLM_BROKER_CONTROL=1 asks for it.

    Returns:
        Whether the process has a control socket, so that runs are put on the board.

    Raises:
        ConfigurationError: The variable has another value than 0 or 1.
    """
    global _started_in
    if _started_in != os.getpid() and VARIABLE in os.environ and is_wanted(default=False):
        _started_in = os.getpid()
        from rlm_broker.watch.server import ControlSocket

        atexit.register(ControlSocket().start().close)
    return BOARD.is_on


def is_wanted(*, default: bool) -> bool:
    """Whether this process has a control socket; `default` holds if the variable says nothing."""
    given = os.environ.get(VARIABLE, "")
    if given not in ("", "0", "1"):
        raise ConfigurationError(f"{VARIABLE} = {given!r}: give 1 for a control socket, or 0 for none")
    return given == "1" if given else default
