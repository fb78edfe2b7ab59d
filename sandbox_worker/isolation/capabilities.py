"""Capabilities of root: dropped from every set, with securebits against their return."""

import ctypes
import errno
import struct
from collections.abc import Mapping

from sandbox_worker.isolation import syscalls

SECUREBITS_LOCKED = 0xEF
"""NOROOT, NO_SETUID_FIXUP and NO_CAP_AMBIENT_RAISE, each set and locked, and KEEP_CAPS cleared and locked."""
_CAPABILITY_VERSION_3 = 0x20080522

TO_BECOME_ANOTHER = {"KILL": 5, "SETGID": 6, "SETUID": 7}
"""Name → number of root's capabilities to start processes as another user, and to end them."""
TO_MAP_IDS = {"DAC_OVERRIDE": 1, **TO_BECOME_ANOTHER}
"""The same, with ids for many workers: the other user owns the files in /proc for the maps."""
TO_OWN_WORKERS = {"CHOWN": 0, **TO_MAP_IDS}
"""The same, with a scratch folder on the host's file system, given to the worker and removed later."""


def last() -> int:
    """Return this kernel's highest capability."""
    number = 0
    while _known(number + 1):
        number += 1
    return number


def _known(number: int) -> bool:
    try:
        syscalls.prctl(syscalls.PR_CAPBSET_READ, number)
    except OSError:  # EINVAL: the kernel has no such capability
        return False
    return True


def missing(wanted: Mapping[str, int]) -> list[str]:
    """Return the names of those capabilities in `wanted` that the effective set lacks."""
    sets = ctypes.create_string_buffer(24)
    syscalls.call("capget", struct.pack("Ii", _CAPABILITY_VERSION_3, 0), sets)
    low, high = struct.unpack_from("I", sets, 0)[0], struct.unpack_from("I", sets, 12)[0]
    effective = high << 32 | low
    return [name for name, number in wanted.items() if not effective >> number & 1]


def require(wanted: Mapping[str, int]) -> None:
    """Require capabilities in the effective set.

    Raises:
        OSError: EPERM, with the names of the missing ones.
    """
    if lacking := missing(wanted):
        names = ", ".join(f"CAP_{name}" for name in lacking)
        raise OSError(errno.EPERM, f"root lacks {names}")


def drop_all(last_capability: int) -> None:
    """Empty the bounding, ambient, effective, permitted and inheritable sets.

    It needs CAP_SETPCAP, and so works only once.
    """
    syscalls.prctl(syscalls.PR_SET_SECUREBITS, SECUREBITS_LOCKED)
    for number in range(last_capability + 1):
        syscalls.prctl(syscalls.PR_CAPBSET_DROP, number)
    drop_own()


def drop_own() -> None:
    """Empty the ambient, effective, permitted and inheritable sets. It needs no privilege."""
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.call("capset", struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24))
