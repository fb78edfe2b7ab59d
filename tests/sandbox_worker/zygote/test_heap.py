"""The heap, in a process of its own: what a forked process copies, and where its new objects lie."""

import json
import subprocess
import sys

from tests.support.places import PROJECT

IMMORTALITY = """
import gc, json, os, sys, types, weakref
sys.path.insert(0, ".")
from sandbox_worker.zygote.heap import make_objects_immortal

class Kept:
    pass

kept, text, code = Kept(), "".join(["made ", "now"]), compile("'a constant of code'", "", "eval")
run = types.FunctionType(code, {})
held = [kept, text, run]

def counts():
    objects = kept, text, code, code.co_consts[0], Kept, os, os.__dict__, os.path.join
    before = [sys.getrefcount(each) for each in objects]
    references = [objects] + [list(objects) for _ in range(3)]
    return [sys.getrefcount(each) - count for each, count in zip(objects, before)]

def copied_by_a_fork():
    # Kilobytes that a forked process has for itself once it has referred to all objects of this one.
    gc.freeze()
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        before = private_kilobytes()
        count = len([each for each in objects])
        os.write(write_end, str(private_kilobytes() - before).encode())
        os._exit(0)
    os.wait()
    return int(os.read(read_end, 100))

def private_kilobytes():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_Dirty"))

objects = [Kept() for _ in range(100_000)]
found = {"counted": counts(), "copied": copied_by_a_fork()}
make_objects_immortal()
found |= {"counted after": counts(), "copied after": copied_by_a_fork()}
late = Kept()
is_alive = weakref.ref(late)
del late
found |= {"result": run(), "later objects live": is_alive() is not None}
print(json.dumps(found))
"""

INHERITANCE = """
import mmap, os, re, sys
sys.path.insert(0, ".")
from sandbox_worker.zygote import heap

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
heap.inherit_page_tables()
print(without, inherited_kilobytes())
"""

FILLING = """
import fcntl, mmap, os, sys
sys.path.insert(0, ".")
from sandbox_worker.zygote import heap

def narrow(flags, pipe=os.pipe2):
    # A pipe as a user with many of them gets it: a write to a full one would wait for ever.
    ends = pipe(flags)
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, mmap.PAGESIZE)
    return ends

os.pipe2 = narrow

scattered = [bytes(1 + number % 400) for number in range(100_000)][::7]  # leaves free blocks on each page
filling = heap.fill_free_blocks()
print(len({id(bytes_) >> 12 for bytes_ in [bytes(100) for _ in range(150)]}))
scattered = [bytes(600 + number % 5_000) for number in range(20_000)][::7]
heap.fill_free_chunks()
print(len({id(bytes_) >> 12 for bytes_ in [bytes(1_000) for _ in range(150)]}))
"""

ARENAS = """
import sys
sys.path.insert(0, ".")
from sandbox_worker import zygote

def largest_megabytes():
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if line.endswith(" 0 \\n") or line.split()[4:] == ["0"]]
    return max(int(end, 16) - int(start, 16) for start, end in spans) >> 20

before = largest_megabytes()
zygote.reserve_arenas(8)
reserved = largest_megabytes()
zygote.release_arenas()
print(before, reserved, largest_megabytes())
"""


def test_references_to_objects_are_counted_no_longer_from_python_3_12_on() -> None:
    done = subprocess.run([sys.executable, "-I", "-c", IMMORTALITY], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert min(found["counted"][:3]) > 0
    assert found["result"] == "a constant of code"
    assert not found["later objects live"]
    if sys.version_info >= (3, 12):
        assert found["counted after"] == [0] * len(found["counted"])
        assert found["copied after"] < found["copied"] / 3
    else:
        assert found["counted after"] == found["counted"]


def test_forks_inherit_page_tables_of_code() -> None:
    done = subprocess.run([sys.executable, "-c", INHERITANCE], capture_output=True, text=True, check=True, cwd=PROJECT)
    without, _, inherited, of_context = map(int, done.stdout.split())
    assert inherited > 1.1 * without
    assert of_context < 1 << 10


def test_new_objects_lie_together_between_no_others() -> None:
    done = subprocess.run([sys.executable, "-c", FILLING], capture_output=True, text=True, check=True, cwd=PROJECT)
    small, large = map(int, done.stdout.split())
    assert small <= 10  # 150 objects of 144 bytes take six pages
    assert large <= 42  # 150 objects of 1,040 bytes take 39


def test_arenas_lie_side_by_side_until_they_are_released() -> None:
    done = subprocess.run([sys.executable, "-c", ARENAS], capture_output=True, text=True, check=True, cwd=PROJECT)
    before, reserved, released = map(int, done.stdout.split())
    assert before < 8 <= reserved
    assert released < 8
