"""Programs that the caller runs beside the REPL: their start, and their end with all processes they started.

Init finds a program's processes by their session, which init's child began before it locked itself in. No process can
leave the session afterwards: behind the seccomp filter `setsid` succeeds without an effect. So init also finds a daemon
whose parents have ended. The kernel does not reuse the session's number while one of its processes lives.
"""

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sandbox_worker.init import files
from sandbox_worker.init.child import Confinement
from sandbox_worker.init.launcher import ProgramLauncher, reason
from sandbox_worker.init.sockets import MOST_FDS, Events
from sandbox_worker.wire.bounds import WatchedLimit
from sandbox_worker.wire.control import ProgramEnded, RunProgram

ROUNDS = 200
"""Most searches for new processes of a program being killed. Killed processes count against `max_processes`
until init waits for them, so a fork bomb soon cannot fork."""
QUIET_ROUNDS = 2
"""Searches in a row that must find no new process: /proc is read while processes come and go."""


@dataclass(slots=True)
class _Program:
    """A program that runs or is being ended.

    Attributes:
        number: Number by which the orchestrator knows it.
        child: Init's child that has started it, or has become it. Its session is the program's.
        is_ending: Whether it is being ended.
        limit: The limit at which it is being ended, or None.
        status: Wait status of its first process, once that has ended.
        not_started: Reason why it could not be started, or None.
    """

    number: int
    child: ProgramLauncher
    is_ending: bool = False
    limit: WatchedLimit | None = None
    status: int | None = None
    not_started: str | None = None

    def hear(self) -> bool:
        """Take what the child has said of the program's end. Return whether it has said anything."""
        said = self.child.hear()
        if isinstance(said, str):
            self.not_started = said
        elif said is not None:
            self.status = said
        return said is not None


