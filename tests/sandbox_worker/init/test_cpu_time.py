"""CPU time, by what was seen at each look."""

import pytest

from sandbox_worker.init.cpu_time import YOUNG_LOOKS, CpuTime, CpuTimes
from sandbox_worker.init.procfs import Seen, Status, Times

REPL = 2
LOOK_S = 0.01


@pytest.fixture
def counted() -> CpuTime:
    made = CpuTime(lambda: 0.0)
    made._cpus = 2
    made.started(REPL)
    return made


def seen(pid: int, cpu_s: float = 0.0, childrens_s: float = 0.0, *, runs: bool = False, threads: int = 1) -> Seen:
    return Seen(pid, Status(1, threads), Times(runs, 0, cpu_s, 0.0, childrens_s))


def test_cpu_time_of_the_living_is_the_kernels(counted: CpuTime) -> None:
    """The CPU time of living processes is what the kernel says."""
    for look in range(1, 101):
        counted.look([seen(REPL, look * LOOK_S, runs=True)], LOOK_S)
    assert counted.block_s == pytest.approx(1.0)
    assert not counted.runs_unheard
    counted.block_started()
    assert counted.block_s == 0


def test_unwaited_children_are_sampled(counted: CpuTime) -> None:
    for look in range(100):
        counted.look([seen(REPL), seen(100 + look, runs=look % 2 == 0)], LOOK_S)
    assert counted.block_s == pytest.approx(0.5, abs=0.02)


def test_samples_are_at_most_one_per_cpu(counted: CpuTime) -> None:
    for look in range(100):
        counted.look([seen(REPL), *(seen(100 * look + each, runs=True) for each in range(1000, 1020))], LOOK_S)
    assert counted.block_s == pytest.approx(2.0, abs=0.05)


def test_waited_children_count_by_the_kernel(counted: CpuTime) -> None:
    """Children that were waited for count by the kernel's figure."""
    for look in range(100):  # seen running all the time, since they wait for a CPU
        counted.look([seen(REPL, childrens_s=look * LOOK_S / 3), seen(100 + look, runs=True)], LOOK_S)
    assert counted.block_s == pytest.approx(0.33, abs=0.02)


def test_waited_child_hides_no_unwaited_ones(counted: CpuTime) -> None:
    """A child that was waited for hides no time of children that were not."""
    for look in range(100):
        counted.look([seen(REPL, childrens_s=look * LOOK_S / 10), seen(100 + look, runs=True)], LOOK_S)
    assert counted.block_s == pytest.approx(1.0, abs=0.02)


def test_child_that_lives_on_counts_once(counted: CpuTime) -> None:
    for look in range(1, YOUNG_LOOKS + 50):
        counted.look([seen(REPL), seen(100, look * LOOK_S, runs=True)], LOOK_S)
    counted.look([seen(REPL)], LOOK_S)
    assert counted.block_s == pytest.approx((YOUNG_LOOKS + 49) * LOOK_S)


def test_young_process_with_threads_counts_as_running(counted: CpuTime) -> None:
    """A young process with threads counts as running, in every state of its first thread."""
    for look in range(100):
        counted.look([seen(REPL), seen(100 + look, threads=2)], LOOK_S)
    assert counted.block_s == pytest.approx(2.0, abs=0.05)


PROGRAM = 50


def test_program_time_counts_apart_from_block() -> None:
    """Processes of a program count apart from those of the block."""
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
    monkeypatch.setattr("sandbox_worker.init.cpu_time._of_the_dead_s", lambda: dead_s)
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
