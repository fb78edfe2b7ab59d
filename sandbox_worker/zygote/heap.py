"""The heap that workers inherit: what makes them copy few of its pages.

- From CPython 3.12 on, an object with a reserved count, such as None, has no references counted (PEP 683). A count lies
  in the object itself. So a worker that used an inherited object would write to the object's page, and copy it: nine of
  ten page faults of a spawn were such copies. `make_objects_immortal` gives this count to all objects.
- A fork copies the page tables of a mapping only if one of its pages is private memory (`vma_needs_copy` in
  mm/memory.c). The code of a library has no such page. So each worker's processes would fault for every 64 KB of the
  interpreter's code that they run, 140 times in all. `inherit_page_tables` gives the largest mappings one private page
  each.
- Free blocks of CPython's allocator lie between living objects. If a worker's new objects took them, then each would
  copy another page. `fill_free_blocks` allocates them all, and a worker's objects lie side by side. `fill_free_chunks`
  does the same for the C library's allocator, which has the objects of more than 512 bytes.
"""

import ctypes
import gc
import os
import re
import sys
from contextlib import suppress
from types import CodeType
from typing import Any

_MOST_WORDS = 1 << 46
"""Words of four bytes in an address space of 48 bits, the most that the kernel gives unasked."""
LARGE_BYTES = 1 << 18
"""Bytes of a mapping from which on forks inherit its page tables: those of the interpreter and of the C library. To
copy the tables of the many smaller ones takes longer than it saves."""
FREE_BLOCKS = re.compile(r"^ *\d+ +(\d+) +\d+ +\d+ +(\d+)$", re.MULTILINE)
"""Pattern of the line of a size class in the allocator's statistics: bytes of a block, number of free blocks."""
MOST_CHUNK_BYTES, LEAST_CHUNK_BYTES = 1 << 16, 24
"""Bytes of the chunks that fill the free ones of the C library's allocator: the first that are tried, and the last."""


def make_objects_immortal() -> None:
    """Make all objects of this process immortal: they are never freed.

    Without effect where CPython counts references to every object.
    """
    forever = _immortal_count()
    if forever is None:
        return
    counts = memoryview((ctypes.c_uint32 * _MOST_WORDS).from_address(0)).cast("B").cast("I")
    found: list[Any] = gc.get_objects()
    while found:
        # An object that was immortal before needs no visit: the collector knows all that it refers to.
        new: list[Any] = []
        for each in found:
            count_at = id(each) >> 2
            if counts[count_at] != forever:
                counts[count_at] = forever
                new.append(each)
        found = gc.get_referents(*new)
        for each in new:
            if type(each) is CodeType:  # the collector does not look into code
                found += (each.co_name, each.co_qualname, each.co_names, each.co_consts)


def _immortal_count() -> int | None:
    """Return the lower half of an immortal object's count, or None if there is no such count here.

    The lower half alone tells mortal from immortal objects: the upper one is zero (3.12) or has flags (3.14). Builds
    without a global lock have their counts elsewhere.
    """
    if sys.byteorder != "little" or "t" in sys.abiflags:
        return None
    probe = object()
    forever, count = (ctypes.c_uint32.from_address(id(each)) for each in (None, probe))
    mortal = count.value
    count.value = forever.value
    held = [probe] * 2
    is_uncounted = count.value == forever.value
    del held
    count.value = mortal
    return forever.value if is_uncounted else None


def inherit_page_tables() -> None:
    """Have forks inherit the page tables of code, by writing to each large mapping the byte that is there.

    Without effect where the kernel refuses such writes (`proc_mem.force_override`). The text of a context is left out:
    the tables of 300 MB would cost each worker 40 ms.
    """
    with suppress(OSError), open("/proc/self/maps") as maps, open("/proc/self/mem", "r+b", buffering=0) as memory:
        for line in maps.readlines():
            span, rights, _, _, inode = line.split()[:5]
            start, end = (int(address, 16) for address in span.split("-"))
            is_code = rights in ("r--p", "r-xp") and inode != "0" and "/memfd:" not in line
            if is_code and end - start >= LARGE_BYTES:
                memory.seek(start)
                byte = memory.read(1)
                memory.seek(start)
                memory.write(byte)


def fill_free_blocks() -> list[bytes]:
    """Return objects that fill the free blocks of pages in use. Keep them as long as workers are forked.

    With another allocator than CPython's own there are none.
    """
    least = sys.getsizeof(b"")
    read_end, write_end = os.pipe2(os.O_NONBLOCK)  # with many pipes of its user, it may have room for a page alone
    os.write(write_end, b"\n")  # so that there is something to read
    stderr = os.dup(2)
    os.dup2(write_end, 2)
    try:
        sys._debugmallocstats()  # prints some 5 KB
    finally:
        os.dup2(stderr, 2)
    statistics = os.read(read_end, 1 << 16).decode()
    for fd in (read_end, write_end, stderr):
        os.close(fd)
    free = [(int(size) - least, int(number)) for size, number in FREE_BLOCKS.findall(statistics)]
    return [bytes(size) for size, number in free for _ in range(number) if size >= 0]


def fill_free_chunks() -> None:
    """Allocate for good what lies free between the C library's chunks, but not its last one, the top.

    Without effect where the library is not the GNU C library 2.33 or later.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return
    libc.mallinfo2.restype = _MallocInfo
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    size = MOST_CHUNK_BYTES
    while size >= LEAST_CHUNK_BYTES:
        top_bytes = libc.mallinfo2().keepcost
        chunk = libc.malloc(size)
        if libc.mallinfo2().keepcost != top_bytes:  # no free chunk is as large as this
            libc.free(chunk)
            size -= max(size // 4, 8)


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )
