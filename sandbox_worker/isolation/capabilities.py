"""Capabilities: dropped in every set, and kept from coming back."""

import struct

from sandbox_worker.isolation import syscalls

SECUREBITS_LOCKED = 0xEF
"""NOROOT, NO_SETUID_FIXUP, NO_CAP_AMBIENT_RAISE, each with its lock, and KEEP_CAPS locked in its cleared state."""
_CAPABILITY_VERSION_3 = 0x20080522


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
