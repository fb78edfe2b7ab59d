"""Init's handles on the REPLs of a worker: one, or after a fork a family of several.

`init/hub.py` has the theory of operation. Each REPL of a family has a control socket, pipes, a bell and a keeper of its
own. Scratch folder, memory, processes, programs and their limits are the worker's, and so the family's. Only a worker
with a PID namespace and a /proc of its own has a family: there init finds the parent of each process.
"""

import contextlib
import errno
import math
import mmap
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from sandbox_worker.init.child import Confinement
from sandbox_worker.init.hub import MOST_FORK_FDS
from sandbox_worker.init.output_pipes import ReplOutput
from sandbox_worker.init.procfs import Seen, Status, Times
from sandbox_worker.init.sockets import Events, Hands, InitSocket, send
from sandbox_worker.init.usage_watch import Watch
from sandbox_worker.isolation.landlock import SCOPES_SIGNALS
from sandbox_worker.wire.control import Died, Failed, Started
from sandbox_worker.wire.descriptors import (
    A_FORK,
    A_HUB,
    BELL,
    FORKED,
    GOES_ON,
    INTERRUPTED_AT,
    KILL,
    REPL_ENDED,
)

RESTS_S = 0.5
"""CPU seconds that a hub may use while it has no fork to make. One that uses more runs functions of model code."""
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
        rested_s: CPU seconds that it had used when it had made its last fork.
    """

    def __init__(self, speaking: socket.socket, moment: int, shared_bytes: int) -> None:
        self.speaking = speaking
        self.moment = moment
        self.shared_bytes = shared_bytes
        self.pid = 0
        self.waiting: dict[socket.socket, LivingRepl] = {}
        self.made: list[LivingRepl] = []
        self.rested_s = math.inf


class LivingRepl:
    """One REPL of a worker, and what init has for it alone.

    Args:
        control: Its control socket. The first one's is the worker's.
        output: Init's ends of its pipes.
        bell: Memory shared with it.
        hands: Socket on which it is handed descriptors; None if it gets none.

    Attributes:
        pid: Its pid; None if it does not live.
        keeper: Its keeper, once it was forked or is a fork.
        hub: The hub that it has become, from which its forks are made.
        block_cpu_s: CPU seconds that its block may use.
        said_cpu_s: CPU seconds of its block that the orchestrator was told of.
    """

    pid: int | None = None
    keeper: _Keeper | None = None
    hub: _Hub | None = None
    block_cpu_s = math.inf
    said_cpu_s = 0.0

    def __init__(self, control: InitSocket, output: ReplOutput, bell: mmap.mmap, hands: Hands | None) -> None:
        self.control = control
        self.output = output
        self.bell = bell
        self.hands = hands

    @property
    def frozen(self) -> int:
        """Number of its hubs and keepers, which run none of model code."""
        return (self.keeper is not None) + (self.hub is not None and self.hub.pid > 0)

    def interrupt(self, block: int) -> None:
        """Send SIGINT for the block of that number."""
        BELL.pack_into(self.bell, INTERRUPTED_AT, block)
        self.signal(signal.SIGINT)

    def signal(self, number: int) -> None:
        """Send a signal to the REPL if it lives."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def has_ended(self, status: int) -> None:
        """Report its end, with its wait status."""
        self.pid = None
        code = os.waitstatus_to_exitcode(status)
        self.control.say(Died(signal=-code) if code < 0 else Died(exit_code=code))


