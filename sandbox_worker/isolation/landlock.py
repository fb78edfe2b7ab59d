"""Landlock: which files a process may open, and which processes outside of its domain it may signal or connect to.

Landlock does not govern chmod, chown, utime, inotify and stat (landlock(7)). Only a root of the worker's own, at
`strict`, keeps them from the host's files.
"""

import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox_worker.isolation import syscalls

EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
REMOVE_DIR = 1 << 4
REMOVE_FILE = 1 << 5
MAKE_CHAR = 1 << 6
MAKE_DIR = 1 << 7
MAKE_REG = 1 << 8
MAKE_SOCK = 1 << 9
MAKE_FIFO = 1 << 10
MAKE_BLOCK = 1 << 11
MAKE_SYM = 1 << 12
REFER = 1 << 13
TRUNCATE = 1 << 14
IOCTL_DEV = 1 << 15

READ = READ_FILE | READ_DIR
CHANGE = (
    WRITE_FILE | TRUNCATE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_SYM | REFER
)
"""All rights to change files, but for devices: no process of a worker may make or control one."""

_OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
"""Possible rights of a rule about a file. The kernel refuses others with EINVAL."""
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_BIND_AND_CONNECT_TCP = 0b11
_SCOPE_ABSTRACT_UNIX_AND_SIGNAL = 0b11
_RESTRICT_SELF_LOG_SAME_EXEC_OFF = 1


SCOPES_SIGNALS = 6
"""First ABI by which a process cannot signal processes outside of its domain (Linux 6.12)."""


@dataclass(frozen=True)
class Grant:
    """Rights to a file, or to a folder and all below it.

    Attributes:
        path: Absolute path. It exists.
        rights: Bits from EXECUTE to IOCTL_DEV. Bits that the kernel does not govern, or that a file cannot have, are
            dropped.
    """

    path: str
    rights: int


def abi() -> int:
    """Return the version of Landlock in this kernel: 1 (Linux 5.13) or higher.

    Raises:
        OSError: ENOSYS if it was not built in; EOPNOTSUPP if it was switched off at boot.
    """
    return syscalls.call("landlock_create_ruleset", 0, 0, _CREATE_RULESET_VERSION)


def governed_rights(version: int) -> int:
    """Return the file rights governed by a kernel with this ABI. It denies them all, except where granted."""
    rights = (1 << 13) - 1
    for since, right in ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEV)):
        if version >= since:
            rights |= right
    return rights


def ruleset_attributes(version: int) -> bytes:
    """Return `struct landlock_ruleset_attr`, as long as this ABI knows it. A longer one with bits set is E2BIG."""
    attributes = struct.pack("=Q", governed_rights(version))
    if version >= 4:
        attributes += struct.pack("=Q", _BIND_AND_CONNECT_TCP)
    if version >= SCOPES_SIGNALS:
        attributes += struct.pack("=Q", _SCOPE_ABSTRACT_UNIX_AND_SIGNAL)
    return attributes


def restrict(ruleset: int, version: int) -> None:
    """Confine the calling thread and its future children to a ruleset. Within a domain this nests another one.

    TCP, abstract Unix sockets and signals to processes outside of the domain are denied as far as this kernel can.
    The process must have no_new_privs or CAP_SYS_ADMIN.

    Raises:
        OSError: Also E2BIG, for the 17th nested domain.
    """
    # Model code can cause denials at will. They are not logged, so that it cannot fill the host's audit log.
    flags = _RESTRICT_SELF_LOG_SAME_EXEC_OFF if version >= 7 else 0
    syscalls.call("landlock_restrict_self", ruleset, flags)


def make_ruleset(grants: Sequence[Grant], version: int) -> int:
    """Return a descriptor of a new ruleset, not in force yet. The caller closes it.

    Raises:
        OSError: Also ENOENT, if a granted path does not exist.
    """
    attributes = ruleset_attributes(version)
    ruleset = syscalls.call("landlock_create_ruleset", attributes, len(attributes), 0)
    try:
        for grant in grants:
            _add(ruleset, grant, governed_rights(version))
    except OSError:
        os.close(ruleset)
        raise
    return ruleset


def _add(ruleset: int, grant: Grant, governed: int) -> None:
    fd = os.open(grant.path, os.O_PATH | os.O_CLOEXEC)
    try:
        rights = grant.rights & governed
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_A_FILE
        rule = struct.pack("=Qi", rights, fd)
        syscalls.call("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, rule, 0, about=grant.path)
    finally:
        os.close(fd)
