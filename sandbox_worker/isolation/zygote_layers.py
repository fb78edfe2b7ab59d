"""The common layers of all workers of a fork server, applied once, and the fork of a worker.

strict    (real root: private root, another uid) → user, mount, pid, net, ipc, uts and cgroup namespaces → pid 1 →
          /proc (and, for an ordinary user, the private root around it) → host name, where it may be set
standard  no namespaces: each worker applies all of its layers itself
process   none
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from sandbox_worker.isolation import capabilities, landlock, mounts, namespaces, rlimits, seccomp, syscalls
from sandbox_worker.isolation.layer import ZygoteLayers, layer
from sandbox_worker.isolation.namespaces import IdMapper, WorkerIds
from sandbox_worker.wire.level import STANDARD, STRICT, Layer, Level

HOSTNAME = "rlm"


def enter_zygote(
    level: Level, new_root: str, readable: Sequence[str], hidden: Sequence[str], orchestrator: int
) -> ZygoteLayers:
    """Apply the common layers of all workers. At "strict" it returns in a forked child, pid 1 of a namespace.

    Call it in a newly exec'd process with one thread, as real root or as an ordinary user. Modules that are imported
    later must lie in /usr or in `readable`.

    Args:
        level: The level. "process" applies no layer, also for root.
        new_root: At "strict", an existing empty private folder. The root is built on it; it stays empty on the host.
        readable: Absolute folders and files that workers may read, such as the Python installation. At "strict" they
            are shown read-only under their own names, and may lie below folders that the host keeps private.
        hidden: Absolute folders that "strict" shows as empty if they lie in a shown folder.
        orchestrator: Pidfd of the process with which this one ends. "strict" closes it.

    Raises:
        LayerFailed: A layer could not be applied. Earlier layers cannot be undone: the caller ends the process.
    """
    if not level.is_security_boundary:
        return ZygoteLayers(level, own_pid=os.getpid())
    with layer("one thread", []):
        namespaces.require_one_thread()
    rlimits.forbid_core_dumps()  # here real root can still raise a hard limit of 0
    if level.confines_zygote:
        return _strict(new_root, readable, hidden, orchestrator)
    return _standard(readable)


def fork_worker(shared: ZygoteLayers) -> int:
    """Fork a worker. At "strict" the child is pid 1 of a pid namespace of its own.

    Returns:
        The child's pid in the parent, 0 in the child.

    Raises:
        LayerFailed: The kernel refused a namespace or a process. The next call may succeed.
    """
    if shared.worker_ids is not None:
        shared.worker_ids.forked += 1
    with layer("fork", []):
        if not shared.level.has_pid_namespace:
            return os.fork()
        return namespaces.fork_into_new_pid_namespace(shared.own_pidfd)


# -- standard --------------------------------------------------------------------------------------------------------


def _standard(readable: Sequence[str]) -> ZygoteLayers:
    landlock_abi = _find_landlock_and_seccomp()
    # Without a root of the worker's own, another user must be able to read Python: a worker imports lazily. Without
    # these capabilities, root could not make, end or clean up after workers of another user. Then they stay uid 0,
    # which has no capabilities left.
    may_change = os.getuid() == 0 and not capabilities.missing(capabilities.TO_OWN_WORKERS)
    ids = namespaces.unused_ids() if may_change and all(map(_others_can_read, readable)) else None
    return ZygoteLayers(
        level=STANDARD,
        worker_ids=ids if ids is not None and namespaces.exist(ids) else None,
        readable=tuple(readable),
        own_pid=os.getpid(),
        landlock_abi=landlock_abi,
        last_capability=capabilities.last(),
    )


def _others_can_read(path: str) -> bool:
    real = Path(path).resolve()
    wanted = 0o005 if real.is_dir() else 0o004
    parents_lead_there = all(parent.stat().st_mode & 0o001 for parent in real.parents)
    return parents_lead_there and real.stat().st_mode & wanted == wanted


# -- strict ----------------------------------------------------------------------------------------------------------


def _strict(new_root: str, readable: Sequence[str], hidden: Sequence[str], orchestrator: int) -> ZygoteLayers:
    applied: list[Layer] = []
    built, ids, mapper = False, None, None
    if os.getuid() == 0:
        built = _build_root_as_root(new_root, readable, hidden, applied)
        # Mapping more than one id needs CAP_SYS_ADMIN, as building the root does. Root of a container may lack it.
        ids = namespaces.unused_ids() if built else WorkerIds(namespaces.NOBODY, 1)
        with layer("other uid", []):
            if namespaces.exist(ids):  # else `become` keeps this process's user
                capabilities.require(capabilities.TO_MAP_IDS if ids.count > 1 else capabilities.TO_BECOME_ANOTHER)
            mapper = IdMapper(ids) if ids.count > 1 else None
            if namespaces.become(ids.first):
                applied.append("other uid")
    with layer("namespaces", applied):
        proc_self = namespaces.open_proc_self()
        namespaces.enter_user_namespace(namespaces.ZYGOTE_NAMESPACES, proc_self, mapper)
        os.close(proc_self)
    with layer("pid 1", applied):
        namespaces.continue_as_pid_1(orchestrator)
    proc_is_fresh = _make_proc_and_root(None if built else new_root, readable, hidden, applied)
    # Rootless podman's default profile denies it. Isolation does not depend on the name.
    with contextlib.suppress(OSError):
        syscalls.sethostname(HOSTNAME)
        applied.append("host name")
    return ZygoteLayers(
        level=STRICT,
        layers=tuple(applied),
        worker_ids=_those_of_each(ids),
        proc_is_fresh=proc_is_fresh,
        temporary_is_free=mounts.temporary_is_free(readable),
        own_pid=os.getpid(),
        own_pidfd=os.pidfd_open(os.getpid()),
        landlock_abi=_find_landlock_and_seccomp(),
        last_capability=capabilities.last(),
    )


def _those_of_each(ids: WorkerIds | None) -> WorkerIds | None:
    """Return ids for workers to become. A single id is the fork server's own already: then None."""
    return ids if ids is not None and ids.count > 1 else None


