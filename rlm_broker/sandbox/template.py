"""Fork servers that have something ready for their REPLs, so that none of them has to get it again."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlm_broker.concurrency.event_loop import AsyncResource, EventLoopRef
from rlm_broker.context.store import StoredContext, store
from rlm_broker.errors import ConfigurationError, SandboxFailed
from rlm_broker.limits import Limits
from rlm_broker.sandbox.repl import INHERITED, SandboxedRepl, made
from rlm_broker.sandbox.workers.fork_server import ForkServer
from rlm_broker.sandbox.workers.source import ColdStart
from rlm_broker.sandbox.workers.warm_pool import WarmPool
from rlm_broker.sandbox.workers.zygote_process import Preparation
from rlm_broker.transport.connection import QueryHandler, refuse
from rlm_broker.transport.listener import Listener

NO_CONTEXT: Final = object()
PREPARE_TIMEOUT_S = 300.0


class Template(AsyncResource):
    """Makes REPLs that find a context, modules and variables in place. Made by `Sandbox.template`.

    Use it as a context manager, within its sandbox: when it is left, its REPLs end.
    """

    def __init__(
        self,
        event_loop: EventLoopRef,
        fork_server: ForkServer,
        listener: Listener,
        limits: Limits,
        preparation: Preparation,
        context: object,
        warm: int | None,
    ) -> None:
        self._event_loop = event_loop
        self._sandboxes_fork_server = fork_server
        self._listener = listener
        self._limits = limits
        self._preparation = preparation
        self._context = context
        self._warm = warm
        self._stored: StoredContext | None = None
        self._pool: WarmPool | None = None

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
        given = None if context is NO_CONTEXT else context
        return made(self.bind_loop(), self._pool, given, handler, tools, values)

    async def _open(self) -> None:
        if self._pool is not None:
            return
        preparation = self._preparation
        if self._context is not NO_CONTEXT:
            stored = self._context
            if not isinstance(stored, StoredContext):  # else its owner closes it
                stored = self._stored = await asyncio.to_thread(store, self._context)
            preparation = Preparation(preparation.imports, preparation.setup, stored, preparation.timeout_s)
        try:
            fork_server = await self._sandboxes_fork_server.prepared(preparation)
        except BaseException:
            self._forget_context()
            raise
        self._pool = WarmPool(ColdStart(fork_server, self._listener, self._limits), self._warm)
        self._pool.fill()

    async def _close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()
            await pool.fork_server.close()
        self._forget_context()

    def _forget_context(self) -> None:
        if self._stored is not None:
            self._stored.close()
            self._stored = None
