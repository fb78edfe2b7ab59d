"""Counts the memory of a REPL's processes: estimated in each sample, measured if the estimate is past the limit.

The estimate is the sum of each process's private memory (RssAnon, VmSwap, VmPTE), plus, for each descriptor, the most
that a descriptor can hold in the kernel. It costs little. It is never too small, because a page that n processes share
counts n times. If the estimate is past the limit, the proportional set size of each process is read, in which each of
the n processes counts 1/n of a shared page, and the targets of its descriptors. Such a measurement takes milliseconds,
which count as the REPL's CPU time: otherwise code could make init work for nothing.

Forks share the memory of their REPL until they write to it. If the sum is past the limit, each REPL of a family, keeper
and hub counts by the pages that it alone has. They are counted again only after it has had page faults: what is left to
it alone because the others have written, or ended, was shared before. What they share counts once for each moment at
which a REPL was forked.

A process may have 65,530 mappings (vm.max_map_count); 60 processes make the kernel hold some 800 MB, which no figure in
/proc shows. Counting the lines of /proc/PID/maps takes 30 ms for that many mappings. Making them costs the process at
least as much time in the kernel, so a process's mappings are counted again only after it has spent such time there.
"""

import functools
import math
import mmap
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox_worker.init.procfs import Proc, Seen, Status

WORTH_COUNTING_S = 0.02
"""CPU seconds in the kernel after which a process's mappings are counted again: enough to make 20,000 of them."""
FREE_MAPPINGS = 16_384
"""Mappings of all processes together that are not charged. A Python that has loaded pandas has 1,000."""
MAPPING_BYTES = 320
"""Bytes of kernel memory for one mapping, with its node in the tree of mappings."""


