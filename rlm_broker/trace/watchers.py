"""The watchers of this process, which are told of its runs and REPLs.

Runs and REPLs tell `WATCHERS`, and know no more of who watches. `control.board` is a watcher, for `ps` and `stop`.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from rlm_broker.trace.event_log import EventLog
from rlm_broker.trace.events import Emit

ReplState = Literal["starting", "idle", "busy"]


class WatchedRun(Protocol):
    """The part of a run that watchers use. They may call it from any thread."""

    id: str
    log: EventLog | None

    def stop(self) -> None:
        """End the run with its best answer so far."""

    def cancel(self) -> None:
        """End the run without an answer."""

    def on_end(self, call: Callable[[BaseException | None], object]) -> None:
        """Call a function when the run has ended, with the error that ended it."""


class WatchedRepl(Protocol):
    """The part of a REPL that watchers use."""

    tree: str | None

    @property
    def pid(self) -> int | None:
        """Process id of its init; None while it has no process."""

    async def ainterrupt(self) -> None:
        """Interrupt its block."""

    async def aclose(self) -> None:
        """End its processes."""


class Watcher(Protocol):
    """Receives what happens to the runs and REPLs of a process. No method may block or raise, but `follows_runs`."""

    def follows_runs(self) -> bool:
        """Return whether runs are watched, so that they keep their events. It is asked before each run and sandbox.

        Raises:
            ConfigurationError: A setting of the watcher cannot be used.
        """
        ...

    def add(self, run: WatchedRun, question: str | None) -> None:
        """Take a run that begins now, with its question."""

    def receivers(self, run: str) -> Sequence[Emit]:
        """Return what receives the events of the run with this id."""
        ...

    def add_repl(self, repl: WatchedRepl) -> object:
        """Take a REPL that is being opened."""

    def became(self, repl: WatchedRepl, state: ReplState) -> None:
        """Take the new state of a REPL. Each block calls it twice."""

    def remove_repl(self, repl: WatchedRepl) -> None:
        """Take the end of a REPL."""


class Watchers:
    """All watchers of a process as one."""

    def __init__(self) -> None:
        self._all: tuple[Watcher, ...] = ()

    def install(self, watcher: Watcher) -> None:
        """Tell this watcher from now on."""
        self._all = (*self._all, watcher)

    def follows_runs(self) -> bool:
        """Return whether one of them watches runs."""
        return any([watcher.follows_runs() for watcher in self._all])

    def add(self, run: WatchedRun, question: str | None) -> None:
        """Tell of a run that begins now."""
        for watcher in self._all:
            watcher.add(run, question)

    def receivers(self, run: str) -> list[Emit]:
        """Return what receives the events of the run with this id."""
        return [emit for watcher in self._all for emit in watcher.receivers(run)]

    def add_repl(self, repl: WatchedRepl) -> None:
        """Tell of a REPL that is being opened."""
        for watcher in self._all:
            watcher.add_repl(repl)

    def became(self, repl: WatchedRepl, state: ReplState) -> None:
        """Tell of the new state of a REPL."""
        for watcher in self._all:
            watcher.became(repl, state)

    def remove_repl(self, repl: WatchedRepl) -> None:
        """Tell of the end of a REPL."""
        for watcher in self._all:
            watcher.remove_repl(repl)


WATCHERS = Watchers()
"""The watchers of this process."""
