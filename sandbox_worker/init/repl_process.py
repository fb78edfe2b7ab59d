"""The REPL as init's child, one after the other: its fork, its signals, its end."""

import contextlib
import faulthandler
import gc
import mmap
import os
import signal
import socket
from typing import NoReturn

from sandbox_worker.init.child import Confinement
from sandbox_worker.init.control_socket import ControlSocket
from sandbox_worker.init.failing import fail
from sandbox_worker.init.hands import Hands
from sandbox_worker.init.output_pipes import ReplOutput, WriteEnds
from sandbox_worker.isolation.layer import LayerFailed
from sandbox_worker.loading.preloaded import Preloaded
from sandbox_worker.repl import own_memory
from sandbox_worker.repl.adapted import draw_apart
from sandbox_worker.repl.channel import Channel
from sandbox_worker.repl.handed import HandedContexts
from sandbox_worker.repl.interrupts import Interrupts
from sandbox_worker.repl.memory_reserve import Reserve
from sandbox_worker.repl.repl import Repl
from sandbox_worker.wire.bell import BELL, INTERRUPTED_AT
from sandbox_worker.wire.bounds import ReplBounds
from sandbox_worker.wire.control import BROKEN, Forked, Started, pack
from sandbox_worker.wire.descriptors import CONNECTION_FD, CONTROL_FD, HANDED_FD, STACK_FD

STACK_SIGNAL = int(signal.SIGRTMAX)
"""Has the REPL print the stack of its threads to `STACK_FD`: one that model code hardly takes for itself."""


class ReplProcess:
    """Init's handle on the REPL that it has forked.

    Args:
        bell: Shared with the REPL.
        preloaded: What the REPL finds.
        mapping_works: Whether texts of contexts can be mapped.
        hands: On which the REPL is given contexts later, if it may be given any.

    Attributes:
        pid: Of the REPL that lives, or None.
    """

    def __init__(
        self,
        confinement: Confinement,
        control: ControlSocket,
        output: ReplOutput,
        bell: mmap.mmap,
        bounds: ReplBounds,
        preloaded: Preloaded,
        mapping_works: bool,
        hands: Hands | None,
    ) -> None:
        self.pid: int | None = None
        self._confinement = confinement
        self._control = control
        self._output = output
        self._bell = bell
        self._bounds = bounds
        self._mapping_works = mapping_works
        self._preloaded = preloaded
        self._hands = hands

    def start(self, connection_fd: int) -> None:
        """Fork a REPL, which speaks on the connection. It is closed here. No other REPL may be there."""
        write_ends = self._output.open()
        if self._hands is not None:
            self._hands.empty()
        BELL.pack_into(self._bell, INTERRUPTED_AT, 0)  # a fresh REPL counts its blocks anew
        pid = os.fork()
        if pid == 0:
            self._become_repl(connection_fd, write_ends)
        self.pid = pid
        if not self._confinement.level.has_pid_namespace:
            self._control.say(Forked(), os.pidfd_open(pid))
        for fd in (connection_fd, *write_ends):
            os.close(fd)

    def interrupt(self, block: int) -> None:
        """SIGINT, for the block of that number."""
        BELL.pack_into(self._bell, INTERRUPTED_AT, block)
        self.signal(signal.SIGINT)

    def signal(self, number: int) -> None:
        """Send a signal, if there is a REPL."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_all(self) -> None:
        """SIGKILL to the REPL, to programs beside it, and to all that they started; return when they are gone."""
        if self.pid is not None or os.getpid() == 1:
            while True:
                with contextlib.suppress(ProcessLookupError):
                    if os.getpid() == 1:
                        os.kill(-1, signal.SIGKILL)  # everything in the namespace but ourselves
                    elif self.pid is not None:
                        os.kill(self.pid, signal.SIGKILL)  # which may not have a process group of its own yet
                        os.killpg(self.pid, signal.SIGKILL)
                try:
                    os.waitpid(-1, 0)
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass  # all that have ended: a signal to all for each of thousands would take minutes
                except ChildProcessError:
                    break
        self.pid = None

    def stop_all_but_repl(self) -> None:
        """SIGSTOP to what the REPL started, which could go on growing while we listen to it: alone it is bounded.

        They are killed with the REPL. Killed before it, they would be taken for ended by a block that waits for them.
        """
        if self._confinement.level.has_pid_namespace and self._confinement.proc.is_own:
            for pid in self._confinement.proc.others():
                if pid != self.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)

    def _become_repl(self, connection_fd: int, write_ends: WriteEnds) -> NoReturn:
        """In the child: behind the REPL's layers, without the control socket, into the loop."""
        self._confinement.settle(
            [
                (write_ends.stdout, 1),
                (write_ends.stderr, 2),
                (connection_fd, CONNECTION_FD),
                (write_ends.stack, STACK_FD),
                *([] if self._hands is None else [(self._hands.taking_fd, HANDED_FD)]),
            ]
        )
        faulthandler.register(STACK_SIGNAL, file=STACK_FD)  # in C: it also works for code that holds the GIL
        interrupts = Interrupts()
        interrupts.install()
        try:
            layers = self._confinement.lock_down(takes_contexts=True)
        except (LayerFailed, OSError) as error:
            fail("start", error)
        os.write(CONTROL_FD, pack(Started(layers=list(layers))))
        self._control.close()
        reserve = Reserve(self._bounds.later_context_bytes)
        channel = Channel(socket.socket(fileno=CONNECTION_FD), self._bounds.max_frame_bytes, interrupts, reserve)
        gc.enable()
        draw_apart(self._preloaded.seed)
        own_memory.be(self._bounds.memory_bytes)
        preloaded, bounds = self._preloaded, self._bounds
        handed = None if self._hands is None else HandedContexts(reserve, self._mapping_works)
        rest = preloaded.variables, handed, preloaded.undecoded
        try:
            Repl(preloaded.contexts, channel, interrupts, reserve, bounds, self._bell, *rest).serve()
        except BaseException:  # noqa: BLE001 - nothing is left that could tell more than an exit code
            os._exit(BROKEN)
