"""The REPL as init's child: its fork, its signals and its end. A new REPL may replace one that ended."""

import contextlib
import faulthandler
import gc
import mmap
import os
import signal
import socket
import time
from collections.abc import Collection
from typing import NoReturn

from sandbox_worker.init.child import Confinement, kill_until_alone, may_have_threads
from sandbox_worker.init.families import LivingRepl
from sandbox_worker.init.hub import become_hub
from sandbox_worker.init.output_pipes import ReplOutput, WriteEnds
from sandbox_worker.init.sockets import Hands, InitSocket
from sandbox_worker.isolation.layer import LayerFailed
from sandbox_worker.loading.context import Preloaded
from sandbox_worker.repl import memory_reserve
from sandbox_worker.repl.adaptation import begin_with
from sandbox_worker.repl.channel import Channel
from sandbox_worker.repl.checkpoint import HandedDescriptors
from sandbox_worker.repl.interrupts import Interrupts
from sandbox_worker.repl.memory_reserve import Reserve
from sandbox_worker.repl.repl import Repl
from sandbox_worker.wire.control import BROKEN, Failed, Forked, InitStep, Started, pack
from sandbox_worker.wire.descriptors import BELL, CONNECTION_FD, CONTROL_FD, HANDED_FD, INTERRUPTED_AT, STACK_FD

STACK_SIGNAL = int(signal.SIGRTMAX)
"""Signal at which the REPL prints the stacks of its threads to `STACK_FD`. Programs rarely use the last real-time
signal themselves."""

ALONE_S = 2.0
"""Seconds until all processes but a checkpoint have ended. Beyond them, the checkpoint is killed, too."""
WAIT_FOR_END_S = 0.02
"""Most seconds between two looks for processes that are left."""


