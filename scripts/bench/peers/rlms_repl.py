"""The reference implementation's REPLs: IPython in a process of its own, and `exec` in ours."""

import json
import sys
import time

import psutil
from rlm.environments.ipython_repl import IPythonREPL  # type: ignore[import-not-found, unused-ignore]
from rlm.environments.local_repl import LocalREPL  # type: ignore[import-not-found, unused-ignore]

BLOCK = "x = 1; print(x)"


def spawn() -> list[float]:
    """Until it has been set up."""
    started = time.perf_counter()
    repl = IPythonREPL(kernel_mode="subprocess")
    taken = time.perf_counter() - started
    repl.cleanup()
    return [taken]


def round_trip() -> list[float]:
    """One block, of the REPL that lives on."""
    return [_seconds(ipython) for _ in range(10)]


def local_round_trip() -> list[float]:
    """The same without any process."""
    return [_seconds(local) for _ in range(10)]


def memory() -> list[float]:
    """Unique bytes of the kernel."""
    ipython.execute_code(BLOCK)
    return [sum(child.memory_full_info().uss for child in psutil.Process().children(recursive=True))]


def _seconds(repl: "IPythonREPL | LocalREPL") -> float:
    started = time.perf_counter()
    repl.execute_code(BLOCK)
    return time.perf_counter() - started


WORK = {"spawn": spawn, "round_trip": round_trip, "local_round_trip": local_round_trip, "memory": memory}
ipython, local = IPythonREPL(kernel_mode="subprocess"), LocalREPL()
for line in sys.stdin:
    print(json.dumps(WORK[line.strip()]()), flush=True)
ipython.cleanup()
