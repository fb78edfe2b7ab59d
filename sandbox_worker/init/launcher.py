"""The launcher: a child of init that starts the programs of a REPL.

Theory of operation
-------------------
A child of init takes milliseconds until it is locked in: the fork copies init's page tables, each write of parent and
child copies a page, and exec throws all of that away. So init keeps the child that it has forked for the first program,
the launcher. It begins a session, locks itself in as a REPL does, and waits on a socket for programs. It starts each by
`posix_spawn`, which shares memory until the exec and copies nothing. It waits for the program's first process, reports
its end, and is free for the next program once init has found no other process in the session.

The launcher runs one program at a time, so that a session belongs to one program. A program that comes meanwhile gets a
child of its own, which locks itself in and execs. A REPL without programs has no launcher.

Code cannot reach the launcher: its Landlock domain is a sibling of the REPL's, and it is not dumpable. Its own program
shares its domain, and may signal it, no more: it ignores what can be ignored. If it is killed, init ends its program
and forks another one. If it was stopped, it is continued before each program. A kernel before Landlock's ABI 6 lets the
REPL do the same.
"""

import contextlib
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from sandbox_worker.init.child import LAST_OF_STDIO, Confinement
from sandbox_worker.init.sockets import MOST_FDS, send
from sandbox_worker.isolation.layer import LayerFailed
from sandbox_worker.wire.control import MAX_PROGRAM_BYTES, Program, unpack_program
from sandbox_worker.wire.descriptors import HANDED_FD, RULESET_FD, receive

_START, _BECOME = b"s", b"b"
"""Packets to a child, with the descriptors of a program: start it and report its end, or become it."""
_ENDED = struct.Struct("=ci")
"""Layout of a child's report that its program has ended: `_STATUS`, and the wait status of its first process."""
_STATUS, _REASON, _LAST_REASON = b"=", b"!", b"x"
"""First bytes of reports. Behind the others stands why the program cannot be started; after the last one the child
ends."""
MAX_REPORT_BYTES = 1000
"""Most bytes of a report. The rest is cut."""
_IGNORED = tuple({*range(1, signal.NSIG)} - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, 32, 33})
"""Signals that a launcher ignores, and none of its programs: all, but for those that cannot be ignored, that of its
child's end, and two of the C library's. A program may mean its own processes by `pkill python`."""
NOT_STARTED = 127
"""Exit code of a child whose program cannot start, as a shell's."""


