"""The system calls of a REPL, its init and a template, by name. `seccomp` turns them into BPF programs."""

import errno
from dataclasses import dataclass

from sandbox_worker.isolation import syscalls
from sandbox_worker.wire.descriptors import HANDED_FD

# -- the rules: names ------------------------------------------------------------------------------------------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ALLOWED = _names(
    """
    read write readv writev pread64 pwrite64 preadv pwritev lseek copy_file_range
    open openat openat2 creat close dup dup2 dup3 pipe pipe2 flock fsync fdatasync fadvise64 fallocate
    stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat
    getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2
    link linkat symlink symlinkat chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat umask
    utime utimes futimesat utimensat truncate ftruncate
    getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr

    brk mprotect munmap mremap msync madvise mlock munlock mlockall munlockall membarrier
    fork vfork exit exit_group wait4 waitid set_tid_address set_robust_list get_robust_list rseq restart_syscall
    futex futex_waitv arch_prctl sched_yield sched_getaffinity sched_getparam sched_getscheduler
    sched_get_priority_max sched_get_priority_min sched_rr_get_interval getpriority getcpu

    kill tkill tgkill pidfd_open pidfd_send_signal pause sigaltstack signalfd signalfd4
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend
    getpid getppid gettid getuid geteuid getgid getegid getgroups getresuid getresgid
    setpgid getpgid getpgrp setsid getsid getrlimit setrlimit getrusage uname times getrandom

    time gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep alarm getitimer setitimer
    timer_create timer_settime timer_gettime timer_getoverrun timer_delete
    timerfd_create timerfd_settime timerfd_gettime eventfd eventfd2
    poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2

    recvfrom getsockname getpeername
    """
)
"""Calls of REPL and init with any arguments. Ordinary Python needs all of them: `shutil.copy2` calls
`listxattr` and `statfs`, and making a `socket` object of a descriptor calls `getsockname`.

Left out on purpose, though they seem harmless: mincore and cachestat (they tell which pages others read), inotify (it
tells which names others open), sysinfo (load, threads and free memory of the machine), io_uring, splice and its kin (a
history of kernel bugs), memfd_create and shared memory (pages that no limit sees), sendmsg (it passes descriptors), and
shutdown."""

ALLOWED_TO_EXEC = _names("execve execveat")
ALLOWED_TO_INIT = _names(
    "sendmsg recvmsg kcmp seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self"
)
ALLOWED_TO_REPL = _names("landlock_restrict_self")
"""Further call of a REPL in a PID namespace, see `init/hub.py`. It takes rights away from its caller alone, and needs a
ruleset, which code cannot make."""
ALLOWED_TO_TEMPLATE = ALLOWED_TO_INIT | _names(
    "unshare setns mount umount2 pivot_root sethostname capset capget setresuid setresgid setgroups setpriority "
    "fcntl mmap madvise prctl prlimit64 socketpair sysinfo"
)
"""Further calls with any arguments, for a fork server with the layers of workers to apply."""
NOT_WITHOUT_NAMESPACES = _names("fork vfork tkill pidfd_open pidfd_send_signal setpgid truncate execve execveat")
"""Calls denied to `threads`: they start processes that would outlive a kill, signal foreign processes, or are governed
by Landlock only in part (truncate by path, before its ABI 3)."""
PRETENDED = _names("setsid")
"""Calls that succeed without an effect for the REPL. The scheduler shares CPUs among sessions
(sched_autogroup_enabled), so thirty sessions would get thirty times a sibling's share. A refusal would break
`subprocess` and daemons: see `adaptation`."""
PRETENDED_TO_THREADS = _names(
    "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat"
)
"""Further calls that succeed without an effect for `threads`. Landlock governs them at no ABI, so without a root of the
worker's own they would reach the user's files. A refusal would break `shutil.copy`."""
ANSWERED = {"clone3": errno.ENOSYS, "sendfile": errno.ENOTSOCK}
"""Calls refused with an error on which callers use another call.

The flags of clone3 lie in memory, which a filter cannot read: on ENOSYS the C library calls clone. `sendfile` to a
socket or a pipe pins pages of a file; they stay when the file is truncated, and no figure counts them. A filter cannot
tell what a descriptor is, so copies from file to file are refused as well: on ENOTSOCK `shutil` and `pathlib` read and
write instead."""
ANSWERED_TO_THREADS = dict.fromkeys(("getxattr", "lgetxattr", "listxattr", "llistxattr"), errno.ENOTSUP)
"""Further such calls for `threads`. Landlock does not govern them, so without a root of the worker's own they would
read attributes of the user's files. `shutil.copy2` takes ENOTSUP for a file system without attributes."""