class Programs:
    """The programs of one worker.

    Args:
        confinement: Locks each program in.
        pids: Lists the processes of the worker, as `Proc` names them.
        say: Called with the end of each program.
        events: What init waits for.
        on_news: Called when the launcher has said something. Call `sweep` then.
    """

    def __init__(
        self,
        confinement: Confinement,
        pids: Callable[[], list[int]],
        say: Callable[[ProgramEnded], None],
        events: Events,
        on_news: Callable[[], object],
    ) -> None:
        self._confinement = confinement
        self._proc = confinement.proc
        self._pids = pids
        self._say = say
        self._events = events
        self._on_news = on_news
        self._running: dict[int, _Program] = {}
        self._launcher: ProgramLauncher | None = None

    def __bool__(self) -> bool:
        return bool(self._running)

    def sessions(self) -> list[int]:
        """Return the sessions of running programs."""
        return list(self._running)

    def start(self, request: RunProgram, cwd: list[bytes], fds: list[int]) -> int | None:
        """Start a program and return its session. Return None if it cannot start, which was reported.

        Args:
            request: The request.
            cwd: Its current folder, as `Scratch.inner` gives it.
            fds: Descriptors that came with the request. They are closed.
        """
        opened = list(fds)
        try:
            if len(opened) != MOST_FDS:  # init had too many open files: the kernel drops descriptors that do not fit
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            try:
                opened.append(files.open_folder(cwd))
            except (files.FileNotOpened, OSError) as error:
                self._say(ProgramEnded(request.number, no_folder=files.refusal(error)))
                return None
            child = self._child_with(opened)
        except OSError as error:
            self._say(ProgramEnded(request.number, not_started=reason(error)))
            return None
        finally:
            for fd in opened:
                os.close(fd)
        self._running[child.pid] = _Program(request.number, child)
        return child.pid

    def end(self, number: int) -> None:
        """End the program of that number. Harmless if it has ended."""
        for program in self._running.values():
            if program.number == number:
                program.is_ending = True

    def end_at(self, limit: WatchedLimit, session: int) -> None:
        """End the program of a session, which has exceeded `limit`."""
        program = self._running[session]
        program.is_ending, program.limit = True, limit

    def ended(self, pid: int, status: int) -> None:
        """Record that a child of init has ended. If it was a program's, the whole program ends."""
        if (program := self._running.get(pid)) is not None:
            if not program.hear() and pid == self.launcher_pid and os.WIFEXITED(status):
                program.not_started = "cannot be started: its launcher has ended"  # with an error that it cannot report
            program.status = status if program.status is None else program.status
            program.is_ending = True
        if pid == self.launcher_pid:
            self._lose_launcher()

    def _hear(self, fd: int, _events: int) -> None:
        """Take what the launcher says."""
        assert self._launcher is not None
        program = self._running.get(self._launcher.pid)
        if program is None:
            self._launcher.hear()
        elif program.hear():
            program.is_ending = True
        if self._launcher.has_hung_up:  # `ended` tells the rest
            self._events.forget(fd)
        self._on_news()

    def sweep(self) -> bool:
        """Kill the processes of programs being ended. Report each program that has none left.

        Call it again whenever children of init have ended.

        Returns:
            False if a program keeps having new processes. The caller then kills all processes of the worker at once.
        """
        for program in [each for each in self._running.values() if each.is_ending]:
            found = self._kill(program)
            if found is None:
                return False
            if not found and (program.status is not None or program.not_started is not None):
                self._forget(program, program.status or 0)
        return True

    def all_were_killed(self, limit: WatchedLimit | None = None) -> None:
        """Report all programs as ended together with the REPL, at `limit` if there was one."""
        for program in list(self._running.values()):
            program.limit = program.limit or limit
            program.hear()
            self._forget(program, signal.SIGKILL if program.status is None else program.status, with_repl=True)
        if self._launcher is not None:
            self._lose_launcher()

    @property
    def launcher_pid(self) -> int:
        """Pid of the launcher; 0 if there is none."""
        return 0 if self._launcher is None else self._launcher.pid

    def _child_with(self, opened: Sequence[int]) -> ProgramLauncher:
        """Return a child that starts or becomes the program of these descriptors."""
        launcher = self._launcher
        if launcher is not None and launcher.pid not in self._running:
            with contextlib.suppress(OSError):
                if not launcher.has_hung_up:
                    launcher.give(opened)
                    return launcher
            self._lose_launcher()  # it was killed, and `ended` has not told yet
        child = ProgramLauncher(self._confinement, opened, becomes=self._launcher is not None)
        if self._launcher is None:
            self._launcher = child
            self._events.listen(child.fileno(), self._hear)
            self._proc.set_aside(child.pid)  # it runs our code alone, and counts for no limit of the REPL's
        return child

    def _lose_launcher(self) -> None:
        """Forget the launcher, which has ended. Its program closes the socket, if it has one."""
        assert self._launcher is not None
        self._events.forget(self._launcher.fileno())
        if self._launcher.pid not in self._running:
            self._launcher.close()
        self._launcher = None
        self._proc.set_aside(0)

    def _kill(self, program: _Program) -> bool | None:
        """Kill all processes of a program. Return whether there were any; None if new ones keep appearing."""
        if program.status is None and program.not_started is None:  # the child may not have its session yet
            os.kill(program.child.pid, signal.SIGKILL)
        killed: set[int] = set()
        quiet = 0
        for _ in range(ROUNDS):
            new = [pid for pid in self._pids() if pid not in killed and self._proc.session(pid) == program.child.pid]
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._proc.number_here(pid), signal.SIGKILL)
            killed.update(new)
            if len(killed) > self._confinement.bounds.repl.max_processes:  # here no kernel limit bounds their number
                return None
            quiet = 0 if new else quiet + 1
            if quiet == QUIET_ROUNDS:
                return bool(killed)
        return None

    def _forget(self, program: _Program, status: int, with_repl: bool = False) -> None:
        del self._running[program.child.pid]
        if program.child is not self._launcher:
            program.child.close()
        code = os.waitstatus_to_exitcode(status)
        self._say(
            ProgramEnded(
                program.number,
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                limit=program.limit,
                with_repl=with_repl,
                not_started=program.not_started,
            )
        )
