"""The warm-up, in a process of its own: it leaves no trace, and saves copied pages in forked processes."""

import json
import subprocess
import sys

from tests.support.places import PROJECT

PROGRAM = """
import gc, json, linecache, os, sys, threading
sys.path.insert(0, ".")
from sandbox_worker.isolation.layer import ZygoteLayers
from sandbox_worker.wire.level import PROCESS
from sandbox_worker.zygote import warm_up

SHARED = ZygoteLayers(PROCESS)

def state():
    streams = sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    return {
        "streams and main module": [id(each) for each in (*streams, sys.modules["__main__"])],
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "lines": [name for name in linecache.cache if name != "<string>"],  # 3.13 keeps this program's own there
    }

def copied_kilobytes():
    # The fewest of three forks: where the kernel puts stacks and heaps differs from fork to fork.
    return min(copied_by_a_fork() for _ in range(3))

def copied_by_a_fork():
    # What a forked process has for itself when it has gone through the same once more: pages that it wrote to.
    gc.freeze()
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        before = private_kilobytes()
        warm_up.rehearse(SHARED)
        os.write(write_end, str(private_kilobytes() - before).encode())
        os._exit(0)
    os.wait()
    kilobytes = int(os.read(read_end, 100))
    os.close(read_end)
    os.close(write_end)
    return kilobytes

def private_kilobytes():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_Dirty"))

gc.disable()
before, unrehearsed = state(), copied_kilobytes()
warm_up.rehearse(SHARED)
found = {"before": before, "after": state(), "unrehearsed": unrehearsed, "rehearsed": copied_kilobytes(), "read": []}
status = warm_up.Proc.status
warm_up.Proc.status = lambda proc, pid: found["read"].append(pid) or status(proc, pid)
warm_up.rehearse(SHARED)
print(json.dumps(found))
"""


def test_warm_up_leaves_nothing_and_spares_pages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
        env={"PYTHONHASHSEED": "0"},  # the addresses of objects depend on it
    )
    found = json.loads(done.stdout)
    assert found["after"] == found["before"]
    assert found["rehearsed"] < 0.9 * found["unrehearsed"]
    assert len({*found["read"]}) == 2  # this process, and one of all others of the machine
