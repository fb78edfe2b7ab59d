"""Reserve of private memory for the REPL's own code, which model code cannot use up.

RLIMIT_DATA has a soft and a hard value (getrlimit(2)). The hard one is the limit of the process. While model code runs,
the soft one is lower by `reserved_bytes` (see `lock_down_repl`). The REPL's own code raises it to the hard one. So the
reserve is available for each block, also after a block that used up all memory. This costs two system calls per block:
the REPL leaves the reserve open while it waits for a block, unless threads of model code run meanwhile.

The REPL's own code frees a part of what it maps above the soft limit, and the allocator gives freed memory to model
code. If code adds objects to full memory block after block, then it would take the reserve step by step: the C library
maps 2 MiB at a time, CPython 1 MiB. So while memory is full, `shut` fills the free memory with objects of its own, the
ballast, and `open` drops them. `shut` drops some at once, as room for short statements, such as the `del` that frees
the memory.

Code of ours that model code calls, such as `print`, needs memory, too. It runs within `helped`: if there is no memory
for it, then it is run again with the reserve open.
"""

import mmap
import os
import resource
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

RESERVE_BYTES = 8 << 20
"""Maximum bytes of the reserve; of a small limit it is an eighth. It takes no memory until it is used."""
BALLAST = 8192
"""Maximum objects of `OBJECT_BYTES` in the ballast: 4 MiB."""
OBJECT_BYTES = 512
"""Bytes of the largest object that CPython's own allocator serves (SMALL_REQUEST_THRESHOLD). Pages of such objects can
serve smaller ones as well."""
PIECE_BYTES = 1 << 14
"""Bytes of an object that the C library's allocator serves."""
LEFT, LEFT_AT_LEAST = 1024, 64
"""Objects of `OBJECT_BYTES` that `close` leaves for model code in full memory: 512 KiB, or 32 KiB once half of the
reserve is used. It leaves one more of `PIECE_BYTES` for each 128 of them."""
SLOW_S = 0.001
"""Seconds of a block, below which the REPL does not test whether memory is full. The test costs 4 microseconds, and no
block fills the memory that fast."""


def reserved_bytes(data_bytes: int) -> int:
    """Return the part of a limit of private memory, in bytes, that model code cannot use."""
    return min(RESERVE_BYTES, data_bytes // 8)


class Reserve:
    """Reserve of this process: open for the REPL's own code, closed while model code runs.

    Without a difference between the soft and the hard limit there is no reserve, and all methods do no harm.

    Args:
        later_bytes: Bytes between the two limits that are for later contexts alone; see `lend`.
    """

    def __init__(self, later_bytes: int = 0) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        self._closed, self._opened = (soft, hard), (hard - later_bytes, hard)
        self._bytes = hard - soft - later_bytes
        self._ballast: list[bytes] = []
        self._is_full = False
        self._is_shut = False
        self._users = 0
        self._closed_at = 0.0

    def __enter__(self) -> None:
        """Open the reserve for code of ours that runs among model code. Several threads may do so at the same time.

        No object is made for this, since there may be no memory for one.
        """
        self._users += 1
        if self._is_shut:
            self._open()

    def __exit__(self, *_error: object) -> None:
        self._users -= 1
        if self._is_shut and not self._users:
            self.shut()

    def close(self) -> None:
        """Close the reserve before a block's code runs, and make the ballast if memory is full."""
        self.shut()
        self._closed_at = time.monotonic()

    def lend(self, size_bytes: int) -> None:
        """Raise both limits by `size_bytes`, for a context that is mapped next, and open the reserve."""
        hard = self._opened[1]
        self._closed = min(self._closed[0] + size_bytes, hard - self._bytes), hard
        self._opened = min(self._opened[0] + size_bytes, hard), hard
        self._is_shut = False
        self._open()

    def end_block(self) -> None:
        """Open the reserve after a block's code, and note whether the block has filled the memory."""
        self._set(self._opened)  # first of all, since the test needs some memory itself
        self._is_shut = False
        if self._bytes and (self._is_full or time.monotonic() - self._closed_at > SLOW_S):
            self._is_full = not self._is_free(self._bytes + self._bytes // 2)
        self._ballast.clear()

    def open(self) -> None:
        """Open the reserve, and drop the ballast. Has no effect while it is open."""
        if self._is_shut:
            self._is_shut = False
            self._open()

    def shut(self) -> None:
        """Close the reserve for model code that runs meanwhile, for example a thread that a block has left."""
        self._is_shut = True
        if self._users:
            return  # another thread needs the reserve now, and shuts it
        if self._is_full and not self._ballast:
            self._fill()
        self._set(self._closed)
        if self._users or not self._is_shut:  # another thread has opened it meanwhile
            self._open()

    def helped(self, work: Callable[[], T]) -> T:
        """Return what `work` returns. If there is no memory for it, then call it again with the reserve open."""
        try:
            return work()
        except MemoryError:
            if self._users or not self._is_shut:
                raise
        self._is_full = True
        with self:
            return work()

    def _open(self) -> None:
        self._set(self._opened)
        self._ballast.clear()

    def _set(self, limits: tuple[int, int]) -> None:
        if self._bytes:
            try:
                resource.setrlimit(resource.RLIMIT_DATA, limits)
            except ValueError:  # model code has lowered the hard limit, which cannot be raised again: do without
                self._bytes = 0

    def _fill(self) -> None:
        ballast = self._ballast
        try:
            left = LEFT if self._is_free(self._bytes // 2) else LEFT_AT_LEAST
            for_model_code = [bytes(OBJECT_BYTES - bytes.__basicsize__) for _ in range(left)]
            for_model_code += [bytes(PIECE_BYTES) for _ in range(left // 128 + 1)]
            ballast.extend([b""] * BALLAST)  # make the list as long as it will be while there is memory for it
            self._set(self._closed)
            for at in range(BALLAST):
                ballast[at] = bytes(OBJECT_BYTES - bytes.__basicsize__)
        except MemoryError:
            pass
        # Drop these only now: ballast that was allocated after them keeps CPython from unmapping their pages.
        for_model_code = []

    def _is_free(self, size_bytes: int) -> bool:
        """Whether so many bytes can be mapped now."""
        try:
            mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except (OSError, MemoryError):
            return False
        return True


_NAMES = ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES")
_ASKED = {*_NAMES, *(os.sysconf_names[name] for name in _NAMES)}
_ask = os.sysconf
_pages = 0


def replace_sysconf() -> None:
    """Replace `os.sysconf`. Call this in the fork server, for all its workers."""
    os.sysconf = _sysconf


def report_memory(memory_bytes: int) -> None:
    """Set the memory that `os.sysconf` reports. Call this in each REPL.

    Packages that plan their work by the size of memory then plan within the REPL's limit.
    """
    global _pages
    _pages = memory_bytes // mmap.PAGESIZE


def _sysconf(name: str | int, /) -> int:
    """Return an integer-valued system configuration variable."""
    return _pages if name in _ASKED else _ask(name)
