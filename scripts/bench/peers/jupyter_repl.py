"""A Jupyter kernel: what most agent frameworks run code in."""

import json
import sys
import time
from typing import Any

import psutil
from jupyter_client.manager import start_new_kernel  # type: ignore[import-not-found, unused-ignore]

BLOCK = "x = 1; print(x)"


def spawn() -> list[float]:
    """Until it answers."""
    started = time.perf_counter()
    manager, client = start_new_kernel()
    taken = time.perf_counter() - started
    _stop(manager, client)
    return [taken]


def round_trip() -> list[float]:
    """One block, of the kernel that lives on."""
    taken = []
    for _ in range(10):
        started = time.perf_counter()
        kept_client.execute_interactive(BLOCK, output_hook=lambda _message: None)
        taken.append(time.perf_counter() - started)
    return taken


def memory() -> list[float]:
    """Unique bytes of the kernel."""
    return [sum(child.memory_full_info().uss for child in psutil.Process().children(recursive=True))]


def _stop(manager: Any, client: Any) -> None:
    client.stop_channels()
    manager.shutdown_kernel(now=True)


WORK = {"spawn": spawn, "round_trip": round_trip, "memory": memory}
kept_manager, kept_client = start_new_kernel()
for line in sys.stdin:
    print(json.dumps(WORK[line.strip()]()), flush=True)
_stop(kept_manager, kept_client)
