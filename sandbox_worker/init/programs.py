"""Programs that the caller runs beside the REPL: their start, and their end with all processes they started.

Init finds a program's processes by their session. Each program starts a session before it locks itself in. No process
can leave the session afterwards: behind the seccomp filter `setsid` succeeds without an effect. So init also finds a
daemon whose parents have ended. The kernel does not reuse the session's number while one of its processes lives.
"""

import contextlib
import errno
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from sandbox_worker.init import files
from sandbox_worker.init.child import Confinement
from sandbox_worker.init.sockets import MOST_FDS
from sandbox_worker.isolation.layer import LayerFailed
from sandbox_worker.wire.bounds import WatchedLimit
from sandbox_worker.wire.control import MAX_PROGRAM_BYTES, ProgramEnded, RunProgram, unpack_program

ROUNDS = 200
"""Most searches for new processes of a program being killed. Killed processes count against `max_processes`
until init waits for them, so a fork bomb soon cannot fork."""
QUIET_ROUNDS = 2
"""Searches in a row that must find no new process: /proc is read while processes come and go."""
REPORT_FD, FOLDER_FD, PROGRAM_FD = 3, 4, 5
"""Descriptors in the child: its report if the program cannot start, its current folder, and the packed program."""
NOT_STARTED = 127
"""Exit code of a child whose program cannot start, as a shell's."""
MAX_REPORT_BYTES = 1000
"""Most bytes of such a report. The rest is cut."""


@dataclass(slots=True)
class _Program:
    """A program that runs or is being ended.

    Attributes:
        number: Number by which the orchestrator knows it.
        pid: Its first process; its session has the same number.
        report_fd: Readable end of the pipe in which its child reports a failed start.
        is_ending: Whether it is being ended.
        limit: The limit at which it is being ended, or None.
        status: Wait status of its first process, once that has ended.
    """

    number: int
    pid: int
    report_fd: int
    is_ending: bool = False
    limit: WatchedLimit | None = None
    status: int | None = None


class Programs:
    """The programs of one worker.

    Args:
        confinement: Locks each program in.
        pids: Lists the processes of the worker, as `Proc` names them.
        say: Called with the end of each program.
    """

    def __init__(
        self, confinement: Confinement, pids: Callable[[], list[int]], say: Callable[[ProgramEnded], None]
    ) -> None:
        self._confinement = confinement
        self._proc = confinement.proc
        self._pids = pids
        self._say = say
        self._running: dict[int, _Program] = {}

    def __bool__(self) -> bool:
        return bool(self._running)

    def sessions(self) -> list[int]:
        """Return the sessions of running programs."""
        return list(self._running)

    def start(self, request: RunProgram, fds: list[int]) -> int | None:
        """Start a program and return its session. Return None if it cannot start, which was reported.

        Args:
            request: The request.
            fds: Descriptors that came with the request. They are closed.
        """
        opened = list(fds)
        try:
            pid, report_fd = self._forked(request, opened)
        except files.FileNotOpened as error:
            self._say(ProgramEnded(request.number, no_folder=str(error)))
            return None
        except OSError as error:
            is_full = isinstance(error, BlockingIOError)
            why = "the REPL has as many processes as max_processes allows" if is_full else error.strerror
            self._say(ProgramEnded(request.number, not_started=f"cannot be started: {why}"))
            return None
        finally:
            for fd in opened:
                os.close(fd)
        self._running[pid] = _Program(request.number, pid, report_fd)
        return pid

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
        """Record that a child of init has ended. If it was a program's first process, the whole program ends."""
        if (program := self._running.get(pid)) is not None:
            program.status = status
            program.is_ending = True

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
            if not found and program.status is not None:
                self._forget(program, program.status)
        return True

    def all_were_killed(self, limit: WatchedLimit | None = None) -> None:
        """Report all programs as ended together with the REPL, at `limit` if there was one."""
        for program in list(self._running.values()):
            program.limit = program.limit or limit
            self._forget(program, signal.SIGKILL if program.status is None else program.status, with_repl=True)

    def _forked(self, request: RunProgram, opened: list[int]) -> tuple[int, int]:
        """Fork a program's child. Return its pid and the readable end of the pipe for its report.

        Args:
            request: The request.
            opened: Descriptors that came with the request. Further ones that init does not keep are added; the caller
                closes all of them.

        Raises:
            FileNotOpened: There is no such folder.
            OSError: The child cannot be forked.
        """
        if len(opened) != MOST_FDS:  # init had too many open files: the kernel drops descriptors that do not fit
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        try:
            opened.append(files.open_folder(request.cwd))
        except OSError as error:
            raise files.FileNotOpened(files.reason(error)) from None
        report_fd, child_report_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        opened.append(child_report_fd)
        try:
            pid = self._fork()
        except OSError:
            os.close(report_fd)
            raise
        if pid == 0:
            self._become_program(opened)
        return pid, report_fd

    def _fork(self) -> int:
        """Fork within `max_processes`. Elsewhere the limit does not bind init, which must be able to start a REPL."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        most = self._confinement.bounds.repl.max_processes
        resource.setrlimit(resource.RLIMIT_NPROC, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        try:
            return os.fork()
        finally:
            resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))

    def _become_program(self, opened: list[int]) -> NoReturn:
        """Lock the child in as the REPL is, enter the folder, and exec the program."""
        program_fd, stdin, stdout, stderr, folder, report_fd = opened
        try:
            places = (stdin, 0), (stdout, 1), (stderr, 2), (report_fd, REPORT_FD), (folder, FOLDER_FD)
            self._confinement.settle([*places, (program_fd, PROGRAM_FD)])
            report_fd = REPORT_FD
            program = unpack_program(os.pread(PROGRAM_FD, MAX_PROGRAM_BYTES, 0))
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and a program would inherit that
                signal.signal(number, signal.SIG_DFL)
            self._confinement.lock_down(takes_contexts=False)
            os.fchdir(FOLDER_FD)
            os.execvpe(program.argv[0], program.argv, {**os.environb, **program.env})
        except BaseException as error:  # noqa: BLE001 - reported to init
            why = error.strerror if isinstance(error, OSError) and not isinstance(error, LayerFailed) else str(error)
            with contextlib.suppress(OSError):
                os.write(report_fd, f"cannot be started: {why or repr(error)}".encode()[:MAX_REPORT_BYTES])
        os._exit(NOT_STARTED)

    def _kill(self, program: _Program) -> bool | None:
        """Kill all processes of a program. Return whether there were any; None if new ones keep appearing."""
        if program.status is None:  # the child may not have its session yet
            os.kill(program.pid, signal.SIGKILL)
        killed: set[int] = set()
        quiet = 0
        for _ in range(ROUNDS):
            new = [pid for pid in self._pids() if pid not in killed and self._proc.session(pid) == program.pid]
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
        del self._running[program.pid]
        try:
            said = os.read(program.report_fd, MAX_REPORT_BYTES).decode("utf-8", "replace")
        except BlockingIOError:  # killed before it could report
            said = ""
        os.close(program.report_fd)
        code = os.waitstatus_to_exitcode(status)
        self._say(
            ProgramEnded(
                program.number,
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                limit=program.limit,
                with_repl=with_repl,
                not_started=said or None,
            )
        )
