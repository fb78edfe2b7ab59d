"""The sandboxes of a node: one for all runs with the same settings, open from the first of them on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from rlm_broker.cluster.messages import EngineSpec
from rlm_broker.limits import Limits
from rlm_broker.sandbox.sandbox import Sandbox

MOST_IDLE = 4
"""Sandboxes that stay open without a run. Each has a fork server of some 20 MB, and one REPL that is ready."""


@dataclass(eq=False, slots=True)
class _Kept:
    """One sandbox.

    Attributes:
        opening: Opens it.
        users: Runs that have it or wait for it.
    """

    sandbox: Sandbox
    opening: asyncio.Task[None]
    users: int = 0


class Sandboxes:
    """Sandboxes by their settings. Lives on one event loop."""

    def __init__(self) -> None:
        self._kept: dict[bytes, _Kept] = {}
        """Settings → sandbox, the least recently used first."""
        self._closing: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def held(self, engine: EngineSpec) -> AsyncIterator[Sandbox]:
        """Have an open sandbox until the block ends.

        Raises:
            ConfigurationError, IsolationUnavailable, SandboxFailed: The node cannot have it.
        """
        key = msgspec.json.encode(engine)
        kept = self._kept.pop(key, None) or _made(engine)
        self._kept[key] = kept  # moved to the end, since it was used last
        kept.users += 1
        try:
            try:
                await asyncio.shield(kept.opening)
            except BaseException:
                if kept.opening.done() and self._kept.get(key) is kept:  # it failed: a further run tries again
                    del self._kept[key]
                raise
            yield kept.sandbox
        finally:
            kept.users -= 1
            self._close_idle(MOST_IDLE)

    async def aclose(self) -> None:
        """Close all sandboxes, which ends all of their REPLs."""
        for kept in self._kept.values():
            kept.users = 0
            kept.opening.cancel()
        self._close_idle(0)
        if self._closing:
            await asyncio.wait(self._closing)

    def _close_idle(self, most: int) -> None:
        """Close sandboxes without a run, the least recently used first, until only that many of them are left."""
        idle = [key for key, kept in self._kept.items() if not kept.users]
        for key in idle[: max(0, len(idle) - most)]:
            closing = asyncio.get_running_loop().create_task(_closed(self._kept.pop(key)))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


def _made(engine: EngineSpec) -> _Kept:
    """Begin to open a sandbox."""
    sandbox = Sandbox(
        Limits(**engine.limits),
        engine.isolation,
        allow_exec=engine.allow_exec,
        seed=engine.seed,
        python=engine.python,
        packages=engine.packages,
    )
    return _Kept(sandbox, asyncio.get_running_loop().create_task(_opened(sandbox)))


async def _opened(sandbox: Sandbox) -> None:
    await sandbox.__aenter__()


async def _closed(kept: _Kept) -> None:
    await asyncio.wait({kept.opening})
    if not kept.opening.cancelled():
        kept.opening.exception()  # read, so that asyncio does not report it as never retrieved
    await kept.sandbox.aclose()
