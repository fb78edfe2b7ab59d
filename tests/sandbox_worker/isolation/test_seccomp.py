"""The filter, simulated for every number.

What is expected is written here by hand and by name: a slip in the rules must not be able to repeat itself.
"""

import errno
import functools
import struct

import pytest

from sandbox_worker.isolation import seccomp, seccomp_rules
from sandbox_worker.isolation.seccomp import Kind
from sandbox_worker.isolation.syscall_table import NUMBERS
from tests.support.tables import table

ALLOW, KILL, PRETEND = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 0x00050000 + errno.EPERM, 0x00050000 + errno.ENOSYS
ENOTSOCK, ENOTSUP = 0x00050000 + errno.ENOTSOCK, 0x00050000 + errno.ENOTSUP
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
AUDIT_ARCH_I386 = 0x40000003
X32 = 0x40000000

ALWAYS = set(
    """
    access alarm arch_prctl brk chdir chmod chown clock_getres clock_gettime clock_nanosleep close
    copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd
    eventfd2 exit exit_group faccessat faccessat2 fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat
    fdatasync fgetxattr flistxattr flock fork fstat fstatfs fsync ftruncate futex futex_waitv futimesat getcpu getcwd
    getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority
    getrandom getresgid getresuid getrlimit getrusage getsid getsockname get_robust_list gettid gettimeofday
    getuid getxattr kill lchown lgetxattr link linkat listxattr llistxattr lseek lstat madvise membarrier mkdir mkdirat
    mlock mlockall mprotect mremap msync munlock munlockall munmap nanosleep newfstatat open openat openat2 pause
    pidfd_open pidfd_send_signal pipe pipe2 poll ppoll pread64 preadv pselect6 pwrite64 pwritev read
    readlink readlinkat readv recvfrom rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending
    rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait sched_get_priority_max sched_get_priority_min
    sched_getaffinity sched_getparam sched_getscheduler sched_rr_get_interval sched_yield select
    set_robust_list set_tid_address setitimer setpgid setrlimit setsid sigaltstack signalfd signalfd4 stat statfs statx
    symlink symlinkat tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_settime
    timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat utime utimensat
    utimes vfork wait4 waitid write writev
    """.split()  # noqa: SIM905
)
NEVER = set(
    """
    socket connect accept accept4 bind listen shutdown setsockopt sendmmsg recvmmsg
    io_uring_setup io_uring_enter io_uring_register io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents
    ptrace process_vm_readv process_vm_writev process_madvise process_mrelease pidfd_getfd perf_event_open bpf
    userfaultfd memfd_create memfd_secret remap_file_pages mincore mbind get_mempolicy set_mempolicy migrate_pages
    move_pages set_mempolicy_home_node mlock2 pkey_alloc pkey_free pkey_mprotect mseal map_shadow_stack cachestat
    shmget shmat shmctl shmdt semget semop semctl semtimedop msgget msgsnd msgrcv msgctl
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr add_key request_key keyctl
    unshare setns mount umount2 pivot_root chroot mount_setattr open_tree open_tree_attr move_mount fsopen fsconfig
    fsmount fspick statmount listmount name_to_handle_at open_by_handle_at quotactl quotactl_fd swapon swapoff
    setuid setgid setreuid setregid setresuid setresgid setfsuid setfsgid setgroups capget capset personality
    lsm_get_self_attr lsm_set_self_attr lsm_list_modules setpriority sched_setparam sched_setscheduler sched_setattr
    sched_getattr ioprio_set ioprio_get rt_sigqueueinfo rt_tgsigqueueinfo
    setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr setxattrat getxattrat listxattrat removexattrat
    file_getattr file_setattr mknod mknodat inotify_init inotify_init1 inotify_add_watch inotify_rm_watch fanotify_init
    fanotify_mark listns rseq_slice_yield lookup_dcookie splice tee vmsplice sync syncfs sync_file_range readahead
    clock_settime clock_adjtime settimeofday adjtimex sethostname setdomainname reboot kexec_load kexec_file_load
    init_module finit_module delete_module create_module get_kernel_syms query_module syslog acct vhangup ustat sysfs sysinfo
    uselib nfsservctl getpmsg putpmsg afs_syscall tuxcall security vserver _sysctl iopl ioperm modify_ldt
    set_thread_area get_thread_area epoll_ctl_old epoll_wait_old futex_wake futex_wait futex_requeue uretprobe uprobe
    """.split()  # noqa: SIM905
)
ONLY_TO_EXEC = {"execve", "execveat"}
ONLY_TO_INIT = set(
    "sendmsg recvmsg kcmp seccomp landlock_create_ruleset landlock_add_rule".split()  # noqa: SIM905
)
ONLY_TO_INIT_AND_REPL = {"landlock_restrict_self"}
WITH_ALL_ARGUMENTS_ZERO = {
    "clone": ALLOW,
    "clone3": ENOSYS,
    "close_range": ALLOW,
    "fcntl": ALLOW,  # F_DUPFD
    "getsockopt": EPERM,
    "ioctl": EPERM,
    "mmap": ALLOW,
    "prctl": EPERM,
    "preadv2": ALLOW,
    "pwritev2": ALLOW,
    "sendfile": ENOTSOCK,
    "prlimit64": ALLOW,
    "sched_setaffinity": ALLOW,
    "sendto": ALLOW,
    "socketpair": EPERM,  # AF_UNSPEC
}
REFUSED_TO_THREADS = set(
    "fork vfork clone kill tgkill tkill pidfd_open pidfd_send_signal setpgid truncate execve execveat".split()  # noqa: SIM905
)
PRETENDED_TO_THREADS = set(
    "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat".split()  # noqa: SIM905
)
UNSUPPORTED_FOR_THREADS = {"getxattr", "lgetxattr", "listxattr", "llistxattr"}
KINDS: list[tuple[Kind, bool]] = [
    ("init", True),
    ("repl", False),
    ("repl", True),
    ("program", True),
    ("threads", False),
]
VARIANTS = [(*kind, arch) for kind in KINDS for arch in ("x86_64", "aarch64")]


