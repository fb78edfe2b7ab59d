"""Replacement of `os.sysconf`, which reports the REPL's own limit as the machine's memory.

The C library answers SC_PHYS_PAGES and SC_AVPHYS_PAGES by the system call sysinfo. It also reveals load, threads and
free memory of the whole machine, so the filter denies it. The C library does not check for the error, and would return
random bytes of its stack.
"""

import mmap
import os

_NAMES = ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES")
_ASKED = {*_NAMES, *(os.sysconf_names[name] for name in _NAMES)}
_ask = os.sysconf
_pages = 0


def answer() -> None:
    """Replace `os.sysconf`. Call this in the fork server, for all its workers."""
    os.sysconf = _sysconf


def be(memory_bytes: int) -> None:
    """Set the memory that `os.sysconf` reports. Call this in each REPL.

    Packages that plan their work by the size of memory then plan within the REPL's limit.
    """
    global _pages
    _pages = memory_bytes // mmap.PAGESIZE


def _sysconf(name: str | int, /) -> int:
    """Return an integer-valued system configuration variable."""
    return _pages if name in _ASKED else _ask(name)
