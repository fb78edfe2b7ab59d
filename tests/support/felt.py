"""Measures of an event loop and of the memory of this process, while a server in it is attacked.

A step of the loop is measured in the CPU time of its thread, and told in units: a piece of work of known size on the
same thread, which takes 23 ms on the machine of SECURITY.md.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from scripts.siege.orchestrator import peak_kb, restart_peak, unit_s


class Felt:
    """The longest step of a loop that runs in another thread, and the growth of the peak of memory, since `begin`.

    Args:
        loop: The loop, of asyncio's own.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._longest_s = 0.0
        timed_loop: Any = loop
        step = timed_loop._run_once

        def timed() -> None:
            started = time.thread_time()
            step()
            self._longest_s = max(self._longest_s, time.thread_time() - started)

        timed_loop._run_once = timed
        self.unit_s: float = self._call(unit_s)
        self.begin()

    def begin(self) -> None:
        """Begin to measure."""
        self._call(lambda: None)  # the last step is over
        self._longest_s = 0.0
        self._begun_kb = restart_peak()

    @property
    def units(self) -> float:
        """The longest step since `begin`."""
        self._call(lambda: None)
        return self._longest_s / self.unit_s

    def beyond(self, most_units: float, most_growth_mb: float) -> str:
        """Return measures beyond their bounds since `begin`, or an empty text."""
        units, growth_mb = self.units, (peak_kb() - self._begun_kb) / 1024
        return f"{units:.1f} units, {growth_mb:.0f} MB" if units > most_units or growth_mb > most_growth_mb else ""

    def _call(self, function: Callable[[], Any]) -> Any:
        async def called() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result()
