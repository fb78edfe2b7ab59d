"""A child of init on its way to be a REPL or a program: what it keeps, and the layers that it puts itself behind."""

import fcntl
import os
from collections.abc import Sequence

from sandbox_worker.init.procfs import Proc
from sandbox_worker.isolation import syscalls
from sandbox_worker.isolation.layer import WorkerBounds, ZygoteLayers
from sandbox_worker.isolation.worker_layers import lock_down_repl
from sandbox_worker.wire.descriptors import GROUP_FD, HANDED_FD, RULESET_FD
from sandbox_worker.wire.layers import Layer

LAST_OF_STDIO = 2


class Confinement:
    """The same for every child that runs model code or what the host runs beside it.

    Args:
        ruleset: Descriptor of the Landlock ruleset of init, or None.
        has_group: Whether `GROUP_FD` leads into a control group.
    """

    def __init__(
        self, shared: ZygoteLayers, bounds: WorkerBounds, ruleset: int | None, proc: Proc, has_group: bool
    ) -> None:
        self.level = shared.level
        self.bounds = bounds
        self.proc = proc
        self._shared = shared
        self._ruleset = ruleset
        self._has_group = has_group
        self._mapped_bytes = 0

    def settle(self, wanted: Sequence[tuple[int, int]]) -> None:
        """In the child: into the control group and a session of its own, without init's descriptors.

        Args:
            wanted: Descriptors and the numbers that they get, up to `HANDED_FD`. Those below `RULESET_FD` that are not
                named stay as they are; those above are closed.
        """
        if self._has_group:
            os.write(GROUP_FD, b"0")
        mapped_bytes, unwritten_bytes = self.proc.mapped_bytes()
        self._mapped_bytes = mapped_bytes - unwritten_bytes
        if self._ruleset is not None:
            wanted = [*wanted, (self._ruleset, RULESET_FD)]
        # First above the numbers that are to be taken, so that none is overwritten before it is its turn.
        copies = [(fcntl.fcntl(fd, fcntl.F_DUPFD, HANDED_FD + 1), number) for fd, number in wanted]
        for copy, number in copies:
            os.dup2(copy, number, inheritable=number <= LAST_OF_STDIO)
        numbers = {number for _, number in wanted}
        for number in {RULESET_FD, HANDED_FD} - numbers:
            os.closerange(number, number + 1)
        os.closerange(max(*numbers, HANDED_FD) + 1, os.sysconf("SC_OPEN_MAX"))
        syscalls.unblock_child_signals()
        syscalls.begin_session()

    def lock_down(self, *, takes_contexts: bool) -> tuple[Layer, ...]:
        """In the child that has settled: apply the layers; return their names.

        Args:
            takes_contexts: Whether it has address space for contexts that come later.

        Raises:
            LayerFailed, OSError: End the process.
        """
        ruleset, bounds = None if self._ruleset is None else RULESET_FD, self.bounds
        if not takes_contexts:
            later_bytes = bounds.repl.later_context_bytes
            bounds = bounds._replace(
                address_space_bytes=bounds.address_space_bytes - later_bytes,
                reserved_bytes=bounds.reserved_bytes - later_bytes,
            )
        return lock_down_repl(self._shared, bounds, ruleset, self._mapped_bytes)
