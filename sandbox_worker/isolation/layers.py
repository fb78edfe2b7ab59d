"""The order in which the walls go up. Each layer needs what the ones after it take away.

    zygote  private root and another uid, by real root while it is one → user, mount, pid, net, ipc, uts and cgroup
            namespaces → pid 1 → /proc
    init    session → mounts → user namespace → capabilities → no_new_privs → not dumpable → Landlock → seccomp
    REPL    resource limits → a Landlock domain within init's → a narrower seccomp filter

A worker is two processes with two sets of walls, because one cannot be had: a filter under which init may fork would
let model code do it, and a limit of init's own would let model code end it by using it up.

Covered at "strict": files, network, other processes, privileges, devices, kernel interfaces, and the bytes of the
scratch folder. Not covered: memory and CPU of the worker as a whole (cgroups, watchdog), bugs of the kernel, and what
shared caches tell. At "process" nothing is covered: that level is no boundary.
"""

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from sandbox_worker.isolation import capabilities, landlock, mounts, namespaces, rlimits, seccomp, syscalls

LEVELS = ("strict", "process")
HOSTNAME = "rlm"
OOM_SCORE = 1000
"""The first to be killed when the machine runs out of memory: a worker, not its orchestrator."""
NICENESS = 5


class LayerFailed(Exception):
    """A wall could not be raised, and nothing may run without it.

    Attributes:
        layer: Its name.
        reason: The call that failed, and the kernel's reason.
    """

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(f"isolation layer {layer!r} failed: {reason}")
        self.layer = layer
        self.reason = reason


@dataclass(frozen=True)
class WorkerBounds:
    """What one worker may use at most. All are positive.

    Attributes:
        address_space_bytes: That each process of the REPL may map on top of what it finds mapped.
        max_processes: Processes and threads, init among them; only at "strict", where they can be counted.
        max_open_files: Descriptors of each process.
        scratch_bytes: The scratch folder as a whole, and a single file.
    """

    address_space_bytes: int
    max_processes: int
    max_open_files: int
    scratch_bytes: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:  # to a tmpfs, 0 means without a bound
                raise ValueError(f"{field.name} is {getattr(self, field.name):,}, and must be at least 1")


@dataclass(frozen=True)
class ZygoteWalls:
    """What `enter_zygote` did and found out, for the workers to be forked.

    Attributes:
        level: "strict" or "process".
        layers: Names of what was applied, in order; without "other uid" the zygote is still who it was.
        proc_is_fresh: Whether a /proc of our own can be mounted; elsewhere workers have none.
        temporary_is_free: Whether workers see their scratch folder at /tmp, too.
        own_pid: Of the zygote, in its own pid namespace.
        own_pidfd: Of the zygote, -1 at "process". It is the way back after a worker's pid namespace was made.
        landlock_abi: 0 at "process".
        last_capability: The highest one of this kernel.
    """

    level: str
    layers: tuple[str, ...]
    proc_is_fresh: bool
    temporary_is_free: bool
    own_pid: int
    own_pidfd: int
    landlock_abi: int
    last_capability: int