class Mappings:
    """Mappings of one REPL's processes."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._known: dict[int, tuple[float, int]] = {}

    def held_bytes(self, seen: Sequence[Seen]) -> int:
        """Return the bytes charged for the mappings of all living processes.

        A new process counts with its parent's mappings until it is counted itself.
        """
        known: dict[int, tuple[float, int]] = {}
        for each in seen:
            counted_at_s, count = self._known.get(each.pid, (0.0, 0))
            if each.times.system_s >= counted_at_s + WORTH_COUNTING_S:
                counted_at_s, count = each.times.system_s, self._proc.mappings(each.status.speaker)
            elif counted_at_s == 0 and (parent := known.get(each.status.parent)) is not None:
                count = max(count, parent[1])
            known[each.pid] = counted_at_s, count
        self._known = known
        return max(0, sum(count for _, count in known.values()) - FREE_MAPPINGS) * MAPPING_BYTES


MEASURING_S = 0.1
"""Most CPU seconds of one measurement. Processes beyond it count with their estimates: a longer measurement would let
the processes grow meanwhile."""
MEASURED_FOR_S = 0.03
"""Seconds for which a measurement stays valid while pages are written. Without writes it stays valid."""
FREE_BYTES = 4 << 20
"""Bytes in sockets and pipes of all processes together that are not charged: each event loop has two sockets."""
PIPE_BYTES = 1 << 16
"""Most bytes in one pipe: the kernel's default capacity, which model code cannot raise."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """One measurement.

    Attributes:
        at: Its time (`time.monotonic`).
        memory_bytes: Memory of all processes.
        each: pid → page faults and private memory at that time.
    """

    at: float
    memory_bytes: int
    each: dict[int, tuple[int, int]]


class Memory:
    """Memory of one REPL's processes.

    Args:
        proc: The /proc in which the processes are seen.
        limit_bytes: The limit. Below it the estimate is precise enough.

    Attributes:
        measuring_s: CPU seconds that measurements have taken so far.
    """

    def __init__(self, proc: Proc, limit_bytes: int) -> None:
        self._shared: dict[int, tuple[int, int]] = {}
        self._unshared: dict[int, tuple[float, int, int, int]] = {}
        self._proc = proc
        self._limit_bytes = limit_bytes
        self._inherited_bytes = 0
        self._mappings = Mappings(proc)
        self._socket_bytes = most_in_a_socket()
        self._measured: _Measured | None = None
        self.measuring_s = 0.0

    def repl_started(self, inherited_bytes: int) -> None:
        """Count a new REPL from here on.

        Args:
            inherited_bytes: Memory it shares with init from the start, for example a context made of objects.
        """
        self._inherited_bytes = inherited_bytes
        self._measured = None

    def share(self, pid: int, moment: int, shared_bytes: int) -> None:
        """Record that a process shares so many bytes with others that were forked at the same moment."""
        self._shared[pid] = moment, shared_bytes

    def beyond_shared_bytes(self, one: Seen) -> int:
        """Return the most private memory of a process beyond what it shares with others of its moment."""
        own_bytes, faults = self._own_bytes(one.status), one.times.faults
        if one.pid not in self._shared:
            return own_bytes
        at, earlier, known_bytes, had_bytes = self._unshared.get(one.pid, (-math.inf, -1, 0, 0))
        if faults == earlier:
            return known_bytes
        if time.monotonic() < at + MEASURED_FOR_S:
            return known_bytes + (faults - earlier) * mmap.PAGESIZE + max(0, own_bytes - had_bytes)
        known_bytes = self._proc.unshared_bytes(one.status.speaker) + one.status.table_bytes
        self._unshared[one.pid] = time.monotonic(), faults, known_bytes, own_bytes
        return known_bytes

    def used_bytes(self, seen: Sequence[Seen]) -> int:
        """Return the memory of all living processes together."""
        worked_s = time.thread_time()
        mappings_bytes = self._mappings.held_bytes(seen)
        if mappings_bytes:
            self.measuring_s += time.thread_time() - worked_s
        holders = [self._own_bytes(each.status) for each in seen]  # each holds the inherited pages, too
        estimate = sum(holders)
        if self._shared and estimate - self._inherited_bytes > self._limit_bytes:
            estimate, holders = self._family_bytes(seen)
        used = estimate - sum(min(each, self._inherited_bytes) for each in holders)
        most = estimate - self._inherited_bytes  # each process may have copied the inherited pages by writing to them
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

    def _family_bytes(self, seen: Sequence[Seen]) -> tuple[int, list[int]]:
        """Return the memory of all processes, what the REPLs of a family share counted once; and the parts of it that
        each hold the inherited pages."""
        worked_s, pids = time.thread_time(), {each.pid for each in seen}
        self._shared = {pid: shared for pid, shared in self._shared.items() if pid in pids}
        self._unshared = {pid: known for pid, known in self._unshared.items() if pid in pids}
        moments = list(dict(self._shared.values()).values())
        strangers = [self._own_bytes(each.status) for each in seen if each.pid not in self._shared]
        relatives = sum(self.beyond_shared_bytes(each) for each in seen if each.pid in self._shared)
        self.measuring_s += time.thread_time() - worked_s
        return relatives + sum(strangers) + sum(moments), [*strangers, *moments]

    def _own_bytes(self, status: Status) -> int:
        return self._limit_bytes if status.is_hidden else status.memory_bytes

    def _held_bytes(self, seen: Sequence[Seen]) -> int:
        """Return the most bytes that their sockets and pipes can hold in the kernel. A shared one counts once."""
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
        """Return an upper bound of the memory now, from the last measurement.

        A page written for the first time shows in RssAnon. A shared page that is copied shows as a fault. Both
        together are too small only where a huge page has replaced small ones. None if the measurement is too old or a
        process is new.
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
        """Measure the memory of the processes beyond what they inherited from init; a shared page counts once.

        Init shares its pages with all processes, and perhaps with other workers of a template. Three lower bounds hold:
        the largest process has at least its private memory less what it inherited; all processes and init together
        have the sum of their set sizes less the inherited bytes, which count once; and each process shares no more of
        init's pages than init's own set size. The largest of the three is used for certain.
        """
        alone = max(self._own_bytes(each.status) - self._inherited_bytes for each in seen)
        if alone > self._limit_bytes:  # measuring waits for the process's lock, while it may grow further
            return alone
        until_s = time.thread_time() + MEASURING_S
        inits = self._proc.shared_out_bytes(self._proc.own_pid) or 0
        everyones = 0
        pids = {each.pid for each in seen}
        at, measured = time.monotonic(), {}
        for each in seen:
            own_bytes = self._own_bytes(each.status)
            # Checked before measuring: a child of vfork that has exec'd since then has almost no memory of its own.
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
    """Return the most bytes that one socket can hold in the kernel.

    The kernel takes a message while the sum of the waiting ones is below the buffer's size (net.core.wmem_default). So
    one message of that size comes on top, and each message has a header of the kernel's.
    """
    one, other = socket.socketpair()
    with one, other:
        return 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) + (1 << 13)
