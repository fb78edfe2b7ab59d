"""Other processes, and what only the kernel may do."""

from sandbox_worker.isolation.syscall_table import MACHINE, NUMBERS
from tests.attacks.arena import Arena, Attack, check, said_it_got_through, said_secret

C = "import ctypes, os, signal\nc = ctypes.CDLL(None, use_errno=True)\n"
VICTIMS = {"the_sibling": "<SIBLING>", "a_neighbour": "<NEIGHBOUR>", "the_orchestrator": "<ORCHESTRATOR>"}
TOUCHES = {
    "sends_a_signal": "os.kill(<PID>, 0); print('<GOT>')",
    "opens_a_pidfd": "os.pidfd_open(<PID>); print('<GOT>')",
    "traces": C + "assert c.ptrace(0x4206, <PID>, 0, 0) == 0; c.ptrace(17, <PID>, 0, 0); print('<GOT>')",  # SEIZE
    "reads_its_memory": "open('/proc/<PID>/mem', 'rb'); print('<GOT>')",
    "reads_its_memory_by_call": C
    + (
        "b = ctypes.create_string_buffer(8)\n"
        "class V(ctypes.Structure): _fields_ = [('p', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "l = V(ctypes.addressof(b), 0)\n"
        "assert c.process_vm_readv(<PID>, ctypes.byref(l), 1, ctypes.byref(l), 1, 0) == 0; print('<GOT>')"
    ),
    "lists_its_descriptors": "os.listdir('/proc/<PID>/fd'); print('<GOT>')",
    "reads_its_limits": "import resource; resource.prlimit(<PID>, resource.RLIMIT_NOFILE); print('<GOT>')",
    "pins_it": "os.sched_setaffinity(<PID>, os.sched_getaffinity(0)); print('<GOT>')",
    "slows_it": "os.setpriority(os.PRIO_PROCESS, <PID>, os.getpriority(0, <PID>)); print('<GOT>')",
    "writes_its_score": "open('/proc/<PID>/oom_score_adj', 'r+'); print('<GOT>')",
}
SIGNALS_ALL = {
    "kills_everybody": "import os; os.kill(-1, 0); print('<GOT>')",
    "kills_its_parents_group": "import os; os.killpg(os.getpgid(os.getppid()), 0); print('<GOT>')",
}
CALLS = """
unshare setns mount umount2 pivot_root chroot move_mount fsopen open_tree mount_setattr
bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register io_setup
ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd process_madvise
keyctl add_key request_key memfd_create memfd_secret shmget shmat msgget semget mq_open remap_file_pages
init_module finit_module delete_module kexec_load reboot swapon swapoff acct syslog quotactl
sethostname setdomainname settimeofday clock_settime adjtimex iopl ioperm modify_ldt personality
inotify_init1 inotify_add_watch fanotify_init name_to_handle_at open_by_handle_at lookup_dcookie
splice tee vmsplice mincore mbind set_mempolicy migrate_pages move_pages setpriority ioprio_set
setuid setgid setresuid setgroups capset setxattr mknod mknodat rt_sigqueueinfo clone3
landlock_create_ruleset seccomp
""".split()  # noqa: SIM905 - a list to be read
ASKS = C + (
    "for number in (<NUMBERS>):\n"
    "    ctypes.set_errno(0)\n"
    "    result = c.syscall(number, 0, 0, 0, 0, 0, 0)\n"
    "    if result >= 0 or ctypes.get_errno() not in (1, 38): print('<GOT>', result, ctypes.get_errno())"
)
"""Only EPERM or ENOSYS: any other answer is the call's own, so that it was reached."""
EVERYBODY_MAY = {"inotify_init1", "memfd_create", "shmget", "msgget", "semget", "mincore", "personality", "tee", "kcmp"}

