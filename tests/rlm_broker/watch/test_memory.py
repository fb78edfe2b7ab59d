import os
import subprocess
import sys

import psutil

from rlm_broker.watch import server

HOLDS = """
import subprocess, sys
held = b"x" * {held}
if {depth}:
    child = subprocess.Popen([sys.executable, "-c", "held = b'x' * {held}; print(flush=True); input()"], stdin=0)
    child.wait()
"""


def test_memory_counts_what_a_process_has_started() -> None:
    held = 30_000_000
    code = HOLDS.format(held=held, depth=1)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # both have their memory
        used = server.bytes_below([process.pid])
        process.communicate(b"\n")
    assert used[process.pid] > 2 * held


def test_shared_pages_count_once_for_all() -> None:
    """Forks of a process with 60 MB have 60 MB together, and not each."""
    held = 60_000_000
    code = f"import os; held = b'x' * {held}; pids = [os.fork() for _ in range(2)]; print(flush=True); os.read(0, 1)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(4):
            process.stdout.readline()
        used = server.bytes_below([process.pid])
        process.communicate(b"12345678")
    assert held < used[process.pid] < 2 * held


def test_ended_process_has_no_memory() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert server.bytes_below([ended.pid]) == {ended.pid: 0}
    assert server.bytes_below([]) == {}


def test_own_memory_is_that_of_this_process() -> None:
    assert 0.5 < server.own_bytes() / psutil.Process(os.getpid()).memory_info().rss < 2