@contextlib.contextmanager
def _layer(name: str, applied: list[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        raise LayerFailed(name, f"{error.filename}: {what}" if error.filename else what) from error
    applied.append(name)


# -- the zygote ------------------------------------------------------------------------------------------------------


def enter_zygote(
    level: str, new_root: str, readable: Sequence[str], hidden: Sequence[str], worker_uid: int
) -> ZygoteWalls:
    """Raise the walls that all workers share. At "strict" the caller goes on as a forked child, pid 1 of a namespace.

    Call it in a freshly exec'd process with one thread, as real root or as an ordinary user. What else is imported
    later must lie in /usr or in `readable`.

    Args:
        level: One of `LEVELS`. "process" does nothing, not even for root.
        new_root: An existing empty private folder, where the root is built; nothing of it stays.
        readable: Absolute folders and files to show read-only under their own names, such as the Python installation.
            Their parents are made anew: they may lie below folders that the host keeps private.
        hidden: Absolute folders to show as empty where they lie in something that is shown.
        worker_uid: User and group of every worker, if we are root; not 0.

    Raises:
        LayerFailed: Naming the layer and the kernel's reason. Nothing can be undone: end the process.
    """
    if level == "process":
        return ZygoteWalls(level, (), True, False, os.getpid(), -1, 0, 0)
    if level != "strict":
        raise LayerFailed("level", f"there is no level {level!r}; there are: {', '.join(LEVELS)}")
    applied: list[str] = []
    with _layer("one thread", []):
        namespaces.require_one_thread()
    rlimits.forbid_core_dumps()  # here, since real root can still raise a hard limit of 0
    built = os.getuid() == 0 and _stop_being_root(new_root, readable, hidden, worker_uid, applied)
    with _layer("namespaces", applied):
        proc_self = namespaces.open_proc_self()
        namespaces.enter_user_namespace(namespaces.ZYGOTE_NAMESPACES, proc_self)
        os.close(proc_self)
    with _layer("pid 1", applied):
        namespaces.continue_as_pid_1()
    proc_is_fresh = _make_proc_and_root(None if built else new_root, readable, hidden, applied)
    with _layer("host name", applied):
        syscalls.sethostname(HOSTNAME)
    with _layer("landlock", []):
        landlock_abi = landlock.abi()
    with _layer("seccomp", []):
        seccomp.prepare()
    return ZygoteWalls(
        level=level,
        layers=tuple(applied),
        proc_is_fresh=proc_is_fresh,
        temporary_is_free=mounts.temporary_is_free(readable),
        own_pid=os.getpid(),
        own_pidfd=os.pidfd_open(os.getpid()),
        landlock_abi=landlock_abi,
        last_capability=capabilities.last(),
    )


def _stop_being_root(
    new_root: str, readable: Sequence[str], hidden: Sequence[str], worker_uid: int, applied: list[str]
) -> bool:
    """Build the root with real rights, since another uid may not be able to reach Python; then become that uid.

    Returns:
        Whether the root was built: root of a container may lack CAP_SYS_ADMIN, and goes on like any user.
    """
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        built = True
    except PermissionError:
        built = False
    if built:
        with _layer("private root", applied):
            # The host's own /proc, to be covered as soon as there is a pid namespace to mount one for.
            mounts.enter_private_root(new_root, readable, hidden, lambda target: syscalls.bind("/proc", target))
    with _layer("other uid", []):
        became = namespaces.become(worker_uid)
    applied.extend(["other uid"] if became else [])
    return built


def _make_proc_and_root(
    new_root: str | None, readable: Sequence[str], hidden: Sequence[str], applied: list[str]
) -> bool:
    """Mount the /proc of the new pid namespace, and build the root around it where none is given.

    Returns:
        False where the kernel refuses one because parts of the host's are masked, as in many containers.
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
        with _layer("own proc", []):
            mount_proc("/proc")
    else:
        with _layer("private root", applied):
            mounts.enter_private_root(new_root, readable, hidden, mount_proc)
    applied.extend(["own proc"] if fresh else [])
    return fresh


def fork_worker(walls: ZygoteWalls) -> int:
    """os.fork, at "strict" with the child as pid 1 of a pid namespace of its own.

    Returns:
        The child's pid in the parent, 0 in the child.

    Raises:
        LayerFailed: No namespace or no process could be had; the next call may succeed.
    """
    with _layer("fork", []):
        if walls.level == "process":
            return os.fork()
        return namespaces.fork_into_new_pid_namespace(walls.own_pidfd)


# -- init ------------------------------------------------------------------------------------------------------------

InitLayer = Callable[[ZygoteWalls, WorkerBounds], None]


def lock_down_init(walls: ZygoteWalls, bounds: WorkerBounds) -> tuple[str, ...]:
    """Raise init's walls in a freshly forked worker; at "strict" the current folder is the empty scratch folder then.

    Call it with every descriptor closed that the worker must not keep.

    Returns:
        Names of the layers applied, in order.

    Raises:
        LayerFailed: Naming the layer and the kernel's reason. End the process.
    """
    applied: list[str] = []
    for name, apply in _INIT_LAYERS if walls.level == "strict" else _INIT_LAYERS_OF_PROCESS:
        with _layer(name, applied):
            apply(walls, bounds)
    return tuple(applied)


def _session(_walls: ZygoteWalls, _bounds: WorkerBounds) -> None:
    # A process group does not end at a pid namespace: kill(0) would reach the zygote and every sibling.
    if os.getsid(0) != os.getpid():
        os.setsid()
    with contextlib.suppress(PermissionError):  # a favour to the machine, and no wall
        os.nice(NICENESS)


def _mounts(walls: ZygoteWalls, bounds: WorkerBounds) -> None:
    syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS)
    mounts.mount_scratch(bounds.scratch_bytes, walls.temporary_is_free)


def _user_namespace(walls: ZygoteWalls, _bounds: WorkerBounds) -> None:
    # RLIMIT_NPROC counts per user namespace. The mounts belong to the outer one, and cannot be changed from this.
    proc_self = namespaces.open_proc_self()
    try:
        with contextlib.suppress(PermissionError):  # a favour to the machine, and no wall
            namespaces.write_below(proc_self, "oom_score_adj", str(OOM_SCORE))
        if walls.proc_is_fresh:
            mounts.mount_own_proc("/proc", only_processes=True)
        else:
            mounts.cover_proc()
        namespaces.enter_user_namespace(syscalls.CLONE_NEWUSER, proc_self)
    finally:
        os.close(proc_self)


def _capabilities(walls: ZygoteWalls, _bounds: WorkerBounds) -> None:
    capabilities.drop_all(walls.last_capability)


def _no_new_privs(_walls: ZygoteWalls, _bounds: WorkerBounds) -> None:
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)  # what Landlock and seccomp demand of the unprivileged


def _not_dumpable(_walls: ZygoteWalls, _bounds: WorkerBounds) -> None:
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # memory, environment and descriptors are closed to the REPL


def _landlock_of_init(walls: ZygoteWalls, _bounds: WorkerBounds) -> None:
    landlock.restrict(_GRANTS_WITH_EXEC, walls.landlock_abi)


def _seccomp_of_init(_walls: ZygoteWalls, _bounds: WorkerBounds) -> None:
    seccomp.install("init", allow_exec=True)


def _end_with_zygote(walls: ZygoteWalls, _bounds: WorkerBounds) -> None:
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != walls.own_pid:  # it ended before that
        os._exit(1)


_INIT_LAYERS: tuple[tuple[str, InitLayer], ...] = (
    ("session", _session),
    ("mounts", _mounts),
    ("user namespace", _user_namespace),
    ("capabilities", _capabilities),
    ("no_new_privs", _no_new_privs),
    ("not dumpable", _not_dumpable),
    ("landlock", _landlock_of_init),  # no mount is possible within a domain
    ("seccomp", _seccomp_of_init),
)

_INIT_LAYERS_OF_PROCESS: tuple[tuple[str, InitLayer], ...] = (
    ("parent death signal", _end_with_zygote),
    ("no_new_privs", _no_new_privs),
)


# -- the REPL --------------------------------------------------------------------------------------------------------


def lock_down_repl(walls: ZygoteWalls, bounds: WorkerBounds, allow_exec: bool) -> tuple[str, ...]:
    """Raise the REPL's walls in init's fork, before any model code.

    Args:
        allow_exec: Whether model code may start programs. They are as confined as it is itself.

    Returns:
        Names of the layers applied, in order.

    Raises:
        LayerFailed: Naming the layer and the kernel's reason. End the process.
    """
    applied: list[str] = []
    strict = walls.level == "strict"
    if not strict:  # where no pid namespace sees to it
        with _layer("parent death signal", applied):
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    with _layer("rlimits", applied):
        no_core = rlimits.forbid_core_dumps()
        mapped = rlimits.mapped_bytes()  # a context of init's counts in every process that inherits it
        rlimits.set_hard(resource.RLIMIT_AS, mapped + bounds.address_space_bytes)
        rlimits.set_hard(resource.RLIMIT_NOFILE, bounds.max_open_files)
        rlimits.set_hard(resource.RLIMIT_FSIZE, bounds.scratch_bytes)
        if strict:  # elsewhere it would count everything that the user runs
            rlimits.set_hard(resource.RLIMIT_NPROC, bounds.max_processes)
    if not strict:
        return tuple(applied)
    with _layer("landlock", applied):
        landlock.restrict(_GRANTS_WITH_EXEC if allow_exec else _GRANTS, walls.landlock_abi)
    if no_core:  # else staying undumpable is what keeps a core_pattern's handler away
        with _layer("dumpable", []):
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # or its own files below /proc/self would be root's
    with _layer("seccomp", applied):
        seccomp.install("repl", allow_exec)
    return tuple(applied)


def _grants(execute: int) -> tuple[landlock.Grant, ...]:
    scratch = landlock.READ | landlock.CHANGE | execute
    return (
        # Not writing: /dev/zero, opened for writing and mapped as shared, is memory that no limit sees.
        landlock.Grant("/", landlock.READ | execute),
        landlock.Grant(mounts.SCRATCH, scratch),
        landlock.Grant(mounts.SHARED_MEMORY, scratch),
        landlock.Grant("/dev/null", landlock.READ_FILE | landlock.WRITE_FILE | landlock.TRUNCATE),
    )


_GRANTS = _grants(execute=0)
_GRANTS_WITH_EXEC = _grants(execute=landlock.EXECUTE)
