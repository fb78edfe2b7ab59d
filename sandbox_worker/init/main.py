"""Pid 1 of a worker: locks itself in, loads the context, starts the REPL, drains its output, and ends it.

It never runs model code, and nothing that model code does reaches it: it has no signal handlers, its memory cannot be
read, and all it takes from the REPL's side are bytes in two pipes.
"""

import contextlib
import gc
import math
import mmap
import os
import select
import signal
import socket
from typing import NoReturn

from sandbox_worker.init import files
from sandbox_worker.init.child import Confinement
from sandbox_worker.init.control_socket import ControlSocket
from sandbox_worker.init.failing import fail
from sandbox_worker.init.hands import Hands
from sandbox_worker.init.output_pipes import EXPLAIN_S, ReplOutput
from sandbox_worker.init.procfs import Proc, Status
from sandbox_worker.init.programs import Programs
from sandbox_worker.init.repl_process import STACK_SIGNAL, ReplProcess
from sandbox_worker.init.usage_watch import GROUP, WATCH, Watch, WorkerUsage
from sandbox_worker.isolation import syscalls
from sandbox_worker.isolation.layer import LayerFailed, WorkerBounds, ZygoteLayers
from sandbox_worker.isolation.worker_layers import lock_down_init
from sandbox_worker.loading.context import ContextBroken, load_into
from sandbox_worker.loading.form import ContextPiece
from sandbox_worker.loading.preloaded import Preloaded
from sandbox_worker.repl.memory_reserve import reserved_bytes
from sandbox_worker.wire.bounds import WATCHED, WatchedLimit
from sandbox_worker.wire.control import (
    Begin,
    Burned,
    Control,
    Died,
    Drain,
    Drained,
    EndProgram,
    Exceeded,
    FileRequest,
    Hand,
    Handed,
    Interrupt,
    Interrupted,
    LastSeen,
    Load,
    Loaded,
    RunProgram,
    Start,
    Stop,
    Stopped,
    unpack_to_init,
)
from sandbox_worker.wire.descriptors import CONTROL_FD
from sandbox_worker.wire.layers import Layer
from sandbox_worker.wire.level import Level
from sandbox_worker.wire.names import CONTEXT
from sandbox_worker.wire.zygote_control import Spawn

EXPLAIN_QUICKLY_S = 0.02
"""`EXPLAIN_S` for one that is past a limit, and goes on."""
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
    hands = Hands() if spawn.bounds.later_context_bytes else None
    children = syscalls.ended_children()
    bounds = _worker_bounds(spawn)
    try:
        proc = None if shared.proc_is_fresh else Proc()  # else it is going to be covered
        if not shared.level.has_own_root:
            os.chdir(spawn.scratch)
        locked = lock_down_init(shared, bounds)
        proc = proc or Proc()
    except (LayerFailed, OSError) as error:
        fail("lock down", error)
    if not shared.level.has_own_root:
        live_in(spawn.scratch)
    confinement = Confinement(shared, bounds, locked.ruleset, proc, has_group=len(fds) > 1)
    layers = [*locked.layers, *([GROUP] if len(fds) > 1 else []), WATCH]
    init = Init(control, bell, children, spawn, confinement, layers, mapping_works, preloaded, hands)
    try:
        init.serve()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the orchestrator learns it: nobody else could
        fail("go on", error)


