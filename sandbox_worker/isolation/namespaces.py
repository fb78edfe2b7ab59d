"""Namespaces: how the fork server enters them, which user it is inside, and how workers get pid namespaces.

Theory of operation
-------------------
An ordinary user may create a user namespace, and owns all other namespaces it creates inside. `unshare(2)` moves
the calling process, with one exception: a pid namespace holds the process's future children only. So the fork server
forks once after `unshare`, and its child is pid 1 (`continue_as_pid_1`).

Each worker needs a pid namespace of its own, whose init is pid 1: when it ends, the kernel kills all processes of the
worker. `clone(CLONE_NEWPID)` would make one, but Python has only `fork`, which also runs its `os.register_at_fork`
hooks. So the fork server calls `unshare(CLONE_NEWPID)`, forks, and returns to its own pid namespace by `setns` on its
own pidfd (`fork_into_new_pid_namespace`). The kernel allows this return because the fork server is pid 1 of a namespace
that its user namespace owns.

An id map of a user namespace may be written once. One's own id can be mapped by the process itself; ids of other users
only by a process outside that has CAP_SETUID (user_namespaces(7)). So a root fork server forks an `IdMapper` first,
which stays outside and writes the maps.
"""

import contextlib
import errno
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sandbox_worker.isolation import syscalls

ZYGOTE_NAMESPACES = (
    syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWCGROUP
)


NOBODY = 65534
"""User and group `nobody`: for workers of a root without unused ids in its user namespace."""
_FREE_IDS = range(0x7000_0000, 0x8000_0000)
"""Ids that no system uses: above those that systemd-nspawn assigns (UIDS-GIDS.md of systemd), positive as a C int."""
_IDS_EACH = 1 << 16
"""Ids for the workers of one fork server."""


@dataclass
class WorkerIds:
    """Users (and groups of the same numbers) for the workers of one fork server.

    The kernel counts processes, pipes, epoll watches, locked memory and pending signals by user. A user of its own
    protects a worker from its siblings there. Ids are assigned in turn, and again after `count` workers. If they were
    derived from pids, a REPL could fork until a later worker got the REPL's own id.

    Attributes:
        first: The first id.
        count: Number of ids.
        forked: Number of workers so far.
    """

    first: int
    count: int
    forked: int = 0

    def of_newest(self) -> int:
        """Return the id of the last forked worker. The first id is the fork server's own if there is more than one."""
        return self.first + (self.forked % (self.count - 1) + 1 if self.count > 1 else 0)


def unused_ids() -> WorkerIds:
    """Return ids for the workers of a root process: one each, or `NOBODY` for all if a container has no more.

    Two fork servers get the same ids with a probability of 1 in 4,096. Their workers then share what is counted by
    user.
    """
    slots = len(_FREE_IDS) // _IDS_EACH
    first = _FREE_IDS.start + int.from_bytes(os.urandom(4), "little") % slots * _IDS_EACH
    ids = WorkerIds(first, _IDS_EACH)
    return ids if exist(ids) else WorkerIds(NOBODY, 1)


def exist(ids: WorkerIds) -> bool:
    """Return whether this user namespace has the ids. The "root" of `unshare -r` has only its own."""
    return all(_is_mapped(ids.first, ids.first + ids.count - 1, kind) for kind in ("uid", "gid"))


def _is_mapped(first: int, last: int, kind: str) -> bool:
    """Return whether ids exist in this user namespace. A line of a map is: first id inside, first outside, count."""
    lines = Path(f"/proc/self/{kind}_map").read_text().splitlines()
    ranges = [(int(inside), int(count)) for inside, _, count in map(str.split, lines)]
    return any(inside <= first and last < inside + count for inside, count in ranges)


def require_one_thread() -> None:
    """Require that this process has one thread, as unshare(CLONE_NEWUSER) does: its own error is a bare EINVAL.

    Raises:
        OSError: EINVAL, with the number of threads.
    """
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if threads != 1:
        raise OSError(errno.EINVAL, f"the process has {threads} threads, and only one with a single thread can enter")


def become(uid: int) -> bool:
    """Become `uid` as user and group, for good. Call it before a user namespace is made, or in one that has `uid`.

    Inside of a user namespace, uid 0 would still be the kernel's uid 0: RLIMIT_NPROC never binds that one, and it owns
    root's files.

    Returns:
        False if this user namespace has no second id, such as under bubblewrap or `unshare -r`. RLIMIT_NPROC then binds
        only as far as it binds the user who made the namespace.

    Raises:
        OSError: Real root lacks the capability to change its user. It must not go on as root.
    """
    with contextlib.suppress(PermissionError):  # always denied in such a namespace: it has no groups to drop
        os.setgroups([])
    try:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # setresuid clears it, and then root would own /proc/self/uid_map
    return True


