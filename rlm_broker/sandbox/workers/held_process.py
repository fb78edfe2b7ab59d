"""A process held by its pidfd, which cannot be confused with a process that got the same pid later."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from rlm_broker.concurrency.forks import left_to_parent
from rlm_broker.errors import SandboxFailed

KILL_TIMEOUT_S = 60.0
"""Seconds until a killed process counts as not killed, which is an error: a process in a system call may end late."""


async def ended(pidfd: int) -> None:
    """Wait until the process of a pidfd has ended. Its exit status can still be asked for."""
    loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, has_ended.set)
    try:
        await has_ended.wait()
    finally:
        loop.remove_reader(pidfd)


class HeldProcess:
    """A process held by its pidfd.

    Args:
        pidfd: Descriptor of the process, which this object owns.
        on_gone: Called once, when the process has ended.
    """

    def __init__(self, pidfd: int, on_gone: Callable[[], None]) -> None:
        self._pidfd = pidfd
        self._gone = asyncio.Event()
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._ended)
        left_to_parent(self, HeldProcess._leave)

    @property
    def pid(self) -> int | None:
        """Process id in this PID namespace; None after the process has ended, or if it has none here."""
        try:
            with open(f"/proc/self/fdinfo/{self._pidfd}") as file:
                found = next((int(line.split()[1]) for line in file if line.startswith("Pid:")), -1)
        except OSError:
            return None
        return found if found > 0 else None

    async def kill(self) -> None:
        """Send SIGKILL, and return when the process has ended.

        Raises:
            SandboxFailed: It has not ended after `KILL_TIMEOUT_S`.
        """
        if self._pidfd >= 0 and not self._gone.is_set():
            self.send_kill()
            try:
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    await self._gone.wait()
            except TimeoutError:
                raise SandboxFailed(f"a worker's process did not end within {KILL_TIMEOUT_S:g} s") from None
        self.forget()

    def send_kill(self) -> None:
        """Send SIGKILL, without waiting for the end."""
        # ProcessLookupError: the process ended by itself. PermissionError: root without CAP_KILL, or AppArmor. The
        # process then ends with init's control socket, or with init.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def forget(self) -> None:
        """Close the descriptor. Has no effect when repeated."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            self._leave()

    def _leave(self) -> None:
        """Close the descriptor, also in a forked process, which shares the loop's epoll with its parent."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._gone.set()
        self._on_gone()
