"""System calls beyond the standard library. Each raises an OSError naming the call, where C returns -1."""

import ctypes
import errno
import os
import signal

from sandbox_worker.isolation.syscall_table import MACHINE, NUMBERS

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

MNT_DETACH = 2
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_SECUREBITS = 28
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

_MADV_COLLAPSE = 25
_HUGE_PAGE = 1 << 21
_CHILD_SIGNALS = (1 << (signal.SIGCHLD - 1)).to_bytes(128, "little")
"""SIGCHLD as a `sigset_t` of the C library."""

_NUMBERS = NUMBERS.get(MACHINE, {})
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


class _MountAttributes(ctypes.Structure):
    """`struct mount_attr` of mount_setattr(2)."""

    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace_fd", ctypes.c_uint64),
    )


def call(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char], about: str = "") -> int:
    """Make a system call. Integers are passed at full width.

    Args:
        name: Name of the call.
        arguments: Up to six arguments.
        about: Object of the call, for the error message.

    Raises:
        OSError: The kernel's error; ENOSYS also if no number is known for this name or machine.
    """
    number = _NUMBERS.get(name)
    if number is None:
        raise OSError(errno.ENOSYS, f"{name}: no number is known for it on {MACHINE}")
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *wide))
    if result < 0:
        raise _error(f"{name} {about}" if about else name)
    return result


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Enter new namespaces (CLONE_NEW*). A new pid namespace holds only the children forked from then on."""
    call("unshare", flags)


def setns(fd: int, flags: int) -> None:
    """Enter the namespaces `flags` of the process behind the pidfd `fd`."""
    call("setns", fd, flags)


def unmount(target: str) -> None:
    """Unmount `target`, also while files in it are open (MNT_DETACH)."""
    call("umount2", os.fsencode(target), MNT_DETACH, about=target)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call mount(2)."""
    call(
        "mount",
        source.encode(),
        os.fsencode(target),
        kind.encode() or 0,
        flags,
        options.encode() or 0,
        about=f"{kind or source} on {target}",
    )


def bind(source: str, target: str) -> None:
    """Show `source`, with the mounts below it, at `target`."""
    call("mount", os.fsencode(source), os.fsencode(target), 0, MS_BIND | MS_REC, 0, about=f"{source} on {target}")


def restrict_mount(target: str, flags: int) -> None:
    """Set MOUNT_ATTR_* on the mount at `target` and on all below it. A remount would change only the topmost."""
    attributes = bytes(_MountAttributes(set=flags))
    call("mount_setattr", AT_FDCWD, os.fsencode(target), AT_RECURSIVE, attributes, len(attributes), about=target)


def pivot_into(new_root: str) -> None:
    """Make the mount at `new_root` the root, and detach the old root."""
    os.chdir(new_root)
    call("pivot_root", b".", b".", about=new_root)  # pivot_root(2): the old root is now mounted over the new one
    call("umount2", b".", MNT_DETACH, about="of the old root")  # uncovers the new root
    os.chdir("/")


def prctl(option: int, argument: int = 0) -> int:
    """Call prctl(2) with all five arguments: some options are EINVAL if an unused argument is not zero."""
    result = int(_libc.prctl(option, argument, 0, 0, 0))
    if result < 0:
        raise _error(f"prctl option {option}")
    return result


def collapse_own_memory() -> None:
    """Collapse this process's private memory into huge pages, for mostly written mappings.

    A fork copies page tables, and huge pages have fewer: 1 ms for a heap of 700 MB instead of 12. No effect before
    Linux 6.1.
    """
    mapping: tuple[int, int] | None = None
    with open("/proc/self/smaps") as smaps:
        lines = smaps.readlines()
    for line in lines:
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            start, end = (int(address, 16) for address in name.split("-"))
            rights, _, _, inode = rest.split()[:4]
            mapping = (start, end) if rights == "rw-p" and inode == "0" else None
        elif name == "Anonymous:" and mapping is not None:
            start, end = mapping
            first, last = -(-start // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
            if first < last and int(rest.split()[0]) * 1024 * 2 > end - start:
                # Errors are ignored: EINVAL if a part was never written, ENOMEM if no huge page is free.
                _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_COLLAPSE)


def ended_children() -> int:
    """Return a signalfd: readable when a child of the reading process has ended. SIGCHLD must be blocked."""
    fd = int(_libc.signalfd(-1, _CHILD_SIGNALS, os.O_NONBLOCK | os.O_CLOEXEC))
    if fd < 0:
        raise _error("signalfd")
    return fd


def unblock_child_signals() -> None:
    """Unblock SIGCHLD. `signal.pthread_sigmask` would build a set of enum members, which copies 40 pages."""
    if _libc.pthread_sigmask(signal.SIG_UNBLOCK, _CHILD_SIGNALS, None):
        raise _error("pthread_sigmask")


def begin_session() -> None:
    """Call setsid(2) itself. `os.setsid` may be replaced by a function for model code, which changes no session."""
    call("setsid")


def sethostname(name: str) -> None:
    """Set the host name of this UTS namespace."""
    call("sethostname", name.encode(), len(name.encode()))
