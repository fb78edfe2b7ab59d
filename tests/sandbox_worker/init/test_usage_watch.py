"""The watch of memory, CPU time and the scratch folder, on processes of these tests."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox_worker.init.procfs import Proc, Seen, Status, Times
from sandbox_worker.init.usage_watch import (
    FASTEST_S,
    LEAST_OF_INTERVAL,
    SLOWEST_S,
    YOUNG_LOOKS,
    CpuTime,
    CpuTimes,
    Watch,
    WorkerUsage,
)
from tests.support.clock import Clock
from tests.support.places import PROJECT
from tests.support.tables import table
from tests.support.waiting import until_now

MIB = 1 << 20
MANY = 1000


@contextmanager
def child(code: str) -> Iterator["subprocess.Popen[str]"]:
    """A Python that runs `code` and has said so; it goes on when a line is written to it."""
    program = f"{code}\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


@contextmanager
def watched(code: str = "x = 1", memory_bytes: int = 1 << 40) -> Iterator[Watch]:
    """The watch of a child as its REPL, at the beginning of a block."""
    with child(code) as repl:
        looking = Watch(Proc(), memory_bytes, MANY)
        looking.repl_started(repl.pid, 0)
        looking.block_started()
        yield looking


def test_watch_counts_written_memory_not_reserved() -> None:
    with watched("import mmap\nx = bytearray(b'x') * (64 << 20)\nreserved = mmap.mmap(-1, 1 << 30, 0x22)") as looking:
        assert 64 * MIB <= looking.look().memory_bytes <= 128 * MIB


def test_watch_counts_excess_processes_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes past their limit are counted, and their status is not read."""
    with child("") as one, child("") as other:
        proc = Proc()
        looking = Watch(proc, 1 << 40, 1, lambda: [one.pid, other.pid])
        monkeypatch.setattr(proc, "status", None)
        usage = looking.look()
    assert (usage.processes, usage.threads) == (2, 2)