# -- the rules: arguments --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneOf:
    """The low half of an argument is one of `values`. For arguments of the kernel's type `int`."""

    argument: int
    values: tuple[int, ...]


@dataclass(frozen=True)
class NoneOf:
    """No bit of `bits` is set in the low half of an argument."""

    argument: int
    bits: int


@dataclass(frozen=True)
class NotAllOf:
    """At least one bit of `bits` is clear in the low half of an argument."""

    argument: int
    bits: int


@dataclass(frozen=True)
class AllOf:
    """Every bit of `bits` is set in the low half of an argument."""

    argument: int
    bits: int


@dataclass(frozen=True)
class IfThen:
    """If `bit` is set in the low half of an argument, `then` is set too. Each is a single bit."""

    argument: int
    bit: int
    then: int


@dataclass(frozen=True)
class Null:
    """A pointer is NULL, in both halves."""

    argument: int


Check = OneOf | NoneOf | NotAllOf | AllOf | IfThen | Null

AF_UNIX = 1
MSG_OOB = 0x1
MSG_FASTOPEN = 0x20000000
CLONE_VM = 0x100
CLONE_FILES = 0x400
CLONE_PARENT = 0x8000
CLONE_THREAD = 0x10000
CLOSE_RANGE_UNSHARE = 0x2
SOL_SOCKET = 1
SOCKET_OPTIONS_HARMLESS = (
    3,  # SO_TYPE
    4,  # SO_ERROR
    7,  # SO_SNDBUF
    8,  # SO_RCVBUF
    30,  # SO_ACCEPTCONN
    38,  # SO_PROTOCOL
    39,  # SO_DOMAIN
)
RWF_TO_WRITE = 0x2 | 0x4 | 0x10  # RWF_DSYNC, RWF_SYNC, RWF_APPEND
MAP_SHARED = 0x1  # the lowest bit of MAP_SHARED_VALIDATE (3), too, and not of MAP_PRIVATE (2)
MAP_ANONYMOUS = 0x20
MAP_HUGETLB = 0x40000
MAP_LOCKED = 0x2000
MAP_POPULATE = 0x8000
MADVICE_HARMLESS = (0, 1, 2, 3, 4, 8, 9, 10, 11, 14, 15, 16, 17, 18, 19, 20, 21)
"""Advice without MADV_POPULATE_READ and MADV_POPULATE_WRITE (22, 23), and without any that later kernels add."""
PRCTL_HARMLESS = (
    2,  # PR_GET_PDEATHSIG; setting it would let a process outlive its worker's death signal
    3,  # PR_GET_DUMPABLE
    15,  # PR_SET_NAME
    16,  # PR_GET_NAME
    21,  # PR_GET_SECCOMP
    23,  # PR_CAPBSET_READ
    38,  # PR_SET_NO_NEW_PRIVS
    39,  # PR_GET_NO_NEW_PRIVS
    0x53564D41,  # PR_SET_VMA: the C library names its arenas
)
FCNTL_HARMLESS = (
    0,  # F_DUPFD
    1,  # F_GETFD
    2,  # F_SETFD
    3,  # F_GETFL
    4,  # F_SETFL
    5,  # F_GETLK
    6,  # F_SETLK
    7,  # F_SETLKW
    36,  # F_OFD_GETLK
    37,  # F_OFD_SETLK
    38,  # F_OFD_SETLKW
    1030,  # F_DUPFD_CLOEXEC
    1032,  # F_GETPIPE_SZ
    1034,  # F_GET_SEALS
)
"""Commands without F_SETOWN and F_SETSIG (they signal foreign processes), F_NOTIFY and F_SETLEASE (they tell what
others do with a shared file)."""
IOCTL_HARMLESS = (
    0x5401,  # TCGETS: isatty
    0x5413,  # TIOCGWINSZ
    0x541B,  # FIONREAD
    0x5421,  # FIONBIO: socket.setblocking
    0x5450,  # FIONCLEX
    0x5451,  # FIOCLEX
)

