"""The public sandbox: REPLs for untrusted code, with or without a model behind them."""

import atexit
import contextlib
import inspect
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Never

from rlm_broker.broker.transport.connection import QueryHandler, refuse
from rlm_broker.broker.transport.listener import Listener
from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.concurrency.resource import AsyncResource
from rlm_broker.errors import ConfigurationError, IsolationUnavailable, SandboxFailed, require_kind, shortage_told
from rlm_broker.events.observers import OBSERVERS
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.arguments import SEED_BITS as SEED_BITS
from rlm_broker.sandbox.arguments import chosen_environment, require_limits
from rlm_broker.sandbox.arguments import require_seed as require_seed
from rlm_broker.sandbox.blocks.record import ReplRecord
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.template import NO_CONTEXT, PREPARE_TIMEOUT_S, Template
from rlm_broker.sandbox.tools import Tools
from rlm_broker.sandbox.workers import canary, cgroups
from rlm_broker.sandbox.workers.context_cache import OF_ALL_MEMORY, ContextCache
from rlm_broker.sandbox.workers.fork_server import Forker, ForkServer
from rlm_broker.sandbox.workers.levels import IsolationName, candidates, warn_if_unprotected
from rlm_broker.sandbox.workers.python_paths import Venv
from rlm_broker.sandbox.workers.source import ColdStart, WarmPool, Workers
from rlm_broker.sandbox.workers.zygote_process import Preparation
from rlm_broker.values.stats import SandboxStats
from sandbox_worker.wire.level import LevelName

MOST_WARM = 10_000
"""Largest `warm`; more is refused. Each ready REPL takes 3.5 MB."""
MAX_SETUP_BYTES = 32 << 10
"""Bytes of set-up code, in one packet with the rest of `Configure`. Longer code is refused."""


