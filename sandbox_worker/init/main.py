"""Pid 1 of a worker: locks itself in, loads the context, starts the REPL, drains its output, and ends it.

It never runs model code, and nothing that model code does reaches it: it has no signal handlers, its memory cannot be
read, and all it takes from the REPL's side are bytes in two pipes.
"""

import contextlib
import faulthandler
import fcntl
import gc
import math
import mmap
import os
import select
import signal
import socket
from typing import NoReturn

from sandbox_worker.init import files
from sandbox_worker.init.control_socket import ControlSocket
from sandbox_worker.init.output_pipes import EXPLAIN_S, ReplOutput, WriteEnds
from sandbox_worker.init.procfs import Proc, Status
from sandbox_worker.init.usage_watch import GROUP, WATCH, Watch, WorkerUsage
from sandbox_worker.isolation import syscalls
from sandbox_worker.isolation.layer import LayerFailed, WorkerBounds, ZygoteLayers
from sandbox_worker.isolation.worker_layers import LockedInit, lock_down_init, lock_down_repl
from sandbox_worker.loading.context import ContextBroken, load_into
from sandbox_worker.loading.form import ContextPiece
from sandbox_worker.loading.preloaded import Preloaded
from sandbox_worker.repl import own_memory
from sandbox_worker.repl.adapted import draw_apart
from sandbox_worker.repl.channel import Channel
from sandbox_worker.repl.interrupts import Interrupts
from sandbox_worker.repl.memory_reserve import Reserve, reserved_bytes
from sandbox_worker.repl.repl import Repl
from sandbox_worker.wire.bell import BELL, INTERRUPTED_AT
from sandbox_worker.wire.bounds import WATCHED, WatchedLimit
from sandbox_worker.wire.control import (
    BROKEN,
    Begin,
    Burned,
    Died,
    Drain,
    Drained,
    Exceeded,
    Failed,
    Forked,
    InitStep,
    Interrupt,
    Interrupted,
    LastSeen,
    Load,
    Loaded,
    Spawn,
    Start,
    Started,
    Stop,
    Stopped,
    pack,
    unpack_to_init,
)
from sandbox_worker.wire.descriptors import CONNECTION_FD, CONTROL_FD, GROUP_FD, RULESET_FD, STACK_FD
from sandbox_worker.wire.names import CONTEXT

STACK_SIGNAL = int(signal.SIGRTMAX)
"""Has the REPL print the stack of its threads to `STACK_FD`: one that model code hardly takes for itself."""
EXPLAIN_QUICKLY_S = 0.02
"""The same for one that is past a limit, and goes on."""
WORTH_SAYING_S = 0.5
"""CPU time that the orchestrator is told of."""


def handle_no_signals() -> None:
    """To be called in the zygote, for every init: see the module's docstring. Their REPLs have handlers again."""
    # Python's only own one. Without any, pid 1 cannot be signalled from inside at all.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # read from a descriptor instead


def live_in(folder: str) -> None:
    """Where programs of ours find it. To be called in the zygote where all its workers have theirs at one place."""
    os.environ["HOME"] = os.environ["TMPDIR"] = folder


def main(fds: list[int], spawn: Spawn, shared: ZygoteLayers, mapping_works: bool, preloaded: Preloaded) -> NoReturn:
    """Be a worker: from the zygote's fork to the end.

    Args:
        preloaded: What the zygote has for it.
        fds: The control socket, and what puts whoever writes "0" to it into the REPL's control group, if there is one.
    """
    _keep_only(fds)
    control = socket.socket(fileno=CONTROL_FD)
    bell = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the REPL, and so made before that is denied
    children = syscalls.ended_children()
    bounds = _worker_bounds(spawn)
    try:
        proc = None if shared.proc_is_fresh else Proc()  # else it is going to be covered
        if not shared.level.has_own_root:
            os.chdir(spawn.scratch)
        locked = lock_down_init(shared, bounds)
        proc = proc or Proc()
    except (LayerFailed, OSError) as error:
        _fail("lock down", error)
    if not shared.level.has_own_root:
        live_in(spawn.scratch)
    init = Init(
        control, bell, children, spawn, shared, locked, bounds, proc, mapping_works, preloaded, has_group=len(fds) > 1
    )
    try:
        init.serve()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the orchestrator learns it: nobody else could
        _fail("go on", error)


