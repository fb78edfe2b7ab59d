"""Init's handle on the checkpoints of its REPL: frozen copies, from which it goes on after a kill.

`repl/checkpoint.py` has the theory of operation. Beside them, one may be in the making. Only a
worker with a PID namespace and a /proc of its own has any: there init finds all other processes, and kills them.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Collection
from functools import partial

from sandbox_worker.init.families import LivingRepl
from sandbox_worker.init.procfs import Proc, Status
from sandbox_worker.init.sockets import Events, send
from sandbox_worker.wire.bounds import ReplBounds
from sandbox_worker.wire.control import NO_FREEZING, Checkpointed
from sandbox_worker.wire.descriptors import A_CHECKPOINT, CHECKPOINT_MADE, GO_ON

COPIED_BYTES_IN_1_S = 8 << 30
"""Private memory that is copied in one second while it is written: 0.5 microseconds for each page that both processes
have. A checkpoint costs at most that, beside its forks."""
WORTH_FREEING = 16
"""Ratio of `memory_bytes` to the least private memory for which a checkpoint is ended. Code that fills all memory would
soon have filled less than that, and would then be killed without a checkpoint."""


class _Checkpoint:
    """One checkpoint, and init's end of its socket. Its pid is 0 until it has spoken."""

    def __init__(self, number: int, speaking: socket.socket, memory_bytes: int) -> None:
        self.number = number
        self.speaking = speaking
        self.memory_bytes = memory_bytes
        self.pid = 0


class FrozenCopies:
    """The checkpoints of a worker's REPL, and the one that is being made.

    Args:
        proc: The /proc in which the processes are seen.
        repl: The REPL.
        events: What init waits for.
        bounds: Limits of the REPL's processes together.
    """

    def __init__(self, proc: Proc, repl: LivingRepl, events: Events, bounds: ReplBounds) -> None:
        self._proc = proc
        self._repl = repl
        self._events = events
        self._memory_bytes, self._kept = bounds.memory_bytes, bounds.keep_checkpoints
        self._made: list[_Checkpoint] = []  # the oldest one first
        self._making: _Checkpoint | None = None
        self._ending: set[int] = set()  # killed, and not waited for yet

    @property
    def pids(self) -> set[int]:
        """Pids of the checkpoints."""
        return {each.pid for each in self._made}

    @property
    def numbers(self) -> list[int]:
        """Numbers of the checkpoints."""
        return [each.number for each in self._made]

    @property
    def processes(self) -> int:
        """Number of processes that count for no limit of the REPL's: the checkpoints, and those of a fork."""
        return len(self._made) + 2 * (self._making is not None)

    def prepare(self, number: int, inherited_bytes: int) -> str | None:
        """Hand the REPL the socket of a checkpoint. Return why it can make none now, as one clause; else None.

        Args:
            inherited_bytes: Memory that the REPL shares with init.
        """
        self.hear()
        hands, pid = self._repl.hands, self._repl.pid
        if hands is None or not self._proc.is_own:
            return NO_FREEZING
        status = (self._proc.status(pid) if pid else None) or Status()
        if status.threads != 1:
            return "threads that an earlier block has left were running"
        memory_bytes = max(0, status.memory_bytes - inherited_bytes)
        if 2 * memory_bytes > self._memory_bytes:
            return "its variables took more than half of memory_bytes"
        taken = [self._proc.unshared_bytes(each.pid) for each in self._made] if len(self._made) > 1 else []
        while len(taken) > 1 and 2 * (memory_bytes + sum(taken)) > self._memory_bytes:
            taken.pop(0)
            self._forget(self._made[0])
        self._forget(self._making)
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._making = _Checkpoint(number, own, memory_bytes)
        self._events.listen(own.fileno(), partial(self._hear, self._making))
        if not hands.hand(theirs.detach(), A_CHECKPOINT):
            self._forget(self._making)
            return "its socket is full"
        return None

    def hear(self) -> None:
        """Take what a checkpoint that is being made has said."""
        if self._making is not None:
            self._hear(self._making)

    def _hear(self, made: _Checkpoint, *_: int) -> None:
        """Take what a checkpoint says, or its end. Report a new one."""
        try:
            said = made.speaking.recv(CHECKPOINT_MADE.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        pid, took_s = CHECKPOINT_MADE.unpack(said) if len(said) == CHECKPOINT_MADE.size else (0, 0.0)
        # Any other pid is a lie of the REPL's: then it has no checkpoint.
        if made is not self._making or pid in (1, self._repl.pid) or pid not in self._proc.others():
            self._forget(made)
            return
        made.pid, self._making = pid, None
        self._made.append(made)
        if len(self._made) > self._kept:
            self._forget(self._made[0])
        cost_s = max(0.0, min(took_s, 1.0)) + made.memory_bytes / COPIED_BYTES_IN_1_S
        self._repl.control.say(Checkpointed(made.number, cost_s))

    def give_up(self) -> None:
        """End all checkpoints, and the one that is being made: the REPL is about to be forked. Return once they have
        ended: until then they take processes from the forks."""
        for each in (*self._made, self._making):
            self._forget(each)
        self.wait_for_ends()

    def wait_for_ends(self) -> None:
        """Return once all that were killed have ended: until then they are processes like others."""
        while self._ending:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._ending.pop(), 0)

    def frees(self, bytes_over: float) -> bool:
        """End the oldest checkpoints if that frees so many bytes, and not few. Return whether it does, once they have
        ended."""
        least, freed = max(bytes_over, self._memory_bytes / WORTH_FREEING), 0
        for number, each in enumerate(self._made, 1):
            freed += self._proc.unshared_bytes(each.pid)
            if freed >= least:
                for old in self._made[:number]:
                    self._forget(old)
                self.wait_for_ends()
                return True
        return False

    def ended(self, pid: int) -> None:
        """Record that a child of init has ended."""
        self._ending.discard(pid)
        for each in [each for each in self._made if each.pid == pid]:
            each.pid = 0
            self._forget(each)

    def resume(self, number: int, connection_fd: int) -> int | None:
        """Have a checkpoint go on with this connection, and end later ones. No other process of the worker may live.

        Returns:
            Its pid; None if there is none of that number.
        """
        made = next((each for each in self._made if each.number == number), None)
        if made is None or self._repl.hands is None:
            return None
        for later in self._made[self._made.index(made) + 1 :]:
            self._forget(later)
        self._repl.hands.empty()
        pid = made.pid
        try:
            os.kill(pid, signal.SIGCONT)
            send(made.speaking, GO_ON, (connection_fd,))
        except OSError:
            return None
        made.pid = 0
        self._forget(made)
        return pid

    def others_were_killed(self, spared: Collection[int]) -> None:
        """Record that init has killed all processes, but for checkpoints of these pids."""
        for pid in self.pids.difference(spared):
            self.ended(pid)
        self._forget(self._making)
        self._ending.clear()

    def _forget(self, checkpoint: _Checkpoint | None) -> None:
        if checkpoint is None:
            return
        self._events.close(checkpoint.speaking)
        if checkpoint.pid:
            if (self._proc.status(checkpoint.pid) or Status()).parent == 1:  # else the REPL has lied about its pid
                self._ending.add(checkpoint.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(checkpoint.pid, signal.SIGKILL)
        if checkpoint in self._made:
            self._made.remove(checkpoint)
        else:
            self._making = None
