"""Pid 1 of a worker: locks itself in, loads the context, starts the REPL, drains its output, and ends it.

It never runs model code, and nothing that model code does reaches it: it has no signal handlers, its memory cannot be
read, and all it takes from the REPL's side are bytes in two pipes.
"""

import contextlib
import ctypes
import fcntl
import gc
import os
import select
import signal
import socket
from pathlib import Path
from typing import Any, NoReturn

from sandbox_worker.channel import Channel
from sandbox_worker.interrupts import Interrupts
from sandbox_worker.isolation.layers import LayerFailed, WorkerBounds, ZygoteWalls, lock_down_init, lock_down_repl
from sandbox_worker.loading import ContextBroken, load
from sandbox_worker.repl import Repl
from sandbox_worker.wire.control import (
    MAX_PACKET_BYTES,
    Control,
    Died,
    Drain,
    Drained,
    Failed,
    Interrupt,
    Interrupted,
    Load,
    Loaded,
    Locked,
    Spawn,
    Start,
    Started,
    Stop,
    Stopped,
    Written,
    pack,
    unpack_to_init,
)
from sandbox_worker.wire.headtail import HeadTail
from sandbox_worker.wire.messages import Stream

CONTROL_FD, DOOR_FD = 3, 4
PIPE_BYTES = 1 << 14
"""With the default of 64 KiB some 1,000 pipes exhaust an ordinary user's allowance (fs.pipe-user-pages-soft)."""
DRAIN_READS = 8
"""Reads of a pipe for one `Drain`: more than it can hold, and an end when something writes on and on."""
SFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC


def main(control_fd: int, spawn: Spawn, walls: ZygoteWalls, mapping_works: bool) -> NoReturn:
    """Be a worker: from the zygote's fork to the end."""
    _keep_only(control_fd, CONTROL_FD)
    control = socket.socket(fileno=CONTROL_FD)
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        # Python's own handlers. Without any, pid 1 cannot be signalled from inside at all.
        signal.signal(number, signal.SIG_DFL)
    children = _child_signals()
    bounds = WorkerBounds(
        address_space_bytes=spawn.memory_bytes,
        max_processes=spawn.max_processes,
        max_open_files=spawn.max_open_files,
        scratch_bytes=spawn.scratch_bytes,
    )
    try:
        if walls.level != "strict":
            os.chdir(spawn.scratch)
        layers = lock_down_init(walls, bounds)
    except (LayerFailed, OSError) as error:
        _fail(control, "lock down", error)
    os.environ["HOME"] = os.environ["TMPDIR"] = str(Path.cwd())
    control.send(pack(Locked(layers=list(layers))))
    Init(control, children, spawn, walls, bounds, mapping_works).serve()


