"""Programs that the host runs beside the REPL: started, told apart from what the REPL started, and ended whole.

A program's processes are found by their session. Each program begins one before it is behind its layers, and no process
behind them can leave it: there `setsid` succeeds and does nothing. So a daemon is found whatever became of its parents,
and the kernel gives the session's number to no other process as long as one of the session lives.
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
from sandbox_worker.init.control_socket import MOST_FDS
from sandbox_worker.isolation.layer import LayerFailed
from sandbox_worker.wire.bounds import WatchedLimit
from sandbox_worker.wire.control import ProgramEnded, RunProgram
from sandbox_worker.wire.program import MAX_PROGRAM_BYTES, unpack_program

ROUNDS = 200
"""How often a program's processes are looked for until no new one is there. Those that have ended count against
`max_processes` until init takes leave of them, so that what forks on and on soon cannot."""
QUIET_ROUNDS = 2
"""So often nothing new has to be found: the list of processes is read while they come and go."""
REPORT_FD, FOLDER_FD, PROGRAM_FD = 3, 4, 5
"""In the child: where it says why the program cannot be started, its current folder, and what is started."""
NOT_STARTED = 127
MAX_REPORT_BYTES = 1000


@dataclass(slots=True)
class _Program:
    """One that runs, or is being ended.

    Attributes:
        pid: Of its first process; its session has the same number.
        report_fd: Readable end of what its child says.
        limit: At which it is being ended, if it is one.
        status: Of its first process, once that has ended.
    """

    number: int
    pid: int
    report_fd: int
    is_ending: bool = False
    limit: WatchedLimit | None = None
    status: int | None = None


class Programs:
    """Those of one worker.

    Args:
        pids: Lists the processes of the worker, as `Proc` names them.
        say: Called with the end of each.
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
        """Of those that run."""
        return list(self._running)

    def start(self, request: RunProgram, fds: list[int]) -> int | None:
        """Start a program; return its session. None: it cannot be started, and that was said.

        Args:
            fds: What travelled beside the request. They are closed.
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
        """End the program of that number; nothing happens if it has ended."""
        for program in self._running.values():
            if program.number == number:
                program.is_ending = True

    def end_at(self, limit: WatchedLimit, session: int) -> None:
        """End the program of a session, which is past a limit of its own."""
        program = self._running[session]
        program.is_ending, program.limit = True, limit

    def ended(self, pid: int, status: int) -> None:
        """Take note that a child of init has ended. What a program leaves running ends with its first process."""
        if (program := self._running.get(pid)) is not None:
            program.status = status
            program.is_ending = True

    def sweep(self) -> bool:
        """Kill what there is of programs that are being ended, and say of which nothing is left.

        To be called again whenever children of init have ended.

        Returns:
            False if a program cannot be emptied in this way: then everything has to be killed at once.
        """
        for program in [each for each in self._running.values() if each.is_ending]:
            found = self._kill(program)
            if found is None:
                return False
            if not found and program.status is not None:
                self._forget(program, program.status)
        return True

    def all_were_killed(self, limit: WatchedLimit | None = None) -> None:
        """Say that all have ended with the REPL; at which limit, if it was one."""
        for program in list(self._running.values()):
            program.limit = program.limit or limit
            self._forget(program, signal.SIGKILL if program.status is None else program.status, with_repl=True)

    def _forked(self, request: RunProgram, opened: list[int]) -> tuple[int, int]:
        """Return the pid of a program's child, and the end of the pipe in which it says why it cannot start.

        Args:
            opened: What travelled beside the request. What init needs no more is added, for the caller to close.

        Raises:
            FileNotOpened, OSError: There is none.
        """
        if len(opened) != MOST_FDS:  # the kernel drops those for which init has no room
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
        """Fork as `max_processes` allows. It binds init only here: elsewhere it has to be able to start a REPL."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        most = self._confinement.bounds.repl.max_processes
        resource.setrlimit(resource.RLIMIT_NPROC, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        try:
            return os.fork()
        finally:
            resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))

    def _become_program(self, opened: list[int]) -> NoReturn:
        """In the child: behind the layers that the REPL has, in its folder, into the program."""
        program_fd, stdin, stdout, stderr, folder, report_fd = opened
        try:
            places = (stdin, 0), (stdout, 1), (stderr, 2), (report_fd, REPORT_FD), (folder, FOLDER_FD)
            self._confinement.settle([*places, (program_fd, PROGRAM_FD)])
            report_fd = REPORT_FD
            program = unpack_program(os.pread(PROGRAM_FD, MAX_PROGRAM_BYTES, 0))
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and programs inherit
                signal.signal(number, signal.SIG_DFL)
            self._confinement.lock_down(takes_contexts=False)
            os.fchdir(FOLDER_FD)
            os.execvpe(program.argv[0], program.argv, {**os.environb, **program.env})
        except BaseException as error:  # noqa: BLE001 - init learns it
            why = error.strerror if isinstance(error, OSError) and not isinstance(error, LayerFailed) else str(error)
            with contextlib.suppress(OSError):
                os.write(report_fd, f"cannot be started: {why or repr(error)}".encode()[:MAX_REPORT_BYTES])
        os._exit(NOT_STARTED)

    def _kill(self, program: _Program) -> bool | None:
        """SIGKILL to all its processes; whether there were any. None: there are ever more of them."""
        if program.status is None:  # it may not have its session yet
            os.kill(program.pid, signal.SIGKILL)
        killed: set[int] = set()
        quiet = 0
        for _ in range(ROUNDS):
            new = [pid for pid in self._pids() if pid not in killed and self._proc.session(pid) == program.pid]
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._proc.number_here(pid), signal.SIGKILL)
            killed.update(new)
            if len(killed) > self._confinement.bounds.repl.max_processes:  # which the kernel does not bound here
                return None
            quiet = 0 if new else quiet + 1
            if quiet == QUIET_ROUNDS:
                return bool(killed)
        return None

    def _forget(self, program: _Program, status: int, with_repl: bool = False) -> None:
        del self._running[program.pid]
        try:
            said = os.read(program.report_fd, MAX_REPORT_BYTES).decode("utf-8", "replace")
        except BlockingIOError:  # killed before it could say
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
