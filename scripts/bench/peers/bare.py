"""Cost of a process in the kernel: forks of a python without further modules."""

import json
import os
import signal
import sys
import time

DESCENDANTS = 100


def fork() -> list[float]:
    """Time a fork, exit and wait."""
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        taken.append(time.perf_counter() - started)
    return taken


def execute() -> list[float]:
    """Time a fork, an exec of `true`, its exit and the wait for it."""
    started = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os.execv("/bin/true", ["true"])
    os.waitpid(pid, 0)
    return [time.perf_counter() - started]


def kill() -> list[float]:
    """Time the end of many forks at once."""
    pids = []
    for _ in range(DESCENDANTS):
        pids.append(os.fork())
        if pids[-1] == 0:
            signal.pause()
    started = time.perf_counter()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    return [time.perf_counter() - started]


WORK = {"fork": fork, "execute": execute, "kill": kill}
for line in sys.stdin:
    print(json.dumps(WORK[line.strip()]()), flush=True)
