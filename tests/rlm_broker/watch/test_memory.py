import subprocess
import sys

import pytest

from rlm_broker.watch import server

HELD = 60_000_000
STARTS = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', 'x = b\"x\" * {HELD}; print(flush=True); input()'])"
FORKS = f"import os; held = b'x' * {HELD}; pids = [os.fork() for _ in range(2)]; print(flush=True); os.read(0, 1)"


@pytest.mark.parametrize(("code", "processes"), [(STARTS, 1), (FORKS, 4)])
def test_memory_counts_what_a_process_has_started_and_shared_pages_once(code: str, processes: int) -> None:
    """A process whose child has 60 MB has these; forks of a process with 60 MB have 60 MB together, and not each."""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(processes):
            process.stdout.readline()
        used = server.bytes_below([process.pid])
        process.communicate(b"12345678\n")
    assert HELD < used[process.pid] < 2 * HELD


def test_ended_process_has_no_memory() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert server.bytes_below([ended.pid]) == {ended.pid: 0}
    assert server.bytes_below([]) == {}