class Init:
    """What a locked-in init does until its end."""

    def __init__(
        self,
        control: socket.socket,
        children: int,
        spawn: Spawn,
        walls: ZygoteWalls,
        bounds: WorkerBounds,
        mapping_works: bool,
    ) -> None:
        self._control = control
        self._children = children
        self._spawn = spawn
        self._walls = walls
        self._bounds = bounds
        self._mapping_works = mapping_works
        self._contexts: dict[str, Any] = {}
        self._repl_pid: int | None = None
        self._pipes: dict[int, _Pipe] = {}
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._poll.register(children, select.POLLIN)

    def serve(self) -> NoReturn:
        """Do what the host says. Its end of the control socket closing is our end, and everybody's below us."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._control.fileno():
                    self._obey()
                elif fd == self._children:
                    self._reap()
                elif fd in self._pipes:
                    self._forward(self._pipes[fd])

    def _obey(self) -> None:
        packet, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            self._kill_all()
            os._exit(0)
        match unpack_to_init(packet):
            case Load(form=form):
                try:
                    self._contexts["context"] = load(fds[0], form, self._mapping_works)
                except ContextBroken as error:
                    _fail(self._control, "load", error)
                os.close(fds[0])
                gc.collect()
                gc.freeze()  # a collection in the REPL would otherwise write to every page of a loaded object
                self._say(Loaded())
            case Start():
                self._kill_all()
                self._drop_pipes()
                self._start(fds[0])
            case Interrupt():
                if self._repl_pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self._repl_pid, signal.SIGINT)
                self._say(Interrupted())
            case Drain():
                self._drain()
                self._say(Drained())
            case Stop():
                self._kill_all()
                self._drain()
                self._drop_pipes()
                self._say(Stopped())

    # -- the REPL's life ---------------------------------------------------------------------------------------------

    def _start(self, door_fd: int) -> None:
        read_ends, write_ends = [], []
        for stream in ("stdout", "stderr"):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            os.set_blocking(read_end, False)
            read_ends.append(_Pipe(read_end, stream, self._spawn.max_output_bytes))
            write_ends.append(write_end)
        pid = os.fork()
        if pid == 0:
            self._become_repl(door_fd, write_ends)
        self._repl_pid = pid
        for fd in (door_fd, *write_ends):
            os.close(fd)
        for pipe in read_ends:
            self._pipes[pipe.fd] = pipe
            self._poll.register(pipe.fd, select.POLLIN)

    def _become_repl(self, door_fd: int, write_ends: list[int]) -> NoReturn:
        """In the child: behind the second walls, without the control socket, into the loop."""
        os.dup2(write_ends[0], 1)
        os.dup2(write_ends[1], 2)
        os.dup2(door_fd, DOOR_FD, inheritable=False)
        os.closerange(DOOR_FD + 1, os.sysconf("SC_OPEN_MAX"))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.setsid()
        interrupts = Interrupts()
        interrupts.install()
        try:
            layers = lock_down_repl(self._walls, self._bounds, self._spawn.allow_exec)
        except (LayerFailed, OSError) as error:
            _fail(self._control, "start", error)
        os.write(CONTROL_FD, pack(Started(layers=list(layers))))
        self._control.close()
        channel = Channel(socket.socket(fileno=DOOR_FD), self._spawn.max_frame_bytes, interrupts)
        gc.enable()
        Repl(self._contexts, channel, interrupts, self._spawn.max_output_bytes).serve()

    def _kill_all(self) -> None:
        """SIGKILL to the REPL and all that it started; return when they are gone."""
        if self._repl_pid is not None or os.getpid() == 1:
            while True:
                with contextlib.suppress(ProcessLookupError):
                    if os.getpid() == 1:
                        os.kill(-1, signal.SIGKILL)  # everything in the namespace but ourselves
                    elif self._repl_pid is not None:
                        os.killpg(self._repl_pid, signal.SIGKILL)
                try:
                    os.waitpid(-1, 0)
                except ChildProcessError:
                    break
        self._repl_pid = None

    def _reap(self) -> None:
        """Take leave of children that ended: the REPL, and orphans, which would else count against its limit."""
        os.read(self._children, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._repl_pid:
                    self._repl_pid = None
                    code = os.waitstatus_to_exitcode(status)
                    self._say(Died(signal=-code) if code < 0 else Died(exit_code=code))

    # -- its output --------------------------------------------------------------------------------------------------

    def _forward(self, pipe: "_Pipe") -> bool:
        """Pass on what is in the pipe; whether there was something."""
        try:
            data = os.read(pipe.fd, PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:  # every write end is closed: nothing can come any more, and poll would report just that for ever
            with contextlib.suppress(KeyError):
                self._poll.unregister(pipe.fd)
            return False
        if head := pipe.kept.add(data):
            self._say(Written(stream=pipe.stream, data=head))
        return True

    def _drain(self) -> None:
        """Pass on all that was written so far."""
        for pipe in self._pipes.values():
            for _ in range(DRAIN_READS):
                if not self._forward(pipe):
                    break
            self._send_tail(pipe)

    def _drop_pipes(self) -> None:
        for pipe in self._pipes.values():
            with contextlib.suppress(KeyError):
                self._poll.unregister(pipe.fd)
            os.close(pipe.fd)
        self._pipes.clear()

    def _send_tail(self, pipe: "_Pipe") -> None:
        tail = pipe.kept.finish()
        for at in range(0, len(tail), PIPE_BYTES):
            self._say(Written(stream=pipe.stream, data=tail[at : at + PIPE_BYTES]))
        pipe.kept = HeadTail[bytes](self._spawn.max_output_bytes, b"")

    def _say(self, message: Control) -> None:
        self._control.send(pack(message))


class _Pipe:
    """The read end of the REPL's descriptor 1 or 2, and what was kept of the current block's bytes."""

    def __init__(self, fd: int, stream: Stream, limit: int) -> None:
        self.fd = fd
        self.stream: Stream = stream
        self.kept = HeadTail[bytes](limit, b"")


def _keep_only(control_fd: int, as_fd: int) -> None:
    """Close everything but the control socket; /dev/null for the rest of stdio."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(control_fd, as_fd, inheritable=False) if control_fd != as_fd else None
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(as_fd + 1, os.sysconf("SC_OPEN_MAX"))


def _child_signals() -> int:
    """A descriptor that is readable when a child ended. Blocked, not handled: see the module's docstring."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    mask = ctypes.c_uint64(1 << (signal.SIGCHLD - 1))
    libc = ctypes.CDLL(None, use_errno=True)
    # glibc's sigset_t is 128 bytes; the kernel reads the first eight.
    full = (ctypes.c_uint64 * 16)(mask.value)
    fd: int = libc.signalfd(-1, full, SFD_NONBLOCK_CLOEXEC)
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"signalfd: {os.strerror(number)}")
    return fd


def _fail(control: socket.socket, step: str, error: Exception) -> NoReturn:
    layer = error.layer if isinstance(error, LayerFailed) else None
    with contextlib.suppress(OSError):
        control.send(pack(Failed(step=step, reason=str(error), layer=layer)))
    os._exit(1)
