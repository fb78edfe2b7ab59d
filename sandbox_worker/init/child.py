"""A child of init before it becomes a REPL or a program: which descriptors it keeps, and how it locks itself in."""

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from types import FunctionType

from sandbox_worker.init.procfs import Proc
from sandbox_worker.isolation import syscalls
from sandbox_worker.isolation.layer import WorkerBounds, ZygoteLayers
from sandbox_worker.isolation.worker_layers import lock_down_repl
from sandbox_worker.wire.descriptors import GROUP_FD, HANDED_FD, RULESET_FD
from sandbox_worker.wire.level import Layer

LAST_OF_STDIO = 2
MOST_DESCRIPTORS = os.sysconf("SC_OPEN_MAX")
"""Number above all descriptors. It is asked for in the fork server: each process that asked would copy ten pages."""
_AFTER_FORK = getattr(threading, "_after_fork", None)
"""Function by which `threading` forgets, in a forked process, the threads that the fork has not copied."""
_FORGET = _AFTER_FORK.__code__ if isinstance(_AFTER_FORK, FunctionType) else None


def have_no_threads() -> None:
    """Have forks skip the search for lost threads, which would copy 50 pages. The fork server, with one thread, calls
    this for itself and for every init."""
    if isinstance(_AFTER_FORK, FunctionType):
        _AFTER_FORK.__code__ = (lambda: None).__code__


def may_have_threads() -> None:
    """Undo `have_no_threads`. Each REPL calls this: model code may fork while it has threads."""
    if isinstance(_AFTER_FORK, FunctionType) and _FORGET is not None:
        _AFTER_FORK.__code__ = _FORGET


def kill_until_alone(kill: Callable[[], object]) -> None:
    """Kill processes by `kill`, until this process has no children. Orphans among them become its children."""
    while True:
        with contextlib.suppress(ProcessLookupError):  # none is left
            kill()
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # reap all that have ended before the next kill(-1): one kill a process takes minutes
        except ChildProcessError:
            return


class Confinement:
    """The steps by which every child locks itself in, a REPL as well as a program.

    Args:
        shared: Layers that the fork server has set up for all its workers.
        bounds: Limits of this worker.
        ruleset: Descriptor of init's Landlock ruleset, or None.
        proc: The /proc of this worker.
        has_group: Whether `GROUP_FD` leads to a control group.

    Attributes:
        has_temporary: Whether the scratch folder is also at /tmp, at a level with a root of the worker's own.
        landlock_abi: Version of Landlock; 0 at a level without it.
        ruleset: Descriptor of init's Landlock ruleset, or None.
    """

    def __init__(
        self, shared: ZygoteLayers, bounds: WorkerBounds, ruleset: int | None, proc: Proc, has_group: bool
    ) -> None:
        self.level = shared.level
        self.bounds = bounds
        self.proc = proc
        self.has_temporary = shared.temporary_is_free
        self.landlock_abi = shared.landlock_abi
        self.ruleset = ruleset
        self._shared = shared
        self._has_group = has_group
        self._mapped_bytes = self._data_bytes = 0

    def settle(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Enter the control group and a new session, and close init's descriptors. Called in the child.

        Args:
            wanted: Descriptors and the numbers they get, up to `HANDED_FD`. Numbers below `RULESET_FD` that are
                not named stay as they are; numbers above are closed.
        """
        if self._has_group:
            os.write(GROUP_FD, b"0")
        mapped_bytes, data_bytes, unwritten_bytes = self.proc.mapped_bytes()
        self._mapped_bytes, self._data_bytes = mapped_bytes - unwritten_bytes, data_bytes - unwritten_bytes
        if self.ruleset is not None:
            wanted = [*wanted, (self.ruleset, RULESET_FD)]
        # Copy all above the target numbers first, so that no descriptor is overwritten before it is moved.
        copies = [(fcntl.fcntl(fd, fcntl.F_DUPFD, HANDED_FD + 1), number) for fd, number in wanted]
        for copy, number in copies:
            os.dup2(copy, number, inheritable=number <= LAST_OF_STDIO)
        numbers = {number for _, number in wanted}
        for number in {RULESET_FD, HANDED_FD} - numbers:
            os.closerange(number, number + 1)
        os.closerange(max(*numbers, HANDED_FD) + 1, MOST_DESCRIPTORS)
        syscalls.unblock_child_signals()
        syscalls.begin_session()

    def lock_down(self, *, for_program: bool) -> tuple[Layer, ...]:
        """Apply the layers and return their names. Called in the child, after `settle`.

        Args:
            for_program: Whether the child becomes a program. Only a REPL gets memory for contexts that are added later.

        Raises:
            LayerFailed, OSError: A layer could not be applied. The caller ends the process.
        """
        ruleset, bounds = None if self.ruleset is None else RULESET_FD, self.bounds
        if for_program:
            later_bytes = bounds.repl.later_context_bytes
            bounds = bounds._replace(
                data_bytes=bounds.data_bytes - later_bytes,
                reserved_bytes=bounds.reserved_bytes - later_bytes,
            )
        mapped = self._mapped_bytes, self._data_bytes
        return lock_down_repl(self._shared, bounds, ruleset, *mapped, for_program=for_program)
