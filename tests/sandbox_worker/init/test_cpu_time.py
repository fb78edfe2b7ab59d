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


def test_time_of_those_that_live_is_what_the_kernel_says(counted: CpuTime) -> None:
    for look in range(1, 101):
        counted.look([seen(REPL, look * LOOK_S, runs=True)], LOOK_S)
    assert counted.block_s == pytest.approx(1.0)
    assert not counted.runs_unheard
    counted.block_started()
    assert counted.block_s == 0


def test_children_without_a_waiting_parent_are_sampled(counted: CpuTime) -> None:
    for look in range(100):
        counted.look([seen(REPL), seen(100 + look, runs=look % 2 == 0)], LOOK_S)
    assert counted.block_s == pytest.approx(0.5, abs=0.02)


def test_no_more_is_sampled_than_there_are_cpus(counted: CpuTime) -> None:
    for look in range(100):
        counted.look([seen(REPL), *(seen(100 * look + each, runs=True) for each in range(1000, 1020))], LOOK_S)
    assert counted.block_s == pytest.approx(2.0, abs=0.05)


def test_children_that_were_waited_for_count_by_the_kernels_word(counted: CpuTime) -> None:
    for look in range(100):  # seen running all the time, since they wait for a CPU
        counted.look([seen(REPL, childrens_s=look * LOOK_S / 3), seen(100 + look, runs=True)], LOOK_S)
    assert counted.block_s == pytest.approx(0.33, abs=0.02)


def test_one_waited_for_among_many_that_are_not_hides_nothing(counted: CpuTime) -> None:
    for look in range(100):
        counted.look([seen(REPL, childrens_s=look * LOOK_S / 10), seen(100 + look, runs=True)], LOOK_S)
    assert counted.block_s == pytest.approx(1.0, abs=0.02)


def test_a_child_that_lives_on_counts_once(counted: CpuTime) -> None:
    for look in range(1, YOUNG_LOOKS + 50):
        counted.look([seen(REPL), seen(100, look * LOOK_S, runs=True)], LOOK_S)
    counted.look([seen(REPL)], LOOK_S)
    assert counted.block_s == pytest.approx((YOUNG_LOOKS + 49) * LOOK_S)


def test_a_young_process_with_threads_runs_whatever_its_first_thread_does(counted: CpuTime) -> None:
    for look in range(100):
        counted.look([seen(REPL), seen(100 + look, threads=2)], LOOK_S)
    assert counted.block_s == pytest.approx(2.0, abs=0.05)


PROGRAM = 50


def test_processes_of_a_program_count_apart_from_those_of_the_block() -> None:
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


def test_time_of_the_dead_belongs_to_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
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