@functools.cache
def instructions_of(program: bytes) -> list[tuple[int, ...]]:
    return list(struct.iter_unpack("=HBBI", program))


def simulate(program: bytes, number: int, arguments: tuple[int, ...] = (), audit_arch: int = 0xC000003E) -> int:
    """Run a BPF program as the kernel would; return the action."""
    words = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("=IIQ6Q", number, audit_arch, 0, *(word & (1 << 64) - 1 for word in words))
    instructions = instructions_of(program)
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, operand = instructions[at]
        at += 1
        match code:
            case 0x20:
                accumulator = struct.unpack_from("=I", data, operand)[0]
            case 0x54:
                accumulator &= operand
            case 0x05:
                at += operand
            case 0x15:
                at += if_true if accumulator == operand else if_false
            case 0x35:
                at += if_true if accumulator >= operand else if_false
            case 0x45:
                at += if_true if accumulator & operand else if_false
            case 0x06:
                return int(operand)
            case _:
                raise AssertionError(f"instruction {code:#x} at {at - 1}")


def verdict(kind: Kind, name: str, *arguments: int) -> int:
    """The same on both architectures, or the test fails."""
    verdicts = {
        simulate(seccomp.program(kind, False, arch), NUMBERS[arch][name], arguments, AUDIT_ARCH[arch])
        for arch in NUMBERS
    }
    assert len(verdicts) == 1
    return verdicts.pop()


# -- every number ----------------------------------------------------------------------------------------------------


def test_expectations_name_each_call_once() -> None:
    sets = (ALWAYS, NEVER, ONLY_TO_EXEC, ONLY_TO_INIT, ONLY_TO_INIT_AND_REPL, set(WITH_ALL_ARGUMENTS_ZERO))
    assert sum(map(len, sets)) == len(set().union(*sets))
    assert set().union(*sets) == NUMBERS["x86_64"].keys() | NUMBERS["aarch64"].keys()


def expected(kind: Kind, allow_exec: bool, name: str | None) -> int:
    if name is None:
        return ENOSYS
    if (kind != "init" and name == "setsid") or (kind == "threads" and name in PRETENDED_TO_THREADS):
        return PRETEND
    if kind == "threads" and name in REFUSED_TO_THREADS | UNSUPPORTED_FOR_THREADS:
        return EPERM if name in REFUSED_TO_THREADS else ENOTSUP
    if name in WITH_ALL_ARGUMENTS_ZERO:
        return WITH_ALL_ARGUMENTS_ZERO[name]
    allowed = name in ALWAYS or (name in ONLY_TO_EXEC and allow_exec) or (name in ONLY_TO_INIT and kind == "init")
    return ALLOW if allowed or (name in ONLY_TO_INIT_AND_REPL and kind in ("init", "repl")) else EPERM


