"""Two names of a folder that are exchanged, at once and without end, while a test looks."""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import WAIT_S

AT_FDCWD, RENAME_EXCHANGE = -100, 2


@contextmanager
def exchanged(*pairs: tuple[Path, Path]) -> Iterator[None]:
    """Exchange the names of each pair in turn, as fast as can be, until the end of the block."""
    done, libc = threading.Event(), ctypes.CDLL(None)

    def exchange() -> None:
        while not done.is_set():
            for one, other in pairs:
                done_at_once = libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE)
                assert done_at_once == 0

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(WAIT_S)
