"""The fork server's process: its start, the requests on its control socket, and its end."""

import asyncio
import contextlib
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from rlm_broker.concurrency.forks import FORKING, left_to_parent, socketpair_of_parent
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import (
    SHORT_OF,
    ConfigurationError,
    RlmBrokerError,
    SandboxFailed,
    is_shortage,
    refused_by_machine,
)
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.workers.cgroups import MemoryGroup
from rlm_broker.sandbox.workers.held_process import InitProcess, ended
from rlm_broker.sandbox.workers.levels import SYSTEM_CALLS, unavailable
from rlm_broker.sandbox.workers.private_folder import PrivateFolder
from rlm_broker.sandbox.workers.python_paths import Venv, environment, isolated, python_paths, shown
from rlm_broker.sandbox.workers.worker import Worker
from sandbox_worker.wire import control
from sandbox_worker.wire.descriptors import receive
from sandbox_worker.wire.level import Level

_log = logging.getLogger("rlm_broker")

EXEC_TIMEOUT_S = 10.0
"""Seconds until a forked process must run the fork server's program. Beyond it, it is killed."""
START_TIMEOUT_S = 60.0
"""Seconds until a fork server without imports and set-up code must be ready. Beyond it, its start has failed."""
HEAP_MB, HEAP_WITH_IMPORTS_MB = 9, 40
"""Megabytes for the small objects of a fork server's modules: those of numpy and pandas take 30. It gives back the
rest; what goes beyond is spread over its address space, and makes forks slower."""
END_TIMEOUT_S = 5.0
"""Seconds until a fork server must have ended after its socket was closed. Beyond it, it is killed."""


class Preparation(Struct, frozen=True):
    """Imports, set-up code and a context of a zygote, for all of its workers.

    Attributes:
        setup: Code of the user's. Every REPL has its variables.
        context: Context of every REPL. It must stay open, since a dead zygote is replaced.
        timeout_s: Seconds for the preparation as a whole.
    """

    imports: tuple[str, ...] = ()
    setup: str = ""
    context: StoredContext | None = None
    timeout_s: float = START_TIMEOUT_S


class ZygoteGone(SandboxFailed):
    """The zygote was killed or stopped before it answered."""