class Init:
    """What a locked-in init does until its end."""

    def __init__(
        self,
        control: socket.socket,
        bell: mmap.mmap,
        children: int,
        spawn: Spawn,
        shared: ZygoteLayers,
        locked: LockedInit,
        bounds: WorkerBounds,
        proc: Proc,
        mapping_works: bool,
        preloaded: Preloaded,
        has_group: bool,
    ) -> None:
        self._bell = bell
        self._children = children
        self._spawn = spawn
        self._shared = shared
        self._bounds = bounds
        self._mapping_works = mapping_works
        self._has_group = has_group
        self._preloaded = preloaded
        self._repl_pid: int | None = None
        self._proc = proc
        self._watch = _watch(proc, shared, spawn)
        self._ruleset = locked.ruleset
        self._layers = [*locked.layers, *([GROUP] if has_group else []), WATCH]
        self._has_started = False
        self._is_watched = False
        self._said_cpu_s = 0.0
        self._block_cpu_s = math.inf
        self._poll = select.poll()
        self._control = ControlSocket(control, self._poll)
        self._poll.register(children, select.POLLIN)
        self._output = ReplOutput(self._poll, spawn.bounds, self._control.say, bell)

    def serve(self) -> NoReturn:
        """Do what the orchestrator says. Its end of the control socket closing is our end, and everybody's below us."""
        while True:
            paused_s = self._output.regulate(self._control.is_clear)
            for fd, events in self._poll.poll(self._wait_ms(paused_s)):
                if fd == self._control.fileno():
                    if events & select.POLLOUT:
                        self._control.flush()
                    if events & ~select.POLLOUT:
                        self._obey()
                elif fd == self._children:
                    self._reap()
                else:
                    self._output.forward(fd)
            if self._repl_pid is not None and self._is_watched and self._watch.wait_s() == 0:
                self._look()

    def _wait_ms(self, paused_s: float | None) -> int | None:
        waits = [] if paused_s is None else [paused_s]
        if self._repl_pid is not None and self._is_watched:
            waits.append(self._watch.wait_s())
        wait_s = min(waits, default=math.inf)
        return math.ceil(wait_s * 1000) if wait_s < math.inf else None

    def _obey(self) -> None:
        packet, fds = self._control.hear()
        if not packet:
            self._kill_all()
            os._exit(0)
        match unpack_to_init(packet):
            case Load(piece=piece):
                if piece is not None:
                    self._load(fds[0], piece)
                self._control.say(Loaded(layers=self._layers))
            case Start():
                self._start(fds[0])
            case Begin(cpu_s=cpu_s):
                self._begin(cpu_s)
            case Interrupt(block=block):
                BELL.pack_into(self._bell, INTERRUPTED_AT, block)
                self._signal(signal.SIGINT)
                self._control.say(Interrupted())
            case Drain():
                self._output.drain()
                self._control.say(Drained())
            case Stop(explain=explain):
                post_mortem = self._explained() if explain else None
                self._end_repl()
                self._control.say(Stopped(post_mortem=post_mortem))
            case request:
                bounds = None if self._shared.level.has_own_root else self._spawn.bounds
                said, opened = files.answer(request, bounds)
                self._control.say(said, *opened)

    def _load(self, fd: int, piece: ContextPiece) -> None:
        try:
            load_into(self._preloaded.contexts, CONTEXT, fd, piece, self._mapping_works)
        except ContextBroken as error:
            _fail("load", error)
        os.close(fd)
        if piece.form.kind != "text":
            gc.collect()
            gc.freeze()  # a collection in the REPL would otherwise write to every page of a loaded object

    def _begin(self, cpu_s: float) -> None:
        self._said_cpu_s = 0.0
        self._block_cpu_s = cpu_s
        self._output.begin_block()
        if not self._is_watched and self._repl_pid is not None:
            own = self._proc.status(self._proc.own_pid) or Status()
            self._watch.repl_started(self._repl_pid, own.memory_bytes)
            self._is_watched = True
        self._watch.block_started()

    def _end_repl(self) -> None:
        """Kill it, and hand over its last output."""
        self._kill_all()
        self._output.drain()
        self._output.close()

    def _signal(self, number: int) -> None:
        if self._repl_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._repl_pid, number)

    # -- the REPL's life ---------------------------------------------------------------------------------------------

    def _start(self, connection_fd: int) -> None:
        if self._has_started:  # else there is nobody: to look for them would go through the machine's processes
            self._kill_all()
            self._output.close()
        self._has_started = True
        write_ends = self._output.open()
        BELL.pack_into(self._bell, INTERRUPTED_AT, 0)  # a fresh REPL counts its blocks anew
        pid = os.fork()
        if pid == 0:
            self._become_repl(connection_fd, write_ends)
        self._repl_pid = pid
        if not self._shared.level.has_pid_namespace:
            self._control.say(Forked(), os.pidfd_open(pid))
        for fd in (connection_fd, *write_ends):
            os.close(fd)
        self._is_watched = False  # until its first block it runs no code but ours

    def _become_repl(self, connection_fd: int, write_ends: WriteEnds) -> NoReturn:
        """In the child: behind the REPL's layers, without the control socket, into the loop."""
        if self._has_group:
            os.write(GROUP_FD, b"0")
        mapped_bytes, unwritten_bytes = self._proc.mapped_bytes()
        os.dup2(write_ends.stdout, 1)
        os.dup2(write_ends.stderr, 2)
        wanted = [(connection_fd, CONNECTION_FD), (write_ends.stack, STACK_FD)]
        if self._ruleset is not None:
            wanted.append((self._ruleset, RULESET_FD))
        # First above the numbers that are to be taken, so that none is overwritten before it is its turn.
        copies = [(fcntl.fcntl(fd, fcntl.F_DUPFD, RULESET_FD + 1), number) for fd, number in wanted]
        for copy, number in copies:
            os.dup2(copy, number, inheritable=False)
        os.closerange(wanted[-1][1] + 1, os.sysconf("SC_OPEN_MAX"))
        faulthandler.register(STACK_SIGNAL, file=STACK_FD)  # in C: it also works for code that holds the GIL
        syscalls.unblock_child_signals()
        os.setsid()
        interrupts = Interrupts()
        interrupts.install()
        try:
            ruleset = None if self._ruleset is None else RULESET_FD
            layers = lock_down_repl(self._shared, self._bounds, ruleset, mapped_bytes - unwritten_bytes)
        except (LayerFailed, OSError) as error:
            _fail("start", error)
        os.write(CONTROL_FD, pack(Started(layers=list(layers))))
        self._control.close()
        reserve = Reserve()
        channel = Channel(socket.socket(fileno=CONNECTION_FD), self._spawn.bounds.max_frame_bytes, interrupts, reserve)
        gc.enable()
        draw_apart(self._preloaded.seed)
        own_memory.be(self._spawn.bounds.memory_bytes)
        preloaded, bounds = self._preloaded, self._spawn.bounds
        try:
            Repl(preloaded.contexts, channel, interrupts, reserve, bounds, self._bell, preloaded.variables).serve()
        except BaseException:  # noqa: BLE001 - nothing is left that could tell more than an exit code
            os._exit(BROKEN)

    def _kill_all(self) -> None:
        """SIGKILL to the REPL and all that it started; return when they are gone."""
        if self._repl_pid is not None or os.getpid() == 1:
            while True:
                with contextlib.suppress(ProcessLookupError):
                    if os.getpid() == 1:
                        os.kill(-1, signal.SIGKILL)  # everything in the namespace but ourselves
                    elif self._repl_pid is not None:
                        os.kill(self._repl_pid, signal.SIGKILL)  # which may not have a process group of its own yet
                        os.killpg(self._repl_pid, signal.SIGKILL)
                try:
                    os.waitpid(-1, 0)
                except ChildProcessError:
                    break
        self._repl_pid = None

    def _stop_all_but_repl(self) -> None:
        """SIGSTOP to what the REPL started, which could go on growing while we listen to it: alone it is bounded.

        They are killed with the REPL. Killed before it, they would be taken for ended by a block that waits for them.
        """
        if self._shared.level.has_pid_namespace and self._shared.proc_is_fresh:
            for pid in self._proc.others():
                if pid != self._repl_pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)

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
                    self._control.say(Died(signal=-code) if code < 0 else Died(exit_code=code))

    # -- what it uses, and what it was doing -------------------------------------------------------------------------

    def _look(self) -> None:
        usage = self._watch.look()
        if usage.cpu_s - self._said_cpu_s >= WORTH_SAYING_S:
            self._control.say(Burned(cpu_s=usage.cpu_s - self._said_cpu_s))
            self._said_cpu_s = usage.cpu_s
        watched: list[tuple[WatchedLimit, float, float | None]] = [
            (limit, getattr(usage, each.usage), getattr(self._spawn.bounds, limit)) for limit, each in WATCHED.items()
        ]
        for limit, used, allowed in [*watched, ("block_timeout_s", usage.cpu_s, self._block_cpu_s)]:
            if allowed is not None and used > allowed:
                post_mortem = self._explained(usage)
                self._end_repl()
                self._control.say(Exceeded(limit=limit, used=used, allowed=allowed, post_mortem=post_mortem))
                return

    def _explained(self, usage: WorkerUsage | None = None) -> LastSeen:
        """Where the REPL is, and what it uses."""
        stack = b""
        wait_s = EXPLAIN_S if usage is None else EXPLAIN_QUICKLY_S
        usage = usage or self._watch.look()
        if self._repl_pid is not None:
            self._stop_all_but_repl()
            self._signal(STACK_SIGNAL)
            stack = self._output.read_stack(wait_s)
        return LastSeen(
            stack=stack.decode("utf-8", "replace"),
            memory_bytes=usage.memory_bytes,
            cpu_s=usage.cpu_s,
            processes=usage.processes,
            threads=usage.threads,
        )