def test_watch_excludes_memory_shared_with_init() -> None:
    """Memory that a REPL shares with init from the start is not the REPL's own."""
    # One process is init and forks the REPL: what they share is there before.
    code = """
import os, signal, sys
sys.path.insert(0, ".")
from sandbox_worker.init.procfs import Proc
from sandbox_worker.init.usage_watch import Watch
context = bytearray(b"x") * (64 << 20)
tell, told = os.pipe()
inherited = Proc().status(os.getpid())
pid = os.fork()
if pid == 0:
    os.read(tell, 1)
    more = bytearray(b"x") * (32 << 20)
    os.write(told, b"2")
    signal.pause()
watch = Watch(Proc(), 1 << 40, 1000)
watch.repl_started(pid, inherited.memory_bytes)
print(watch.look().memory_bytes >> 20)
os.write(told, b"1")
while not os.read(tell, 1) == b"2": os.write(told, b"1")
print(watch.look().memory_bytes >> 20)
os.kill(pid, signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT)
    before, after = map(int, done.stdout.split())
    assert before < 8
    assert 32 <= after <= 64


def test_watch_counts_cpu_time_from_block_start() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    with child(burn) as repl:
        looking = Watch(Proc(), 1 << 40, MANY)
        looking._repl_pid = repl.pid
        assert looking.look().cpu_s >= 0.25
        looking.block_started()
        assert looking.look().cpu_s < 0.1


def test_watch_counts_threads_and_processes() -> None:
    threads = "import threading\nstop = threading.Event()\nfor _ in range(7): threading.Thread(target=stop.wait, daemon=True).start()"
    with watched(threads) as looking:
        usage = looking.look()
    assert (usage.processes, usage.threads) == (1, 8)


def test_watch_ignores_ended_processes() -> None:
    """A process that ended is no error and has no usage."""
    with child("x = 1") as repl:
        looking = Watch(Proc(), 1 << 40, MANY)
        looking.repl_started(repl.pid, 0)
        repl.send_signal(signal.SIGKILL)
        repl.wait()
    usage = looking.look()
    assert (usage.memory_bytes, usage.processes, usage.threads) == (0, 0, 0)


def test_watch_slows_while_all_processes_sleep() -> None:
    """The watch looks often while a process works, and ever more rarely while all sleep."""

    def looked_and_waits_longer() -> bool:
        looking.look()
        return looking.wait_s() > 5 * FASTEST_S

    with watched() as looking:
        assert looking.wait_s() <= FASTEST_S
        until_now(looked_and_waits_longer)
        assert looking.wait_s() <= SLOWEST_S * (1 + LEAST_OF_INTERVAL)
        looking.block_started()
        assert looking.wait_s() <= FASTEST_S


def test_watch_draws_its_moments_anew() -> None:
    with watched() as looking:
        waits = set()
        for _ in range(50):
            looking.block_started()
            looking.look()
            waits.add(round(looking.wait_s(), 4))
    assert len(waits) >= 10
    assert max(waits) > 2 * min(waits)


def looked(watch: Watch) -> Watch:
    watch.look()
    return watch


def test_sleeping_process_is_sampled_about_twice_a_second() -> None:
    with watched() as looking:
        until_now(lambda: looked(looking)._interval_s == 0.5)
        waits = [looked(looking).wait_s() for _ in range(20)]
    assert 0.3 < max(waits) <= 0.625
    assert min(waits) < 0.45


@table("are_several", [False, True])
def test_process_that_may_grow_unseen_is_sampled_often(are_several: bool) -> None:
    """The watch alone bounds a single process without RLIMIT_AS, and several processes with it."""
    with child("x = 1") as one, child("x = 1") as other:
        pids = [one.pid, other.pid] if are_several else [one.pid]
        looking = Watch(Proc(), 1 << 40, MANY, lambda: pids, is_loose=not are_several)
        looking.repl_started(one.pid, 0)
        until_now(lambda: looked(looking)._interval_s == 0.02)
        intervals = [looked(looking)._interval_s for _ in range(8)]
    assert max(intervals) < 0.2


def test_nothing_is_used_before_the_first_sample() -> None:
    assert WorkerUsage() == WorkerUsage(0, 0.0, 0, 0, 0, 0)
    looking = Watch(Proc(), 1 << 40, MANY, lambda: [])
    assert dataclasses.replace(looking.look(), cpu_s=0.0) == WorkerUsage()


def test_cpu_time_of_a_program_is_no_time_of_the_block() -> None:
    burn = "import os, time\nos.setsid()\nwhile time.process_time() < 0.3: pass"
    with child("x = 1") as repl, child(burn) as program:
        looking = Watch(Proc(), 1 << 40, MANY, lambda: [repl.pid, program.pid])
        looking.repl_started(repl.pid, 0)
        looking.block_started()
        looking.program_started(program.pid)
        assert looking.wait_s() <= FASTEST_S
        usage = looking.look()
        assert usage.processes == 2
        assert usage.cpu_s < 0.1
        assert looking.cpu_times.of_program(program.pid) >= 0.25


def test_late_sample_is_due_at_once(clock: Clock) -> None:
    looking = Watch(Proc(), 1 << 40, MANY, lambda: [])
    looking.block_started()
    clock.forward(FASTEST_S / 2)
    assert 0 < looking.wait_s() < FASTEST_S
    clock.forward(1)
    assert looking.wait_s() == 0


def test_scratch_folder_is_walked_ten_times_a_second_at_most(clock: Clock, tmp_path: Path) -> None:
    """New files of the folder and deleted ones that are open count, up to the number that the walk stops at."""
    gone = tmp_path / "gone"
    gone.write_bytes(b"x" * MIB)
    with gone.open("rb") as still_open:
        gone.unlink()
        looking = Watch(Proc(), 1 << 40, MANY, lambda: [os.getpid()], str(tmp_path), max_scratch_files=2)
        usage = looking.look()
        assert usage.scratch_files == 0
        assert MIB <= usage.scratch_bytes < 2 * MIB
        still_open.read(1)
    (tmp_path / "new").write_bytes(b"x" * MIB)
    assert looking.look().scratch_files == 0
    clock.forward(0.5)
    usage = looking.look()
    assert usage.scratch_files == 1
    assert MIB <= usage.scratch_bytes < 2 * MIB
    for number in range(5):
        (tmp_path / str(number)).touch()
    clock.forward(0.5)
    assert looking.look().scratch_files == 3


def test_time_before_a_block_is_none_of_its_samples(clock: Clock) -> None:
    """A young process that is found running counts from the start of the block, and not from the sample before it."""
    with child("x = 1") as repl, child("print(flush=True)\nwhile True: pass") as busy:
        pids = [repl.pid]
        looking = Watch(Proc(), 1 << 40, MANY, lambda: pids)
        looking.repl_started(repl.pid, 0)
        looking.look()
        clock.forward(100)
        looking.block_started()
        pids.append(busy.pid)
        looking.look()
        busy.kill()
        busy.wait()
        pids.pop()
        assert looking.look().cpu_s < 50


def test_measuring_counts_as_time_of_the_block_that_made_it_necessary() -> None:
    with watched(memory_bytes=1) as looking:
        looking.look()
        before_s = looking.memory.measuring_s
        assert before_s > 0
        looking.block_started()
        used_s = looking.look().cpu_s
    assert looking.memory.measuring_s - before_s <= used_s < 0.1


REPL = 2
LOOK_S = 0.01


def counted_on_two_cpus() -> CpuTime:
    made = CpuTime(lambda: 0.0)
    made._cpus = 2
    made.started(REPL)
    return made


def seen(pid: int, cpu_s: float = 0.0, childrens_s: float = 0.0, *, runs: bool = False, threads: int = 1) -> Seen:
    return Seen(pid, Status(1, threads), Times(runs, 0, cpu_s, 0.0, childrens_s))


def test_cpu_time_of_the_living_is_the_kernels() -> None:
    counted = counted_on_two_cpus()
    for look in range(1, 101):
        counted.look([seen(REPL, look * LOOK_S, runs=True)], LOOK_S)
    assert counted.block_s == pytest.approx(1.0)
    assert not counted.runs_unheard
    counted.block_started()
    assert counted.block_s == 0


@table(
    "looked_at, block_s",
    [
        (lambda look: [seen(REPL), seen(100 + look, runs=look % 2 == 0)], 0.5),
        # Samples are at most one for each CPU.
        (lambda look: [seen(REPL), *(seen(100 * look + each, runs=True) for each in range(1000, 1020))], 2.0),
        # Children that were waited for count by the kernel. They are seen running, since they wait for a CPU.
        (lambda look: [seen(REPL, childrens_s=look * LOOK_S / 3), seen(100 + look, runs=True)], 0.33),
        # A child that was waited for hides no time of children that were not.
        (lambda look: [seen(REPL, childrens_s=look * LOOK_S / 10), seen(100 + look, runs=True)], 1.0),
        # A young process with threads counts as running, in every state of its first thread.
        (lambda look: [seen(REPL), seen(100 + look, threads=2)], 2.0),
    ],
)
def test_children_are_sampled_until_they_were_waited_for(
    looked_at: Callable[[int], list[Seen]], block_s: float
) -> None:
    counted = counted_on_two_cpus()
    for look in range(100):
        counted.look(looked_at(look), LOOK_S)
    assert counted.block_s == pytest.approx(block_s, abs=0.05 if block_s == 2.0 else 0.02)


def test_child_that_lives_on_counts_once() -> None:
    counted = counted_on_two_cpus()
    for look in range(1, YOUNG_LOOKS + 50):
        counted.look([seen(REPL), seen(100, look * LOOK_S, runs=True)], LOOK_S)
    counted.look([seen(REPL)], LOOK_S)
    assert counted.block_s == pytest.approx((YOUNG_LOOKS + 49) * LOOK_S)


PROGRAM = 50


def test_program_time_counts_apart_from_block() -> None:
    times = CpuTimes(lambda pid: PROGRAM if pid >= PROGRAM else REPL)
    times.block.started(REPL)
    times.program_started(PROGRAM)
    for look in range(1, 101):
        times.look(
            [seen(REPL, look * LOOK_S), seen(PROGRAM, look * LOOK_S / 2), seen(PROGRAM + 1, look * LOOK_S)], LOOK_S
        )
    assert times.block.block_s == pytest.approx(1.0)
    assert times.of_program(PROGRAM) == pytest.approx(1.5)
    times.block.block_started()
    assert times.block.block_s == 0
    assert times.of_program(PROGRAM) == pytest.approx(1.5)


def test_cpu_time_of_the_dead_keeps_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    dead_s = 0.0
    monkeypatch.setattr("sandbox_worker.init.usage_watch._of_the_dead_s", lambda: dead_s)
    times = CpuTimes(lambda pid: pid)
    times.block.started(REPL)
    times.program_started(PROGRAM)
    dead_s = 5.0  # of all that init took leave of, 3 s were the program's
    times.process_ended(PROGRAM, 3.0)
    times.process_ended(REPL, 2.0)
    times.look([seen(REPL), seen(PROGRAM)], LOOK_S)
    assert times.block.block_s == pytest.approx(2.0)
    assert times.of_program(PROGRAM) == pytest.approx(3.0)
    times.only(())
    times.look([seen(REPL)], LOOK_S)
    assert times.block.block_s == pytest.approx(2.0)