PRIVILEGES = {
    "runs_a_setuid_program": "import subprocess; print(subprocess.run(['su', '-c', 'echo <GOT>'], input=b'', capture_output=True).stdout)",
    "regains_a_capability": C + "assert c.prctl(24, 0, 0, 0, 0) == 0; print('<GOT>')",
    "takes_its_privileges_back": C + "assert c.prctl(38, 0, 0, 0, 0) == 0; print('<GOT>')",
    "keeps_its_capabilities": C + "assert c.prctl(8, 1, 0, 0, 0) == 0; print('<GOT>')",
    "outlives_its_parent": C + "assert c.prctl(1, 0, 0, 0, 0) == 0; print('<GOT>')",
    "types_into_a_terminal": "import fcntl; fcntl.ioctl(0, 0x5412, b'x'); print('<GOT>')",
    "has_signals_sent": "import fcntl; fcntl.fcntl(4, 8, <NEIGHBOUR>); print('<GOT>')",
    "watches_a_folder": "import fcntl, os; fcntl.fcntl(os.open('/usr', 0), 1026, 1); print('<GOT>')",
    "takes_huge_pages": "import mmap; mmap.mmap(-1, 1 << 21, 0x40022); print('<GOT>')",
    "shares_memory_that_no_limit_sees": "import mmap; mmap.mmap(-1, 1 << 20); print('<GOT>')",
    "has_a_table_of_descriptors_of_its_own": C + "assert c.close_range(1000, 1000, 2) == 0; print('<GOT>')",
    "starts_a_thread_with_descriptors_of_its_own": C
    + (
        "stack = ctypes.create_string_buffer(1 << 16)\n"
        "top = ctypes.c_void_p(ctypes.addressof(stack) + (1 << 16) - 64)\n"
        "assert c.clone(ctypes.cast(c.pause, ctypes.c_void_p), top, 0x50B00, None) > 0; print('<GOT>')"
    ),
    "pins_pages_of_a_file_in_a_socket": (
        "import os, socket\nopen('pinned', 'wb').write(bytes(4096))\n"
        "a, b = socket.socketpair(); os.sendfile(a.fileno(), os.open('pinned', 0), 0, 1); print('<GOT>')"
    ),
    "pins_pages_of_a_file_in_a_pipe": (
        "import os\nopen('pinned', 'wb').write(bytes(4096))\n"
        "os.sendfile(os.pipe()[1], os.open('pinned', 0), 0, 1); print('<GOT>')"
    ),
    "sees_the_machines_load": C + "assert c.sysinfo(ctypes.create_string_buffer(200)) == 0; print('<GOT>')",
    "asks_a_socket_for_its_peers": "import socket; socket.socketpair()[0].getsockopt(1, 17, 12); print('<GOT>')",
    "asks_what_others_read": "import os; os.preadv(os.open(os.__file__, 0), [bytearray(1)], 0, os.RWF_NOWAIT); print('<GOT>')",
    "calls_as_a_32_bit_program": C + "print('<GOT>') if c.syscall(0x40000000 + 39) > 0 else None",
}
FOR_ANYBODY = {
    "watches_a_folder", "shares_memory_that_no_limit_sees", "has_a_table_of_descriptors_of_its_own",
    "pins_pages_of_a_file_in_a_socket", "pins_pages_of_a_file_in_a_pipe", "sees_the_machines_load",
    "asks_a_socket_for_its_peers",
}  # fmt: skip

ATTACKS = [
    *(
        Attack(f"{name}: {victim}", ("import os\n" + code).replace("<PID>", pid), said_it_got_through,
               shown=name in ("sends_a_signal", "opens_a_pidfd", "pins_it"))
        for name, code in TOUCHES.items()
        for victim, pid in VICTIMS.items()
    ),
    *(Attack(name, code, said_it_got_through, levels=("standard",), shown=False) for name, code in SIGNALS_ALL.items()),
    *(
        Attack(f"calls: {name}", ASKS.replace("<NUMBERS>", f"{NUMBERS[MACHINE][name]},"), said_it_got_through,
               shown=name in EVERYBODY_MAY)
        for name in CALLS
        if name in NUMBERS[MACHINE]
    ),
    *(Attack(name, code, said_it_got_through, shown=name in FOR_ANYBODY)
      for name, code in PRIVILEGES.items()),
    Attack("finds the neighbour by its name", "import glob\nfor p in glob.glob('/proc/[0-9]*/environ'):\n"
           "    try: print([e for e in open(p).read().split(chr(0)) if 'CANARY' in e])\n    except OSError: pass", said_secret),
]  # fmt: skip


def test_processes_and_kernel_are_out_of_reach(arena: Arena) -> None:
    check(arena, ATTACKS)
