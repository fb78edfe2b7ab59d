"""Init's handles on a family: a REPL and its forks, all in one worker. `init/hub.py` has the theory of operation.

Each REPL of a family has a control socket, pipes, a bell and a keeper of its own. Scratch folder, memory, processes,
programs and their limits are the worker's, and so the family's. Only a worker with a PID namespace and a /proc of its
own has a family: there init finds the parent of each process.
"""

import contextlib
import errno
import math
import mmap
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from sandbox_worker.init.child import Confinement
from sandbox_worker.init.hub import MOST_FORK_FDS
from sandbox_worker.init.output_pipes import ReplOutput
from sandbox_worker.init.procfs import Seen, Status, Times
from sandbox_worker.init.repl_process import LivingRepl
from sandbox_worker.init.sockets import Hands, InitSocket, send
from sandbox_worker.init.usage_watch import WORTH_SAYING_S, Watch
from sandbox_worker.isolation.landlock import SCOPES_SIGNALS
from sandbox_worker.wire.bounds import ReplBounds, WatchedLimit
from sandbox_worker.wire.control import (
    Begin,
    Burned,
    Checkpoint,
    Control,
    Died,
    Drain,
    Drained,
    EndHub,
    Failed,
    ForkRepl,
    Hand,
    Handed,
    Interrupt,
    Interrupted,
    LastSeen,
    Prepared,
    Started,
    Stop,
    Stopped,
    ToInit,
)
from sandbox_worker.wire.descriptors import A_FORK, A_HUB, FORKED, GOES_ON, KILL, REPL_ENDED

KILLED_S = 5.0
"""Seconds until a keeper has killed its REPL and all that this has started. Beyond them, the whole family is killed."""
SPARE_FDS = 64
"""Descriptors of init that forks leave free."""


class _Keeper(NamedTuple):
    """Init's end of a keeper's socket, and its pid."""

    pid: int
    speaking: socket.socket


class _Hub:
    """A hub, and init's end of its socket.

    Args:
        moment: Number of the moment at which it has become a hub.
        shared_bytes: Private memory that it shares with its forks.

    Attributes:
        pid: Its pid; 0 until its REPL goes on in another process.
        waiting: Init's ends of the sockets of keepers that are not there yet → the REPL of each.
        made: Forks that are there, and are kept until its own REPL is, too.
    """

    def __init__(self, speaking: socket.socket, moment: int, shared_bytes: int) -> None:
        self.speaking = speaking
        self.moment = moment
        self.shared_bytes = shared_bytes
        self.pid = 0
        self.waiting: dict[socket.socket, Relative] = {}
        self.made: list[Relative] = []


class Relative:
    """One REPL of a family, and what init has for it alone.

    Args:
        control: Its control socket. The first one's is the worker's.
        output: Init's ends of its pipes.
        repl: Its process.
        hands: Socket on which it is handed descriptors.
    """

    def __init__(self, control: InitSocket, output: ReplOutput, repl: LivingRepl, hands: Hands) -> None:
        self.control = control
        self.output = output
        self.repl = repl
        self.hands = hands
        self.keeper: _Keeper | None = None
        self.hub: _Hub | None = None
        self.block_cpu_s = math.inf
        self.said_cpu_s = 0.0


