"""The layers of one worker, in their order. Each layer needs rights that later ones take away.

              init                                                                            REPL
    strict    session → own uid → mounts → user namespace → capabilities → no_new_privs →     limits → narrower Landlock
              not dumpable → Landlock → seccomp                                               → narrower seccomp
    standard  session → own uid → capabilities → parent's death → no_new_privs →              the same, for threads only
              not dumpable → Landlock → seccomp
    process   parent's death → no_new_privs                                                   limits

A worker is two processes with two sets of layers. One process would not do: a filter that lets init fork would let
model code fork, and model code could end init by using up a limit that both share.

"strict" covers files, network, other processes, privileges, devices, kernel interfaces, and the bytes of the scratch
folder. "standard" covers the same, but for what stat(2) tells of the host's files. "process" is not a boundary. No
level covers bugs of the kernel and side channels through shared caches.
"""

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from sandbox_worker.isolation import capabilities, landlock, mounts, namespaces, rlimits, seccomp, syscalls
from sandbox_worker.isolation.landlock import Grant
from sandbox_worker.isolation.layer import WorkerBounds, ZygoteLayers, layer
from sandbox_worker.wire.level import PROCESS, STANDARD, STRICT, Layer, LevelName

OOM_SCORE = 1000
"""The highest `oom_score_adj`: if memory runs out, the kernel kills a worker and not its orchestrator."""
ADDRESS_SPACE_FACTOR, FILES_BYTES = 2, 256 << 20
"""Address space of a process for each byte of its private memory, and beside it: for libraries, and memory that is
reserved and never written. It is no more, since code may write memory, protect it, and so hide it from RLIMIT_DATA."""
NICENESS = 5

InitLayer = Callable[[ZygoteLayers, WorkerBounds], int | None]
"""Applies one layer. Returns the descriptor of a ruleset that also confines the REPL, or None."""


class LockedInit(NamedTuple):
    """Result of `lock_down_init`.

    Attributes:
        layers: Names of the applied layers, in order.
        ruleset: Descriptor of the Landlock ruleset for the REPL. None if the REPL makes its own.
    """

    layers: tuple[Layer, ...]
    ruleset: int | None


def lock_down_init(shared: ZygoteLayers, bounds: WorkerBounds) -> LockedInit:
    """Apply init's layers in a newly forked worker.

    The caller has closed all descriptors that the worker must not keep. At "strict" the current folder is the empty
    scratch folder afterwards. At other levels the caller has changed into it before.

    Raises:
        LayerFailed: A layer could not be applied. The caller ends the process.
    """
    applied: list[Layer] = []
    ruleset: int | None = None
    for name, apply in _INIT_LAYERS[shared.level.name]:
        if name != OWN_UID or shared.worker_ids is not None:
            with layer(name, applied):
                made = apply(shared, bounds)
            ruleset = ruleset if made is None else made
    return LockedInit(tuple(applied), ruleset)


