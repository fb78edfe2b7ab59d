"""Memory that processes hold together, on real ones that this process started."""

import itertools
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sandbox_worker.init.memory import FREE_BYTES, MEASURED_FOR_S, PIPE_BYTES, Mappings, Memory, most_in_a_socket
from sandbox_worker.init.procfs import Proc, Seen, Status, Times
from tests.support.clock import Clock
from tests.support.tables import table

MIB = 1 << 20


class Family:
    """Forks of this process, which have `shared`: each does what it is told by a number of MiB to copy."""

    def __init__(self, children: int, shared: bytearray) -> None:
        self.proc = Proc()
        self.pids = []
        self._pairs = []
        for _ in range(children):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                ours.close()
                _obey(theirs, shared)
            theirs.close()
            self.pids.append(pid)
            self._pairs.append(ours)
        for child in [*range(children)] * 2:  # after a turn it has copied all pages that waiting for the next one takes
            self.copy(child, 0)

    def copy(self, child: int, megabytes: int) -> None:
        self._pairs[child].send(bytes([megabytes]))
        assert self._pairs[child].recv(1) == b"."

    def memory(self, limit_bytes: int, inherited_bytes: int = 0) -> Memory:
        """A measurement of the children as a REPL that has started."""
        made = Memory(self.proc, limit_bytes)
        made.repl_started(inherited_bytes)
        return made

    def seen(self) -> list[Seen]:
        found = [(pid, self.proc.status(pid), self.proc.times(pid)) for pid in self.pids]
        return [Seen(pid, status, times) for pid, status, times in found if status is not None]

    def end(self) -> None:
        for pid, ours in zip(self.pids, self._pairs, strict=True):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            ours.close()


def _obey(told: socket.socket, shared: bytearray) -> None:
    while number := told.recv(1):
        for at in range(0, number[0] * MIB, 4096):
            shared[at] = 1
        told.send(b".")
    os._exit(0)


@contextmanager
def family(children: int = 3, sockets: int = 0) -> Iterator[Family]:
    """Start children that share 60 MiB and pairs of sockets. This process lets go of both."""
    shared = bytearray(b"x") * (60 * MIB)
    pairs = [socket.socketpair() for _ in range(sockets)]
    made = Family(children, shared)
    del shared
    for end in itertools.chain(*pairs):
        end.close()
    try:
        yield made
    finally:
        made.end()


def test_memory_below_limit_counts_each_process() -> None:
    with family() as readers:
        memory = readers.memory(1 << 40)
        assert memory.used_bytes(readers.seen()) >= 3 * 60 * MIB
        assert memory.measuring_s == 0