class Zygote:
    """One zygote: the process, its control socket, and its folder on the host.

    Requests are made one at a time, and each answer is awaited: one left over would be taken for the next request's.
    """

    def __init__(
        self, level: Level, allow_exec: bool, preparation: Preparation, seed: int | None, venv: Venv | None = None
    ) -> None:
        self._level = level
        self._allow_exec = allow_exec
        self._preparation = preparation
        self._seed = seed
        self._venv = venv
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._usable = True
        self._control, self._theirs = socketpair_of_parent()
        self._control.setblocking(False)
        left_to_parent(self, Zygote._leave)
        try:
            self.folder = PrivateFolder()
        except BaseException:
            self._control.close()
            self._theirs.close()
            raise

    async def start(self) -> control.ZygoteReady:
        """Start the process, and return its own report.

        Raises:
            ZygoteGone: It was killed before it was ready.
            ConfigurationError: The preparation failed.
            IsolationUnavailable: A layer could not be applied.
            SandboxFailed: It cannot start for any other reason, or took too long.
            OSError: There was no process or descriptor for it.
        """
        (root := self.folder.path / "root").mkdir()
        paths = python_paths()
        heap_mb = HEAP_WITH_IMPORTS_MB if self._preparation.imports else HEAP_MB
        self._process, self._pidfd = start(self._theirs.fileno(), paths, self._seed, self._venv, heap_mb)
        self._theirs.close()
        pieces = () if self._preparation.context is None else self._preparation.context.pieces()
        told = shown(paths, self._venv)
        configure = control.Configure(
            level=self._level.name,
            new_root=_utf8(root),
            readable=[_utf8(path) for path in told.readable],
            hidden=[_utf8(path) for path in told.hidden],
            preload=list(self._preparation.imports),
            setup=self._preparation.setup,
            context=[piece for _, piece in pieces],
            seed=self._seed,
            packages=told.packages,
        )
        try:
            socket.send_fds(self._control, [control.pack(configure)], [fd for fd, _ in pieces])
            answer, _ = await self._answer(self._preparation.timeout_s)
        except ZygoteGone as error:
            if self._preparation == Preparation():
                raise SandboxFailed(str(error)) from None  # no ZygoteGone: its time is over, so it is not tried again
            limit = f"timeout_s = {self._preparation.timeout_s:g}"
            raise SandboxFailed(f"a template's imports, setup and context took longer than {limit}") from None
        except (OSError, EOFError):
            with contextlib.suppress(TimeoutError):  # a process closes its sockets before it has an exit status
                await asyncio.wait_for(ended(self._pidfd), END_TIMEOUT_S)
            why = _ended_early(self._level, self._process)
            if self._process.poll() == -signal.SIGKILL:  # killed from outside: a system call filter sends SIGSYS
                raise ZygoteGone(str(why)) from None
            raise why from None
        if isinstance(answer, control.NotPrepared):
            raise ConfigurationError(f"a template cannot be made: its {answer.step} failed: {answer.reason}")
        if isinstance(answer, control.ZygoteFailed):
            raise unavailable(self._level, answer.layer, answer.reason, answer.code)
        if not isinstance(answer, control.ZygoteReady):
            raise SandboxFailed("the sandbox's fork server sent an unexpected message")
        if self._level.has_own_root:
            self.folder.remove()  # the root is mounted in the zygote's own mount namespace only
        return answer

    async def spawn(self, limits: ReplLimits, group: MemoryGroup | None = None) -> Worker:
        """Have the zygote fork a worker. If it cannot, its control group is removed.

        Raises:
            ZygoteGone: The zygote does not answer.
            SandboxFailed: The zygote could not fork.
        """
        with contextlib.ExitStack() as undo:
            if group is not None:
                undo.callback(group.remove)
            scratch = self._make_scratch()
            ours, theirs = socketpair_of_parent()
            undo.callback(ours.close)
            request = control.Spawn(allow_exec=self._allow_exec, scratch=_utf8(scratch), bounds=limits.repl_bounds())
            with theirs:
                try:
                    fds = [theirs.fileno(), *([group.join_fd] if group else [])]
                    socket.send_fds(self._control, [control.pack(request)], fds)
                    answer, answer_fds = await self._answer(limits.start_timeout_s)
                except (OSError, EOFError) as error:
                    if is_shortage(error):  # the pidfd was cut off; the worker ends with its control socket
                        raise
                    self._usable = False
                    assert self._process is not None
                    why = _why_ended(self._process)
                    raise ZygoteGone(f"the sandbox's fork server is gone: {why}") from None
            if isinstance(answer, control.SpawnFailed):
                raise SandboxFailed(f"no worker could be forked: {answer.reason}")
            if not isinstance(answer, control.Spawned) or len(answer_fds) != 1:
                raise SandboxFailed("the sandbox's fork server sent an unexpected message")
            undo.pop_all()
        return Worker(self._level, InitProcess(answer_fds[0], ours), scratch, group, self._seed)

    def is_usable(self) -> bool:
        """Return whether the zygote lives, as far as is known, and has answered every request."""
        return self._usable and self._process is not None and self._process.poll() is None

    async def end(self) -> bool:
        """Close the zygote's socket, which ends it and all its workers; return when the zygote has ended. Return
        whether its folder is gone, too."""
        with contextlib.suppress(OSError):  # closed already, or the zygote has ended
            # A process forked by C code may have a copy, and would keep the zygote from its end.
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        self._theirs.close()
        if self._process is not None:
            try:
                await asyncio.wait_for(ended(self._pidfd), END_TIMEOUT_S if self._usable else 0)
            except TimeoutError:
                if self._process.returncode is None:  # else it was reaped, and the group may be another process's
                    # What it has just forked may be stopped, without a parent death signal. PermissionError: no
                    # CAP_KILL.
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(self._process.pid, signal.SIGKILL)
                await ended(self._pidfd)
            self._process.wait()
            if self._process.stderr is not None:
                self._process.stderr.close()
            self._leave()
            self._process = None
        return self.folder.remove()

    def _leave(self) -> None:
        """Close the pidfd, also in a forked process."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def _make_scratch(self) -> str:
        """Make a worker's scratch folder on the host, at a level without a root of its own; else return ""."""
        if self._level.has_own_root:
            return ""
        try:
            return tempfile.mkdtemp(prefix="scratch-", dir=self.folder.path)
        except OSError as error:
            raise refused_by_machine(f"no scratch folder can be made in {self.folder.path}", error) from None

    async def _answer(self, timeout_s: float) -> tuple[control.FromZygote, list[int]]:
        loop = asyncio.get_running_loop()
        has_answered = asyncio.Event()
        control_fd = self._control.fileno()
        loop.add_reader(control_fd, has_answered.set)
        try:
            async with asyncio.timeout(timeout_s):
                await has_answered.wait()
        except TimeoutError:
            self._usable = False  # a late answer would be taken for the next request's
            raise ZygoteGone(f"the sandbox's fork server did not answer within {timeout_s:g} s") from None
        finally:
            loop.remove_reader(control_fd)
        packet, fds = receive(self._control, control.MAX_PACKET_BYTES, 1)
        if not packet:
            raise EOFError
        return control.unpack_from_zygote(packet), list(fds)


