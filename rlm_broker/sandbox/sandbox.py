"""The public sandbox: REPLs for untrusted code, with or without a model behind them."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlm_broker.concurrency.event_loop import AsyncResource, EventLoopRef
from rlm_broker.errors import ConfigurationError, IsolationUnavailable, SandboxFailed, require_kind
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.arguments import require_limits
from rlm_broker.sandbox.environment import SEED_BITS as SEED_BITS
from rlm_broker.sandbox.environment import require_seed as require_seed
from rlm_broker.sandbox.levels import canary
from rlm_broker.sandbox.levels.level import candidates, warn_if_unprotected
from rlm_broker.sandbox.packages.packages import chosen_packages, venv_of
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.shared import shared
from rlm_broker.sandbox.template import NO_CONTEXT, PREPARE_TIMEOUT_S, Template
from rlm_broker.sandbox.workers import cgroups
from rlm_broker.sandbox.workers.context_cache import OF_ALL_MEMORY, ContextCache
from rlm_broker.sandbox.workers.fork_server import ForkServer
from rlm_broker.sandbox.workers.source import ColdStart, Workers
from rlm_broker.sandbox.workers.venv import Venv
from rlm_broker.sandbox.workers.warm_pool import WarmPool
from rlm_broker.sandbox.workers.zygote_process import Preparation
from rlm_broker.stats import SandboxStats
from rlm_broker.transport.connection import QueryHandler, refuse
from rlm_broker.transport.listener import Listener
from sandbox_worker.wire.level import LevelName

MOST_WARM = 10_000
"""REPLs that can be kept ready. They take 3.5 MB each."""
MAX_SETUP_BYTES = 32 << 10
"""Largest set-up code: it goes in one packet with the rest of `Configure`. Beyond it the code is refused."""


class Sandbox(AsyncResource):
    """Starts REPLs in processes of their own, isolated from the machine and from each other.

    Use it as a context manager (`with` or `async with`): the fork server is started when it is entered, and nothing
    that was started in it is left when it is left.

    Args:
        limits: Bounds of each REPL that is given none of its own; None takes the defaults. A `Limits` is one, too.
        isolation: "auto" (the stronger of the first two that there is, or an error), "strict", "standard", or
            "process", which protects nothing and is never chosen by itself.
        allow_exec: Whether code may start other programs, within the same isolation. None: wherever that is possible,
            which at "standard" it is not.
        exact_memory: Hold each REPL's memory by a control group, exactly and with the kernel's own for it. It takes up
            to 30 ms more for each REPL; without it memory is watched, every 10 ms while a block runs.
        warm: Number of REPLs that are kept ready, made ahead and each used once. A ready REPL is there in less than a
            millisecond. None: one, from the second REPL on that is asked for.
        seed: From 0 to 2**32 - 1: code draws the same numbers from `random` and numpy's global generator in each REPL,
            also after a kill, and sets of text have the same order. None: every REPL draws others.
        python: Folder of a virtual environment whose packages code has in the place of yours, read-only. It is one of
            your version of Python.
        packages: The same as a list, such as `["numpy>=2"]`: uv or pip make an environment of them, from wheels alone,
            when the sandbox is opened. It is kept, and used again for the same list.
        listener: The port that REPLs connect to; None opens one of its own on loopback.
        event_loop: Where it lives; None is decided by how it is opened.

    Raises:
        ConfigurationError: There is no such level, or it cannot allow what is wanted; or no such environment. That
            packages cannot be installed is said when it is opened.
    """

    def __init__(
        self,
        limits: ReplLimits | None = None,
        isolation: str = "auto",
        *,
        allow_exec: bool | None = None,
        exact_memory: bool = False,
        warm: int | None = None,
        seed: int | None = None,
        python: str | os.PathLike[str] | None = None,
        packages: Sequence[str] | None = None,
        listener: Listener | None = None,
        event_loop: EventLoopRef | None = None,
    ) -> None:
        require_limits(limits)
        require_kind("exact_memory", exact_memory, bool)
        self.limits = limits or ReplLimits()
        self._candidates = candidates(isolation, allow_exec)
        warn_if_unprotected(self._candidates[0])
        self._allow_exec = allow_exec is not False
        _require_warm(warm)
        require_seed(seed)
        self.seed = seed
        self._packages = chosen_packages(python, packages)
        self._exact_memory = exact_memory
        self._warm = warm
        self._listener = listener
        self._own_listener: Listener | None = None
        self._fork_server: ForkServer | None = None
        self._workers: Workers | None = None
        self._importable: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._pool: WarmPool | None = None
        self._event_loop = event_loop

    @classmethod
    def shared(
        cls,
        limits: ReplLimits | None = None,
        isolation: str = "auto",
        *,
        allow_exec: bool | None = None,
        warm: int | None = None,
        python: str | os.PathLike[str] | None = None,
        packages: Sequence[str] | None = None,
    ) -> "Sandbox":
        """Return the sandbox of this process that has these settings, open: the same for all who ask for it.

        For frameworks that make and drop objects by the thousand, from any thread. It lives on the background loop, is
        opened anew in a forked process, and is closed at exit with all below it. Leave it open: it is everybody's.

        Raises:
            ConfigurationError, IsolationUnavailable, SandboxFailed: As for a `Sandbox` and its opening.
        """
        require_limits(limits)
        candidates(isolation, allow_exec)
        _require_warm(warm)
        bounds = (limits or ReplLimits()).model_dump_json(include=set(ReplLimits.model_fields))
        key = (bounds, isolation, allow_exec, warm, chosen_packages(python, packages))
        of_its_own: dict[str, Any] = {"allow_exec": allow_exec, "warm": warm, "python": python, "packages": packages}
        return shared(key, lambda: cls(limits, isolation, **of_its_own))

    def stats(self) -> SandboxStats:
        """What lives in the sandbox now, and how much it has started."""
        if self._fork_server is None or self._pool is None:
            return SandboxStats(self.level)
        alive, started = self._fork_server.counts()
        return SandboxStats(self.level, alive, len(self._pool.ready), started)

    @property
    def level(self) -> LevelName:
        """The level that is enforced; before it is open, the strongest that it is going to try."""
        return (self._fork_server.level if self._fork_server else self._candidates[0]).name

    def repl(
        self,
        context: object = None,
        answer: QueryHandler = refuse,
        *,
        tools: Sequence[str] = (),
        values: Mapping[str, Any] | None = None,
        limits: ReplLimits | None = None,
        env: Mapping[str, str] | None = None,
        seed: int | None = None,
    ) -> SandboxedRepl:
        """Return a new REPL, to be used as a context manager.

        Args:
            context: What its variable `context` holds: text, a dict or list of plain values, or a path; see `store`.
                A `StoredContext` is shared: it stays the caller's to close.
            answer: Async function of one query, which answers `llm_query` and its like; of an `LMHandler`,
                `handler.answers(...)`. Without one they say that no model is connected.
            tools: Names of functions that code may call; `answer` is asked, by queries that want a "tool".
            values: Name → value that code finds.
            limits: Bounds of this REPL; None takes those of the sandbox. With others than those no REPL is ready: a
                worker is made.
            env: Name → text that code finds in `os.environ`, also after a kill. Up to 64 KiB together.
            seed: As that of a sandbox, and in its place, for `random` and numpy's global generator. The order of sets
                is the sandbox's: its fork server has one for all of its REPLs, which only `Sandbox(seed=)` fixes.

        Raises:
            ConfigurationError: `answer` cannot be called, a tool is no name, a value does not cross, or one of the
                others cannot be used or is larger than a message to a REPL may be.
            SandboxFailed: The sandbox is not open. (A context that cannot be read is refused when it is entered.)
        """
        if self._workers is None:
            raise SandboxFailed("the sandbox is not open: use it as `with Sandbox() as sandbox:`")
        given: dict[str, Any] = {"tools": tools, "values": values, "limits": limits, "env": env, "seed": seed}
        return SandboxedRepl(self.bind_loop(), self._workers, context, answer, **given)

    def template(
        self,
        context: object = NO_CONTEXT,
        *,
        imports: Sequence[str] = (),
        setup: str = "",
        warm: int = 0,
        timeout_s: float = PREPARE_TIMEOUT_S,
    ) -> Template:
        """Return a template, to be used as a context manager: its REPLs are forked from a process that has it all.

        Args:
            context: What the variable `context` of each holds, as for `repl`. (Texts need none: they are mapped.)
            imports: Modules that are imported already.
            setup: Code whose variables each REPL finds; `context` is there. It runs once, and is trusted like your own
                program: at "strict" it has no network and none of your files, at "standard" all that you have. It must
                leave no threads, processes, open files or shared memory.
            warm: REPLs that are kept ready, as those of the sandbox.
            timeout_s: Seconds for all of that.

        Raises:
            ConfigurationError: `setup` or a module's name is no text. Errors of the code itself are raised when the
                template is entered.
            SandboxFailed: The sandbox is not open.
        """
        if self._fork_server is None or (listener := self._listener or self._own_listener) is None:
            raise SandboxFailed("the sandbox is not open: use it as `with Sandbox() as sandbox:`")
        is_list = isinstance(imports, Sequence) and not isinstance(imports, str)
        if not isinstance(setup, str) or not is_list or not all(isinstance(name, str) for name in imports):
            raise ConfigurationError("imports is a list of modules' names, and setup is code as text")
        for code in (setup, *imports):
            if code.encode("utf-8", "replace").decode() != code:
                raise ConfigurationError("setup or the name of a module has a lone surrogate, which no source has")
        if len(setup.encode()) > MAX_SETUP_BYTES:
            raise ConfigurationError(f"setup is longer than {MAX_SETUP_BYTES:,} bytes: put it into a module")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise ConfigurationError(f"timeout_s = {timeout_s!r}: give a positive number of seconds")
        _require_warm(warm)
        preparation = Preparation(tuple(imports), setup, timeout_s=timeout_s)
        return Template(self.bind_loop(), self._fork_server, listener, self.limits, preparation, context, warm)

    def importable(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return which of these modules its code can import. They are looked for once, and none is imported.

        Raises:
            SandboxFailed: The sandbox is not open.
        """
        if self._fork_server is None:
            raise SandboxFailed("the sandbox is not open: use it as `with Sandbox() as sandbox:`")
        wanted = tuple(names)
        if wanted not in self._importable:
            self._importable[wanted] = self._fork_server.importable(wanted)
        return self._importable[wanted]

    async def _open(self) -> None:
        if self._workers is not None:
            return
        try:
            listener = self._listener
            if listener is None:
                listener = self._own_listener = Listener()
                await listener.start()
            self._fork_server = await self._strongest(listener, await venv_of(self._packages))
            cold_start = ColdStart(self._fork_server, listener)
            cache_bytes = int(cgroups.memory_bytes() * OF_ALL_MEMORY)
            cache = ContextCache(self._fork_server, listener, self.limits, cache_bytes)
            self._pool = WarmPool(cold_start, self.limits, self._warm)
            self._pool.fill()
            self._workers = Workers(cold_start, self.limits, (cache, self._pool))
        except BaseException:
            await self._close()
            raise

    async def _strongest(self, listener: Listener, venv: Venv | None) -> ForkServer:
        """Start a fork server at the strongest level for which a canary shows that it holds on this machine."""
        refusals = []
        for level in self._candidates:
            may_exec = self._allow_exec and level.may_exec
            fork_server = ForkServer(level, may_exec, self._exact_memory, seed=self.seed, venv=venv)
            try:
                await fork_server.start()
                if level.is_security_boundary:
                    await self._send_canary(fork_server, listener)
                return fork_server
            except IsolationUnavailable as error:
                await fork_server.close()
                refusals.append(error)
            except BaseException:
                await fork_server.close()
                raise
        if len(refusals) == 1:
            raise refusals[0]
        raise IsolationUnavailable(" Nor: ".join(dict.fromkeys(map(str, refusals))))

    async def _send_canary(self, fork_server: ForkServer, listener: Listener) -> None:
        """Run the canary in a REPL of its own. Raises: IsolationUnavailable."""
        workers = Workers(ColdStart(fork_server, listener), ReplLimits())
        async with SandboxedRepl(self.bind_loop(), workers) as repl:
            block = await repl.aexecute(canary.PROGRAM)
        canary.require_held(fork_server.level, canary.verdict(fork_server.level, block.final_answer))

    async def _close(self) -> None:
        workers, self._workers, self._pool = self._workers, None, None
        if workers is not None:
            await workers.close()
        fork_server, self._fork_server = self._fork_server, None
        if fork_server is not None:
            await fork_server.close()
        if self._own_listener is not None:
            await self._own_listener.stop()
            self._own_listener = None


def _require_warm(warm: object) -> None:
    if warm is not None and (isinstance(warm, bool) or not isinstance(warm, int) or not 0 <= warm <= MOST_WARM):
        raise ConfigurationError(f"warm must be a number of REPLs from 0 to {MOST_WARM:,}, or None, not {warm!r}")
