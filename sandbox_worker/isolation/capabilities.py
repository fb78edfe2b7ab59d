"""Capabilities: dropped in every set, and kept from coming back."""

import ctypes
import errno
import struct
from collections.abc import Mapping

from sandbox_worker.isolation import syscalls

SECUREBITS_LOCKED = 0xEF
"""NOROOT, NO_SETUID_FIXUP, NO_CAP_AMBIENT_RAISE, each with its lock, and KEEP_CAPS locked in its cleared state."""
_CAPABILITY_VERSION_3 = 0x20080522

TO_BECOME_ANOTHER = {"KILL": 5, "SETGID": 6, "SETUID": 7}
"""Name → number of what root needs to start processes as another user, and to end them."""
TO_MAP_IDS = {"DAC_OVERRIDE": 1, **TO_BECOME_ANOTHER}
"""The same with ids for many workers: their maps are files of the other user's."""
TO_OWN_WORKERS = {"CHOWN": 0, **TO_MAP_IDS}
"""The same with a scratch folder on the host, which is given to the worker and removed after it."""


def last() -> int:
    """The highest capability that this kernel knows."""
    number = 0
    while _known(number + 1):
        number += 1
    return number


def _known(number: int) -> bool:
    try:
        syscalls.prctl(syscalls.PR_CAPBSET_READ, number)
    except OSError:  # EINVAL is how the kernel says that it has no such capability
        return False
    return True


def missing(wanted: Mapping[str, int]) -> list[str]:
    """Names of the capabilities of `wanted` that are not in the effective set."""
    sets = ctypes.create_string_buffer(24)
    syscalls.call("capget", struct.pack("Ii", _CAPABILITY_VERSION_3, 0), sets)
    low, high = struct.unpack_from("I", sets, 0)[0], struct.unpack_from("I", sets, 12)[0]
    effective = high << 32 | low
    return [name for name, number in wanted.items() if not effective >> number & 1]


def require(wanted: Mapping[str, int]) -> None:
    """Raises: OSError, EPERM with the names of those that are missing."""
    if lacking := missing(wanted):
        names = ", ".join(f"CAP_{name}" for name in lacking)
        raise OSError(errno.EPERM, f"root lacks {names}")


def drop_all(last_capability: int) -> None:
    """Empty the bounding, ambient, effective, permitted and inheritable sets; needs CAP_SETPCAP, and so works once."""
    syscalls.prctl(syscalls.PR_SET_SECUREBITS, SECUREBITS_LOCKED)
    for number in range(last_capability + 1):
        syscalls.prctl(syscalls.PR_CAPBSET_DROP, number)
    drop_own()


def drop_own() -> None:
    """Empty the ambient, effective, permitted and inheritable sets, which everybody may."""
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.call("capset", struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24))
