"""Fork servers that have something ready for their REPLs, so that none of them has to get it again."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psutil

from rlm_broker.context import StoredContext, store
from rlm_broker.errors import ConfigurationError, SandboxFailed
from rlm_broker.home import Home, Resident
from rlm_broker.limits import Limits
from rlm_broker.sandbox.host import Host, Preparation
from rlm_broker.sandbox.pool import Pool
from rlm_broker.sandbox.repl import INHERITED, SandboxedRepl
from rlm_broker.sandbox.starting import Starter, Starts
from rlm_broker.transport.connection import QueryHandler, refuse
from rlm_broker.transport.listener import Listener
from rlm_broker.transport.session import frames_of

NO_CONTEXT: Final = object()
PREPARE_TIMEOUT_S = 300.0
WORTH_BYTES = 1 << 20
"""Of a context as JSON: loading less takes no longer than asking whether somebody has."""
EACH_BYTE = 5
"""Memory that a byte of JSON takes as Python objects, about: a guess before it is loaded."""
SHARE_OF_MEMORY = 4
"""All contexts that are kept loaded by themselves take a fourth of the machine's memory at most."""


class Template(Resident):
    """Makes REPLs that find a context, modules and variables in place. Made by `Sandbox.template`.

    Use it as a context manager, within its sandbox: when it is left, its REPLs end.
    """

    def __init__(
        self,
        home: Home,
        host: Host,
        listener: Listener,
        limits: Limits,
        preparation: Preparation,
        context: object,
        warm: int | None,
    ) -> None:
        self._home = home
        self._level_host = host
        self._listener = listener
        self._limits = limits
        self._preparation = preparation
        self._context = context
        self._warm = warm
        self._stored: StoredContext | None = None
        self._pool: Pool | None = None

    def repl(
        self,
        handler: QueryHandler = refuse,
        *,
        context: object = NO_CONTEXT,
        tools: Sequence[str] = (),
        values: Mapping[str, Any] | None = None,
    ) -> SandboxedRepl:
        """A new REPL, see `Sandbox.repl`.

        Args:
            context: Of this REPL alone; only where the template has none.

        Raises:
            ConfigurationError: The template has a context.
            SandboxFailed: The template is not open.
        """
        if self._pool is None:
            raise SandboxFailed("the template is not open: use it as `with sandbox.template(...) as template:`")
        if self._context is not NO_CONTEXT:
            if context is not NO_CONTEXT:
                raise ConfigurationError("the template has a context already: make another for another one")
            context = INHERITED
        frames = frames_of(values or {}, self._limits.max_frame_bytes)
        given = None if context is NO_CONTEXT else context
        return SandboxedRepl(self.home, self._pool, given, handler, (list(tools), frames))

    async def _open(self) -> None:
        if self._pool is not None:
            return
        preparation = self._preparation
        if self._context is not NO_CONTEXT:
            self._stored = await asyncio.to_thread(store, self._context)
            preparation = Preparation(preparation.imports, preparation.setup, self._stored, preparation.timeout_s)
        host = self._level_host.like(preparation)
        try:
            await host.start()
        except BaseException:
            await host.close()
            self._forget_context()
            raise
        self._pool = Pool(Starter(host, self._listener, self._limits), self._warm)
        self._pool.fill()

    async def _close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()
            await pool.host.close()
        self._forget_context()

    def _forget_context(self) -> None:
        if self._stored is not None:
            self._stored.close()
            self._stored = None


class LoadedContexts:
    """Keeps large contexts of objects loaded that are used again: from the second REPL on they are only forked.

    Texts are mapped by every worker at no cost, and need none of it. What was used longest ago goes first, once no
    REPL of it is left.
    """

    def __init__(self, starter: Starter, listener: Listener) -> None:
        self._starter = starter
        self._listener = listener
        self._max_bytes = psutil.virtual_memory().total // SHARE_OF_MEMORY
        self._seen: set[int] = set()
        self._loaded: dict[int, _Loaded] = {}
        """By inode of the memfd, which tells one context from another; in the order of their last use."""

    async def starter(self, context: StoredContext) -> Starts | None:
        """Who has it loaded; None if nobody has, and who asks is to load it for himself."""
        size_bytes = context.info.form.size_bytes
        if context.info.form.kind != "json" or size_bytes < WORTH_BYTES:
            return None
        key = os.fstat(context.fd).st_ino
        loaded = self._loaded.pop(key, None)
        if loaded is None:
            if key not in self._seen:
                self._seen.add(key)
                return None
            if not await self._has_room(size_bytes * EACH_BYTE):
                return None
            loaded = self._loaded.get(key) or _Loaded(self._starter, self._listener, context)
        self._loaded[key] = loaded
        try:
            return await asyncio.shield(loaded.starting)
        except SandboxFailed:
            self._loaded.pop(key, None)
            return None

    async def close(self) -> None:
        """End them all. Harmless when repeated."""
        loaded, self._loaded = list(self._loaded.values()), {}
        for each in loaded:
            await each.close()

    async def _has_room(self, wanted_bytes: int) -> bool:
        """Make room."""
        while (taken := sum(each.size_bytes for each in self._loaded.values())) + wanted_bytes > self._max_bytes:
            idle = next((key for key, each in self._loaded.items() if each.is_idle), None)
            if taken == 0 or idle is None:
                return False
            await self._loaded.pop(idle).close()
        return True


class _Loaded:
    """One of them."""

    def __init__(self, starter: Starter, listener: Listener, context: StoredContext) -> None:
        self.size_bytes = context.info.form.size_bytes * EACH_BYTE
        self._context = StoredContext(os.dup(context.fd), context.info)  # its maker may close it
        self._host = starter.host.like(Preparation(context=self._context, timeout_s=PREPARE_TIMEOUT_S))
        self._starter = Starter(self._host, listener, starter.limits)
        self.starting = asyncio.get_running_loop().create_task(self._start())

    @property
    def is_idle(self) -> bool:
        return self.starting.done() and self._host.is_idle

    async def close(self) -> None:
        self.starting.cancel()
        await asyncio.wait({self.starting})
        await self._host.close()
        self._context.close()

    async def _start(self) -> Starts:
        await self._host.start()
        return self._starter