def lock_down_repl(
    shared: ZygoteLayers,
    bounds: WorkerBounds,
    ruleset: int | None,
    mapped_bytes: int,
    data_bytes: int,
    *,
    for_program: bool = False,
) -> tuple[Layer, ...]:
    """Apply the REPL's layers in init's child, before it runs any model code, or becomes a program.

    Args:
        shared: Layers set up by the fork server.
        bounds: Limits of the worker.
        ruleset: Result of `lock_down_init`. It is closed.
        mapped_bytes, data_bytes: Address space, and private writable memory, that this process has already, such as a
            context inherited from init. They do not count against the limits.
        for_program: Whether the child stays undumpable until it becomes a program, which is dumpable.

    Returns:
        Names of the applied layers, in order.

    Raises:
        LayerFailed: A layer could not be applied. The caller ends the process.
    """
    applied: list[Layer] = []
    level = shared.level
    if not level.has_pid_namespace:  # a pid namespace ends with its pid 1 by itself
        with layer("parent death signal", applied):
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    with layer("rlimits", applied):
        no_core = rlimits.forbid_core_dumps()
        # Private writable memory is what a person means by memory. Libraries map files besides, and reserve much of
        # what they never write.
        rlimits.set_hard(resource.RLIMIT_DATA, data_bytes + bounds.data_bytes, bounds.reserved_bytes)
        rlimits.set_hard(resource.RLIMIT_AS, mapped_bytes + ADDRESS_SPACE_FACTOR * bounds.data_bytes + FILES_BYTES)
        rlimits.set_hard(resource.RLIMIT_NOFILE, bounds.repl.max_open_files)
        rlimits.set_hard(resource.RLIMIT_FSIZE, bounds.repl.scratch_bytes)
        if level.has_user_namespace or shared.worker_ids is not None:  # else it would count all processes of the user
            # One more than init may fork: the child that waits for a program takes no process away from code. The REPL
            # allows itself more for checkpoints. If code does so, the watch still counts its processes.
            copies = bounds.repl.keep_checkpoints + 1 if level.has_pid_namespace else 0
            most = bounds.repl.max_processes + (level.runs_programs and bounds.allow_exec) + copies
            rlimits.set_hard(resource.RLIMIT_NPROC, most, copies)
    if not level.is_security_boundary:
        return tuple(applied)
    with layer("landlock", applied):
        if ruleset is None:
            ruleset = landlock.make_ruleset(_standard_grants(shared), shared.landlock_abi)
        # At "strict" the rules are init's own. The nested domain matters: from it, code cannot signal or trace init.
        landlock.restrict(ruleset, shared.landlock_abi)
        os.close(ruleset)
    if no_core and not for_program:  # else it stays undumpable, which keeps a core_pattern's handler from running
        with layer("dumpable", []):
            # Without this, root owns its files in /proc/self, and init could not count its descriptors. Siblings still
            # cannot trace it: Landlock denies ptrace from one domain into another.
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
    with layer("seccomp", applied):
        seccomp.install("threads" if not level.may_exec else "program" if for_program else "repl", bounds.allow_exec)
    return tuple(applied)


# -- init's layers ---------------------------------------------------------------------------------------------------


def _session(_shared: ZygoteLayers, _bounds: WorkerBounds) -> None:
    # A process group spans pid namespaces: without a session of its own, kill(0) would reach the fork server and all
    # siblings.
    if os.getsid(0) != os.getpid():
        os.setsid()
    with contextlib.suppress(PermissionError):  # only kind to the machine: isolation holds without it
        os.nice(NICENESS)


def _own_uid(shared: ZygoteLayers, _bounds: WorkerBounds) -> None:
    assert shared.worker_ids is not None
    uid = shared.worker_ids.of_newest()
    if not shared.level.has_own_root:
        os.chown(".", uid, uid)
    namespaces.become(uid)


def _mounts(shared: ZygoteLayers, bounds: WorkerBounds) -> None:
    syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS)
    mounts.mount_scratch(bounds.repl.scratch_bytes, bounds.repl.max_scratch_files, shared.temporary_is_free)


def _user_namespace(shared: ZygoteLayers, _bounds: WorkerBounds) -> None:
    # RLIMIT_NPROC counts by user namespace. The mounts belong to the outer namespace, and cannot be changed from this.
    proc_self = namespaces.open_proc_self()
    try:
        be_the_first_to_go(proc_self)
        if shared.proc_is_fresh:
            mounts.mount_own_proc("/proc", only_processes=True)
        else:
            mounts.cover_proc()
        namespaces.enter_user_namespace(syscalls.CLONE_NEWUSER, proc_self)
    finally:
        os.close(proc_self)


def be_the_first_to_go(proc_self: int) -> None:
    """Raise `oom_score_adj`, so that the kernel kills this process before the orchestrator.

    Args:
        proc_self: Descriptor of /proc/self.
    """
    with contextlib.suppress(PermissionError):  # only kind to the machine: isolation holds without it
        namespaces.write_below(proc_self, "oom_score_adj", str(OOM_SCORE))


def _capabilities(shared: ZygoteLayers, _bounds: WorkerBounds) -> None:
    capabilities.drop_all(shared.last_capability)


