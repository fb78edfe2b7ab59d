"""Address space that model code may not use: our own code needs it when model code has used up all the rest.

RLIMIT_AS has two values. The hard one is the limit of the process. While model code runs, the soft one is lower by
`reserved_bytes` (see `lock_down_repl`); our own code raises it to the hard one. So the reserve is there again for each
block, also after a block that used up all memory. It costs two system calls.

What our own code maps above the soft limit is freed in part, and free memory of a process serves model code, too. Code
that adds to full memory, block after block, would take the reserve bit by bit: the C library maps 2 MiB at a time,
CPython 1 MiB. So while memory is full, `close` fills what is free with objects of its own, and `open` lets go of them.
Of some it lets go at once: with these short statements run, such as the `del` that frees the memory.
"""

import mmap
import resource
import time

RESERVE_BYTES = 8 << 20
"""Bytes of address space, at most; an eighth of a smaller limit. They are not written to, and so take no memory."""
BALLAST = 8192
"""Objects of `OBJECT_BYTES` that fill what is free, at most: 4 MiB."""
OBJECT_BYTES = 512
"""Bytes of the largest object that CPython's own allocator serves. Room for these serves smaller ones, too."""
PIECE_BYTES = 1 << 14
"""Bytes of an object that the C library serves."""
LEFT, LEFT_AT_LEAST = 1024, 64
"""Objects of `OBJECT_BYTES` that model code gets in full memory: 512 KiB, or 32 KiB once half of the reserve is used.
One of `PIECE_BYTES` comes with 128 of them."""
SLOW_S = 0.001
"""Seconds. Whether memory is full is not looked for after a block that took less: looking costs 4 microseconds."""


def reserved_bytes(address_space_bytes: int) -> int:
    """The part of a limit of address space that is kept from model code."""
    return min(RESERVE_BYTES, address_space_bytes // 8)


class Reserve:
    """The reserve of this process, where it has one: open for our own code, closed while model code runs.

    Args:
        later_bytes: The part of what lies between the two limits that is for contexts alone, and lent one by one.
    """

    def __init__(self, later_bytes: int = 0) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        self._closed, self._opened = (soft, hard), (hard - later_bytes, hard)
        self._bytes = hard - soft - later_bytes
        self._ballast: list[bytes] = []
        self._is_full = False
        self._closed_at = 0.0

    def close(self) -> None:
        """Keep it from the block that runs next."""
        if self._is_full:
            self._fill()
        self.shut()
        self._closed_at = time.monotonic()

    def lend(self, size_bytes: int) -> None:
        """Let the process have this much address space more: for a context that is mapped now."""
        hard = self._opened[1]
        self._closed = min(self._closed[0] + size_bytes, hard - self._bytes), hard
        self._opened = min(self._opened[0] + size_bytes, hard), hard
        self.open()

    def end_block(self) -> None:
        """Open it, after a look whether the block has filled the memory."""
        if self._bytes and (self._is_full or time.monotonic() - self._closed_at > SLOW_S):
            self._is_full = not self._is_half_free()
        self.open()

    def open(self) -> None:
        """Let our own code have it. Harmless when repeated."""
        self._set(self._opened)
        self._ballast.clear()

    def shut(self) -> None:
        """Keep it from code that runs while ours waits, such as a thread that a block has left."""
        self._set(self._closed)

    def _set(self, limits: tuple[int, int]) -> None:
        if self._bytes:
            try:
                resource.setrlimit(resource.RLIMIT_AS, limits)
            except ValueError:  # model code has lowered the hard limit
                self._bytes = 0

    def _fill(self) -> None:
        ballast = self._ballast
        try:
            left = LEFT if self._is_half_free() else LEFT_AT_LEAST
            for_model_code = [bytes(OBJECT_BYTES - bytes.__basicsize__) for _ in range(left)]
            for_model_code += [bytes(PIECE_BYTES) for _ in range(left // 128 + 1)]
            ballast.extend([b""] * BALLAST)  # as long as it is going to be, while there is memory for that
            self.shut()
            for at in range(BALLAST):
                ballast[at] = bytes(OBJECT_BYTES - bytes.__basicsize__)
        except MemoryError:
            pass
        for_model_code = []  # not before: what lies behind them keeps CPython from unmapping where they lay

    def _is_half_free(self) -> bool:
        """Whether as much as half of the reserve can be mapped now."""
        try:
            mmap.mmap(-1, self._bytes // 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except (OSError, MemoryError):
            return False
        return True
