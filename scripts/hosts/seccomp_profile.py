"""Writes the seccomp profile of this package for container engines, from the tables of system calls.

    python -m scripts.hosts.seccomp_profile > rlm_broker/profiles/seccomp.json

It denies what the documentation of container engines lists as denied by default, and allows what `strict` needs on top.
"""

import json
from typing import Any

from sandbox_worker.isolation.syscall_table import NUMBERS

FOR_STRICT = ("unshare", "setns", "mount", "mount_setattr", "umount2", "pivot_root")
"""Each is necessary and all suffice: tests/e2e/test_profiles.py tries every one."""
DENIED = frozenset(
    name
    for line in (
        "acct reboot kexec_load kexec_file_load swapon swapoff syslog vhangup quotactl quotactl_fd ioperm iopl",
        "settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname sysfs ustat uselib _sysctl",
        "init_module finit_module delete_module create_module get_kernel_syms query_module modify_ldt nfsservctl",
        "bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register lookup_dcookie",
        "add_key request_key keyctl personality ptrace kcmp process_vm_readv process_vm_writev process_madvise",
        "pidfd_getfd open_by_handle_at fanotify_init mbind get_mempolicy set_mempolicy set_mempolicy_home_node",
        "migrate_pages move_pages umount fsopen fsconfig fsmount fspick open_tree open_tree_attr move_mount listns",
    )
    for name in line.split()
)
"""Calls that act on the whole machine, on other processes, or on mounts; and those with a history of kernel bugs."""
AF_VSOCK = 40
"""Sockets to the host of a virtual machine: no namespace of the network confines them."""


def profile() -> dict[str, Any]:
    """The profile, as in the runtime specification of the Open Container Initiative."""
    known = {name for table in NUMBERS.values() for name in table}
    ordinary = known - DENIED - {*FOR_STRICT, "socket"}
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": 1,
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
        "syscalls": [
            {"names": sorted(ordinary), "action": "SCMP_ACT_ALLOW"},
            {
                "names": ["socket"],
                "action": "SCMP_ACT_ALLOW",
                "args": [{"index": 0, "value": AF_VSOCK, "op": "SCMP_CMP_NE"}],
            },
            {
                "comment": "what the isolation level 'strict' of rlm-broker needs besides",
                "names": sorted(FOR_STRICT),
                "action": "SCMP_ACT_ALLOW",
            },
        ],
    }


if __name__ == "__main__":
    print(json.dumps(profile(), indent=2))
