"""Pid 1 of a worker: locks itself in, loads the context, starts the REPL, drains its output, and ends it.

Init never runs model code. Model code cannot reach init either: init has no signal handlers, its memory cannot be read,
and it reads nothing from the REPL's side but the bytes of two pipes.
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
from sandbox_worker.init.checkpoints import FrozenCopies
from sandbox_worker.init.child import Confinement
from sandbox_worker.init.families import Family, Relative
from sandbox_worker.init.output_pipes import EXPLAIN_S, ReplOutput
from sandbox_worker.init.procfs import Proc, Status
from sandbox_worker.init.programs import Programs
from sandbox_worker.init.repl_process import STACK_SIGNAL, ReplProcess, fail
from sandbox_worker.init.sockets import Hands, InitSocket
from sandbox_worker.init.usage_watch import GROUP, WATCH, WORTH_SAYING_S, Watch, WorkerUsage
from sandbox_worker.isolation import mounts, syscalls
from sandbox_worker.isolation.layer import LayerFailed, WorkerBounds, ZygoteLayers
from sandbox_worker.isolation.worker_layers import lock_down_init
from sandbox_worker.loading.context import ContextBroken, Preloaded, load_into
from sandbox_worker.loading.form import ContextPiece
from sandbox_worker.repl.memory_reserve import reserved_bytes
from sandbox_worker.wire.bounds import WATCHED, WatchedLimit
from sandbox_worker.wire.control import (
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
    ToInit,
    unpack_to_init,
)
from sandbox_worker.wire.descriptors import CONTROL_FD
from sandbox_worker.wire.level import Layer, Level
from sandbox_worker.wire.names import CONTEXT

EXPLAIN_QUICKLY_S = 0.02
"""Seconds to wait for the stack of a REPL that is past a limit. The REPL still runs, so the wait is shorter than
`EXPLAIN_S`."""


OF_ONE_REPL = Start | Resume | Checkpoint | ForkRepl | EndHub | Hand | Begin | Interrupt | Drain | Stop
"""Requests about one REPL, of which a family has several."""


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
    bounds = _worker_bounds(spawn)
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
        self._confinement = confinement
        self._family: Family | None = None
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
        self._said_cpu_s = 0.0
        self._block_cpu_s = math.inf
        self._poll = select.poll()
        self._control = InitSocket(control, self._poll)
        self._poll.register(children, select.POLLIN)
        self._output = ReplOutput(self._poll, spawn.bounds, self._control.say, bell)
        can_freeze = confinement.level.has_pid_namespace
        self._checkpoints = FrozenCopies(confinement.proc, hands if can_freeze else None, self._poll, spawn.bounds)
        self._programs = Programs(confinement, self._watch.pids, self._control.say, self._poll)
        self._repl = ReplProcess(
            confinement, self._control, self._output, bell, spawn.bounds, preloaded, mapping_works, hands
        )

    def serve(self) -> NoReturn:
        """Carry out the orchestrator's requests, forward output and watch the REPL.

        When the orchestrator's end of the control socket closes, init kills all processes of the worker and exits.
        """
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
                elif self._programs.hear(fd):
                    self._sweep()
                elif not self._output.forward(fd):
                    self._hear_of_copies(fd, events)
            if self._has_to_watch and self._watch.wait_s() == 0:
                self._look()

    def _hear_of_copies(self, fd: int, events: int) -> None:
        """Take what has come from a checkpoint, or of a family."""
        if self._family is not None and self._family.hear(fd, events):
            self._look_after(self._family)
        elif (made := self._checkpoints.hear(fd, self._repl.pid)) is not None:
            self._control.say(made)

    @property
    def _has_to_watch(self) -> bool:
        lives = self._repl.pid is not None or (self._family is not None and self._family.lives)
        return self._is_watched and (lives or bool(self._programs))

    def _wait_ms(self, paused_s: float | None) -> int | None:
        waits = [] if paused_s is None else [paused_s]
        if self._family is not None:
            waits += self._family.regulate()
        if self._has_to_watch:
            waits.append(self._watch.wait_s())
        wait_s = min(waits, default=math.inf)
        return math.ceil(wait_s * 1000) if wait_s < math.inf else None

    def _obey(self) -> None:
        packet, fds = self._control.hear()
        if not packet:
            self._repl.kill_all()
            os._exit(0)
        request = unpack_to_init(packet)
        if self._family is not None and isinstance(request, OF_ONE_REPL):
            self._carry_out(self._family, self._family.members[0], request, fds)
            return
        match request:
            case Load(piece=piece):
                self._load(piece, fds)
            case Start(seed=seed):
                self._start(fds[0], seed)
            case Begin(cpu_s=cpu_s, is_late=is_late):
                self._begin(cpu_s, is_late)
            case Interrupt(block=block):
                self._repl.interrupt(block)
                self._control.say(Interrupted())
            case Stop(explain=explain):
                self._stop(explain)
            case RunProgram() | EndProgram() as request:
                self._run_or_end_program(request, fds)
            case ForkRepl() | EndHub() as request:
                self._fork(request, fds)
            case request:
                self._control.say(*self._answered(request, fds))

    def _stop(self, explain: bool) -> None:
        post_mortem = self._explained() if explain else None
        self._end_repl()
        self._control.say(Stopped(post_mortem=post_mortem, checkpoints=self._checkpoints.numbers))

    def _fork(self, request: ForkRepl | EndHub, fds: list[int]) -> None:
        """Begin a family, if the REPL can be forked."""
        if isinstance(request, EndHub):  # its family has ended since
            return
        if self._hands is None or not self._proc.is_own:
            for fd in fds:
                os.close(fd)
            self._control.say(Prepared("its sandbox cannot freeze processes"))
            return
        self._begin_to_watch()
        self._hear_of_checkpoint()
        self._checkpoints.wait_for_ends()
        first = Relative(self._control, self._output, self._repl, self._hands)
        family = Family(self._confinement, self._poll, self._watch, first, self._obey_fork, self._explained)
        problem = family.fork(first, request.needs_hub, fds, self._checkpoints.pids)
        if problem is None:
            self._family = family
            self._checkpoints.give_up()
        self._control.say(Prepared(problem))

    def _carry_out(self, family: Family, of: Relative, request: ToInit, fds: list[int]) -> None:
        if isinstance(request, Begin):
            self._begin_to_watch()
        family.carry_out(of, request, fds)
        self._look_after(family)

    def _obey_fork(self, fork: Relative) -> None:
        """Obey the request on a fork's control socket. At its end, the fork ends."""
        assert self._family is not None
        try:
            packet, fds = fork.control.hear(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if packet:
            self._carry_out(self._family, fork, unpack_to_init(packet), fds)
        else:
            self._family.leave(fork)

    def _look_after(self, family: Family) -> None:
        """Kill all processes if a REPL could not be ended alone. Forget a family of which no fork was made or is left
        and whose first REPL is not kept apart."""
        if family.is_broken:
            self._end_family(family)
        if family.is_over:
            self._family = None

    def _end_family(self, family: Family, limit: WatchedLimit | None = None) -> None:
        """Kill all processes, since no REPL of the family could be ended alone."""
        family.is_broken = False
        living = [each for each in family.members if each.repl.pid is not None]
        self._kill_all(limit)
        for each in [*family.members]:
            family.has_ended(each)
        if limit is None:
            for each in living:
                each.control.say(Died(signal=signal.SIGKILL))

    def _answered(
        self, request: Drain | Resume | Checkpoint | Hand | FileRequest, fds: list[int]
    ) -> tuple[Control, *tuple[int, ...]]:
        """Return the answer and the descriptors to send with it."""
        if isinstance(request, Drain):
            self._output.drain()
            self._hear_of_checkpoint()
            return (Drained(),)
        if isinstance(request, Resume):
            return (Handed(taken=self._resume(request.number, fds[0])),)
        if isinstance(request, Checkpoint):
            self._hear_of_checkpoint()
            return (Prepared(self._checkpoints.prepare(request.number, self._repl.pid, self._inherited_bytes())),)
        if isinstance(request, Hand):
            return (Handed(taken=self._hands is not None and self._hands.hand(fds[0])),)
        said, opened = files.answer(request, self._scratch)
        return said, *opened

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

    def _begin(self, cpu_s: float, is_late: bool) -> None:
        self._said_cpu_s = 0.0
        self._block_cpu_s = cpu_s
        if not is_late:
            self._output.begin_block()
        self._begin_to_watch()
        self._watch.block_started()

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
            self._output.close()
            if self._hands is not None:
                self._hands.empty()
        self._has_started = True
        self._repl.start(connection_fd, seed)

    def _resume(self, number: int, connection_fd: int) -> bool:
        """Have a checkpoint go on as the REPL, and return whether there is one of that number."""
        pid = self._checkpoints.resume(number, connection_fd)
        if pid is None:
            return False
        self._repl.resumed(pid)
        self._begin_to_watch()  # unlike a fresh REPL, it has run model code
        return True

    def _kill_all(self, limit: WatchedLimit | None = None, *, spares_checkpoints: bool = False) -> None:
        """Kill the REPL and the programs beside it."""
        self._hear_of_checkpoint()
        pids = self._checkpoints.pids if spares_checkpoints else set()
        if not pids:
            self._repl.kill_all()
        self._checkpoints.others_were_killed(self._repl.kill_all_but(pids) if pids else ())
        self._programs.all_were_killed(limit)
        self._watch.cpu_times.only(())
        self._is_watched = False  # the next block or program begins to watch again: until then only our code runs
        self._block_cpu_s = math.inf

    def _end_repl(self, limit: WatchedLimit | None = None) -> None:
        """Kill the REPL and the programs, and forward their last output. Checkpoints keep the pipes."""
        self._kill_all(limit, spares_checkpoints=True)
        self._output.drain()
        if self._checkpoints.pids:
            self._output.drop_stack()
        else:
            self._output.close()

    def _hear_of_checkpoint(self) -> None:
        if (made := self._checkpoints.hear_all(self._repl.pid)) is not None:
            self._control.say(made)

    def _reap(self) -> None:
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
                    self._repl.pid = None
                    code = os.waitstatus_to_exitcode(status)
                    self._control.say(Died(signal=-code) if code < 0 else Died(exit_code=code))
        self._sweep()

    def _sweep(self) -> None:
        """Continue to end programs that are to end. If one cannot be ended alone, kill all code of the worker."""
        if not self._programs.sweep():
            if self._family is not None:
                self._end_family(self._family)
            else:
                self._end_repl()
                self._control.say(Died(signal=signal.SIGKILL))
        keepers = [] if self._family is None else self._family.keepers()
        self._watch.cpu_times.only([*self._programs.sessions(), *keepers])

    # -- its resources, and where it was -----------------------------------------------------------------------------

    def _look(self) -> None:
        usage = self._sample()
        if usage.cpu_s - self._said_cpu_s >= WORTH_SAYING_S:
            self._control.say(Burned(cpu_s=usage.cpu_s - self._said_cpu_s))
            self._said_cpu_s = usage.cpu_s
        watched: list[tuple[WatchedLimit, float, float | None]] = [
            (limit, getattr(usage, each.usage), getattr(self._spawn.bounds, limit)) for limit, each in WATCHED.items()
        ]
        for limit, used, allowed in [*watched, ("block_timeout_s", usage.cpu_s, self._block_cpu_s)]:
            if allowed is not None and used > allowed:
                if limit == "memory_bytes" and self._checkpoints.frees(used - allowed):
                    return  # an honest block is not killed for want of memory that only its checkpoint needs
                if self._family is not None:
                    self._end_of_family(self._family, limit, used, allowed)
                    return
                post_mortem = self._explained(None, usage)
                self._end_repl(limit)
                self._control.say(Exceeded(limit=limit, used=used, allowed=allowed, post_mortem=post_mortem))
                return
        if self._family is not None and (over := self._family.over_cpu_time()) is not None:
            self._end_one(self._family, *over)
        self._look_at_programs()

    def _end_of_family(self, family: Family, limit: WatchedLimit, used: float, allowed: float) -> None:
        """End one REPL of a family that takes too much memory, and let the others go on; end all at other limits."""
        if limit == "memory_bytes" and (one := family.to_end_first()) is not None:
            self._end_one(family, one, limit, used, allowed)
            return
        living = [each for each in family.members if each.repl.pid is not None]
        post_mortems = [self._explained(each) for each in living]
        self._end_family(family, limit)
        for each, post_mortem in zip(living, post_mortems, strict=True):
            each.control.say(Exceeded(limit=limit, used=used, allowed=allowed, post_mortem=post_mortem))

    def _end_one(self, family: Family, one: Relative, limit: WatchedLimit, used: float, allowed: float) -> None:
        post_mortem = self._explained(one)
        family.end(one)
        one.control.say(Exceeded(limit=limit, used=used, allowed=allowed, post_mortem=post_mortem))
        self._look_after(family)

    def _sample(self) -> WorkerUsage:
        self._watch.uncounted = self._checkpoints.processes
        if self._family is not None:
            self._watch.uncounted += self._family.frozen
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

    def _explained(self, of: Relative | None = None, usage: WorkerUsage | None = None) -> LastSeen:
        """Return the Python stack of a REPL, the worker's own or one of its family, and the worker's usage, for the
        post-mortem."""
        stack = b""
        wait_s = EXPLAIN_S if usage is None else EXPLAIN_QUICKLY_S
        usage = usage or self._sample()
        repl, output = (self._repl, self._output) if of is None else (of.repl, of.output)
        if repl.pid is not None:
            if of is None:
                self._repl.stop_all_but_repl()
            repl.signal(STACK_SIGNAL)
            stack = output.read_stack(wait_s)
        elif output.has_stack:
            stack = output.read_stack(EXPLAIN_QUICKLY_S)
        return LastSeen(
            stack=stack.decode("utf-8", "replace"),
            memory_bytes=usage.memory_bytes,
            cpu_s=usage.cpu_s,
            processes=usage.processes,
            threads=usage.threads,
        )


def _worker_bounds(spawn: Spawn) -> WorkerBounds:
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
    os.closerange(CONTROL_FD + len(fds), os.sysconf("SC_OPEN_MAX"))