@table("kind, allow_exec, arch", VARIANTS)
def test_filter_answers_each_number_from_0_to_500(kind: Kind, allow_exec: bool, arch: str) -> None:
    """Every number from 0 to 500 gets the answer that its name deserves."""
    program = seccomp.program(kind, allow_exec, arch)
    names = {number: name for name, number in NUMBERS[arch].items()}
    found = {number: simulate(program, number, audit_arch=AUDIT_ARCH[arch]) for number in range(501)}
    assert found == {number: expected(kind, allow_exec, names.get(number)) for number in range(501)}


@table("kind, allow_exec, arch", VARIANTS)
def test_unknown_numbers_do_not_exist_and_other_architectures_kill(kind: Kind, allow_exec: bool, arch: str) -> None:
    """No x32 call and no number past the tables is known."""
    program = seccomp.program(kind, allow_exec, arch)
    numbers = [*range(X32, X32 + 600), 1000, X32 - 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
    assert {simulate(program, number, audit_arch=AUDIT_ARCH[arch]) for number in numbers} == {ENOSYS}
    others = {AUDIT_ARCH_I386, *AUDIT_ARCH.values()} - {AUDIT_ARCH[arch]}
    assert {simulate(program, 0, audit_arch=other) for other in others} == {KILL}


@table("arch", ["x86_64", "aarch64"])
def test_init_may_all_that_its_repl_may(arch: str) -> None:
    """Init may do all that its REPL may, since filters add up."""
    programs = [seccomp.program(kind, True, arch) for kind in ("init", "repl")]
    words = (*range(70), 1024, 1030, 1031, 1032, 1034, 0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x53564D41)
    for number in NUMBERS[arch].values():
        for word in words:
            init, repl = ((program, number, (word, word), AUDIT_ARCH[arch]) for program in programs)
            assert simulate(*init) == ALLOW or simulate(*repl) != ALLOW


def test_machine_without_table_is_refused_by_name() -> None:
    with pytest.raises(OSError, match="no table of system calls for machine 'riscv64'; there are: aarch64, x86_64"):
        seccomp.program("repl", False, "riscv64")


def test_rule_names_are_calls() -> None:
    names = [
        value for name, value in vars(seccomp_rules).items() if name.isupper() and isinstance(value, frozenset | dict)
    ]
    assert len(names) >= 11
    assert set().union(*names) <= NUMBERS["x86_64"].keys() | NUMBERS["aarch64"].keys()


# -- arguments -------------------------------------------------------------------------------------------------------

MAP_PRIVATE, MAP_SHARED, MAP_SHARED_VALIDATE, MAP_ANONYMOUS, MAP_HUGETLB = 2, 1, 3, 0x20, 0x40000
THREAD = 0x3D0F00  # what pthread_create asks for
HIGH = 1 << 32


@table(
    "name, arguments, action",
    [
        ("clone", (THREAD,), ALLOW),
        ("clone", (0x01200011,), ALLOW),  # fork
        ("clone", (0x4111,), ALLOW),  # vfork
        *[("clone", (flag | 0x11,), EPERM) for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000)],
        *[("clone", (flag | 0x11,), EPERM) for flag in (0x10000000, 0x20000000, 0x40000000)],
        ("clone", (0x8011,), EPERM),  # CLONE_PARENT
        ("clone", (THREAD & ~0x400,), EPERM),  # a thread without CLONE_FILES
        ("clone", (0x411,), ALLOW),  # a process with CLONE_FILES
        ("close_range", (3, 0xFFFFFFFF, 0), ALLOW),
        ("close_range", (3, 0xFFFFFFFF, 4), ALLOW),  # CLOSE_RANGE_CLOEXEC
        *[("close_range", (3, 0xFFFFFFFF, flags), EPERM) for flags in (2, 6)],  # CLOSE_RANGE_UNSHARE
        *[("getsockopt", (4, 1, option), ALLOW) for option in (3, 4, 7, 8, 30, 38, 39)],
        *[("getsockopt", (4, 1, option), EPERM) for option in (17, 26, 31, 59)],  # SO_PEERCRED, ..., SO_PEERSEC
        ("getsockopt", (4, 6, 3), EPERM),  # TCP has a number 3, too
        ("getsockopt", (4, 6, 35), EPERM),  # TCP_ZEROCOPY_RECEIVE
        ("preadv2", (4, 0, 1, 0, 0, 0), ALLOW),
        ("preadv2", (4, 0, 1, 0, 0, 8), EPERM),  # RWF_NOWAIT
        *[("pwritev2", (4, 0, 1, 0, 0, flags), ALLOW) for flags in (0, 2, 4, 16)],
        *[("pwritev2", (4, 0, 1, 0, 0, flags), EPERM) for flags in (1, 8, 9, 64, 1 << 31)],
        *[("ioctl", (0, request), ALLOW) for request in (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)],
        ("ioctl", (0, 0x5412), EPERM),  # TIOCSTI: types into another terminal
        ("ioctl", (0, 0x5452), EPERM),  # FIOASYNC
        *[("prctl", (option,), ALLOW) for option in (2, 3, 15, 16, 21, 23, 36, 38, 39, 0x53564D41)],
        ("prctl", (1,), EPERM),  # PR_SET_PDEATHSIG
        ("prctl", (4, 0), EPERM),  # PR_SET_DUMPABLE
        ("prctl", (22,), EPERM),  # PR_SET_SECCOMP
        ("prctl", (0x59616D61,), EPERM),  # PR_SET_PTRACER
        *[("fcntl", (0, command), ALLOW) for command in (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032, 1034)],
        *[("fcntl", (0, command), EPERM) for command in (8, 10, 15, 1024, 1026, 1031, 1033)],
        ("socketpair", (1,), ALLOW),
        *[("socketpair", (family,), EPERM) for family in (2, 10, 16, 17, 40)],
        ("sendto", (0, 0, 0, 0x4000, 0, 0), ALLOW),  # MSG_NOSIGNAL
        ("sendto", (0, 0, 0, 0, 0x1000, 16), EPERM),
        ("sendto", (0, 0, 0, 0, 5 * HIGH, 16), EPERM),  # an address whose low half is 0
        ("sendto", (0, 0, 0, 0x20000000, 0, 0), EPERM),  # MSG_FASTOPEN
        ("sendto", (0, 0, 0, 0x1, 0, 0), EPERM),  # MSG_OOB
        ("prlimit64", (0, 7), ALLOW),
        ("prlimit64", (1, 7), EPERM),
        ("sched_setaffinity", (1,), EPERM),
        ("mmap", (0, 4096, 3, MAP_PRIVATE | MAP_ANONYMOUS), ALLOW),
        ("mmap", (0, 4096, 3, MAP_SHARED), ALLOW),
        ("mmap", (0, 4096, 3, MAP_SHARED | MAP_ANONYMOUS), EPERM),
        ("mmap", (0, 4096, 3, MAP_SHARED_VALIDATE | MAP_ANONYMOUS), EPERM),
        ("mmap", (0, 4096, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB), EPERM),
    ],
)
def test_arguments_decide(name: str, arguments: tuple[int, ...], action: int) -> None:
    assert verdict("repl", name, *arguments) == action


