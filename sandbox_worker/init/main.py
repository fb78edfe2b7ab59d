"""Pid 1 of a worker: locks itself in, loads the context, starts the REPL, drains its output, and ends it.

Init never runs model code. Model code cannot reach init either: init has no signal handlers, its memory cannot be read,
and it reads nothing from the REPL's side but the bytes of two pipes.
"""

import contextlib
import gc
import math
import mmap
import os
import signal
import socket
from functools import cached_property
from typing import NoReturn

from sandbox_worker.init import files
from sandbox_worker.init.checkpoints import FrozenCopies
from sandbox_worker.init.child import MOST_DESCRIPTORS, Confinement
from sandbox_worker.init.families import Family, LivingRepl
from sandbox_worker.init.output_pipes import EXPLAIN_S, ReplOutput
from sandbox_worker.init.procfs import Proc, Status
from sandbox_worker.init.programs import Programs
from sandbox_worker.init.repl_process import STACK_SIGNAL, ReplProcess, fail
from sandbox_worker.init.sockets import Events, Hands, InitSocket
from sandbox_worker.init.usage_watch import GROUP, WATCH, WORTH_SAYING_S, Watch, WorkerUsage
from sandbox_worker.isolation import mounts, syscalls
from sandbox_worker.isolation.layer import LayerFailed, WorkerBounds, ZygoteLayers
from sandbox_worker.isolation.worker_layers import lock_down_init
from sandbox_worker.loading.context import ContextBroken, Preloaded, load_into
from sandbox_worker.loading.form import ContextPiece
from sandbox_worker.repl.memory_reserve import reserved_bytes
from sandbox_worker.wire.bounds import WATCHED, WatchedLimit
from sandbox_worker.wire.control import (
    IN_FAMILY,
    NO_FREEZING,
    Begin,
    Burned,
    Checkpoint,
    Control,
    Died,
    Drain,
    Drained,
    EndHub,
    EndProgram,
    Exceeded,
    FileRequest,
    ForkRepl,
    Hand,
    Handed,
    Interrupt,
    Interrupted,
    LastSeen,
    Load,
    Loaded,
    Prepared,
    Resume,
    RunProgram,
    Spawn,
    Start,
    Stop,
    Stopped,
    unpack_to_init,
)
from sandbox_worker.wire.descriptors import CONTROL_FD
from sandbox_worker.wire.level import Layer, Level
from sandbox_worker.wire.names import CONTEXT

EXPLAIN_QUICKLY_S = 0.02
"""Seconds to wait for the stack of a REPL that is past a limit. The REPL still runs, so the wait is shorter than
`EXPLAIN_S`."""


QuickRequest = Start | Resume | Checkpoint | ForkRepl | Hand | Interrupt | Drain | Stop | FileRequest
"""Requests that are answered at once."""


def handle_no_signals() -> None:
    """Remove Python's signal handlers. The fork server calls this once, for every init; a REPL installs its own.

    The kernel drops a signal from inside a pid namespace if its pid 1 has no handler for it (pid_namespaces(7)). So no
    process of the worker can signal init.
    """
    # SIGINT's is the only handler that Python installs.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # read from a descriptor instead


def live_in(folder: str) -> None:
    """Set HOME and TMPDIR to the scratch folder.

    At `strict` the fork server calls this once: every worker mounts its scratch folder at the same path.
    """
    os.environ["HOME"] = os.environ["TMPDIR"] = folder


def main(fds: list[int], spawn: Spawn, shared: ZygoteLayers, mapping_works: bool, preloaded: Preloaded) -> NoReturn:
    """Be init of one worker, from the fork to the end.

    Args:
        fds: The control socket and, if the REPL has a control group, its `cgroup.procs` file. A process that writes
            "0" to that file moves into the group.
        spawn: The bounds of this worker.
        shared: Layers that the fork server has set up for all its workers.
        mapping_works: Whether contexts can be mapped as Python strings here.
        preloaded: Contexts and values that the fork server has loaded.
    """
    _keep_only(fds)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, CONTROL_FD)  # else three calls would ask for it
    bounds = worker_bounds(spawn)
    try:
        bell = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the REPL, and so made before that is denied
        hands = Hands() if spawn.bounds.later_context_bytes or shared.level.has_pid_namespace else None
        children = syscalls.ended_children()
        proc = None if shared.proc_is_fresh else Proc()  # opened now: locking down mounts a file system over it
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
    except BaseException as error:  # noqa: BLE001 - init has no other way to report it than the control socket
        fail("go on", error)