class Family:
    """The REPLs of one worker, once the first of them is forked.

    Args:
        confinement: As of the worker's children.
        poll: Gets the descriptors to wait for. Call `hear` for each readable one.
        watch: Samples all processes.
        first: The worker's own REPL.
        obey: Called when the control socket of a fork is readable.
        explain: Returns the state of a REPL before its end.

    Attributes:
        members: All REPLs that have not been closed.
        is_broken: Whether a REPL could not be ended alone. The caller then kills all processes of the worker.
    """

    def __init__(
        self,
        confinement: Confinement,
        poll: "select.poll",
        watch: Watch,
        first: Relative,
        obey: Callable[[Relative], None],
        explain: Callable[[Relative], LastSeen],
    ) -> None:
        self.members = [first]
        self.is_broken = False
        self._bounds: ReplBounds = confinement.bounds.repl
        self._proc = confinement.proc
        self._abi = confinement.landlock_abi
        self._ruleset = confinement.ruleset
        self._poll = poll
        self._watch = watch
        self._obey = obey
        self._explain = explain
        self._hearers: dict[int, Callable[[], None]] = {}
        self._moments = 0
        watch.cpu_times.owners = self._owners

    @property
    def lives(self) -> bool:
        """Whether any REPL lives."""
        return any(each.repl.pid is not None for each in self.members)

    @property
    def is_over(self) -> bool:
        """Whether the first REPL is alone, and is not kept apart from any fork."""
        first, *forks = self.members
        return not forks and first.keeper is None and first.hub is None

    @property
    def frozen(self) -> int:
        """Number of hubs and keepers, which run none of model code."""
        return len(self.keepers()) + sum(each.hub is not None and each.hub.pid > 0 for each in self.members)

    def keepers(self) -> list[int]:
        """Return the pids of all keepers."""
        return [each.keeper.pid for each in self.members if each.keeper is not None]

    def hear(self, fd: int, events: int) -> bool:
        """Take what has come on `fd`. Return False if it is no descriptor of the family's."""
        hearer = self._hearers.get(fd)
        if hearer is None:
            return any(each.output.forward(fd) for each in self.members[1:])
        if events & select.POLLOUT:
            next(each for each in self.members if each.control.fileno() == fd).control.flush()
        if events & ~select.POLLOUT:
            hearer()
        return True

    def regulate(self) -> list[float]:
        """Choose the pipes of forks to wait for, see `ReplOutput.regulate`. Return when further calls are due."""
        paused_s = [each.output.regulate(each.control.is_clear) for each in self.members[1:]]
        return [each for each in paused_s if each is not None]

    def carry_out(self, of: Relative, request: ToInit, fds: list[int]) -> None:
        """Carry out a request about one REPL."""
        if isinstance(request, EndHub):
            self._end_hub(of)
        elif isinstance(request, Begin):
            of.said_cpu_s, of.block_cpu_s = 0.0, request.cpu_s
            if not request.is_late:
                of.output.begin_block()
            self._watch.block_started(0 if of.keeper is None else of.keeper.pid)
        else:
            of.control.say(self._answer(of, request, fds))

    def _answer(self, of: Relative, request: ToInit, fds: list[int]) -> Control:
        match request:
            case Interrupt(block=block):
                of.repl.interrupt(block)
                return Interrupted()
            case Drain():
                of.output.drain()
                return Drained()
            case Stop(explain=explain):
                post_mortem = self._explain(of) if explain and of.repl.pid is not None else None
                self.end(of)
                return Stopped(post_mortem=post_mortem)
            case ForkRepl(needs_hub=needs_hub):
                return Prepared(self.fork(of, needs_hub, fds))
            case Checkpoint():
                return Prepared("it was forked, or is a fork")
            case Hand():
                return Handed(taken=of.hands.hand(fds[0]))
        for fd in fds:
            os.close(fd)
        return Handed(taken=False)

    # -- forks -------------------------------------------------------------------------------------------------------

    def fork(self, of: Relative, needs_hub: bool, fds: Sequence[int], checkpoints: Collection[int] = ()) -> str | None:
        """Have a REPL forked as soon as it is a hub. Return why it cannot be now, as one clause; else None.

        Args:
            fds: Control socket, connection and bell of the fork. They are closed.
            checkpoints: Pids of the REPL's checkpoints.
        """
        control_fd, connection_fd, bell_fd = fds
        problem = self._problem(of, needs_hub, checkpoints)
        if problem is None and needs_hub:
            self._end_hub(of)
            problem = self._make_hub(of)
        if problem is not None:
            for fd in fds:
                os.close(fd)
            return problem
        control = InitSocket(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, control_fd), self._poll)
        bell = mmap.mmap(bell_fd, mmap.PAGESIZE)
        output, hands = ReplOutput(self._poll, self._bounds, control.say, bell), Hands()
        relative = Relative(control, output, LivingRepl(bell), hands)
        self.members.append(relative)
        self._hearers[control_fd] = lambda: self._obey(relative)
        given = [connection_fd, *output.open(), hands.give_away(), bell_fd]
        self._ask(of, A_FORK, relative, given)
        if needs_hub:  # the last to be asked for, and awaited by the hub: the two are made at the same time
            self._ask(of, GOES_ON, of, [])
        for fd in given:
            os.close(fd)
        return None

    def _problem(self, of: Relative, needs_hub: bool, checkpoints: Collection[int]) -> str | None:
        if self._abi < SCOPES_SIGNALS:
            return "this kernel cannot keep forks apart, and Linux 6.12 or newer can"
        if of.repl.pid is None:
            return "its process has ended"
        if MOST_FORK_FDS * (len(self.members) + 1) + SPARE_FDS > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            return f"{len(self.members):,} REPLs have taken its sandbox's descriptors (`ulimit -n`)"
        if not needs_hub:
            return None if of.hub is not None else "its frozen copy has ended"
        if (self._proc.status(of.repl.pid) or Status()).threads != 1:
            return "threads that an earlier block has left were running"
        if self._has_left_processes(of, checkpoints):
            return "processes that an earlier block has left were running"
        return None

    def _has_left_processes(self, of: Relative, checkpoints: Collection[int]) -> bool:
        """Whether any process that the REPL has started is there, or an orphan of one."""
        assert of.repl.pid is not None
        session, known = self._proc.session(of.repl.pid), {*self._known(), *checkpoints}
        for pid in self._proc.others():
            status = self._proc.status(pid) if pid not in known and self._proc.session(pid) == session else None
            if status is not None and status.parent in (of.repl.pid, 1 if of.keeper is None else of.keeper.pid):
                return True
        return False

    def _known(self) -> set[int]:
        hubs = [each.hub.pid for each in self.members if each.hub is not None]
        return {1, *hubs, *self.keepers(), *(each.repl.pid or 0 for each in self.members)}

    def _make_hub(self, of: Relative) -> str | None:
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not of.hands.hand(theirs.detach(), A_HUB):
            own.close()
            return "its socket is full"
        status = self._proc.status(of.repl.pid or 0) or Status()
        self._moments += 1
        hub = of.hub = _Hub(own, self._moments, status.memory_bytes - status.table_bytes)
        self._listen(own, lambda: self._hear_end(of, hub))
        return None

    def _ask(self, of: Relative, packet: bytes, fork: Relative, given: list[int]) -> None:
        """Ask the hub of a REPL for a fork. It hears of it when it has become one."""
        assert of.hub is not None
        assert self._ruleset is not None
        hub = of.hub
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hub.waiting[own] = fork
        self._listen(own, lambda: self._hear_new(of, hub, own))
        with theirs, contextlib.suppress(OSError):  # it has ended, as the keeper's socket says, too
            send(hub.speaking, packet, (theirs.fileno(), self._ruleset, *given))

    def _hear_end(self, of: Relative, hub: _Hub) -> None:
        """Take the end of a hub. What keepers have said before comes first: it may be why there is no fork."""
        for speaking in [*hub.waiting]:
            if of.hub is hub:
                self._hear_new(of, hub, speaking)
        self._end_hub(of)

    def _hear_new(self, of: Relative, hub: _Hub, speaking: socket.socket) -> None:
        """Take what a new keeper says of itself and of its REPL."""
        try:
            said = speaking.recv(FORKED.size, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):  # unix(7): a packet was left unread; poll says so again
            return
        error, keeper_pid, repl_pid = FORKED.unpack(said) if len(said) == FORKED.size else (errno.ECHILD, 0, 0)
        fork = hub.waiting.pop(speaking)
        self._unlisten(speaking)
        if fork not in self.members:  # its owner has given it up meanwhile
            self.is_broken |= not error and not self._was_killed(_Keeper(keeper_pid, speaking))
            speaking.close()
            return
        if error:
            speaking.close()
            if fork is of:  # it goes on as the process that it was, and nothing keeps it apart from forks
                self._end_hub(of, error)
            else:
                self._refuse(fork, error)
            return
        is_lie = keeper_pid == repl_pid or not {keeper_pid, repl_pid} <= {*self._proc.others()} - self._known()
        self.is_broken |= is_lie
        if fork is of:
            hub.pid = of.repl.pid or 0
            self._end_keeper(of)
        else:
            hub.made.append(fork)
        fork.repl.pid, fork.keeper = repl_pid, _Keeper(keeper_pid, speaking)
        self._listen(speaking, lambda: self._hear_keeper(fork))
        for pid in (keeper_pid, repl_pid, hub.pid):
            self._watch.memory.share(pid, hub.moment, hub.shared_bytes)
        self._watch.cpu_times.program_started(keeper_pid)
        if hub.pid:
            for each in hub.made:
                each.control.say(Started(layers=[]))
            hub.made.clear()

    def _hear_keeper(self, of: Relative) -> None:
        assert of.keeper is not None
        try:
            said = of.keeper.speaking.recv(REPL_ENDED.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if len(said) != REPL_ENDED.size:  # it was killed from outside
            self.is_broken = True
            return
        code = os.waitstatus_to_exitcode(*REPL_ENDED.unpack(said))
        of.repl.pid = None
        of.control.say(Died(signal=-code) if code < 0 else Died(exit_code=code))

    # -- ends --------------------------------------------------------------------------------------------------------

    def end(self, of: Relative) -> None:
        """Kill a REPL and all that it started, and forward its last output. Return when all has ended."""
        if of.keeper is None and of.repl.pid is not None:
            self.is_broken = True
        if of.keeper is not None:
            self.is_broken |= not self._was_killed(of.keeper)
        self.has_ended(of)

    def has_ended(self, of: Relative) -> None:
        """Record that all processes of a REPL have ended, and forward its last output."""
        self._end_hub(of)
        self._end_keeper(of)
        of.repl.pid = None
        of.block_cpu_s = math.inf
        of.output.drain()
        of.output.close()

    def leave(self, of: Relative) -> None:
        """Forget a fork, whose control socket has ended, and end its processes."""
        if of in self.members:
            self.end(of)
            self._drop(of)

    def _was_killed(self, keeper: _Keeper) -> bool:
        until = time.monotonic() + KILLED_S
        answer = select.poll()
        answer.register(keeper.speaking, select.POLLIN)
        try:
            keeper.speaking.send(KILL, socket.MSG_DONTWAIT)
            while (left_s := until - time.monotonic()) > 0 and answer.poll(math.ceil(1000 * left_s)):
                said = keeper.speaking.recv(REPL_ENDED.size, socket.MSG_DONTWAIT)
                if len(said) != REPL_ENDED.size:
                    return said == KILL
        except OSError:
            return False
        return False

    def _end_keeper(self, of: Relative) -> None:
        """Have a keeper end, and nothing below it."""
        keeper, of.keeper = of.keeper, None
        if keeper is not None:
            self._unlisten(keeper.speaking)
            keeper.speaking.close()

    def _end_hub(self, of: Relative, error: int = 0) -> None:
        """Have a hub end. The forks that are not whole are refused."""
        hub, of.hub = of.hub, None
        if hub is None:
            return
        self._unlisten(hub.speaking)
        hub.speaking.close()
        for speaking in hub.waiting:
            self._unlisten(speaking)
            speaking.close()
        for fork in hub.made:
            self.end(fork)
        for fork in ({*hub.waiting.values(), *hub.made} - {of}) & {*self.members}:
            self._refuse(fork, error)

    def _refuse(self, fork: Relative, error: int) -> None:
        reason = "its processes ended" if error in (0, errno.ECHILD) else os.strerror(error)
        fork.control.say(Failed(step="fork", reason=reason, code=error))
        self._drop(fork)

    def _drop(self, fork: Relative) -> None:
        self.members.remove(fork)
        for hub in [each.hub for each in self.members if each.hub is not None and fork in each.hub.made]:
            hub.made.remove(fork)
        fork.output.close()
        fork.hands.close()
        fork.repl.bell.close()
        fd = fork.control.fileno()
        del self._hearers[fd]
        self._poll.unregister(fd)
        fork.control.close()

    def _listen(self, speaking: socket.socket, hearer: Callable[[], None]) -> None:
        self._poll.register(speaking.fileno(), select.POLLIN)
        self._hearers[speaking.fileno()] = hearer

    def _unlisten(self, speaking: socket.socket) -> None:
        self._poll.unregister(speaking.fileno())
        del self._hearers[speaking.fileno()]

    # -- their resources ---------------------------------------------------------------------------------------------

    def over_cpu_time(self) -> tuple[Relative, WatchedLimit, float, float] | None:
        """Report the CPU time of each block. Return a REPL whose block has used more than it may, the limit, what it
        used and what it may use."""
        for each, keeper in [(one, one.keeper) for one in self.members if one.keeper is not None]:
            used_s = self._watch.cpu_times.of_program(keeper.pid)
            if used_s - each.said_cpu_s >= WORTH_SAYING_S:
                each.control.say(Burned(cpu_s=used_s - each.said_cpu_s))
                each.said_cpu_s = used_s
            most: dict[WatchedLimit, float | None] = {"cpu_s": self._bounds.cpu_s, "block_timeout_s": each.block_cpu_s}
            for limit, allowed_s in most.items():
                if allowed_s is not None and used_s > allowed_s:
                    return each, limit, used_s, allowed_s
        return None

    def to_end_first(self) -> Relative | None:
        """Return the REPL to end if all have too much memory: the one that, with all that it started, has grown most
        since the sample before, in megabytes; else the one that has most beyond what it shares with others."""
        seen, before = self._watch.seen, {each.pid: each for each in self._watch.seen_before}
        owners = self._owners(seen)
        sizes = {keeper: [0, 0] for keeper in self.keepers()}
        for each in seen:
            if (size := sizes.get(owners.get(each.pid, 0))) is not None:
                had = before.get(each.pid, Seen(each.pid, Status(), Times()))
                grown_bytes = max(0, each.status.memory_bytes - had.status.memory_bytes)
                size[0] += max(grown_bytes, (each.times.faults - had.times.faults) * mmap.PAGESIZE)
                size[1] += self._watch.memory.beyond_shared_bytes(each)
        most = max(sizes, key=lambda keeper: (sizes[keeper][0] >> 20, sizes[keeper][1]), default=0)
        return next((each for each in self.members if each.keeper is not None and each.keeper.pid == most), None)

    def _owners(self, seen: Sequence[Seen]) -> dict[int, int]:
        """Return pid → pid of the keeper, for all processes below one."""
        parents = {each.pid: each.status.parent for each in seen}
        owners = {pid: pid for pid in self.keepers()}
        for pid in parents:
            above = []
            while pid in parents and pid not in owners:
                above.append(pid)
                pid = parents[pid]
            if pid in owners:
                owners.update(dict.fromkeys(above, owners[pid]))
        return owners