class ReplProcess(LivingRepl):
    """Init's handle on the REPL it forks.

    Args:
        confinement: Locks the REPL in.
        control: The socket to the orchestrator.
        output: Init's ends of the REPL's pipes.
        bell: Memory shared with the REPL.
        hands: Socket on which the REPL gets descriptors later; None if it gets none.
        preloaded: Contexts and values that the REPL begins with.
        mapping_works: Whether contexts can be mapped as Python strings here.
    """

    def __init__(
        self,
        confinement: Confinement,
        control: InitSocket,
        output: ReplOutput,
        bell: mmap.mmap,
        hands: Hands | None,
        preloaded: Preloaded,
        mapping_works: bool,
    ) -> None:
        super().__init__(control, output, bell, hands)
        self._confinement = confinement
        self._bounds = confinement.bounds.repl
        self._mapping_works = mapping_works
        self._preloaded = preloaded
        self._seed: int | None = None

    def start(self, connection_fd: int, seed: int | None) -> None:
        """Fork a REPL that uses `connection_fd`, which is closed here. No other REPL of this worker may live.

        Args:
            seed: Seed of its random numbers, if all REPLs have none.
        """
        write_ends = self.output.open()
        BELL.pack_into(self.bell, INTERRUPTED_AT, 0)  # a new REPL counts its blocks from the start
        pid = os.fork()
        if pid == 0:
            self._seed = seed
            self._become_repl(connection_fd, write_ends)
        self.pid = pid
        if not self._confinement.level.has_pid_namespace:
            self.control.say(Forked(), os.pidfd_open(pid))
        for fd in (connection_fd, *write_ends):
            os.close(fd)

    def kill_all(self, spared: Collection[int] = ()) -> set[int]:
        """Kill the REPL, the programs beside it and all their descendants, but for checkpoints of these pids. Return
        when they have ended.

        Returns:
            Pids of the checkpoints that live: none, if not all others could be killed without them.
        """
        left = self._kill_others(spared) if spared else set()
        if not left and (self.pid is not None or os.getpid() == 1):
            kill_until_alone(self._kill)
        self.pid = None
        return left

    def _kill(self) -> None:
        if os.getpid() == 1:
            os.kill(-1, signal.SIGKILL)  # all processes of the namespace but init itself
        elif self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)  # before it has a process group of its own, killpg misses it
            os.killpg(self.pid, signal.SIGKILL)

    def _kill_others(self, spared: Collection[int]) -> set[int]:
        """Kill all processes but these. Return those of them that live, once all others have ended; none if some do
        not.

        All processes are stopped at once before they are listed, so that none starts another one meanwhile.
        """
        until, proc, living = time.monotonic() + ALONE_S, self._confinement.proc, set(spared)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)
        while living and (others := [pid for pid in proc.others(with_aside=True) if pid not in living]):
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until:  # a child of the checkpoint, for example, which does not wait for it
                return set()
            signal.sigtimedwait({signal.SIGCHLD}, WAIT_FOR_END_S)
            with contextlib.suppress(ChildProcessError):
                while pid := os.waitpid(-1, os.WNOHANG)[0]:
                    living.discard(pid)
        return living & {*proc.others()}

    def resumed(self, pid: int) -> None:
        """Go on with a checkpoint as the REPL."""
        BELL.pack_into(self.bell, INTERRUPTED_AT, 0)
        self.pid = pid

    def stop_all_but_repl(self) -> None:
        """Stop the REPL's descendants, so that they do not grow while the REPL prints its stack.

        RLIMIT_DATA bounds the REPL alone. The descendants are killed later, with the REPL: if they were killed first, a
        block waiting for one would go on and report its end.
        """
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGSTOP)  # at once: a list of them would miss what they fork meanwhile
            self.signal(signal.SIGCONT)

    def _become_repl(self, connection_fd: int, write_ends: WriteEnds) -> NoReturn:
        """Lock the child in, close the control socket, and serve blocks until the end."""
        self._confinement.settle(
            [
                (write_ends.stdout, 1),
                (write_ends.stderr, 2),
                (connection_fd, CONNECTION_FD),
                (write_ends.stack, STACK_FD),
                *([] if self.hands is None else [(self.hands.taking_fd, HANDED_FD)]),
            ]
        )
        faulthandler.register(STACK_SIGNAL, file=STACK_FD)  # a handler in C: it needs no GIL
        interrupts = Interrupts()
        interrupts.install()
        try:
            layers = self._confinement.lock_down(for_program=False)
        except (LayerFailed, OSError) as error:
            fail("start", error)
        os.write(CONTROL_FD, pack(Started(layers=list(layers))))
        os.close(CONTROL_FD)  # by its number: the object would take eight copied pages
        may_have_threads()
        gc.enable()
        # Family and type are given, since `socket` would else ask for them. It needs them for addresses alone.
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, CONNECTION_FD)
        try:
            self.repl_on(connection, interrupts).serve()
        except BaseException:  # noqa: BLE001 - the control socket is closed: only the exit code can tell
            os._exit(BROKEN)

    def repl_on(self, connection: socket.socket, interrupts: Interrupts) -> Repl:
        """Make the REPL, in the process that it lives in."""
        bounds, preloaded = self._bounds, self._preloaded
        reserve = Reserve(bounds.later_context_bytes)
        channel = Channel(connection, bounds.max_frame_bytes, interrupts, reserve)
        if (seed := preloaded.seed if self._seed is None else self._seed) is not None:
            begin_with(seed)
        memory_reserve.report_memory(bounds.memory_bytes)
        rest = preloaded.variables, preloaded.undecoded, self._mapping_works, self._become_hub
        return Repl(preloaded.contexts, channel, interrupts, reserve, bounds, self.bell, *rest)

    def _become_hub(self, handed: HandedDescriptors) -> mmap.mmap | None:
        return become_hub(handed, self._confinement.landlock_abi, self._bounds.keep_checkpoints + 1)


def fail(step: InitStep, error: BaseException) -> NoReturn:
    """Report the step that failed on the control socket, and end the process."""
    layer, code = (error.layer, error.code) if isinstance(error, LayerFailed) else (None, 0)
    with contextlib.suppress(OSError):
        os.write(CONTROL_FD, pack(Failed(step=step, reason=str(error) or repr(error), layer=layer, code=code)))
    os._exit(1)
