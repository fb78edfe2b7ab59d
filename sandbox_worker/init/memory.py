"""What the processes of a REPL hold together: estimated at each look, measured where the estimate is past the limit.

The estimate is the sum of what each process has written (RssAnon, VmSwap, VmPTE), which counts a page for each process
that shares it, and for each descriptor the most that any can hold: it costs little and is never too small. Where it is
past the limit, each process is asked for its proportional set size, in which a shared page counts in parts, and for
what its descriptors lead to. That takes milliseconds, which count as the REPL's CPU time.
"""

import functools
import mmap
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox_worker.init.mappings import Mappings
from sandbox_worker.init.procfs import Proc, Seen, Status

MEASURING_S = 0.1
"""CPU time of one measurement. Processes that are not reached count with their estimates: all could grow meanwhile."""
MEASURED_FOR_S = 0.03
"""Time for which a measurement holds while pages are written to; it holds for as long as none are."""
FREE_BYTES = 4 << 20
"""What sockets and pipes of all processes together may hold without being counted: an event loop has two sockets."""
PIPE_BYTES = 1 << 16
"""What a pipe holds at most; model code cannot make it larger."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """What all held when it was measured (`time.monotonic`), and each process's faults and own memory at that time."""

    at: float
    memory_bytes: int
    each: dict[int, tuple[int, int]]


class Memory:
    """Of one REPL.

    Args:
        limit_bytes: Below it the estimate is good enough.

    Attributes:
        measuring_s: CPU seconds that measurements have taken so far.
    """

    def __init__(self, proc: Proc, limit_bytes: int) -> None:
        self._proc = proc
        self._limit_bytes = limit_bytes
        self._inherited_bytes = 0
        self._mappings = Mappings(proc)
        self._socket_bytes = most_in_a_socket()
        self._measured: _Measured | None = None
        self.measuring_s = 0.0

    def repl_started(self, inherited_bytes: int) -> None:
        """A fresh REPL is to be looked at.

        Args:
            inherited_bytes: What it shares with init from the start (a context made of objects) is not its own.
        """
        self._inherited_bytes = inherited_bytes
        self._measured = None

    def used_bytes(self, seen: Sequence[Seen]) -> int:
        """What `seen`, which are all that live, hold together."""
        worked_s = time.thread_time()
        mappings_bytes = self._mappings.held_bytes(seen)
        if mappings_bytes:
            self.measuring_s += time.thread_time() - worked_s
        estimate = sum(self._own_bytes(each.status) for each in seen)
        used = estimate - sum(min(self._own_bytes(each.status), self._inherited_bytes) for each in seen)
        most = estimate - self._inherited_bytes  # each process may have made a copy of what it had inherited
        descriptors = sum(self._proc.descriptors(each.status.speaker) for each in seen)
        if most + mappings_bytes + max(0, descriptors * self._socket_bytes - FREE_BYTES) <= self._limit_bytes:
            return used + mappings_bytes
        worked_s = time.thread_time()
        held_bytes = mappings_bytes + self._held_bytes(seen)
        if most + held_bytes > self._limit_bytes:
            known = self._since_measured(seen)
            used = self._measure(seen) if known is None or known + held_bytes > self._limit_bytes else known
        self.measuring_s += time.thread_time() - worked_s
        return used + held_bytes

    def _own_bytes(self, status: Status) -> int:
        return self._limit_bytes if status.is_hidden else status.memory_bytes

    def _held_bytes(self, seen: Sequence[Seen]) -> int:
        """The most that their sockets and pipes can hold in the kernel, of those that several share once."""
        kinds: set[str] = set()
        unseen = 0
        for each in seen:
            opened = self._proc.opened(each.status.speaker)
            kinds.update(opened)
            if not opened and each.status.memory_bytes:  # it runs a program that init may not read
                unseen += self._proc.descriptors(each.status.speaker)
        sockets = unseen + sum(kind.startswith("socket:") for kind in kinds)
        pipes = sum(kind.startswith("pipe:") for kind in kinds)
        return max(0, sockets * self._socket_bytes + pipes * PIPE_BYTES - FREE_BYTES)

    def _since_measured(self, seen: Sequence[Seen]) -> int | None:
        """What they can hold by now, by what was measured last; None if that was too long ago or a process is new.

        A page that was written to for the first time shows in RssAnon; a shared one that was copied shows as a fault.
        Both together are too small only for huge pages that took the place of others.
        """
        measured = self._measured
        if measured is None or any(each.pid not in measured.each for each in seen):
            return None
        pages = sum(each.times.faults - measured.each[each.pid][0] for each in seen)
        if pages and time.monotonic() > measured.at + MEASURED_FOR_S:
            return None
        grown = sum(max(0, self._own_bytes(each.status) - measured.each[each.pid][1]) for each in seen)
        return measured.memory_bytes + pages * mmap.PAGESIZE + grown

    def _measure(self, seen: Sequence[Seen]) -> int:
        """What they hold beyond what init gave, of pages that they share each once.

        What is still shared counts for each process no more than it does for init, which shares it with them all, and
        perhaps with other workers of a template; and for init and all processes together no more than once. And no
        process has more of init's than it got. All bounds hold, so that the largest of the results is used for certain.
        """
        alone = max(self._own_bytes(each.status) - self._inherited_bytes for each in seen)
        if alone > self._limit_bytes:  # asking for more waits for the process, which may go on growing meanwhile
            return alone
        until_s = time.thread_time() + MEASURING_S
        inits = self._proc.shared_out_bytes(self._proc.own_pid) or 0
        everyones = 0
        pids = {each.pid for each in seen}
        at, measured = time.monotonic(), {}
        for each in seen:
            own_bytes = self._own_bytes(each.status)
            # Asked first: a child of vfork that has run its program since then has next to nothing.
            if each.status.parent in pids and self._proc.have_one_memory(each.pid, each.status.parent):
                continue
            measured[each.pid] = each.times.faults, own_bytes
            shared_out = self._proc.shared_out_bytes(each.status.speaker) if time.thread_time() < until_s else None
            if shared_out is not None:
                everyones += shared_out + each.status.table_bytes
            elif (now := self._proc.status(each.pid)) is not None:  # else it has ended
                everyones += self._own_bytes(now)
        used = max(0, alone, everyones + inits - self._inherited_bytes, everyones - len(seen) * inits)
        self._measured = _Measured(at, used, measured)
        return used


@functools.cache
def most_in_a_socket() -> int:
    """Bytes: messages are taken as long as their sum is below the size of the buffer (net.core.wmem_default), so that
    one of that size comes on top; and each has a header of the kernel's.
    """
    one, other = socket.socketpair()
    with one, other:
        return 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) + (1 << 13)