class Family:
    """Makes and ends the REPLs of a worker, once the first of them is forked.

    Args:
        confinement: As of the worker's children.
        events: What init waits for.
        watch: Samples all processes.
        members: All REPLs that have not been closed, the worker's own first. Forks come and go here.
        obey: Called when the control socket of a fork has a packet, or its end.
        has_failed: Called when a REPL cannot be ended alone. The caller then kills all processes of the worker.
    """

    def __init__(
        self,
        confinement: Confinement,
        events: Events,
        watch: Watch,
        members: list[LivingRepl],
        obey: Callable[[LivingRepl], None],
        has_failed: Callable[[], None],
    ) -> None:
        self._members = members
        self._bounds = confinement.bounds.repl
        self._proc = confinement.proc
        self._abi = confinement.landlock_abi
        self._ruleset = confinement.ruleset
        self._events = events
        self._watch = watch
        self._obey = obey
        self._has_failed = has_failed
        self._moments = 0
        watch.cpu_times.owners = self._owners

    def keepers(self) -> list[int]:
        """Return the pids of all keepers."""
        return [each.keeper.pid for each in self._members if each.keeper is not None]

    # -- forks -------------------------------------------------------------------------------------------------------

    def fork(self, of: LivingRepl, needs_hub: bool, fds: Sequence[int], checkpoints: Collection[int]) -> str | None:
        """Have a REPL forked as soon as it is a hub. Return why it cannot be now, as one clause; else None.

        Args:
            fds: Control socket, connection and bell of the fork. They are closed.
            checkpoints: Pids of the REPL's checkpoints.
        """
        control_fd, connection_fd, bell_fd = fds
        problem = self._problem(of, needs_hub, checkpoints)
        if problem is None and needs_hub:
            self.end_hub(of)
            problem = self._make_hub(of)
        if problem is not None:
            for fd in fds:
                os.close(fd)
            return problem
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, control_fd)
        control = InitSocket(connected, self._events, lambda: self._obey(fork))
        bell, hands = mmap.mmap(bell_fd, mmap.PAGESIZE), Hands()
        fork = LivingRepl(control, ReplOutput(self._events, self._bounds, control.say, bell), bell, hands)
        self._members.append(fork)
        given = [connection_fd, *fork.output.open(), hands.give_away(), bell_fd]
        self._ask(of, A_FORK, fork, given)
        if needs_hub:  # the last to be asked for, and awaited by the hub: the two are made at the same time
            self._ask(of, GOES_ON, of, [])
        for fd in given:
            os.close(fd)
        return None

    def _problem(self, of: LivingRepl, needs_hub: bool, checkpoints: Collection[int]) -> str | None:
        if self._abi < SCOPES_SIGNALS:
            return "this kernel cannot keep forks apart, and Linux 6.12 or newer can"
        if of.pid is None:
            return "its process has ended"
        if MOST_FORK_FDS * (len(self._members) + 1) + SPARE_FDS > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            return f"{len(self._members):,} REPLs have taken its sandbox's descriptors (`ulimit -n`)"
        if not needs_hub:
            return None if of.hub is not None else "its frozen copy has ended"
        if (self._proc.status(of.pid) or Status()).threads != 1:
            return "threads that an earlier block has left were running"
        if self._has_left_processes(of, checkpoints):
            return "processes that an earlier block has left were running"
        return None

    def _has_left_processes(self, of: LivingRepl, checkpoints: Collection[int]) -> bool:
        """Whether any process that the REPL has started is there, or an orphan of one."""
        assert of.pid is not None
        session, known = self._proc.session(of.pid), {*self._known(), *checkpoints}
        for pid in self._proc.others():
            status = self._proc.status(pid) if pid not in known and self._proc.session(pid) == session else None
            if status is not None and status.parent in (of.pid, 1 if of.keeper is None else of.keeper.pid):
                return True
        return False

    def _known(self) -> set[int]:
        hubs = [each.pid for each in self._hubs()]
        return {1, *hubs, *self.keepers(), *(each.pid or 0 for each in self._members)}

    def _hubs(self) -> "list[_Hub]":
        return [each.hub for each in self._members if each.hub is not None]

    def _make_hub(self, of: LivingRepl) -> str | None:
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        assert of.hands is not None
        if not of.hands.hand(theirs.detach(), A_HUB):
            own.close()
            return "its socket is full"
        status = self._proc.status(of.pid or 0) or Status()
        self._moments += 1
        of.hub = hub = _Hub(own, self._moments, status.memory_bytes - status.table_bytes)
        self._events.listen(own.fileno(), lambda *_: self._hear_end(of, hub))  # it never says anything
        return None

    def _hear_end(self, of: LivingRepl, hub: _Hub, error: int = 0) -> None:
        """Take what keepers have said before their hub ended, such as why it cannot fork, or which fork is there."""
        self.hear_keepers()
        if of.hub is hub:
            self.end_hub(of, error)

    def hear_keepers(self) -> None:
        """Take what new keepers have said. A request may come from what their REPLs have said since."""
        for of, hub in [(each, each.hub) for each in self._members if each.hub is not None]:
            for speaking in [*hub.waiting]:
                if of.hub is hub and speaking in hub.waiting:
                    self._hear_new(of, hub, speaking)

    def _ask(self, of: LivingRepl, packet: bytes, fork: LivingRepl, given: list[int]) -> None:
        """Ask the hub of a REPL for a fork. It hears of it when it has become one."""
        assert of.hub is not None
        assert self._ruleset is not None
        hub = of.hub
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hub.waiting[own], hub.rested_s = fork, math.inf
        self._events.listen(own.fileno(), lambda *_: self._hear_new(of, hub, own))
        with theirs, contextlib.suppress(OSError):  # it has ended, as the keeper's socket says, too
            send(hub.speaking, packet, (theirs.fileno(), self._ruleset, *given))

    def _hear_new(self, of: LivingRepl, hub: _Hub, speaking: socket.socket) -> None:
        """Take what a new keeper says of itself and of its REPL."""
        try:
            said = speaking.recv(FORKED.size, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):  # unix(7): a packet was left unread; poll says so again
            return
        error, keeper_pid, repl_pid = FORKED.unpack(said) if len(said) == FORKED.size else (errno.ECHILD, 0, 0)
        fork, keeper = hub.waiting.pop(speaking), _Keeper(keeper_pid, speaking)
        self._events.forget(speaking.fileno())
        if not error:
            self._begin(of, hub, fork, keeper, repl_pid)
            return
        speaking.close()
        if fork is of:  # it goes on as the process that it was, and nothing keeps it apart from forks
            self._hear_end(of, hub, error)
        else:
            self._refuse(fork, error)

    def _begin(self, of: LivingRepl, hub: _Hub, fork: LivingRepl, keeper: _Keeper, pid: int) -> None:
        """Take the processes of a fork, or of the REPL that goes on beside its hub."""
        if keeper.pid == pid or not {keeper.pid, pid} <= {*self._proc.others()} - self._known():  # a lie
            self._has_failed()
        if fork is of:
            hub.pid = of.pid or 0
            self._end_keeper(of)
        else:
            hub.made.append(fork)
        fork.pid, fork.keeper = pid, keeper
        self._events.listen(keeper.speaking.fileno(), lambda *_: self._hear_keeper(fork))
        for each in (keeper.pid, pid, hub.pid):
            self._watch.memory.share(each, hub.moment, hub.shared_bytes)
        self._watch.cpu_times.program_started(keeper.pid)
        if hub.pid:
            for made in hub.made:
                made.control.say(Started(layers=[]))
            hub.made.clear()

    def _hear_keeper(self, of: LivingRepl) -> None:
        assert of.keeper is not None
        try:
            said = of.keeper.speaking.recv(REPL_ENDED.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if len(said) != REPL_ENDED.size:  # it was killed from outside
            self._has_failed()
            return
        of.has_ended(*REPL_ENDED.unpack(said))

    # -- ends --------------------------------------------------------------------------------------------------------

    def end(self, of: LivingRepl) -> None:
        """Kill a REPL and all that it started, and forward its last output. Return when all has ended."""
        if of.keeper is not None:
            self._kill(of.keeper)
        elif of.pid is not None:
            self._has_failed()
        self.was_ended(of)

    def was_ended(self, of: LivingRepl) -> None:
        """Record that all processes of a REPL have ended, and forward its last output."""
        self.end_hub(of)
        self._end_keeper(of)
        of.pid = None
        of.block_cpu_s = math.inf
        of.output.drain()
        of.output.close()

    def leave(self, of: LivingRepl) -> None:
        """Forget a fork, whose control socket has ended, and end its processes."""
        if of in self._members:
            self.end(of)
            self._drop(of)

    def _kill(self, keeper: _Keeper) -> None:
        """Have a keeper kill its REPL and all that it started, and end."""
        until = time.monotonic() + KILLED_S
        answer = select.poll()
        answer.register(keeper.speaking, select.POLLIN)
        said = b""
        with contextlib.suppress(OSError):
            keeper.speaking.send(KILL, socket.MSG_DONTWAIT)
            while (left_s := until - time.monotonic()) > 0 and answer.poll(math.ceil(1000 * left_s)):
                said = keeper.speaking.recv(REPL_ENDED.size, socket.MSG_DONTWAIT)
                if len(said) != REPL_ENDED.size:
                    break
        if said != KILL:
            self._has_failed()

    def _end_keeper(self, of: LivingRepl) -> None:
        """Have a keeper end, and nothing below it."""
        keeper, of.keeper = of.keeper, None
        if keeper is not None:
            self._events.close(keeper.speaking)

    def end_hub(self, of: LivingRepl, error: int = 0) -> None:
        """Have a hub end. The forks that are not whole are refused."""
        hub, of.hub = of.hub, None
        if hub is None:
            return
        self._events.close(hub.speaking)
        if hub.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(hub.pid, signal.SIGKILL)  # functions of model code may hold it up
        for speaking in hub.waiting:
            self._give_up(speaking)
        for fork in hub.made:
            self.end(fork)
        for fork in ({*hub.waiting.values(), *hub.made} - {of}) & {*self._members}:
            self._refuse(fork, error)

    def _give_up(self, speaking: socket.socket) -> None:
        """Have a keeper that has not spoken yet end with its REPL."""
        with contextlib.suppress(OSError):  # it has ended
            speaking.shutdown(socket.SHUT_RD)  # its REPL cannot speak from here on, and ends
            speaking.recv(FORKED.size)  # unix(7): a packet that is left unread resets the socket
            speaking.send(KILL, socket.MSG_DONTWAIT)
        self._events.close(speaking)

    def _refuse(self, fork: LivingRepl, error: int) -> None:
        reason = "its processes ended" if error in (0, errno.ECHILD) else os.strerror(error)
        fork.control.say(Failed(step="fork", reason=reason, code=error))
        self._drop(fork)

    def _drop(self, fork: LivingRepl) -> None:
        self._members.remove(fork)
        for hub in self._hubs():
            hub.made = [each for each in hub.made if each is not fork]
            for speaking in [speaking for speaking, each in hub.waiting.items() if each is fork]:
                del hub.waiting[speaking]
                self._give_up(speaking)
        fork.output.close()
        if fork.hands is not None:
            fork.hands.close()
        fork.bell.close()
        fork.control.close()

    # -- their resources ---------------------------------------------------------------------------------------------

    def end_strays(self) -> None:
        """Kill the processes of the last sample that belong to no REPL, unless a fork is being made; and end hubs that
        do not rest. Functions of model code for `os.register_at_fork` may hold up a fork, or start a process."""
        if any(each.waiting for each in self._hubs()):
            return
        used_s = {each.pid: each.times.cpu_s for each in self._watch.seen}
        for each in self._members:
            if each.hub is not None and each.hub.pid in used_s:
                each.hub.rested_s = min(each.hub.rested_s, used_s[each.hub.pid])
                if used_s[each.hub.pid] > each.hub.rested_s + RESTS_S:
                    self.end_hub(each)
        owned = self._known() | self._owners(self._watch.seen).keys()
        session = next((self._proc.session(each.pid) for each in self._members if each.pid is not None), 0)
        for pid in [each.pid for each in self._watch.seen if each.status.parent in {1, *used_s}]:
            # One whose parent is not in the sample has got another one since, maybe a keeper.
            if pid not in owned and session and self._proc.session(pid) == session:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def to_end_first(self) -> LivingRepl | None:
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
        return next((each for each in self._members if each.keeper is not None and each.keeper.pid == most), None)

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
