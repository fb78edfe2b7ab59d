"""Seccomp: which system calls a process may make, and with which arguments.

An allow-list by name, turned into a BPF program by a pure function. Filters add up: what a later one allows, the ones
before it must allow too. There are four:

    template                        what init may, and what raises init's walls: for fork servers that load things
    init                            what the REPL may, and what raises the REPL's walls
    repl                            ordinary Python, in a pid namespace and a root of its own
    threads                         the same where it has neither: no process but its own to start or to signal

    not this machine's calls        the process is killed
    allowed, arguments fit          the call
    clone3, unknown or newer, x32   ENOSYS: the C library falls back to an older call
    setsid, at times chmod          0, and nothing happens, see `PRETENDED`
    everything else                 EPERM

With a connected TCP socket as the only door no other layer will do: from an empty network namespace and a Landlock
domain without TCP it can still be made to listen, or be aimed at another peer. io_uring, which bypasses any filter, is
denied as a whole.
"""

import ctypes
import errno
import functools
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sandbox_worker.isolation import syscalls
from sandbox_worker.isolation.syscall_table import MACHINE, NUMBERS

Kind = Literal["template", "init", "repl", "threads"]

# -- the rules: names ------------------------------------------------------------------------------------------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ALLOWED = _names(
    """
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek sendfile copy_file_range
    open openat openat2 creat close close_range dup dup2 dup3 pipe pipe2 flock fsync fdatasync fadvise64 fallocate
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
    setpgid getpgid getpgrp setsid getsid getrlimit setrlimit getrusage sysinfo uname times getrandom

    time gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep alarm getitimer setitimer
    timer_create timer_settime timer_gettime timer_getoverrun timer_delete
    timerfd_create timerfd_settime timerfd_gettime eventfd eventfd2
    poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2

    recvfrom getsockname getpeername getsockopt
    """
)
"""What both processes may call with any arguments. Ordinary Python needs all of it: `listxattr` and `statfs` are
`shutil.copy2`, `getsockname` makes a `socket` object of a descriptor. Not here, though it may seem harmless: mincore
and cachestat (what others read), inotify (the names that others open), io_uring, splice and its kin (a history of
kernel bugs), memfd_create and shared memory (pages that no limit sees), sendmsg, recvmsg (descriptors), shutdown."""

ALLOWED_TO_EXEC = _names("execve execveat")
ALLOWED_TO_INIT = _names("sendmsg recvmsg seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self")
ALLOWED_TO_TEMPLATE = ALLOWED_TO_INIT | _names(
    "unshare setns mount umount2 pivot_root sethostname capset capget setresuid setresgid setgroups setpriority "
    "fcntl mmap prctl prlimit64 socketpair"
)
"""With any arguments, for a fork server that raises the walls of workers."""
NOT_WITHOUT_NAMESPACES = _names("fork vfork tkill pidfd_open pidfd_send_signal setpgid truncate execve execveat")
"""Not for `threads`: processes that would outlive a kill, signals to strangers, and what Landlock governs only by
name or in part (truncate by path, before its ABI 3)."""
PRETENDED = _names("setsid")
"""For the REPL this succeeds and does nothing. The scheduler shares the CPUs out by sessions (sched_autogroup_enabled):
thirty of them would be thirty times a sibling. Refused, it would break `subprocess` and daemons."""
PRETENDED_TO_THREADS = _names(
    "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat"
)
"""For `threads` these, too: Landlock does not govern them at any ABI, so without a root of our own they would reach the
user's files; refused, they would break `shutil.copy`."""
WITH_OLDER_TWIN = _names("clone3")
"""ENOSYS: its flags lie in memory, where no filter can see them, and the C library falls back to clone."""

# -- the rules: arguments --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneOf:
    """The low half of an argument is one of `values`. For arguments that the kernel takes as `int`."""

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
class Null:
    """A pointer is NULL, in both halves."""

    argument: int


Check = OneOf | NoneOf | NotAllOf | AllOf | Null