@table("name, arguments", [("fcntl", (0, 1031)), ("prctl", (4, 1)), ("prctl", (1, 9))])
def test_init_may_more_than_its_repl(name: str, arguments: tuple[int, ...]) -> None:
    assert verdict("init", name, *arguments) == ALLOW
    assert verdict("repl", name, *arguments) == EPERM


@table(
    "name, arguments, action",
    [
        ("clone", (THREAD,), ALLOW),
        ("clone", (0x01200011,), EPERM),  # fork
        ("clone", (0x4111,), EPERM),  # vfork: shares memory, and is a process
        ("clone", (THREAD | 0x10000000,), EPERM),
        ("clone", (THREAD & ~0x400,), EPERM),
        ("kill", (seccomp_rules.OWN_PID, 9), ALLOW),
        ("tgkill", (seccomp_rules.OWN_PID, 1, 9), ALLOW),
        *[(name, (pid, 9), EPERM) for name in ("kill", "tgkill") for pid in (0, 1, -1, 1000)],
        ("sched_setaffinity", (1,), EPERM),
    ],
)
def test_thread_arguments_decide(name: str, arguments: tuple[int, ...], action: int) -> None:
    assert verdict("threads", name, *arguments) == action


def test_no_program_may_become_the_reaper_of_its_orphans() -> None:
    kinds: tuple[Kind, ...] = ("init", "repl", "program", "threads")
    assert [verdict(kind, "prctl", 36) for kind in kinds] == [ALLOW, ALLOW, EPERM, EPERM]
