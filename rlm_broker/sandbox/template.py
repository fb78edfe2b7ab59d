"""A fork server of the user's own: it has a context, modules and variables ready for many REPLs."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlm_broker.broker.transport.connection import QueryHandler, refuse
from rlm_broker.broker.transport.listener import Listener
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.concurrency.resource import AsyncResource
from rlm_broker.concurrency.threads import in_thread
from rlm_broker.context.store import store
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import ConfigurationError, SandboxFailed
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.blocks.record import ReplRecord
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.repl_process import Inherited
from rlm_broker.sandbox.tools import Tools
from rlm_broker.sandbox.workers.fork_server import Forker
from rlm_broker.sandbox.workers.source import ColdStart, WarmPool, Workers
from rlm_broker.sandbox.workers.zygote_process import Preparation

NO_CONTEXT: Final = object()
"""Stands for a context that was not given. None is a context."""
PREPARE_TIMEOUT_S = 300.0
"""Seconds for imports, set-up code and the decoding of the context. Beyond it, opening the template raises."""


class Template(AsyncResource):
    """Makes REPLs with a context, modules and variables in place. Made by `Sandbox.template`.

    Example:
        ```python
        with Sandbox() as sandbox, sandbox.template(setup="table = {n: n * n for n in range(1000)}") as template:
            with template.repl() as repl:
                print(repl.execute("print(table[7])").stdout)  # 49
        ```

    A template has a fork server of its own. Use it as a context manager (`with` or `async with`), inside the block of
    its sandbox. When it is left, its REPLs have ended.

    Entering it raises `ConfigurationError` if an import or the set-up code fails, `ContextRefused` if the context
    cannot be read, and `SandboxFailed` if the fork server cannot start or takes longer than `timeout_s`.

    Args:
        event_loop: Loop of the template.
        sandboxes_fork_server: Starts the template's own fork server, and ends it with the sandbox at the latest.
        listener: Port for REPLs.
        limits: Limits of each REPL without its own.
        preparation: Modules and set-up code.
        context: Value of the variable `context` in each REPL; `NO_CONTEXT` lets each REPL have its own.
        warm: Number of REPLs kept ready; None as for `Sandbox`.
    """

    def __init__(
        self,
        event_loop: EventLoopRef,
        sandboxes_fork_server: Forker,
        listener: Listener,
        limits: ReplLimits,
        preparation: Preparation,
        context: object,
        warm: int | None,
    ) -> None:
        self._event_loop = event_loop
        self._sandboxes_fork_server = sandboxes_fork_server
        self._listener = listener
        self._limits = limits
        self._preparation = preparation
        self._context = context
        self._warm = warm
        self._stored: StoredContext | None = None
        self._fork_server: Forker | None = None
        self._workers: Workers | None = None

    def repl(
        self,
        answer: QueryHandler = refuse,
        *,
        context: object = NO_CONTEXT,
        tools: Sequence[str] | Mapping[str, Any] | Tools = (),
        values: Mapping[str, Any] | None = None,
        limits: ReplLimits | None = None,
        env: Mapping[str, str] | None = None,
        seed: int | None = None,
        scaffold: bool = True,
        record: ReplRecord | None = None,
    ) -> SandboxedRepl:
        """Return a new REPL. It is started when it is entered as a context manager.

        Example:
            ```python
            with sandbox.template(imports=["statistics"]) as template:
                with template.repl(context=[1, 2, 6]) as repl:
                    print(repl.execute("import statistics; print(statistics.mean(context))").stdout)  # 3
            ```

        Args:
            answer, tools, values, limits, env, seed, scaffold, record: As for `Sandbox.repl`.
            context: Context of this REPL alone, if the template has none.

        Raises:
            ConfigurationError: The template has a context already, or an argument cannot be used.
            SandboxFailed: The template is not open.
        """
        if self._workers is None:
            raise SandboxFailed("the template is not open: use it as `with sandbox.template(...) as template:`")
        if self._context is not NO_CONTEXT:
            if context is not NO_CONTEXT:
                raise ConfigurationError(
                    "the template has a context already: make another template for another context"
                )
            assert self._stored is not None  # set by `_open`
            context = Inherited(self._stored)
        given = None if context is NO_CONTEXT else context
        more: dict[str, Any] = {"values": values, "limits": limits, "env": env, "seed": seed, "scaffold": scaffold}
        more["record"] = record
        return SandboxedRepl(self.bind_loop(), self._workers, given, answer, tools=tools, **more)

    async def _open(self) -> None:
        preparation = self._preparation
        if self._context is not NO_CONTEXT:
            given = self._context
            if isinstance(given, StoredContext):  # its owner may close it while the template is open
                self._stored = given.another()
            else:
                self._stored = await in_thread(lambda _: store(given), discard=StoredContext.close)
            preparation = Preparation(preparation.imports, preparation.setup, self._stored, preparation.timeout_s)
        self._fork_server = await self._sandboxes_fork_server.prepared(preparation)
        cold_start = ColdStart(self._fork_server, self._listener)
        pool = WarmPool(cold_start, self._limits, self._warm)
        pool.fill()
        self._workers = Workers(cold_start, self._limits, (pool,))

    async def _close(self) -> None:
        if self._workers is not None:
            await self._workers.close()
        self._workers = None
        if self._fork_server is not None:
            await self._fork_server.close()
        self._fork_server = None
        if self._stored is not None:
            self._stored.close()
            self._stored = None