class Init:
    """The loop of init, once it is locked in."""

    _is_broken = False
    """Whether a REPL could not be ended alone."""

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
        self._confinement = confinement
        self._children = children
        self._spawn = spawn
        self._scratch = _scratch(confinement, spawn)
        self._mapping_works = mapping_works
        self._preloaded = preloaded
        self._proc = confinement.proc
        self._watch = _watch(confinement.proc, confinement.level, spawn)
        self._layers = layers
        self._has_started = False
        self._is_watched = False
        self._events = events = Events()
        self._control = InitSocket(control, events, self._obey)
        events.listen(children, self._reap)
        output = ReplOutput(events, spawn.bounds, self._control.say, bell)
        self._repl = ReplProcess(confinement, self._control, output, bell, hands, preloaded, mapping_works)
        self._repls: list[LivingRepl] = [self._repl]  # and its forks
        self._checkpoints = FrozenCopies(confinement.proc, self._repl, events, spawn.bounds)
        self._programs = Programs(confinement, self._watch.pids, self._control.say, events, self._sweep)

    @cached_property
    def _family(self) -> Family:
        """Made once a fork is wanted: most workers never have one."""
        return Family(self._confinement, self._events, self._watch, self._repls, self._obey, self._break)

    def _break(self) -> None:
        self._is_broken = True

    @property
    def _is_family(self) -> bool:
        """Whether there are forks, or the REPL is still kept apart from such that have ended."""
        return len(self._repls) > 1 or self._repl.frozen > 0 or self._repl.hub is not None

    def serve(self) -> NoReturn:
        """Carry out the orchestrator's requests, forward output and watch the REPL.

        When the orchestrator's end of the control socket closes, init kills all processes of the worker and exits.
        """
        while True:
            self.take_turn()

    def take_turn(self) -> None:
        """Wait for what comes next, and take it."""
        wait_s = self._watch.wait_s() if self._has_to_watch else math.inf
        for each in self._repls:
            paused_s = each.output.regulate(each.control.is_clear)
            wait_s = wait_s if paused_s is None else min(wait_s, paused_s)
        self._events.wait(None if wait_s == math.inf else math.ceil(wait_s * 1000))
        if self._has_to_watch and self._watch.wait_s() == 0:
            self._look()
        if self._is_broken:
            self._lose_all()

    @property
    def _has_to_watch(self) -> bool:
        return self._is_watched and (self._repl.pid is not None or len(self._repls) > 1 or bool(self._programs))

    # -- requests ----------------------------------------------------------------------------------------------------

    def _obey(self, of: LivingRepl | None = None) -> None:
        """Obey the next request on the control socket of a fork, or else of the worker. At its end, end the fork, or
        all."""
        of = of or self._repl
        try:
            packet, fds = of.control.hear()
        except BlockingIOError:
            return
        if self._is_family:
            self._family.hear_keepers()
        if not packet:
            if of is self._repl:
                self._repl.kill_all()
                os._exit(0)
            self._family.leave(of)
            return
        match unpack_to_init(packet):
            case Load(piece=piece):
                self._load(piece, fds)
            case Start(seed=seed) if not self._is_family:
                self._start(fds[0], seed)
            case Begin() as request:
                self._begin(of, request)
            case RunProgram() | EndProgram() as request:
                self._run_or_end_program(request, fds)
            case EndHub():
                self._family.end_hub(of)
            case request:
                of.control.say(*self._answered(of, request, fds))

    def _answered(self, of: LivingRepl, request: QuickRequest, fds: list[int]) -> tuple[Control, *tuple[int, ...]]:
        """Return the answer and the descriptors to send with it."""
        match request:
            case Interrupt(block=block):
                of.interrupt(block)
                return (Interrupted(),)
            case Drain():
                of.output.drain()
                self._checkpoints.hear()
                return (Drained(),)
            case Stop(explain=explain):
                post_mortem = self._explained(of) if explain else None
                self._end(of)
                return (Stopped(post_mortem=post_mortem, checkpoints=self._checkpoints.numbers),)
            case Resume(number=number) if not self._is_family:
                return (Handed(taken=self._resume(number, fds[0])),)
            case Start() | Resume():
                os.close(fds[0])
                return (Handed(taken=False),)
            case Checkpoint() if self._is_family:
                return (Prepared(IN_FAMILY),)
            case Checkpoint(number=number):
                return (Prepared(self._checkpoints.prepare(number, self._inherited_bytes())),)
            case ForkRepl(needs_hub=needs_hub):
                return (Prepared(self._fork_problem(of, needs_hub, fds)),)
            case Hand():
                return (Handed(taken=of.hands is not None and of.hands.hand(fds[0])),)
        said, opened = files.answer(request, self._scratch)
        return said, *opened

    def _fork_problem(self, of: LivingRepl, needs_hub: bool, fds: list[int]) -> str | None:
        if not self._proc.is_own:
            for fd in fds:
                os.close(fd)
            return NO_FREEZING
        self._begin_to_watch()
        self._checkpoints.hear()
        self._checkpoints.wait_for_ends()
        problem = self._family.fork(of, needs_hub, fds, self._checkpoints.pids)
        if problem is None:
            self._checkpoints.give_up()
        return problem

    def _load(self, piece: ContextPiece | None, fds: list[int]) -> None:
        if piece is not None:
            try:
                undecoded = load_into(self._preloaded.contexts, CONTEXT, fds[0], piece, self._mapping_works)
            except ContextBroken as error:
                fail("load", error)
            os.close(fds[0])
            if undecoded is not None:
                self._preloaded.undecoded.append(undecoded)
            if piece.form.kind != "text":
                gc.collect()
                gc.freeze()  # else each collection in the REPL would write to, and so copy, every page of the objects
        self._control.say(Loaded(layers=self._layers))

    def _begin(self, of: LivingRepl, request: Begin) -> None:
        of.said_cpu_s, of.block_cpu_s = 0.0, request.cpu_s
        if not request.is_late:
            of.output.begin_block()
        self._begin_to_watch()
        self._watch.block_started(0 if of.keeper is None else of.keeper.pid)

    def _run_or_end_program(self, request: RunProgram | EndProgram, fds: list[int]) -> None:
        if isinstance(request, EndProgram):
            self._programs.end(request.number)
            self._sweep()
            return
        self._begin_to_watch()
        if (session := self._programs.start(request, self._scratch.inner(request.cwd), fds)) is not None:
            self._watch.program_started(session)

    def _begin_to_watch(self) -> None:
        if not self._is_watched:
            self._watch.repl_started(self._repl.pid or 0, self._inherited_bytes())
            self._is_watched = True

    def _inherited_bytes(self) -> int:
        return (self._proc.status(self._proc.own_pid) or Status()).memory_bytes

    def _start(self, connection_fd: int, seed: int | None) -> None:
        if self._has_started:  # before the first start there is no process to kill, and listing them reads all of /proc
            self._kill_all()
            self._repl.output.close()
            if self._repl.hands is not None:
                self._repl.hands.empty()
        self._has_started = True
        self._repl.start(connection_fd, seed)

    def _resume(self, number: int, connection_fd: int) -> bool:
        """Have a checkpoint go on as the REPL, and return whether there is one of that number."""
        pid = self._checkpoints.resume(number, connection_fd)
        os.close(connection_fd)
        if pid is None:
            return False
        self._repl.resumed(pid)
        self._begin_to_watch()  # unlike a fresh REPL, it has run model code
        return True

    # -- ends --------------------------------------------------------------------------------------------------------

    def _kill_all(self, limit: WatchedLimit | None = None, *, spares_checkpoints: bool = False) -> None:
        """Kill all REPLs and the programs beside them."""
        self._checkpoints.hear()
        spared = self._repl.kill_all(self._checkpoints.pids if spares_checkpoints else ())
        self._checkpoints.others_were_killed(spared)
        self._programs.all_were_killed(limit)
        self._watch.cpu_times.only(())
        self._is_watched = False  # the next block or program begins to watch again: until then only our code runs
        self._repl.block_cpu_s = math.inf

    def _end(self, of: LivingRepl | None, limit: WatchedLimit | None = None) -> None:
        """Kill a REPL with all that it started, and forward its last output. Without a family, programs and, with None
        or without a family, all REPLs end, too. Checkpoints keep the pipes."""
        if of is not None and self._is_family:
            self._family.end(of)
            return
        self._kill_all(limit, spares_checkpoints=True)
        for each in [*self._repls] if self._is_family else []:
            self._family.was_ended(each)
        self._repl.output.drain()
        if self._checkpoints.pids:
            self._repl.output.drop_stack()
        else:
            self._repl.output.close()

    def _lose_all(self) -> None:
        """Kill all processes, since a program or a REPL could not be ended alone."""
        living = [each for each in self._repls if each.pid is not None]
        self._end(None)
        self._is_broken = False
        for each in living:
            each.control.say(Died(signal=signal.SIGKILL))

    def _reap(self, *_event: int) -> None:
        """Wait for all children that have ended: the REPL, and orphans, which count as processes until then."""
        with contextlib.suppress(BlockingIOError):  # a kill has taken the signal since
            os.read(self._children, 4096)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                pid = found.si_pid
                session = os.getsid(pid)  # a zombie keeps its session until it is waited for
                _, status, used = os.wait4(pid, 0)
                spent_s, is_launcher = used.ru_utime + used.ru_stime, pid == self._programs.launcher_pid
                self._watch.cpu_times.process_ended(session, spent_s, is_launcher=is_launcher)
                self._programs.ended(pid, status)
                self._checkpoints.ended(pid)
                if pid == self._repl.pid:
                    self._repl.has_ended(status)
        self._sweep()

    def _sweep(self) -> None:
        """Continue to end programs that are to end. If one cannot be ended alone, kill all code of the worker."""
        if not self._programs.sweep():
            self._lose_all()
        keepers = [each.keeper.pid for each in self._repls if each.keeper is not None]
        self._watch.cpu_times.only([*self._programs.sessions(), *keepers])

    # -- its resources, and where it was -----------------------------------------------------------------------------

    def _look(self) -> None:
        usage = self._sample()
        if self._is_family:
            self._family.end_strays()
        spent = [
            (each, self._cpu_s(each, usage))
            for each in self._repls
            if each.keeper is not None or (each is self._repl and (each.pid is not None or not self._is_family))
        ]
        for each, cpu_s in spent:
            if cpu_s - each.said_cpu_s >= WORTH_SAYING_S:
                each.control.say(Burned(cpu_s=cpu_s - each.said_cpu_s))
                each.said_cpu_s = cpu_s
        for limit, watched in WATCHED.items():
            used, allowed = getattr(usage, watched.usage), getattr(self._spawn.bounds, limit)
            if allowed is not None and used > allowed and limit != "cpu_s":  # which each REPL has for itself
                self._end_at(limit, used, allowed, usage)
                return
        for each, cpu_s in spent:
            most: dict[WatchedLimit, float | None] = {
                "cpu_s": self._spawn.bounds.cpu_s,
                "block_timeout_s": each.block_cpu_s,
            }
            for limit, allowed_s in most.items():
                if allowed_s is not None and cpu_s > allowed_s:
                    self._end_at(limit, cpu_s, allowed_s, usage, each)
                    return
        self._look_at_programs()

    def _end_at(
        self, limit: WatchedLimit, used: float, allowed: float, usage: WorkerUsage, of: LivingRepl | None = None
    ) -> None:
        """End a REPL that is past a limit, or all of them. Of a family that has too much memory, one is enough."""
        if limit == "memory_bytes":
            if self._checkpoints.frees(used - allowed):
                return  # an honest block is not killed for want of memory that only its checkpoint needs
            of = self._family.to_end_first() if self._is_family else None
        those = [each for each in self._repls if each.pid is not None] or [self._repl] if of is None else [of]
        post_mortems = [self._explained(each, usage) for each in those]
        self._end(of, limit)
        for each, post_mortem in zip(those, post_mortems, strict=True):
            each.control.say(Exceeded(limit=limit, used=used, allowed=allowed, post_mortem=post_mortem))

    def _cpu_s(self, of: LivingRepl, usage: WorkerUsage) -> float:
        """Return the CPU seconds of the block of a REPL."""
        return usage.cpu_s if of.keeper is None else self._watch.cpu_times.of_program(of.keeper.pid)

    def _sample(self) -> WorkerUsage:
        self._watch.uncounted = self._checkpoints.processes + sum(each.frozen for each in self._repls)
        return self._watch.look()

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

    def _explained(self, of: LivingRepl, usage: WorkerUsage | None = None) -> LastSeen:
        """Return the Python stack of a REPL, and the worker's usage, for the post-mortem."""
        stack = b""
        wait_s = EXPLAIN_S if usage is None else EXPLAIN_QUICKLY_S
        usage = usage or self._sample()
        if of.pid is not None:
            if not self._is_family:
                self._repl.stop_all_but_repl()
            of.signal(STACK_SIGNAL)
            stack = of.output.read_stack(wait_s)
        elif of.output.has_stack:
            stack = of.output.read_stack(EXPLAIN_QUICKLY_S)
        return LastSeen(
            stack=stack.decode("utf-8", "replace"),
            memory_bytes=usage.memory_bytes,
            cpu_s=self._cpu_s(of, usage),
            processes=usage.processes,
            threads=usage.threads,
        )


