"""Address space that is kept for when model code has used up all of its own."""

import contextlib
import mmap

RESERVE_BYTES = 8 << 20
"""Of address space: it is never written to, and so takes no memory."""
PIECES, PIECE_BYTES = 64, 1 << 16
"""What a short block takes to be read, compiled and run, several times."""


class Reserve:
    """Held while code may use all the rest, and let go of at a MemoryError.

    Without it, while what has filled the memory is still held, not even the `del` for it would run any more.
    """

    def __init__(self) -> None:
        self._held: mmap.mmap | None = None
        with contextlib.suppress(OSError):
            _mapped(4 * RESERVE_BYTES).close()  # or it would be too much of a small limit
            self._held = _mapped(RESERVE_BYTES)

    def release(self) -> None:
        """Let blocks live on it. Harmless when repeated."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def hold(self) -> None:
        """Have it again, if there is enough besides. Harmless when repeated."""
        if self._held is not None:
            return
        with contextlib.suppress(OSError, MemoryError):
            held = _mapped(RESERVE_BYTES)
            try:
                _ = [bytes(PIECE_BYTES) for _ in range(PIECES)]  # from new memory, or what others have given back
            except MemoryError:
                held.close()
            else:
                self._held = held


def _mapped(size_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