class IdMapper:
    """A child that stays root, and maps `ids` in the later user namespace of its parent.

    Only a process outside of the namespace that has CAP_SETUID may map ids of other users (user_namespaces(7)). /proc
    must belong to the present pid namespace.
    """

    def __init__(self, ids: WorkerIds) -> None:
        our_end, self._go = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._go)
            os.read(our_end, 1)
            error = 0
            try:
                _write_maps(Path(f"/proc/{parent}"), f"{ids.first} {ids.first} {ids.count}")
            except OSError as failed:
                error = failed.errno or errno.EPERM
            os._exit(error)
        os.close(our_end)

    def map(self) -> None:
        """Have the child write the maps. Call it once, in the new namespace."""
        os.close(self._go)
        error = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        if error:
            raise OSError(error, f"uid_map: {os.strerror(error)}")


def _write_maps(process: Path, line: str) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", line), ("gid_map", line)):
        with (process / name).open("w", buffering=1) as file:
            file.write(text)


def enter_user_namespace(flags: int, proc_self_fd: int, mapper: IdMapper | None = None) -> None:
    """Enter new namespaces, a user namespace among them, with the same user and group inside.

    Args:
        flags: CLONE_NEW* flags, with CLONE_NEWUSER.
        proc_self_fd: /proc/self, opened before. It stays valid when /proc is covered.
        mapper: Maps the ids of workers; None maps this process's own ids.
    """
    uid, gid = os.getuid(), os.getgid()
    try:
        syscalls.unshare(flags)
    except OSError as error:
        if error.errno == errno.ENOSPC:  # the code for a sysctl's limit: user_namespaces(7)
            raise OSError(
                error.errno, "unshare: the limit of sysctl user.max_user_namespaces (or user.max_*) is reached"
            ) from error
        raise
    if mapper is not None:
        mapper.map()
        return
    write_below(proc_self_fd, "setgroups", "deny")  # required before gid_map may be written: user_namespaces(7)
    write_below(proc_self_fd, "uid_map", f"{uid} {uid} 1")
    write_below(proc_self_fd, "gid_map", f"{gid} {gid} 1")


def open_proc_self() -> int:
    """Return a descriptor of /proc/self for `write_below`. The caller closes it."""
    return os.open("/proc/self", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def write_below(folder_fd: int, name: str, text: str) -> None:
    """Write `text` to the existing file `name` below an open folder, in one write(2) as files of /proc require."""
    fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder_fd)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def continue_as_pid_1(orchestrator: int) -> None:
    """Fork into the new pid namespace. Only the child returns; the parent waits for it and ends as it ends.

    Args:
        orchestrator: Pidfd of a process with which both end. The child is to be isolated, and does not keep it.
    """
    pid = os.fork()
    if pid:
        _monitor(pid, orchestrator)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(orchestrator)


def _monitor(pid: int, orchestrator: int) -> NoReturn:
    """Wait for the child and end with its code; end it when the orchestrator ends.

    All descriptors but two pidfds are closed: a reader of the child gets its EOF.
    """
    os.dup2(orchestrator, 0)
    os.closerange(1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the orchestrator, which ends this process later
    child, poll = os.pidfd_open(pid), select.poll()
    for pidfd in (0, child):
        poll.register(pidfd, select.POLLIN)
    if child not in dict(poll.poll()):
        try:
            signal.pidfd_send_signal(child, signal.SIGKILL)
        except PermissionError:  # AppArmor forbids it; the end of this process has the child killed
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def fork_into_new_pid_namespace(own_pidfd: int) -> int:
    """Fork a child as pid 1 of a pid namespace of its own.

    Args:
        own_pidfd: A pidfd of the calling process. It must be pid 1 of a pid namespace that its user namespace owns:
            the kernel lets it return only to such a namespace.

    Returns:
        The child's pid in the parent, 0 in the child.
    """
    syscalls.unshare(syscalls.CLONE_NEWPID)
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:  # also after a failed fork: else the new namespace stays pending, and the next unshare is EINVAL
            syscalls.setns(own_pidfd, syscalls.CLONE_NEWPID)
    return pid