def test_memory_past_limit_counts_shared_pages_once() -> None:
    with family() as readers:
        estimate = sum(each.status.memory_bytes for each in readers.seen())
        memory = readers.memory(estimate * 2 // 3)
        first = memory.used_bytes(readers.seen())
        assert first < estimate / 2  # what they share with this process, too, is there once
        assert memory.measuring_s > 0
        for child in range(3):
            readers.copy(child, 60)
        assert memory.used_bytes(readers.seen()) >= first + 100 * MIB


def test_memory_measurement_holds_until_pages_are_written(clock: Clock) -> None:
    with family() as readers:
        memory = readers.memory(sum(each.status.memory_bytes for each in readers.seen()) * 2 // 3)
        measured: list[int] = []
        memory_of = readers.proc.shared_out_bytes
        readers.proc.shared_out_bytes = lambda speaker: measured.append(speaker) or memory_of(speaker)  # type: ignore[method-assign,func-returns-value]
        first = memory.used_bytes(readers.seen())
        asked = len(measured)
        assert asked == 4  # init and three
        assert memory.used_bytes(readers.seen()) - first < MIB
        assert len(measured) == asked
        first_seen, *others = readers.seen()
        grown = first_seen.status._replace(memory_bytes=first_seen.status.memory_bytes + 8 * MIB)
        assert memory.used_bytes([first_seen._replace(status=grown), *others]) - first >= 8 * MIB
        readers.copy(0, 1)
        assert MIB <= memory.used_bytes(readers.seen()) - first < 8 * MIB
        assert len(measured) == asked
        clock.forward(MEASURED_FOR_S * 1.1)
        memory.used_bytes(readers.seen())
        assert len(measured) > asked


def test_hidden_process_counts_its_possible_memory() -> None:
    with family(1) as one:
        (seen,) = one.seen()
        hidden = Seen(seen.pid, type(seen.status)(1, 2, 0, 0, seen.pid, is_hidden=True), seen.times)
        assert one.memory(1 << 30).used_bytes([hidden]) >= 1 << 30


def test_shared_sockets_count_once() -> None:
    with family(sockets=40) as holders:
        seen = holders.seen()
        memory = holders.memory(0)  # so that it looks closely
        each = memory._socket_bytes
        assert 2 * 100_000 < each < 16 * MIB
        held = memory._held_bytes(seen)
        assert 80 * each - FREE_BYTES <= held <= 110 * each


def test_pipe_holds_as_much_as_is_charged_for_it() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    assert os.write(write_end, b"x" * (PIPE_BYTES + 1)) == PIPE_BYTES
    for fd in (read_end, write_end):
        os.close(fd)


def test_sockets_count_on_top_of_memory_near_the_limit() -> None:
    """Far below the limit, what sockets can hold is not charged; near it, it is."""
    with family(1, sockets=40) as holders:
        seen = holders.seen()
        own = seen[0].status.memory_bytes
        far, near, past = map(holders.memory, (1 << 40, own + MIB, own - MIB))
        assert far.used_bytes(seen) == own
        assert far.measuring_s == 0
        held = near._held_bytes(seen)
        assert held > 0
        assert near.used_bytes(seen) >= held
        assert near.measuring_s > 0
        assert past.used_bytes(seen) == own + held


def test_inherited_memory_is_no_processs_own() -> None:
    """Below the limit each process's part of it is left out; copies of inherited pages count towards the limit."""
    with family(2) as readers:
        seen = readers.seen()
        inherited = min(each.status.memory_bytes for each in seen) // 2
        memory = readers.memory(1 << 40, inherited)
        assert memory.used_bytes(seen) == sum(each.status.memory_bytes for each in seen) - 2 * inherited
        memory.repl_started(1 << 39)
        assert memory.used_bytes(seen) == 0


def test_one_process_past_the_limit_is_not_measured() -> None:
    """A REPL counts with its private memory alone, whatever it shares: a reading would wait for its lock."""
    with family(1) as one:
        one.copy(0, 60)
        (seen,) = one.seen()
        memory = one.memory(50 * MIB, 5 * MIB)
        one.proc.shared_out_bytes = lambda _: 1 // 0  # type: ignore[assignment, method-assign]
        used = memory.used_bytes([seen]) - memory._held_bytes([seen])
    assert used == seen.status.memory_bytes - 5 * MIB


def test_process_that_cannot_be_measured_counts_as_estimated() -> None:
    with family(2) as readers:
        seen = readers.seen()
        estimate = sum(each.status.memory_bytes for each in seen)
        memory = readers.memory(estimate * 2 // 3)
        readers.proc.shared_out_bytes = lambda _: None  # type: ignore[assignment, method-assign]
        assert memory.used_bytes(seen) >= estimate


def test_socket_holds_little_less_than_is_charged_for_it() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with one, other:
        one.setblocking(False)
        buffer_bytes = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        held = one.send(b"x" * (buffer_bytes - (1 << 14))) + one.send(b"x" * (buffer_bytes - 1024))
        with pytest.raises(BlockingIOError):
            one.send(b"x")
    assert held <= most_in_a_socket() <= 1.2 * held


def test_pages_that_init_shares_out_count_once() -> None:
    """Set sizes of 30 MiB each, 60 MiB inherited: at most the bytes beyond those are those of the REPL."""
    with family(2) as readers:
        seen = readers.seen()
        alone = max(each.status.memory_bytes for each in seen) - 60 * MIB
        memory = readers.memory(max(0, alone) + MIB, 60 * MIB)
        readers.proc.shared_out_bytes = lambda _: 30 * MIB  # type: ignore[assignment, method-assign]
        used = memory.used_bytes(seen) - memory._held_bytes(seen)
    assert 30 * MIB <= used < max(alone, 0) + 60 * MIB


def test_mappings_are_charged_beyond_the_free_ones_and_counted_rarely() -> None:
    proc, counts, counted = Proc(), {1: 20_000}, list[int]()
    proc.mappings = lambda speaker: counted.append(speaker) or counts[speaker]  # type: ignore[method-assign,func-returns-value]
    mappings = Mappings(proc)

    def charged(*processes: tuple[int, float]) -> int:
        """Return how many mappings are charged. The first process is the parent of the second."""
        parents = {2: 1}
        seen = [
            Seen(pid, Status(parents.get(pid, 0), 1, speaker=pid), Times(system_s=system_s))
            for pid, system_s in processes
        ]
        held, rest = divmod(mappings.held_bytes(seen), 320)
        assert rest == 0
        return held

    assert charged((1, 0.019)) == 0
    assert charged((1, 0.02)) == 20_000 - 16_384
    assert charged((1, 0.03), (2, 0.0)) == 2 * 20_000 - 16_384  # a new process has its parent's mappings
    assert counted == [1]
    counts |= {1: 1_000, 2: 15_385}
    assert charged((1, 0.041), (2, 0.0)) == 21_000 - 16_384
    assert charged((1, 0.05), (2, 0.02)) == 1
    assert charged((1, 0.05), (2, 0.02), (3, 0.0)) == 1
    assert counted == [1, 1, 2]


# -- sums, of figures made by hand -----------------------------------------------------------------------------------


class Figures(Proc):
    """A /proc with figures made by hand: pid → its mappings, what it has open, and its share of all set sizes."""

    def __init__(self, shared: dict[int, int | None], opened: dict[int, list[str]], mapped: int = 0) -> None:
        super().__init__()
        self.measured: list[int] = []
        self.siblings: set[int] = set()
        self._shared, self._opened, self._mapped = shared, opened, mapped

    def mappings(self, speaker: int) -> int:
        return self._mapped if speaker == 1 else 0

    def descriptors(self, speaker: int) -> int:
        return len(self._opened.get(speaker, [])) or (9 if speaker == UNREADABLE else 0)

    def opened(self, speaker: int) -> list[str]:
        return self._opened.get(speaker, [])

    def have_one_memory(self, one: int, other: int) -> bool:
        return {one, other} <= self.siblings

    def shared_out_bytes(self, speaker: int) -> int | None:
        self.measured.append(speaker)
        return self._shared.get(speaker)


UNREADABLE = 8
"""Pid of a process whose descriptors can be counted and not read."""


def process(pid: int, megabytes: int, parent: int = 0, faults: int = 0) -> Seen:
    status = Status(parent, 1, megabytes * MIB, table_bytes=MIB, speaker=pid)
    return Seen(pid, status, Times(faults=faults, system_s=1.0))


def figures(
    shared: dict[int, int],
    opened: dict[int, list[str]] | None = None,
    mapped: int = 0,
    siblings: set[int] | None = None,
) -> Figures:
    made = Figures({pid: megabytes * MIB for pid, megabytes in shared.items()}, opened or {}, mapped)
    made.siblings = siblings or set()
    return made


TWO = [process(1, 60), process(2, 60, parent=1)]
OWN = os.getpid()


@table(
    "proc, limit, inherited, seen, used",
    [
        (figures({}), 80, 50, TWO, 20),  # copies of what they inherited would be 70
        (
            figures({OWN: 30, 1: 5, 2: 5}),
            64,
            50,
            [TWO[0], process(2, 55)],
            10,
        ),  # the larger one alone has 10 of its own
        (figures({OWN: 0, 1: 20, 2: 20}), 100, 0, TWO, 60),
        (figures({OWN: 5, 1: 35, 2: 35}), 100, 0, TWO, 77),  # with 1 of page tables each
        (figures({OWN: 5, 1: 35, 2: 35}), 99, 20, TWO, 62),  # less 5 shared with init for each
        (figures({OWN: 0, 1: 35, 2: 35}, siblings={1, 2}), 100, 0, TWO, 60),
        (figures({OWN: 0, 1: 70, 2: 70}, siblings={1, 2}), 100, 0, TWO, 71),  # one memory counts once
        (figures({OWN: 0, 1: 35, 2: 35}, siblings={1, 3}), 100, 0, [process(1, 60, parent=3), TWO[1]], 72),
        (figures({}), 50, 0, TWO, 60),  # no measurement is needed
    ],
)
def test_measured_memory_is_the_largest_of_what_is_certain(
    proc: Figures, limit: int, inherited: int, seen: list[Seen], used: int
) -> None:
    memory = Memory(proc, limit * MIB)
    memory.repl_started(inherited * MIB)
    assert memory.used_bytes(seen) == used * MIB
    assert bool(proc.measured) == bool(proc._shared)


def test_sockets_and_pipes_count_beyond_the_free_bytes() -> None:
    sockets, pipes = ([f"{kind}:[{number}]" for number in range(50)] for kind in ("socket", "pipe"))
    both = {1: sockets + pipes, 2: [*sockets[:10], "/dev/null"]}
    for opened, expected in (
        (both, 50 * most_in_a_socket() + 50 * PIPE_BYTES - FREE_BYTES),
        ({1: pipes[:1]}, 0),
        ({1: sockets}, 50 * most_in_a_socket() - FREE_BYTES),
    ):
        memory = figures({}, opened)
        assert Memory(memory, 0)._held_bytes(TWO) == expected
    unread = Memory(figures({}, {1: sockets}), 0)._held_bytes([*TWO, process(UNREADABLE, 1)])
    assert unread == 59 * most_in_a_socket() - FREE_BYTES
    assert FREE_BYTES == 4 * MIB


def test_measurement_is_taken_again_where_a_process_is_new() -> None:
    proc = figures({OWN: 0, 1: 35, 2: 35, 3: 1})
    memory = Memory(proc, 100 * MIB)
    memory.repl_started(0)
    smaller = [process(1, 59), process(2, 59, parent=1)]
    for seen, measurements in ((TWO, 3), (TWO, 3), (smaller, 3), ([*TWO, process(3, 1)], 7)):
        assert memory.used_bytes(seen) == (72 if len(seen) == 2 else 74) * MIB
        assert len(proc.measured) == measurements
    memory.repl_started(0)
    memory.used_bytes(TWO)
    assert len(proc.measured) == 10
    past = figures({OWN: 0, 1: 35, 2: 35}, {1: [f"socket:[{number}]" for number in range(50)]})
    memory = Memory(past, 72 * MIB + 1)  # what sockets hold takes it past its limit
    for measurements in (3, 6):
        memory.used_bytes(TWO)
        assert len(past.measured) == measurements


def test_mappings_count_as_memory_and_their_count_as_time() -> None:
    charged = (116_384 - 16_384) * 320
    for limit, used in ((1 << 40, 120 * MIB + charged), (120 * MIB + charged - 1, 72 * MIB + charged)):
        proc = figures({OWN: 0, 1: 35, 2: 35}, mapped=116_384)
        memory = Memory(proc, limit)
        memory.repl_started(0)
        assert memory.used_bytes(TWO) == used
        assert 0 < memory.measuring_s < 1
        assert bool(proc.measured) == (limit < 1 << 40)