class Init:
    """What a locked-in init does until its end."""

    def __init__(
        self,
        control: socket.socket,
        bell: mmap.mmap,
        children: int,
        spawn: Spawn,
        confinement: Confinement,
        layers: list[Layer],
        mapping_works: bool,
        preloaded: Preloaded,
        hands: Hands | None,
    ) -> None:
        self._hands = hands
        self._children = children
        self._spawn = spawn
        self._level = confinement.level
        self._mapping_works = mapping_works
        self._preloaded = preloaded
        self._proc = confinement.proc
        self._watch = _watch(confinement.proc, confinement.level, spawn)
        self._layers = layers
        self._has_started = False
        self._is_watched = False
        self._said_cpu_s = 0.0
        self._block_cpu_s = math.inf
        self._poll = select.poll()
        self._control = ControlSocket(control, self._poll)
        self._poll.register(children, select.POLLIN)
        self._output = ReplOutput(self._poll, spawn.bounds, self._control.say, bell)
        self._programs = Programs(confinement, self._watch.pids, self._control.say)
        self._repl = ReplProcess(
            confinement, self._control, self._output, bell, spawn.bounds, preloaded, mapping_works, hands
        )

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
            if self._has_to_watch and self._watch.wait_s() == 0:
                self._look()

    @property
    def _has_to_watch(self) -> bool:
        return self._is_watched and (self._repl.pid is not None or bool(self._programs))

    def _wait_ms(self, paused_s: float | None) -> int | None:
        waits = [] if paused_s is None else [paused_s]
        if self._has_to_watch:
            waits.append(self._watch.wait_s())
        wait_s = min(waits, default=math.inf)
        return math.ceil(wait_s * 1000) if wait_s < math.inf else None

    def _obey(self) -> None:
        packet, fds = self._control.hear()
        if not packet:
            self._repl.kill_all()
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
                self._repl.interrupt(block)
                self._control.say(Interrupted())
            case Drain():
                self._output.drain()
                self._control.say(Drained())
            case Stop(explain=explain):
                post_mortem = self._explained() if explain else None
                self._end_repl()
                self._control.say(Stopped(post_mortem=post_mortem))
            case RunProgram() | EndProgram() as request:
                self._run_or_end_program(request, fds)
            case request:
                self._control.say(*self._answered(request, fds))

    def _answered(self, request: Hand | FileRequest, fds: list[int]) -> tuple[Control, *tuple[int, ...]]:
        """Return the answer, and the descriptors that go with it."""
        if isinstance(request, Hand):
            return (Handed(taken=self._hands is not None and self._hands.hand(fds[0])),)
        bounds = None if self._level.has_own_root else self._spawn.bounds
        said, opened = files.answer(request, bounds)
        return said, *opened

    def _load(self, fd: int, piece: ContextPiece) -> None:
        try:
            undecoded = load_into(self._preloaded.contexts, CONTEXT, fd, piece, self._mapping_works)
        except ContextBroken as error:
            fail("load", error)
        os.close(fd)
        if undecoded is not None:
            self._preloaded.undecoded.append(undecoded)
        if piece.form.kind != "text":
            gc.collect()
            gc.freeze()  # a collection in the REPL would otherwise write to every page of a loaded object

    def _begin(self, cpu_s: float) -> None:
        self._said_cpu_s = 0.0
        self._block_cpu_s = cpu_s
        self._output.begin_block()
        self._begin_to_watch()
        self._watch.block_started()

    def _run_or_end_program(self, request: RunProgram | EndProgram, fds: list[int]) -> None:
        if isinstance(request, EndProgram):
            self._programs.end(request.number)
            self._sweep()
            return
        self._begin_to_watch()
        if (session := self._programs.start(request, fds)) is not None:
            self._watch.program_started(session)

    def _begin_to_watch(self) -> None:
        if not self._is_watched:
            own = self._proc.status(self._proc.own_pid) or Status()
            self._watch.repl_started(self._repl.pid or 0, own.memory_bytes)
            self._is_watched = True

    def _start(self, connection_fd: int) -> None:
        if self._has_started:  # else there is nobody: to look for them would go through the machine's processes
            self._kill_all()
            self._output.close()
        self._has_started = True
        self._repl.start(connection_fd)

    def _kill_all(self, limit: WatchedLimit | None = None) -> None:
        """Kill the REPL, and the programs beside it."""
        self._repl.kill_all()
        self._programs.all_were_killed(limit)
        self._watch.cpu_times.only(())
        self._is_watched = False  # until the next REPL's first block or a program: till then no code runs but ours
        self._block_cpu_s = math.inf

    def _end_repl(self, limit: WatchedLimit | None = None) -> None:
        """Kill it, and hand over its last output."""
        self._kill_all(limit)
        self._output.drain()
        self._output.close()

    def _reap(self) -> None:
        """Take leave of children that ended: the REPL, and orphans, which would else count against its limit."""
        os.read(self._children, 4096)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                pid = found.si_pid
                session = os.getsid(pid)  # which it has until we take leave of it
                _, status, used = os.wait4(pid, 0)
                self._watch.cpu_times.process_ended(session, used.ru_utime + used.ru_stime)
                self._programs.ended(pid, status)
                if pid == self._repl.pid:
                    self._repl.pid = None
                    code = os.waitstatus_to_exitcode(status)
                    self._control.say(Died(signal=-code) if code < 0 else Died(exit_code=code))
        self._sweep()

    def _sweep(self) -> None:
        """Go on with the end of programs. What cannot be ended alone is ended with everything else."""
        if not self._programs.sweep():
            self._end_repl()
            self._control.say(Died(signal=signal.SIGKILL))
        self._watch.cpu_times.only(self._programs.sessions())

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
                self._end_repl(limit)
                self._control.say(Exceeded(limit=limit, used=used, allowed=allowed, post_mortem=post_mortem))
                return
        self._look_at_programs()

    def _look_at_programs(self) -> None:
        most_s = self._spawn.bounds.cpu_s
        over = [
            session
            for session in self._programs.sessions()
            if most_s is not None and self._watch.cpu_times.of_program(session) > most_s
        ]
        for session in over:
            self._programs.end_at("cpu_s", session)
        if over:
            self._sweep()

    def _explained(self, usage: WorkerUsage | None = None) -> LastSeen:
        """Where the REPL is, and what it uses."""
        stack = b""
        wait_s = EXPLAIN_S if usage is None else EXPLAIN_QUICKLY_S
        usage = usage or self._watch.look()
        if self._repl.pid is not None:
            self._repl.stop_all_but_repl()
            self._repl.signal(STACK_SIGNAL)
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
    later_bytes, reserved = spawn.bounds.later_context_bytes, reserved_bytes(address_space_bytes)
    return WorkerBounds(spawn.allow_exec, spawn.bounds, address_space_bytes + later_bytes, reserved + later_bytes)


def _watch(proc: Proc, level: Level, spawn: Spawn) -> Watch:
    bounds, is_loose = (spawn.bounds.memory_bytes, spawn.bounds.max_processes), spawn.bounds.later_context_bytes > 0
    if level.has_own_root:  # whose scratch folder bounds itself
        return Watch(proc, *bounds, proc.others if proc.is_own else proc.below, is_loose=is_loose)
    most_files = spawn.bounds.max_scratch_files
    return Watch(proc, *bounds, scratch=spawn.scratch, max_scratch_files=most_files, is_loose=is_loose)


def _keep_only(fds: list[int]) -> None:
    """Close everything but these, which get the numbers from 3 on; /dev/null for stdio."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    copies = [os.dup(fd) for fd in fds]  # ascending, so that none is overwritten before it is its turn
    for number, copy in enumerate(copies, CONTROL_FD):
        os.dup2(copy, number, inheritable=False)
    os.closerange(CONTROL_FD + len(fds), os.sysconf("SC_OPEN_MAX"))
