"""Namespaces, the identity inside them, and the processes that hold them."""

import contextlib
import errno
import os
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
"""User and group of the workers of a root that has no unused ids to give."""
_FREE_IDS = range(0x7000_0000, 0x8000_0000)
"""Ids that nothing uses: above those that systemd-nspawn hands out (UIDS-GIDS.md of systemd), positive as a C int."""
_IDS_EACH = 1 << 16


@dataclass
class WorkerIds:
    """Users (and groups of the same numbers) for the workers of one zygote.

    A user of its own is a worker's protection from its siblings in what the kernel counts by user: processes, pipes,
    epoll watches, locked memory, signals. They are given in turn, and again after `count` workers. Were they given by
    pid, a REPL could choose by forks who gets its own.

    Attributes:
        forked: Workers so far.
    """

    first: int
    count: int
    forked: int = 0

    def of_newest(self) -> int:
        """The id of the worker that was forked last: never the first one, the zygote's, where there are others."""
        return self.first + (self.forked % (self.count - 1) + 1 if self.count > 1 else 0)


def unused_ids() -> WorkerIds:
    """Ids for workers, for somebody who is root: an own one for each, or one for all where a container has no more.

    Two zygotes may get the same ones, by a chance of 1 in 4,096; their workers then share what is counted by user.
    """
    slots = len(_FREE_IDS) // _IDS_EACH
    first = _FREE_IDS.start + int.from_bytes(os.urandom(4), "little") % slots * _IDS_EACH
    ids = WorkerIds(first, _IDS_EACH)
    return ids if exist(ids) else WorkerIds(NOBODY, 1)


def exist(ids: WorkerIds) -> bool:
    """Whether our user namespace has them: the "root" of `unshare -r` has none but its own."""
    return all(_is_mapped(ids.first, ids.first + ids.count - 1, kind) for kind in ("uid", "gid"))


def _is_mapped(first: int, last: int, kind: str) -> bool:
    """Whether ids exist in our user namespace; each line of a map is the first id inside, the one outside, a count."""
    lines = Path(f"/proc/self/{kind}_map").read_text().splitlines()
    ranges = [(int(inside), int(count)) for inside, _, count in map(str.split, lines)]
    return any(inside <= first and last < inside + count for inside, count in ranges)


def require_one_thread() -> None:
    """Check what unshare(CLONE_NEWUSER) demands, whose own answer is a bare EINVAL.

    Raises:
        OSError: EINVAL, with the number of threads.
    """
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if threads != 1:
        raise OSError(errno.EINVAL, f"the process has {threads} threads, and only one with a single thread can enter")


def become(uid: int) -> bool:
    """Become `uid` as user and group, for good. Call it before any user namespace is made, or in one that has `uid`.

    Uid 0 would stay the kernel's uid 0 within a user namespace: RLIMIT_NPROC never binds that one, and it owns root's
    files.

    Returns:
        False where no second id exists: we are "root" of somebody's user namespace (bubblewrap, `unshare -r`), and
        RLIMIT_NPROC binds only as far as it binds whoever made that.

    Raises:
        OSError: Real root without the capability to become somebody else. It must not go on as root.
    """
    with contextlib.suppress(PermissionError):  # denied for good in such a namespace, where there are no groups to lose
        os.setgroups([])
    try:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # cleared by setresuid, and then /proc/self/uid_map belongs to root
    return True


class IdMapper:
    """A child that stays root, and maps `ids` in the user namespace that its parent enters later.

    user_namespaces(7): more than one's own id can only be mapped by somebody outside with CAP_SETUID. /proc must be
    that of the present pid namespace.
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
        """To be called in the new namespace, once."""
        os.close(self._go)
        error = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        if error:
            raise OSError(error, f"uid_map: {os.strerror(error)}")


def _write_maps(process: Path, line: str) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", line), ("gid_map", line)):
        with (process / name).open("w", buffering=1) as file:
            file.write(text)


def enter_user_namespace(flags: int, proc_self_fd: int, mapper: IdMapper | None = None) -> None:
    """Leave for the new namespaces `flags`, CLONE_NEWUSER among them, and stay who we are inside.

    Args:
        proc_self_fd: /proc/self, opened before; it stays good when /proc is covered.
        mapper: Maps further ids besides our own.
    """
    uid, gid = os.getuid(), os.getgid()
    try:
        syscalls.unshare(flags)
    except OSError as error:
        if error.errno == errno.ENOSPC:  # of all codes; user_namespaces(7)
            raise OSError(
                error.errno, "unshare: sysctl user.max_user_namespaces, or one like it, is reached"
            ) from error
        raise
    if mapper is not None:
        mapper.map()
        return
    write_below(proc_self_fd, "setgroups", "deny")  # user_namespaces(7): without it gid_map is not ours to write
    write_below(proc_self_fd, "uid_map", f"{uid} {uid} 1")
    write_below(proc_self_fd, "gid_map", f"{gid} {gid} 1")


def open_proc_self() -> int:
    """A descriptor of /proc/self for `write_below`; the caller closes it."""
    return os.open("/proc/self", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def write_below(folder_fd: int, name: str, text: str) -> None:
    """Write `text` to the existing file `name` below an open folder, in one write(2), as files of /proc demand."""
    fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder_fd)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def continue_as_pid_1() -> None:
    """Fork into the pid namespace that was just made: the child returns, the parent only waits for it."""
    pid = os.fork()
    if pid:
        _monitor(pid)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)


def _monitor(pid: int) -> NoReturn:
    """End as the child `pid` ends. It holds no descriptor, so that whoever waits for the child's EOF gets it."""
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the orchestrator, which ends us when it has finished
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def fork_into_new_pid_namespace(own_pidfd: int) -> int:
    """os.fork; the child is pid 1 of a pid namespace of its own.

    Args:
        own_pidfd: A pidfd of the calling process, which must be pid 1 of a pid namespace that its own user namespace
            owns: only into such a one it may come back.

    Returns:
        The child's pid in the parent, 0 in the child.
    """
    syscalls.unshare(syscalls.CLONE_NEWPID)
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:  # after a failed fork, too: the namespace would stay pending, and every later unshare be EINVAL
            syscalls.setns(own_pidfd, syscalls.CLONE_NEWPID)
    return pid
