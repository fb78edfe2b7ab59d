"""What `os.sysconf` says of the machine's memory in a REPL: the REPL's own limit.

The call that it makes for that, sysinfo, tells load, threads and free memory of the whole machine, and is denied. The C
library does not look at the error, and would give what lies on its stack.
"""

import mmap
import os

_NAMES = ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES")
_ASKED = {*_NAMES, *(os.sysconf_names[name] for name in _NAMES)}
_ask = os.sysconf
_pages = 0


def answer() -> None:
    """Take the place of `os.sysconf`. To be called in the zygote, for all of its workers."""
    os.sysconf = _sysconf


def be(memory_bytes: int) -> None:
    """To be called in each REPL: code that divides its work by the memory that there is gets a number it can use."""
    global _pages
    _pages = memory_bytes // mmap.PAGESIZE


def _sysconf(name: str | int, /) -> int:
    """Return an integer-valued system configuration variable."""
    return _pages if name in _ASKED else _ask(name)
