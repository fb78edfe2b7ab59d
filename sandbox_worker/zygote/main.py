"""Main function of the fork server: does all slow work once, then only forks.

The process has one thread, runs no model code and holds no secret. The orchestrator executes it with `-I -S`, an
explicit `sys.path` and an environment of its own.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import NoReturn

from sandbox_worker.init import main as init
from sandbox_worker.init.child import have_no_threads
from sandbox_worker.init.procfs import Proc, Status
from sandbox_worker.isolation import syscalls
from sandbox_worker.isolation.layer import LayerFailed, ZygoteLayers
from sandbox_worker.isolation.mounts import SCRATCH
from sandbox_worker.isolation.zygote_layers import enter_zygote, fork_worker
from sandbox_worker.loading.context import Preloaded
from sandbox_worker.loading.form import MAX_PIECES
from sandbox_worker.loading.self_test import mapping_works
from sandbox_worker.repl import memory_reserve
from sandbox_worker.repl.adaptation import adapt
from sandbox_worker.wire.control import (
    MAX_PACKET_BYTES,
    Configure,
    NotPrepared,
    Packages,
    Spawn,
    Spawned,
    SpawnFailed,
    ZygoteFailed,
    ZygoteReady,
    pack,
    unpack_to_zygote,
)
from sandbox_worker.wire.descriptors import receive
from sandbox_worker.wire.level import level_named
from sandbox_worker.zygote.heap import fill_free_blocks, fill_free_chunks, inherit_page_tables
from sandbox_worker.zygote.preload import PreparationFailed, other_threads, prepare
from sandbox_worker.zygote.warm_up import rehearse


def main(control_fd: int, orchestrator: int) -> NoReturn:
    """Serve the orchestrator at the other end of `control_fd` until it closes its end, or ends.

    Its end is seen by a pidfd as well: a process that C code has forked from it may hold a copy of its socket.

    The first packet must be `Configure`; the answer is `ZygoteReady`, `ZygoteFailed` or `NotPrepared`. Every later one
    must be `Spawn`.

    Args:
        control_fd: Control socket.
        orchestrator: Pidfd of the orchestrator.
    """
    # A supervisor may have left SIGCHLD ignored. The kernel would then reap children itself, and waitpid would fail
    # with ECHILD (waitpid(2)).
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control = socket.socket(fileno=control_fd)
    packet, fds = receive(control, MAX_PACKET_BYTES, MAX_PIECES)
    configure = unpack_to_zygote(packet)
    assert isinstance(configure, Configure)
    level = level_named(configure.level)
    watched = None
    if not level.confines_zygote:  # else the process outside of the namespaces watches, also while code prepares
        watched = orchestrator
        _end_with_parent_thread(orchestrator)
    try:
        shared = enter_zygote(level, configure.new_root, configure.readable, configure.hidden, orchestrator)
        if configure.packages is not None:
            import_from(configure.packages)
        adapt(shared.level, configure.seed)
        mapped = mapping_works()
        preloaded = prepare(configure, fds, shared, mapped)
        _require_one_thread()
    except LayerFailed as error:
        control.send(pack(ZygoteFailed(reason=str(error), layer=error.layer, code=error.code)))
        os._exit(1)
    except PreparationFailed as error:
        control.send(pack(NotPrepared(step=error.step, reason=error.reason)))
        os._exit(1)
    if shared.level.is_security_boundary:  # the filters of these levels deny sysinfo
        memory_reserve.replace_sysconf()
    rehearse(shared)
    inherit_page_tables()
    _filling = fill_free_blocks()
    fill_free_chunks()
    syscalls.collapse_own_memory()
    init.handle_no_signals()
    have_no_threads()
    _streams = sys.stdout, sys.stderr  # else the first block of each REPL, which replaces them, would close them
    if shared.level.has_own_root:
        init.live_in(SCRATCH)
    # Keep the collector of workers away from inherited objects: it writes to each object's header, and so would copy
    # all pages that the worker shares with this process.
    gc.freeze()
    gc.disable()
    proc = Proc()
    own = proc.status(proc.own_pid) or Status()
    proc.close()
    control.send(pack(ZygoteReady(layers=list(shared.layers), memory_bytes=own.memory_bytes)))
    _serve(control, watched, shared, mapped, preloaded)


def _end_with_parent_thread(orchestrator: int) -> None:
    """Have the kernel end this process with the thread waiting for its preparation.

    Code of the user's prepares, which may take long, and watches no descriptor. Later the parent's death signal would
    be wrong: an event loop may go on in another thread.
    """
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([orchestrator], [], [], 0)[0]:  # it ended before the signal was set
        os._exit(0)


def _serve(
    control: socket.socket, orchestrator: int | None, shared: ZygoteLayers, mapped: bool, preloaded: Preloaded
) -> NoReturn:
    ended = syscalls.ended_children()  # one descriptor for all: every fork copies each open descriptor, so no pidfds
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(control.fileno(), select.POLLIN)
    if orchestrator is not None:
        poll.register(orchestrator, select.POLLIN)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 0)
    while True:
        for fd, _ in poll.poll():
            if fd == orchestrator:
                os._exit(0)
            if fd == ended:
                _reap(ended)
                continue
            packet, fds = receive(control, MAX_PACKET_BYTES, 2)
            if not packet:
                os._exit(0)  # the orchestrator has ended; if this is pid 1, then the kernel ends all workers as well
            spawn = unpack_to_zygote(packet)
            assert isinstance(spawn, Spawn)
            try:
                pid = fork_worker(shared)
                if pid == 0:
                    init.main(fds, spawn, shared, mapped, preloaded)
                pidfd = os.pidfd_open(pid)
                fds.append(pidfd)
                socket.send_fds(control, [pack(Spawned())], [pidfd])
            except (LayerFailed, OSError) as error:
                control.send(pack(SpawnFailed(reason=str(error))))
            finally:
                for received in fds:
                    os.closerange(received, received + 1)  # without errors


def _reap(ended: int) -> None:
    """Reap all workers that have ended."""
    os.read(ended, 1 << 12)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _require_one_thread() -> None:
    """Refuse a second thread in this process.

    A forked process has a copy of the forking thread alone. If another thread held a lock, then the lock would never
    be released in any worker. A process with two threads cannot enter a user namespace either (unshare(2)).

    Raises:
        PreparationFailed: An import or the set-up code has started a thread.
    """
    if started := other_threads():
        raise PreparationFailed("setup", f"it or an import started {started}")


def import_from(packages: Packages) -> None:
    """Have all later imports come from these packages alone.

    Call this in the fork server before it imports modules of the user. Loaded modules of the worker's own code stay
    loaded. Only packages in `packages.own` are imported anew, since the environment may have another version of them.
    """
    for name in packages.own:
        sys.modules.pop(name, None)
    sys.path[:] = packages.search
    sys.path_importer_cache.clear()
    sys.executable = packages.executable
    sys.meta_path.append(_OwnFinder(packages.own))


class _OwnFinder:
    """Finder of last resort, for packages that the worker's own code needs and the environment does not have."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = self._places.get(name)
        if place is None:
            return None
        if os.path.isdir(place):  # noqa: PTH112 - pathlib would touch, and so copy, pages of the fork server
            return spec_from_file_location(name, f"{place}/__init__.py", submodule_search_locations=[place])
        return spec_from_file_location(name, place)