def _capabilities_if_any(shared: ZygoteLayers, _bounds: WorkerBounds) -> None:
    proc_self = namespaces.open_proc_self()
    be_the_first_to_go(proc_self)
    os.close(proc_self)
    # An ordinary user has no capabilities, and may not change the bounding set. no_new_privs keeps new ones away.
    with contextlib.suppress(PermissionError):
        capabilities.drop_all(shared.last_capability)
    capabilities.drop_own()


def _no_new_privs(_shared: ZygoteLayers, _bounds: WorkerBounds) -> None:
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)  # Landlock and seccomp require it of an unprivileged process


def _not_dumpable(_shared: ZygoteLayers, _bounds: WorkerBounds) -> None:
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # the REPL cannot read memory, environment and descriptors of init


def _landlock(shared: ZygoteLayers, bounds: WorkerBounds) -> int:
    ruleset = landlock.make_ruleset(_strict_grants(bounds.allow_exec), shared.landlock_abi)
    landlock.restrict(ruleset, shared.landlock_abi)
    return ruleset


def _landlock_without_root(shared: ZygoteLayers, _bounds: WorkerBounds) -> None:
    proc = Grant("/proc", landlock.READ)  # init reads the memory of its REPL there
    ruleset = landlock.make_ruleset([*_standard_grants(shared), proc], shared.landlock_abi)
    landlock.restrict(ruleset, shared.landlock_abi)
    os.close(ruleset)


def _seccomp(_shared: ZygoteLayers, _bounds: WorkerBounds) -> None:
    seccomp.install("init", allow_exec=True)


def _end_with_zygote(shared: ZygoteLayers, _bounds: WorkerBounds) -> None:
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != shared.own_pid:  # the fork server ended before the signal was set
        os._exit(1)


OWN_UID: Layer = "own uid"

_INIT_LAYERS: dict[LevelName, tuple[tuple[Layer, InitLayer], ...]] = {
    STRICT.name: (
        ("session", _session),
        (OWN_UID, _own_uid),  # before the mounts: the worker then owns its scratch folder
        ("mounts", _mounts),
        ("user namespace", _user_namespace),
        ("capabilities", _capabilities),
        ("no_new_privs", _no_new_privs),
        ("not dumpable", _not_dumpable),
        ("landlock", _landlock),  # no mount is possible within a domain
        ("seccomp", _seccomp),
    ),
    STANDARD.name: (
        ("session", _session),
        (OWN_UID, _own_uid),
        ("capabilities", _capabilities_if_any),
        ("parent death signal", _end_with_zygote),  # cleared by a change of uid
        ("no_new_privs", _no_new_privs),
        ("not dumpable", _not_dumpable),
        ("landlock", _landlock_without_root),
        ("seccomp", _seccomp),
    ),
    PROCESS.name: (
        ("parent death signal", _end_with_zygote),
        ("no_new_privs", _no_new_privs),
    ),
}


# -- what may be opened ----------------------------------------------------------------------------------------------

_READ_WRITE = landlock.READ_FILE | landlock.WRITE_FILE | landlock.TRUNCATE


def _strict_grants(allow_exec: bool) -> list[Grant]:
    execute = landlock.EXECUTE if allow_exec else 0
    scratch = landlock.READ | landlock.CHANGE | execute
    return [
        # No right to write: a shared writable mapping of /dev/zero is memory that no limit counts.
        Grant("/", landlock.READ | execute),
        Grant(mounts.SCRATCH, scratch),
        Grant(mounts.SHARED_MEMORY, scratch),
        Grant("/dev/null", _READ_WRITE),
    ]


def _standard_grants(shared: ZygoteLayers) -> list[Grant]:
    """Return grants to read the files of a private root. None lets a program be started."""
    devices = [f"/dev/{name}" for name in mounts.DEVICES]
    system = [*mounts.SYSTEM, *map(str, Path("/").glob("lib*")), *shared.readable, *devices]
    readable = [Grant(path, landlock.READ) for path in _existing(system)]
    return [*readable, Grant("/dev/null", _READ_WRITE), Grant(str(Path.cwd()), landlock.READ | landlock.CHANGE)]


def _existing(paths: Iterable[str]) -> list[str]:
    return [path for path in dict.fromkeys(paths) if Path(path).exists()]