def start(
    control_fd: int, paths: list[str], seed: int | None, venv: Venv | None = None, heap_mb: int = HEAP_MB
) -> tuple["subprocess.Popen[bytes]", int]:
    """Start the process, with its end of the control socket and its first `sys.path`; return it and a pidfd of it.
    `seed` is that of its hashes; None draws one. Code finds the programs of `venv` first. Raise OSError without a
    process or descriptor; no process is left then. `heap_mb` is reserved for its small objects."""
    with contextlib.ExitStack() as opened:
        own = os.pidfd_open(os.getpid())
        opened.callback(os.close, own)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)  # `Popen` would leave its own open if its pipe failed
        opened.callback(os.close, null)
        reserve = f"from sandbox_worker.zygote import reserve_arenas; reserve_arenas({heap_mb})"
        serve = f"from sandbox_worker.zygote.main import main; main({control_fd}, {own})"
        program = f"import sys; sys.path[:] = {paths!r}; {reserve}; {serve}"
        opened.enter_context(FORKING)
        opened.enter_context(_exec_bounded())
        process = subprocess.Popen(
            [sys.executable, *isolated(seed), "-S", "-c", program],
            pass_fds=[control_fd, own],
            env=environment(seed, venv),
            cwd="/",
            stdin=null,
            stdout=null,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl+C at the terminal signals the orchestrator alone
        )
    try:
        return process, os.pidfd_open(process.pid)
    except OSError:  # no descriptor is free; or SIGCHLD is ignored, and the process has ended and was reaped already
        process.kill()
        process.communicate()
        raise


@contextlib.contextmanager
def _exec_bounded() -> Iterator[None]:
    """Kill a process that this thread forks within the block and that runs no program after `EXEC_TIMEOUT_S`.

    `Popen` waits for the exec in vfork(2). A process that a SIGSTOP meets before it would hold this thread for ever.
    """
    earlier = _children(thread := threading.get_native_id())

    def kill_new() -> None:
        for pid in _children(thread) - earlier:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(EXEC_TIMEOUT_S, kill_new)
    with contextlib.suppress(RuntimeError):  # no thread can be started
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _children(thread: int) -> set[int]:
    """Return the pids of the processes that a thread has forked; none if this kernel does not list them."""
    try:
        return set(map(int, Path(f"/proc/self/task/{thread}/children").read_text().split()))
    except OSError:
        return set()


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one: a REPL takes 3, so that the usual 1,024 allow 300."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _log.info("this process's soft limit of open files was raised from %d to %d, its hard one", soft, hard)


EXIT_OF_SIGNAL = 128
"""Added to a signal's number in the exit status of the fork server's parent, if it has one, as shells do."""


def _ended_early(level: Level, process: "subprocess.Popen[bytes]") -> RlmBrokerError:
    """Return the error for the end of a fork server before it was ready."""
    if _killed_by(process) == signal.SIGSYS:
        reason = "the fork server was killed by SIGSYS, as a system call filter does for a call that it forbids"
        return unavailable(level, SYSTEM_CALLS, reason)
    why = _why_ended(process)
    number = re.search(r"\[Errno (\d+)\]", why)  # as Python's traceback ends
    what_would = SHORT_OF.get(int(number[1])) if number else None
    return SandboxFailed(f"the sandbox's fork server cannot start: {why}" + (f"; {what_would}" if what_would else ""))


def _why_ended(process: "subprocess.Popen[bytes]") -> str:
    """Return a fork server's last line on stderr, or the signal that killed it, or its exit status."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    words = ""
    if process.stderr is not None:
        os.set_blocking(process.stderr.fileno(), False)
        words = (process.stderr.read() or b"").decode("utf-8", "replace").strip()
    if words:
        return words.splitlines()[-1]
    number = _killed_by(process)
    return f"it was killed by {signal.Signals(number).name}" if number else f"it ended with status {process.poll()}"


def _utf8(path: str | Path) -> str:
    """Return `path` as the fork server names it, whose locale is C.UTF-8. Our own locale may know ASCII alone. Raise
    ConfigurationError for a name that is not UTF-8: no message can carry it."""
    try:
        return os.fsencode(path).decode()
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"the path {os.fsencode(path)!r} is not UTF-8: rename it, or set TMPDIR if it is the temporary folder"
        ) from None


def _killed_by(process: "subprocess.Popen[bytes]") -> int:
    """Return the number of the signal that ended a process, or 0."""
    status = process.poll()
    number = -status if status is not None and status < 0 else (status or 0) - EXIT_OF_SIGNAL
    return number if number in set(signal.Signals) else 0
