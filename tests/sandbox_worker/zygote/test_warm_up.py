"""The warm-up, in a process of its own: it leaves no trace, and saves copied pages in forked processes."""

import json
import subprocess
import sys

from tests.support.places import PROJECT

PROGRAM = """
import gc, json, linecache, os, sys, threading
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

def copied_kilobytes():
    # The fewest of three forks: where the kernel puts stacks and heaps differs from fork to fork.
    return min(copied_by_a_fork() for _ in range(3))

def copied_by_a_fork():
    # What a forked process has for itself when it has gone through the same once more: pages that it wrote to.
    gc.freeze()
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        before = private_kilobytes()
        warm_up.rehearse(0)
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
warm_up.rehearse(0)
found = {"before": before, "after": state(), "unrehearsed": unrehearsed, "rehearsed": copied_kilobytes(), "read": []}
status = warm_up.Proc.status
warm_up.Proc.status = lambda proc, pid: found["read"].append(pid) or status(proc, pid)
warm_up.rehearse(0)
print(json.dumps(found))
"""

INHERITANCE = """
import mmap, os, re, sys
sys.path.insert(0, ".")
from sandbox_worker.zygote import warm_up

def inherited_kilobytes():
    # The pages of files and of memfds that a forked process has mapped as soon as it can count them.
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        with open("/proc/self/status") as status:
            os.write(write_end, " ".join(re.findall("Rss(?:File|Shmem):.* ([0-9]+) kB", status.read())).encode())
        os._exit(0)
    os.wait()
    return os.read(read_end, 100).decode()

# 64 MB of text that the fork server has read
context = os.memfd_create("context")
os.truncate(context, 1 << 26)
mapped = mmap.mmap(context, 1 << 26, mmap.MAP_PRIVATE, mmap.PROT_READ)
mapped.find(b"1")
inherited_kilobytes()
without = inherited_kilobytes()
warm_up.inherit_page_tables()
print(without, inherited_kilobytes())
"""

FILLING = """
import fcntl, mmap, os, sys
sys.path.insert(0, ".")
from sandbox_worker.zygote import warm_up

def narrow(flags, pipe=os.pipe2):
    # A pipe as a user with many of them gets it: a write to a full one would wait for ever.
    ends = pipe(flags)
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, mmap.PAGESIZE)
    return ends

os.pipe2 = narrow

scattered = [bytes(1 + number % 400) for number in range(100_000)][::7]  # leaves free blocks on each page
filling = warm_up.fill_free_blocks()
print(len({id(bytes_) >> 12 for bytes_ in [bytes(100) for _ in range(150)]}))
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
    assert len({*found["read"]}) == 1  # of all processes of the machine


def test_forks_inherit_page_tables_of_code() -> None:
    done = subprocess.run([sys.executable, "-c", INHERITANCE], capture_output=True, text=True, check=True, cwd=PROJECT)
    without, _, inherited, of_context = map(int, done.stdout.split())
    assert inherited > 1.1 * without
    assert of_context < 1 << 10


def test_new_objects_lie_together_between_no_others() -> None:
    done = subprocess.run([sys.executable, "-c", FILLING], capture_output=True, text=True, check=True, cwd=PROJECT)
    assert int(done.stdout) <= 10  # 150 objects of 144 bytes take six pages
