"""A process held by its pidfd: it cannot be confused with a process that got the pid later."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from rlm_broker.errors import SandboxFailed

KILL_TIMEOUT_S = 60.0
"""Longest wait for the end of a killed process. Beyond it the worker counts as not killed, which is an error."""


async def ended(pidfd: int) -> None:
    """Wait until the process of a pidfd has ended; its exit status stays to be asked for."""
    loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, has_ended.set)
    try:
        await has_ended.wait()
    finally:
        loop.remove_reader(pidfd)


class HeldProcess:
    """A process held by its pidfd.

    Args:
        on_gone: Called when it has ended.
    """

    def __init__(self, pidfd: int, on_gone: Callable[[], None]) -> None:
        self._pidfd = pidfd
        self._gone = asyncio.Event()
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._ended)

    async def kill(self) -> None:
        """SIGKILL; return when it is gone.

        Raises:
            SandboxFailed: It is there after `KILL_TIMEOUT_S`.
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
        """SIGKILL, without waiting for the end."""
        # ProcessLookupError: it ended by itself. PermissionError: root without CAP_KILL, or AppArmor; then the end of
        # init's control socket, or of init, has to end it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def forget(self) -> None:
        """Give the descriptor back. Harmless when repeated."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._gone.set()
        self._on_gone()