def worker_bounds(spawn: Spawn) -> WorkerBounds:
    """Return what the kernel enforces."""
    # A single process shall get a MemoryError before the watch kills it. The watch also counts page tables, which take
    # 1 byte for each 512 bytes mapped: so a process has less private memory than the memory limit, by 1/128.
    data_bytes = spawn.bounds.memory_bytes - spawn.bounds.memory_bytes // 128
    later_bytes, reserved = spawn.bounds.later_context_bytes, reserved_bytes(data_bytes)
    return WorkerBounds(spawn.allow_exec, spawn.bounds, data_bytes + later_bytes, reserved + later_bytes)


def _scratch(confinement: Confinement, spawn: Spawn) -> files.Scratch:
    if not confinement.level.has_own_root:
        return files.Scratch(spawn.scratch, spawn.bounds, is_counted=True)
    other_name = mounts.TEMPORARY if confinement.has_temporary else mounts.SCRATCH
    return files.Scratch(other_name, spawn.bounds, is_counted=False)


def _watch(proc: Proc, level: Level, spawn: Spawn) -> Watch:
    bounds, is_loose = (spawn.bounds.memory_bytes, spawn.bounds.max_processes), spawn.bounds.later_context_bytes > 0
    if level.has_own_root:  # then the scratch folder is a tmpfs with a size of its own
        return Watch(proc, *bounds, proc.others if proc.is_own else proc.below, is_loose=is_loose)
    most_files = spawn.bounds.max_scratch_files
    return Watch(proc, *bounds, scratch=spawn.scratch, max_scratch_files=most_files, is_loose=is_loose)


def _keep_only(fds: list[int]) -> None:
    """Close all descriptors but `fds`, renumber those from 3 on, and connect 0, 1 and 2 to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    copies = [os.dup(fd) for fd in fds]  # ascending numbers: no copy is overwritten before it is moved
    for number, copy in enumerate(copies, CONTROL_FD):
        os.dup2(copy, number, inheritable=False)
    os.closerange(CONTROL_FD + len(fds), MOST_DESCRIPTORS)