def _find_landlock_and_seccomp() -> int:
    with layer("landlock", []):
        landlock_abi = landlock.abi()
    with layer("seccomp", []):
        seccomp.prepare()
    return landlock_abi


def _build_root_as_root(new_root: str, readable: Sequence[str], hidden: Sequence[str], applied: list[Layer]) -> bool:
    """Build the root with root's rights, because another user may not be able to read Python.

    Returns:
        Whether it was built. Root of a container may lack CAP_SYS_ADMIN, and continues as an ordinary user does.
    """
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS)
    except PermissionError:
        return False
    with layer("private root", applied):
        # The host's own /proc, until there is a pid namespace for which a new one can be mounted over it.
        mounts.enter_private_root(new_root, readable, hidden, lambda target: syscalls.bind("/proc", target))
    return True


def _make_proc_and_root(
    new_root: str | None, readable: Sequence[str], hidden: Sequence[str], applied: list[Layer]
) -> bool:
    """Mount the /proc of the new pid namespace, and build the root around it if it is not built yet.

    Returns:
        False if the kernel refuses it because parts of the host's /proc are masked, as in many containers.
    """
    fresh = True

    def mount_proc(target: str) -> None:
        nonlocal fresh
        try:
            mounts.mount_own_proc(target, only_processes=False)
        except PermissionError:
            fresh = False
            if new_root is not None:
                syscalls.bind("/proc", target)

    if new_root is None:
        with layer("own proc", []):
            mount_proc("/proc")
    else:
        with layer("private root", applied):
            mounts.enter_private_root(new_root, readable, hidden, mount_proc)
    applied.extend(["own proc"] if fresh else [])
    return fresh