class Sandbox(AsyncResource):
    """Starts REPLs in processes of their own, isolated from the machine and from each other.

    Use it as a context manager (`with` or `async with`). Entering it starts a fork server. When it is left, all
    processes started in it have ended.

    Example:
        ```python
        with Sandbox() as sandbox, sandbox.repl({"a": 1}) as repl:
            print(repl.execute("print(context)").stdout)  # {'a': 1}
        ```

    Args:
        limits: Limits of each REPL without its own; None takes the defaults. A `Limits` will do.
        isolation: "auto", "strict", "standard" or "process". "auto" takes "strict" where this machine can give it, else
            "standard", or raises. "process" gives no protection, and is never chosen by "auto".
        allow_exec: Whether code may start programs, with the same isolation. None allows it at every level but
            "standard", where it is impossible.
        exact_memory: Whether a control group limits each REPL's memory exactly, the kernel's memory for it included.
            It takes up to 30 ms more for each REPL. Without it, memory is sampled every 10 ms while a block runs.
        warm: Number of REPLs started ahead and kept ready, each for one use. A ready REPL is opened in less
            than 1 ms. None keeps one ready, from the second REPL on.
        seed: Seed from 0 to 2**32 - 1. Each REPL then draws the same numbers from `random` and numpy's global
            generator, also after a kill, and orders sets of text alike. None lets every REPL draw others.
        python: Folder of a virtual environment for your version of Python. Code has its packages, read-only, in place
            of yours.
        packages: List of packages, such as `["numpy>=2"]`, in place of a folder. When the sandbox is opened, uv or pip
            make an environment of them, from wheels alone. It is kept, and used again for the same list.

    Attributes:
        limits: Limits of each REPL without its own.
        seed: The given seed, or None.

    Raises:
        ConfigurationError: An argument cannot be used, or the level cannot allow programs. Raised when the sandbox is
            opened if its packages cannot be installed.
        IsolationUnavailable: This machine cannot give the level. Raised when the sandbox is opened.
        SandboxFailed: No process can be started. Raised when the sandbox is opened.
    """

    def __init__(
        self,
        limits: ReplLimits | None = None,
        isolation: IsolationName = "auto",
        *,
        allow_exec: bool | None = None,
        exact_memory: bool = False,
        warm: int | None = None,
        seed: int | None = None,
        python: str | os.PathLike[str] | None = None,
        packages: Sequence[str] | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            from rlm_broker.values.first_guesses import refuse

            refuse("Sandbox", unknown, [name for name in inspect.signature(Sandbox).parameters if name != "unknown"])
        require_limits(limits)
        require_kind("exact_memory", exact_memory, bool)
        self.limits = limits or ReplLimits()
        self._candidates = candidates(isolation, allow_exec)
        warn_if_unprotected(self._candidates[0])
        self._allow_exec = allow_exec is not False
        _require_warm(warm)
        require_seed(seed)
        self.seed = seed
        self._packages = chosen_environment(python, packages)
        self._exact_memory = exact_memory
        self._warm = warm
        self._listener: Listener | None = None
        self._own_listener: Listener | None = None
        self._fork_server: Forker | None = None
        self._workers: Workers | None = None
        self._importable: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._pool: WarmPool | None = None

    @classmethod
    def create(cls, *_given: object, **_named: object) -> Never:
        """Refuse a call that other libraries have, with the sentence that says how a sandbox is opened here.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError("there is no Sandbox.create: write `with Sandbox() as sandbox:`, or Sandbox.shared()")

    @classmethod
    def shared(
        cls,
        limits: ReplLimits | None = None,
        isolation: IsolationName = "auto",
        *,
        allow_exec: bool | None = None,
        warm: int | None = None,
        python: str | os.PathLike[str] | None = None,
        packages: Sequence[str] | None = None,
    ) -> "Sandbox":
        """Return the open sandbox of this process with these settings: each call with the same ones returns the same.

        For objects made and dropped by the thousand, from any thread. The sandbox lives on the background loop. A
        forked process opens one of its own. It is closed at exit with all below it. Do not close it, since other
        callers use it.

        Example:
            ```python
            with Sandbox.shared().repl("some text") as repl:
                print(repl.execute("print(len(context))").stdout)  # 9
            ```

        Args:
            limits, isolation, allow_exec, warm, python, packages: As for `Sandbox`.

        Raises:
            ConfigurationError, IsolationUnavailable, SandboxFailed: As for `Sandbox` and its opening.
        """
        sandbox = cls._shared(limits, isolation, allow_exec, warm, python, packages)
        if not sandbox.is_open:  # not by `__enter__`: an interrupted caller must not close what others use
            sandbox.bind_loop().run(sandbox.__aenter__(sandbox))
        return sandbox

    @classmethod
    async def ashared(
        cls,
        limits: ReplLimits | None = None,
        isolation: IsolationName = "auto",
        *,
        allow_exec: bool | None = None,
        warm: int | None = None,
        python: str | os.PathLike[str] | None = None,
        packages: Sequence[str] | None = None,
    ) -> "Sandbox":
        """Return the same sandbox as `shared` does, awaited: other tasks go on while it opens."""
        sandbox = cls._shared(limits, isolation, allow_exec, warm, python, packages)
        if not sandbox.is_open:
            await sandbox.bind_loop().arun(sandbox.__aenter__(sandbox))
        return sandbox

    @classmethod
    def _shared(
        cls,
        limits: ReplLimits | None,
        isolation: IsolationName,
        allow_exec: bool | None,
        warm: int | None,
        python: str | os.PathLike[str] | None,
        packages: Sequence[str] | None,
    ) -> "Sandbox":
        """Return the shared sandbox with these settings, on the background loop. It may not be open yet.

        Several callers may open it at the same time: one does, and the others wait.
        """
        require_limits(limits)
        candidates(isolation, allow_exec)
        _require_warm(warm)
        wanted = limits or ReplLimits()
        bounds = tuple(getattr(wanted, name) for name in ReplLimits.fields)
        key = (os.getpid(), bounds, isolation, allow_exec, warm, chosen_environment(python, packages))
        with _shared_lock:
            sandbox = _shared_sandboxes.get(key)
            if sandbox is None:
                sandbox = Sandbox(limits, isolation, allow_exec=allow_exec, warm=warm, python=python, packages=packages)
                _shared_sandboxes[key] = sandbox
        sandbox.bind_loop()
        return sandbox

    def stats(self) -> SandboxStats:
        """Return the number of live REPLs in the sandbox, of ready ones, and of all that it has started.

        Example:
            ```python
            with sandbox.repl():
                print(sandbox.stats().workers)
            ```
        """
        if self._fork_server is None or self._pool is None:
            return SandboxStats(self.level)
        alive, started = self._fork_server.counts()
        return SandboxStats(self.level, alive, len(self._pool.ready), started)

    @property
    def level(self) -> LevelName:
        """Name of the enforced level; before the sandbox is open, of the strongest level it will try."""
        return (self._fork_server.level if self._fork_server else self._candidates[0]).name

    def repl(
        self,
        context: object = None,
        answer: QueryHandler = refuse,
        *,
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
            with sandbox.repl({"a": 1}, values={"n": 2}, limits=ReplLimits(block_timeout_s=5)) as repl:
                print(repl.execute("print(context['a'] + n)").stdout)  # 3
            ```

        Args:
            context: Value of its variable `context`: text, a dict or list of plain values, or a path, see `store`.
                A `StoredContext` is shared, and stays the caller's to close.
            answer: Async function that answers a query of code, for example `llm_query`. For an `LMHandler`, give
                `handler.answers(...)`. Without one, code gets the error that no model is connected.
            tools: Functions for code, by name, as for `Tools`. They are called in this process, with the context
                variables of `execute`'s caller: an async function on the REPL's loop, any other in a thread that is
                not waited for when its block ends. With names alone, each call is a query that wants a "tool".
            values: Name → value for code.
            limits: Limits of this REPL; None takes the sandbox's. With other limits no REPL is ready, and a
                worker is started.
            env: Name → text in `os.environ` of code, also after a kill. Up to 64 KiB together.
            seed: Seed of `random` and numpy's global generator in this REPL, in place of the sandbox's. The order of
                sets is fixed by `Sandbox(seed=)` alone: all REPLs are forked from one process.
            scaffold: Whether code finds names of our own, such as `llm_query`, `answer` and `search`. If not, then no
                name is there or restored but what you give, so values and tools may have any name. `SUBMIT` is there
                in blocks with `submit=`.
            record: Record of another REPL, whose blocks the new one runs again when it is opened: see
                `SandboxedRepl.record` and `replayed`. Give it the same context, tools and values.

        Returns:
            A REPL, not open yet. Entering it raises `ContextRefused` if the context cannot be read.

        Raises:
            ConfigurationError: `answer` cannot be called, the name of a tool or value is not an identifier, a value
                cannot be sent as it is, or another argument cannot be used or is too large.
            SandboxFailed: The sandbox is not open.
        """
        if self._workers is None:
            raise SandboxFailed("the sandbox is not open: use it as `with Sandbox() as sandbox:`")
        more: dict[str, Any] = {"values": values, "limits": limits, "env": env, "seed": seed, "scaffold": scaffold}
        more["record"] = record
        return SandboxedRepl(self.bind_loop(), self._workers, context, answer, tools=tools, **more)

    def template(
        self,
        context: object = NO_CONTEXT,
        *,
        imports: Sequence[str] = (),
        setup: str = "",
        warm: int = 0,
        timeout_s: float = PREPARE_TIMEOUT_S,
    ) -> Template:
        """Return a template. Its REPLs are forked from a process with the context, modules and variables ready.

        Example:
            ```python
            with sandbox.template([1, 2, 3], setup="total = sum(context)") as template, template.repl() as repl:
                print(repl.get("total"))  # 6
            ```

        Args:
            context: Value of the variable `context` in each REPL, as for `repl`. Useful for objects: texts are mapped,
                and need no template.
            imports: Modules imported ahead.
            setup: Code that runs once, with `context`; each REPL finds its variables. It is trusted like your own
                program: at "strict" it has no network and none of your files, at "standard" it has all that you have.
                It must leave no threads, processes, open files or shared memory.
            warm: Number of REPLs kept ready, as for `Sandbox`.
            timeout_s: Seconds for the preparation as a whole.

        Returns:
            A template, not open yet. `Template` lists the errors of entering it.

        Raises:
            ConfigurationError: `setup` or a module's name is not text, or another argument cannot be used.
            SandboxFailed: The sandbox is not open.
        """
        if self._fork_server is None or (listener := self._listener or self._own_listener) is None:
            raise SandboxFailed("the sandbox is not open: use it as `with Sandbox() as sandbox:`")
        is_list = isinstance(imports, Sequence) and not isinstance(imports, str)
        if not isinstance(setup, str) or not is_list or not all(isinstance(name, str) for name in imports):
            raise ConfigurationError("imports must be a list of module names, and setup must be code as text")
        for code in (setup, *imports):
            if code.encode("utf-8", "replace").decode() != code:
                raise ConfigurationError("setup or a module name has a lone surrogate, which Python source cannot have")
        if len(setup.encode()) > MAX_SETUP_BYTES:
            raise ConfigurationError(f"setup is longer than {MAX_SETUP_BYTES:,} bytes: put it into a module")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise ConfigurationError(f"timeout_s = {timeout_s!r}: give a positive number of seconds")
        _require_warm(warm)
        preparation = Preparation(tuple(imports), setup, timeout_s=timeout_s)
        return Template(self.bind_loop(), self._fork_server, listener, self.limits, preparation, context, warm)

    def importable(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return which of these modules code can import. They are looked for once, and none is imported.

        Example:
            ```python
            sandbox.importable(["json", "no_such_module"])  # ('json',)
            ```

        Args:
            names: Names of modules.

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
        for observer in OBSERVERS:
            observer.sandbox_opens()
        with shortage_told("the sandbox cannot be opened"):
            listener = self._listener
            if listener is None:
                listener = self._own_listener = Listener()
                await listener.start()
            self._fork_server = await self._forker(listener)
        cold_start = ColdStart(self._fork_server, listener)
        cache_bytes = int(cgroups.memory_bytes() * OF_ALL_MEMORY)
        cache = ContextCache(self._fork_server, listener, self.limits, cache_bytes)
        self._pool = WarmPool(cold_start, self.limits, self._warm)
        self._pool.fill()
        self._workers = Workers(cold_start, self.limits, (cache, self._pool))

    async def _forker(self, listener: Listener) -> Forker:
        """Return the fork server of the REPLs. It is closed with the sandbox."""
        venv = None
        if self._packages is not None:
            from rlm_broker.sandbox.packages import venv_of

            venv = await venv_of(self._packages)
        return await self._strongest(listener, venv)

    async def _strongest(self, listener: Listener, venv: Venv | None) -> ForkServer:
        """Start a fork server at the strongest level that holds on this machine, as a canary shows.

        Raises:
            IsolationUnavailable: No level holds. The message has the reason for each.
        """
        refusals = []
        for level in self._candidates:
            may_exec = self._allow_exec and level.may_exec
            fork_server = ForkServer(level, may_exec, self._exact_memory, seed=self.seed, venv=venv)
            try:
                await fork_server.start()
                if level.is_security_boundary:
                    await self._send_canary(fork_server, listener)
                return fork_server
            except BaseException as error:
                await to_its_end(fork_server.close)
                if not isinstance(error, IsolationUnavailable):
                    raise
                refusals.append(error)
        if len(refusals) == 1:
            raise refusals[0]
        raise IsolationUnavailable(" Also: ".join(dict.fromkeys(map(str, refusals))))

    async def _send_canary(self, fork_server: ForkServer, listener: Listener) -> None:
        """Run the canary in a REPL of its own.

        Raises:
            IsolationUnavailable: An attempt of the canary succeeded, or it did not report.
        """
        workers = Workers(ColdStart(fork_server, listener), ReplLimits())
        repl = SandboxedRepl(self.bind_loop(), workers)
        repl.is_listed = False  # if the user stopped it, the level would be refused
        async with repl:
            block = await repl.aexecute(canary.PROGRAM)
        canary.require_held(fork_server.level, canary.verdict(fork_server.level, block.final_answer))

    async def _close(self) -> None:
        if self._workers is not None:
            await self._workers.close()
        self._workers = self._pool = None
        if self._fork_server is not None:
            await self._fork_server.close()
        self._fork_server = None
        if self._own_listener is not None:
            await self._own_listener.stop()
            self._own_listener = None


def place(sandbox: Sandbox, event_loop: EventLoopRef | None = None, listener: Listener | None = None) -> Sandbox:
    """Have a closed sandbox live on this event loop, and its REPLs connect to this port. Returns the sandbox."""
    sandbox._event_loop, sandbox._listener = event_loop, listener
    return sandbox


def forker_of(sandbox: Sandbox) -> Forker:
    """Return the fork server of an open sandbox."""
    assert sandbox._fork_server is not None
    return sandbox._fork_server


@contextlib.contextmanager
def seeded(sandbox: Sandbox, seed: int | None) -> Iterator[None]:
    """Give a closed sandbox without a seed this one, if it is opened within the block."""
    own = sandbox.seed
    sandbox.seed = seed if own is None and not sandbox.is_open else own
    try:
        yield
    finally:
        sandbox.seed = own


def _require_warm(warm: object) -> None:
    if warm is not None and (isinstance(warm, bool) or not isinstance(warm, int) or not 0 <= warm <= MOST_WARM):
        raise ConfigurationError(f"warm must be a number of REPLs from 0 to {MOST_WARM:,}, or None, not {warm!r}")


_shared_lock = threading.Lock()
"""Held while the table is looked at, and never while a sandbox opens."""
_shared_sandboxes: "dict[tuple[Any, ...], Sandbox]" = {}
"""Process id and settings → sandbox. A forked process inherits the table, and must not use its parent's sandboxes."""


def close_all() -> None:
    """Close the shared sandboxes of this process. The next call of `Sandbox.shared` makes new ones."""
    with _shared_lock:
        own = [key for key in _shared_sandboxes if key[0] == os.getpid()]
        sandboxes = [_shared_sandboxes.pop(key) for key in own]
    for sandbox in sandboxes:
        sandbox.close()


def _forget_shared() -> None:
    """Start empty in a forked child. The lock may be held there by a thread that was not forked."""
    global _shared_lock
    _shared_lock = threading.Lock()
    _shared_sandboxes.clear()


os.register_at_fork(after_in_child=_forget_shared)
atexit.register(close_all)