ARGUMENTS: dict[str, tuple[Check, ...]] = {
    # CLONE_PARENT would make a sibling, which init would take for an orphan of its REPL. A thread without CLONE_FILES
    # would have its own table of descriptors, and /proc/PID/fd shows only the first thread's. The C library always sets
    # CLONE_FILES for threads.
    "clone": (
        IfThen(0, CLONE_THREAD, CLONE_FILES),
        NoneOf(
            0,
            syscalls.CLONE_NEWNS
            | syscalls.CLONE_NEWCGROUP
            | syscalls.CLONE_NEWUTS
            | syscalls.CLONE_NEWIPC
            | syscalls.CLONE_NEWUSER
            | syscalls.CLONE_NEWPID
            | syscalls.CLONE_NEWNET
            | CLONE_PARENT,
        ),
    ),
    "close_range": (NoneOf(2, CLOSE_RANGE_UNSHARE),),  # else the calling thread gets its own table of descriptors
    "fcntl": (OneOf(1, FCNTL_HARMLESS),),
    # Each level and option runs kernel code of its own: TCP_ZEROCOPY_RECEIVE, for example, maps received pages.
    "getsockopt": (OneOf(1, (SOL_SOCKET,)), OneOf(2, SOCKET_OPTIONS_HARMLESS)),
    "ioctl": (OneOf(1, IOCTL_HARMLESS),),
    # Anonymous shared memory can be filled and unmapped: then no figure of a process shows it. MAP_POPULATE fills
    # memory in one call, during which init cannot read the figures of the growing process.
    "mmap": (NotAllOf(3, MAP_SHARED | MAP_ANONYMOUS), NoneOf(3, MAP_HUGETLB | MAP_LOCKED | MAP_POPULATE)),
    "madvise": (OneOf(2, MADVICE_HARMLESS),),
    "prctl": (OneOf(0, PRCTL_HARMLESS),),
    # RWF_NOWAIT tells which pages of a file are in memory, and so what others read.
    "preadv2": (OneOf(5, (0,)),),
    "pwritev2": (NoneOf(5, 0xFFFF_FFFF ^ RWF_TO_WRITE),),
    "prlimit64": (OneOf(0, (0,)),),
    # Only on the socket by which init passes contexts. No other socket of a REPL carries descriptors.
    "recvmsg": (OneOf(0, (HANDED_FD,)),),
    "sched_setaffinity": (OneOf(0, (0,)),),
    # An address, or MSG_FASTOPEN, connects a TCP socket to another peer. MSG_OOB on a socketpair has been buggy.
    "sendto": (Null(4), NoneOf(3, MSG_FASTOPEN | MSG_OOB)),
    "socketpair": (OneOf(0, (AF_UNIX,)),),
}

ARGUMENTS_OF_INIT: dict[str, tuple[Check, ...]] = {
    "fcntl": (OneOf(1, (*FCNTL_HARMLESS, 1031)),),  # F_SETPIPE_SZ
    "prctl": (
        OneOf(
            0,
            (
                *PRCTL_HARMLESS,
                syscalls.PR_SET_DUMPABLE,
                syscalls.PR_SET_PDEATHSIG,
                syscalls.PR_SET_CHILD_SUBREAPER,
            ),
        ),
    ),
}

ARGUMENTS_OF_REPL: dict[str, tuple[Check, ...]] = {
    # Orphans of code that makes itself their reaper stay below it, and end with it.
    "prctl": (OneOf(0, (*PRCTL_HARMLESS, syscalls.PR_SET_CHILD_SUBREAPER)),),
}

OWN_PID = 0x7FFF_FFF1
"""Placeholder for the process's own pid in a program for `threads`. Pids are smaller: PID_MAX_LIMIT is 4,194,304."""

ARGUMENTS_OF_THREADS: dict[str, tuple[Check, ...]] = {
    "clone": (AllOf(0, CLONE_VM | CLONE_THREAD | CLONE_FILES), *ARGUMENTS["clone"]),
    "kill": (OneOf(0, (OWN_PID,)),),
    "tgkill": (OneOf(0, (OWN_PID,)),),
}