AF_UNIX = 1
MSG_OOB = 0x1
MSG_FASTOPEN = 0x20000000
CLONE_VM = 0x100
CLONE_PARENT = 0x8000
CLONE_THREAD = 0x10000
MAP_SHARED = 0x1  # the lowest bit of MAP_SHARED_VALIDATE (3), too, and not of MAP_PRIVATE (2)
MAP_ANONYMOUS = 0x20
MAP_HUGETLB = 0x40000
PRCTL_HARMLESS = (
    2,  # PR_GET_PDEATHSIG; setting it would let a descendant outlive or kill at a distance
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
"""Not F_SETOWN, F_SETSIG (a signal to a stranger), F_NOTIFY, F_SETLEASE (what others do with a shared file)."""
IOCTL_HARMLESS = (
    0x5401,  # TCGETS: isatty
    0x5413,  # TIOCGWINSZ
    0x541B,  # FIONREAD
    0x5421,  # FIONBIO: socket.setblocking
    0x5450,  # FIONCLEX
    0x5451,  # FIOCLEX
)

ARGUMENTS: dict[str, tuple[Check, ...]] = {
    # CLONE_PARENT would plant a child of init, which init would take for its REPL's.
    "clone": (
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
    "fcntl": (OneOf(1, FCNTL_HARMLESS),),
    "ioctl": (OneOf(1, IOCTL_HARMLESS),),
    # Without a file behind it, shared memory can be filled and unmapped from sight: no per-process number shows it.
    "mmap": (NotAllOf(3, MAP_SHARED | MAP_ANONYMOUS), NoneOf(3, MAP_HUGETLB)),
    "prctl": (OneOf(0, PRCTL_HARMLESS),),
    "prlimit64": (OneOf(0, (0,)),),
    "sched_setaffinity": (OneOf(0, (0,)),),
    # An address, or MSG_FASTOPEN, aims a TCP socket anew. MSG_OOB on a socketpair is a rare and buggy corner.
    "sendto": (Null(4), NoneOf(3, MSG_FASTOPEN | MSG_OOB)),
    "socketpair": (OneOf(0, (AF_UNIX,)),),
}

ARGUMENTS_OF_INIT: dict[str, tuple[Check, ...]] = {
    "fcntl": (OneOf(1, (*FCNTL_HARMLESS, 1031)),),  # F_SETPIPE_SZ
    "prctl": (OneOf(0, (*PRCTL_HARMLESS, syscalls.PR_SET_DUMPABLE, syscalls.PR_SET_PDEATHSIG)),),
}

OWN_PID = 0x7FFF_FFF1
"""Stands for the process's own pid in a program for `threads`, until it is known: no pid is that large."""

ARGUMENTS_OF_THREADS: dict[str, tuple[Check, ...]] = {
    "clone": (AllOf(0, CLONE_VM | CLONE_THREAD), *ARGUMENTS["clone"]),
    "kill": (OneOf(0, (OWN_PID,)),),
    "tgkill": (OneOf(0, (OWN_PID,)),),
}

# -- the program: pure -----------------------------------------------------------------------------------------------

Verdict = int | tuple[Check, ...]  # what a call gets: a SECCOMP_RET_* value, or checks of its arguments

RET_KILL_PROCESS = 0x80000000
RET_ALLOW = 0x7FFF0000
RET_EPERM = 0x00050000 | errno.EPERM
RET_ENOSYS = 0x00050000 | errno.ENOSYS
RET_PRETEND = 0x00050000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_JUMP = 0x05  # BPF_JMP | BPF_JA
_IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_IF_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_IF_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENTS = 0, 4, 16  # in struct seccomp_data

Instruction = tuple[int, int, int, int]  # struct sock_filter: code, jump if true, jump if false, operand


@functools.cache
def program(kind: Kind, allow_exec: bool, arch: str) -> bytes:
    """The BPF program for one process of a worker, as an array of `struct sock_filter`.

    Args:
        kind: "template" may make namespaces and mounts. "init" may pass descriptors, and raise the REPL's walls after
            its fork. In "threads" `OWN_PID` stands for the process's own pid.
        allow_exec: Whether it may start programs. Init's must allow it if the REPL's is going to; "threads" never may.
        arch: As `uname -m` says it.

    Raises:
        OSError: ENOSYS, there is no table of system calls for `arch`.
    """
    if arch not in NUMBERS:
        known = ", ".join(sorted(NUMBERS))
        raise OSError(errno.ENOSYS, f"no table of system calls for machine {arch!r}; there are: {known}")
    arguments = ARGUMENTS | {"init": ARGUMENTS_OF_INIT, "threads": ARGUMENTS_OF_THREADS}.get(kind, {})
    pretended = {"repl": PRETENDED, "threads": PRETENDED | PRETENDED_TO_THREADS}.get(kind, frozenset())
    allowed = {"init": ALLOWED_TO_INIT, "template": ALLOWED_TO_TEMPLATE}.get(kind, frozenset()) | ALLOWED
    allowed |= ALLOWED_TO_EXEC if allow_exec else frozenset()
    if kind == "template":
        arguments = {name: checks for name, checks in arguments.items() if name not in ALLOWED_TO_TEMPLATE}

    def verdict(name: str) -> Verdict:
        if name in WITH_OLDER_TWIN:
            return RET_ENOSYS
        if name in pretended:
            return RET_PRETEND
        if kind == "threads" and name in NOT_WITHOUT_NAMESPACES:
            return RET_EPERM
        return arguments.get(name, RET_ALLOW if name in allowed else RET_EPERM)

    ranges = _ranges({number: verdict(name) for name, number in NUMBERS[arch].items()})
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _assemble(ranges, AUDIT_ARCH[arch]))


def _ranges(verdicts: dict[int, Verdict]) -> list[tuple[int, Verdict]]:
    """First number and verdict of each run of equal verdicts, from 0 to the end of all numbers."""
    ranges: list[tuple[int, Verdict]] = []
    for number in range(max(verdicts) + 2):  # one past the last, where the unknown begins; x32 calls lie there too
        verdict = verdicts.get(number, RET_ENOSYS)
        if not ranges or ranges[-1][1] != verdict:
            ranges.append((number, verdict))
    return ranges


def _assemble(ranges: Sequence[tuple[int, Verdict]], audit_arch: int) -> list[Instruction]:
    """Check the architecture, search the number, then check the arguments where the verdict depends on them."""
    start: list[Instruction] = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_IF_EQUAL, 1, 0, audit_arch),
        (_RETURN, 0, 0, RET_KILL_PROCESS),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    blocks: list[Instruction] = []
    block_starts: dict[tuple[Check, ...], int] = {}
    for _, verdict in ranges:
        if isinstance(verdict, tuple):
            block_starts[verdict] = len(blocks)
            blocks += _check_all(verdict)
    return [*start, *_search(ranges, _search_length(ranges), block_starts), *blocks]