def _worker_bounds(spawn: Spawn) -> WorkerBounds:
    # One process alone is to get a MemoryError before the watch ends it: its page tables, 1 byte in 512, are counted.
    address_space_bytes = spawn.bounds.memory_bytes - spawn.bounds.memory_bytes // 128
    return WorkerBounds(spawn.allow_exec, spawn.bounds, address_space_bytes, reserved_bytes(address_space_bytes))


def _watch(proc: Proc, shared: ZygoteLayers, spawn: Spawn) -> Watch:
    if shared.level.has_own_root:  # whose scratch folder bounds itself
        return Watch(proc, spawn.bounds.memory_bytes, proc.others if shared.proc_is_fresh else proc.below)
    return Watch(
        proc, spawn.bounds.memory_bytes, scratch=spawn.scratch, max_scratch_files=spawn.bounds.max_scratch_files
    )


def _keep_only(fds: list[int]) -> None:
    """Close everything but these, which get the numbers from 3 on; /dev/null for stdio."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    copies = [os.dup(fd) for fd in fds]  # ascending, so that none is overwritten before it is its turn
    for number, copy in enumerate(copies, CONTROL_FD):
        os.dup2(copy, number, inheritable=False)
    os.closerange(CONTROL_FD + len(fds), os.sysconf("SC_OPEN_MAX"))


def _fail(step: InitStep, error: BaseException) -> NoReturn:
    layer, code = (error.layer, error.code) if isinstance(error, LayerFailed) else (None, 0)
    with contextlib.suppress(OSError):
        os.write(CONTROL_FD, pack(Failed(step=step, reason=str(error) or repr(error), layer=layer, code=code)))
    os._exit(1)
