"""The rehearsal, in a process of its own: what it must not leave behind, and that it does what it is for."""

import json
import subprocess
import sys

from tests.support.places import PROJECT

PROGRAM = """
import builtins, gc, json, linecache, os, resource, sys, threading
sys.path.insert(0, ".")
from sandbox_worker.zygote import warm_up

def state():
    streams = sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    return {
        "streams and main module": [id(each) for each in (*streams, sys.modules["__main__"])],
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "lines": [name for name in linecache.cache if name != "<string>"],  # 3.13 keeps this program's own there
    }

def written_pages():
    # Of a forked process that goes through the same once more. The fewest of several: a machine that moves pages
    # about, to make free ones adjoin, makes a process fault on each of them again.
    gc.freeze()
    return min(pages_of_one() for _ in range(5))

def pages_of_one():
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        warm_up.rehearse(0)
        os.write(write_end, str(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before).encode())
        os._exit(0)
    os.wait()
    pages = int(os.read(read_end, 100))
    os.close(read_end)
    os.close(write_end)
    return pages

gc.disable()
before, unrehearsed = state(), written_pages()
warm_up.rehearse(0)
print(json.dumps({"before": before, "after": state(), "unrehearsed": unrehearsed, "rehearsed": written_pages()}))
"""


def test_it_leaves_nothing_behind_and_spares_forked_processes_copied_pages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
    )
    found = json.loads(done.stdout)
    assert found["after"] == found["before"]
    assert found["rehearsed"] < 0.9 * found["unrehearsed"]