def _search_length(ranges: Sequence[tuple[int, Verdict]]) -> int:
    return 2 * len(ranges) - 1  # a leaf for each, and a comparison for all but one


def _search(
    ranges: Sequence[tuple[int, Verdict]], to_blocks: int, block_starts: dict[tuple[Check, ...], int]
) -> list[Instruction]:
    """A binary search: the kernel loads it in a third of the time that a list of comparisons takes.

    Args:
        to_blocks: Instructions from the first one here to the blocks that check arguments.
        block_starts: Where each block begins, counted from the first.
    """
    if len(ranges) == 1:
        verdict = ranges[0][1]
        if isinstance(verdict, int):
            return [(_RETURN, 0, 0, verdict)]
        return [(_JUMP, 0, 0, to_blocks - 1 + block_starts[verdict])]  # counted from the next instruction
    middle = len(ranges) // 2
    below, above = ranges[:middle], ranges[middle:]
    below_length = _search_length(below)  # at most 255, which the field's one byte enforces
    return [
        (_IF_AT_LEAST, below_length, 0, above[0][0]),
        *_search(below, to_blocks - 1, block_starts),
        *_search(above, to_blocks - 1 - below_length, block_starts),
    ]


def _check_all(checks: tuple[Check, ...]) -> list[Instruction]:
    instructions = [instruction for check in checks for instruction in _check(check)]
    return [*instructions, (_RETURN, 0, 0, RET_ALLOW)]


def _check(check: Check) -> list[Instruction]:
    """Go on behind these instructions if `check` holds, else EPERM."""
    low = _OFFSET_ARGUMENTS + 8 * check.argument  # both architectures are little-endian
    load: Instruction = (_LOAD, 0, 0, low)
    refuse: Instruction = (_RETURN, 0, 0, RET_EPERM)
    match check:
        case OneOf(values=values):
            last = len(values)
            return [load, *((_IF_EQUAL, last - at, 0, value) for at, value in enumerate(values)), refuse]
        case NoneOf(bits=bits):
            return [load, (_IF_ANY_BIT, 0, 1, bits), refuse]
        case NotAllOf(bits=bits):
            return [load, (_AND, 0, 0, bits), (_IF_EQUAL, 0, 1, bits), refuse]
        case AllOf(bits=bits):
            return [load, (_AND, 0, 0, bits), (_IF_EQUAL, 1, 0, bits), refuse]
        case Null():
            high: Instruction = (_LOAD, 0, 0, low + 4)
            return [load, (_IF_EQUAL, 1, 0, 0), refuse, high, (_IF_EQUAL, 1, 0, 0), refuse]


# -- and the kernel --------------------------------------------------------------------------------------------------

_SET_MODE_FILTER = 1


class _LoadableProgram(ctypes.Structure):
    """`struct sock_fprog`: the number of instructions, and where they lie."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


@functools.cache
def _loadable(code: bytes) -> tuple[bytes, ctypes.Array[ctypes.c_char]]:
    memory = ctypes.create_string_buffer(code, len(code))
    return bytes(_LoadableProgram(len(code) // 8, ctypes.addressof(memory))), memory


def prepare() -> None:
    """Assemble every program that a worker may want, so that `install` after a fork is little but the system call.

    Raises:
        OSError: See `program`.
    """
    for kind, allow_exec in (("init", True), ("repl", False), ("repl", True), ("threads", False)):
        _loadable(program(kind, allow_exec, MACHINE))


def install(kind: Kind, allow_exec: bool) -> None:
    """Put the calling thread and all that it starts under `program`, for ever. The process must have no_new_privs."""
    code = program(kind, allow_exec, MACHINE)
    if kind == "threads":
        code = code.replace(struct.pack("=I", OWN_PID), struct.pack("=I", os.getpid()))
    header, _ = _loadable(code)
    syscalls.call("seccomp", _SET_MODE_FILTER, 0, header)