class ProgramLauncher:
    """Init's handle on a child that starts programs.

    Args:
        confinement: Locks the child in.
        opened: Descriptors of its first program: the packed program, the program's 0, 1 and 2, and its current folder.
            The caller closes them.
        becomes: Whether the child becomes that program, and starts no other.

    Attributes:
        pid: Its pid, and the number of its session.
        has_hung_up: Whether it says no more: it is about to end, or has become its program.

    Raises:
        OSError: The child cannot be forked.
    """

    def __init__(self, confinement: Confinement, opened: Sequence[int], *, becomes: bool) -> None:
        self.has_hung_up = False
        self._giving, taking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with taking, contextlib.ExitStack() as stack:
            stack.callback(self._giving.close)
            send(self._giving, _BECOME if becomes else _START, opened)
            self.pid = _fork(confinement.bounds.repl.max_processes)
            if self.pid == 0:
                _launch(confinement, taking.fileno())
            stack.pop_all()

    def fileno(self) -> int:
        return self._giving.fileno()

    def give(self, opened: Sequence[int]) -> None:
        """Have it start a further program. Raise OSError if it has ended."""
        os.kill(self.pid, signal.SIGCONT)
        send(self._giving, _START, opened)

    def hear(self) -> int | str | None:
        """Return the wait status of the program's first process, or why the program cannot be started; None if it has
        said neither."""
        try:
            said = self._giving.recv(MAX_REPORT_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # unix(7): its end was closed with a program unread
            said = _LAST_REASON + b"cannot be started: its launcher was killed"
        self.has_hung_up = said[:1] in (b"", _LAST_REASON)
        if said[:1] == _STATUS:
            return int(_ENDED.unpack(said)[1])
        return said[1:].decode("utf-8", "replace") if said else None

    def close(self) -> None:
        """Close the socket. A child that waits on it ends."""
        self._giving.close()


def reason(error: BaseException) -> str:
    """Return why a program cannot be started, as the rest of a sentence about it."""
    if isinstance(error, BlockingIOError):
        return "cannot be started: the REPL has as many processes as max_processes allows"
    why = error.strerror if isinstance(error, OSError) and not isinstance(error, LayerFailed) else str(error)
    return f"cannot be started: {why or repr(error)}"


def _fork(most: int) -> int:
    """Fork within `max_processes`. Elsewhere the limit does not bind init, which must be able to start a REPL."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        return os.fork()
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))


# -- in the child --------------------------------------------------------------------------------------------------


def _launch(confinement: Confinement, taking_fd: int) -> NoReturn:
    """Lock the child in as the REPL is, and start programs until init closes the socket."""
    try:
        confinement.settle([(taking_fd, HANDED_FD)])
        taking_fd = HANDED_FD
        os.closerange(LAST_OF_STDIO + 1, RULESET_FD)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        confinement.lock_down(for_program=True)
        taking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, HANDED_FD)
        while True:
            how, opened = receive(taking, 1, MOST_FDS + 1)
            if not opened:
                os._exit(0)
            taking.send(_run(opened, becomes=how == _BECOME))
            if how == _BECOME:
                os._exit(NOT_STARTED)
    except BaseException as error:  # noqa: BLE001 - reported to init
        with contextlib.suppress(OSError):
            os.write(taking_fd, _refusal(error, _LAST_REASON))
    os._exit(NOT_STARTED)


def _run(opened: list[int], *, becomes: bool) -> bytes:
    """Start or become a program. Return the report of its end, or of its failure to start."""
    program_fd, *places, folder = opened
    try:
        try:
            program = unpack_program(os.pread(program_fd, MAX_PROGRAM_BYTES, 0))
            os.fchdir(folder)
            if becomes:
                for number, fd in enumerate(places):
                    os.dup2(fd, number)
                for number in _IGNORED:
                    signal.signal(number, signal.SIG_DFL)
                _first_found(program, os.execve)
            moves = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(places)]
            # In a process group of its own: a program may signal its group, and the launcher is not part of it.
            start = partial(os.posix_spawn, file_actions=moves, setpgroup=0, setsigdef=_IGNORED)
            pid = _first_found(program, start)
        finally:
            for fd in opened:
                os.close(fd)
    except Exception as error:  # noqa: BLE001 - reported to init
        return _refusal(error)
    return _ENDED.pack(_STATUS, os.waitpid(pid, 0)[1])


def _refusal(error: BaseException, kind: bytes = _REASON) -> bytes:
    return (kind + reason(error).encode())[:MAX_REPORT_BYTES]


def _first_found(program: Program, start: Callable[[bytes, list[bytes], dict[bytes, bytes]], int]) -> int:
    """Start the first program of that name in the folders of PATH, or raise the OSError that tells most."""
    env, name = {**os.environb, **program.env}, program.argv[0]
    folders = [b""] if b"/" in name else env.get(b"PATH", os.fsencode(os.defpath)).split(b":")
    paths = [os.path.join(folder, name) for folder in folders]  # noqa: PTH118 - bytes
    failed: OSError | None = None
    for path in [each for each in paths if os.access(each, os.X_OK)] or paths:  # a try costs ten times a look
        try:
            return start(path, program.argv, env)
        except OSError as error:
            if failed is None or isinstance(failed, FileNotFoundError | NotADirectoryError):
                failed = error
    assert failed is not None
    raise failed
