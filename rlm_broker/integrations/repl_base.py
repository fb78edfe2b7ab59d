"""A sandboxed REPL behind one object of a peer's: an interpreter, an executor, an environment.

Theory of operation
-------------------
Peers create such objects by the dozen, drop some of them, use them from any thread, and fork. `PeerRepl` has what all
of them need, and the adapter has what one peer wants:

- Nothing is opened before the first use. Without a sandbox of the caller's, all objects of a process share one
  (`Sandbox.shared`).
- One execution at a time. A second thread is refused or waits, as the peer's contract says.
- Tools run on the host, in threads, in the context of the caller of `execute`. A tool that runs its own object's code
  would wait for itself, and is refused. It may read variables.
- An object that is used after it was closed, or in a forked process, is refused. A killed REPL whose
  variables did not come back ends it, or the next execution finds a fresh REPL.
- Each refusal is an error of the peer's class, with one sentence.
- A dropped object closes its REPL. So the REPL must not keep the object: it knows the tools while code runs only.
"""

import asyncio
import contextlib
import contextvars
import inspect
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

from rlm_broker.errors import ConfigurationError, RlmBrokerError, ValueTooLarge
from rlm_broker.limits import ReplLimits
from rlm_broker.results import Block
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox

LARGE_VALUES: Final = ReplLimits(max_frame_bytes=256 << 20)
"""Limits for peers that give inputs of 100 MB as variables."""
HostFunction = Callable[..., Any]
_running: Final[contextvars.ContextVar[tuple["_HostTools", ...]]] = contextvars.ContextVar("running", default=())
"""The objects whose code waits for the tool that runs in this context."""


class PeerRepl:
    """A REPL without names of rlm-broker's, opened at its first use, for one object of a peer's.

    Example:
        ```python
        repl = PeerRepl("this interpreter", RuntimeError)
        block = repl.execute("add(n, 2)", values={"n": 1}, tools={"add": lambda left, right: left + right})
        print(block.value)  # 3
        repl.close()
        ```

    Args:
        name: The words for the object in sentences, for example "this interpreter".
        error: The peer's exception for what is refused. It is made of one sentence.
        sandbox: An open sandbox of the caller's; None shares one of the process.
        limits: Limits of the REPL; None takes those of the caller's sandbox, or `LARGE_VALUES`.
        waits: Whether a thread waits while code runs for another one. If not, it is refused.
        survives: Whether the object goes on with a fresh REPL when all variables of one are lost, or it is closed.
        convert: Makes of a value that does not cross one that does, for example of a model its fields, or raises the
            peer's error.
        options: More arguments of `Sandbox.repl`, for example `env`.

    Attributes:
        why_closed: Reason of the end, in a clause; None while it can be used.
        blocks: Number of blocks whose variables are there; 0 in a fresh REPL.
    """

    def __init__(
        self,
        name: str,
        error: Callable[[str], Exception],
        *,
        sandbox: Sandbox | None = None,
        limits: ReplLimits | None = None,
        waits: bool = False,
        survives: bool = False,
        convert: Callable[[Any], Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.why_closed: str | None = None
        self.blocks = 0
        self._name = name
        self._error = error
        self._sandbox = sandbox
        self._limits = limits or (None if sandbox else LARGE_VALUES)
        self._waits = waits
        self._survives = survives
        self._convert = convert
        self._options = dict(options or {})
        self._host = _HostTools()
        self._one_at_a_time = threading.RLock()
        self._repl: SandboxedRepl | None = None
        self._pid = 0
        self._tool_names: frozenset[str] = frozenset()

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox of the REPL, opened if it is the shared one."""
        return self._sandbox or Sandbox.shared(self._limits)

    def open(self) -> None:
        """Open the REPL, unless it is open. Raise the peer's error if it was closed, or cannot be opened."""
        with self.turn():
            self._opened()

    def execute(
        self,
        code: str,
        *,
        values: Mapping[str, Any] | None = None,
        kept: Mapping[str, Any] | None = None,
        tools: Mapping[str, HostFunction] | None = None,
        **wanted: Any,
    ) -> Block:
        """Run code, and return its block with any `status`: see also `value`, `result`, `error_type` and `limit`.

        Args:
            code: Python source.
            values: Name → value, bound before the code runs. One that did not change since costs nothing.
            kept: Name → value that each later execution finds again, also after a death.
            tools: Name → function on the host. Code calls these and no others, so give all of them each time.
            wanted: More arguments of `SandboxedRepl.execute`. `value` is true and `echo` false, unless they say else.

        Raises:
            Exception: The peer's error: `code`, a name or a value cannot be used; the object is closed, in use, or of
                another process; the REPL has died and the object does not survive it.
            BaseException: What a tool has raised, if it is neither an Exception nor SystemExit. The object is closed.
        """
        with self.turn():
            repl = self._opened()
            with self._refusals():
                self._offer(repl, frozenset(tools or ()))
                if values:
                    self._provide(repl, values)
                if kept:
                    repl.provide(kept)
                with self._host.serving(repl, tools or {}):
                    block = repl.execute(code, **{"value": True, "echo": False, **wanted})
            if (escaped := self._host.escaped) is not None:
                self._host.escaped = None
                self._end(f"one of its tools raised {type(escaped).__name__}")
                raise escaped
            self.blocks += 1
            if block.status == "killed":
                self.blocks -= self.blocks if (undone := block.blocks_undone) is None else undone
                if not self._survives and undone is None:
                    self._end(f"its process has ended: {block.error}")
                    raise self._error(f"{self._name} has ended: {block.error}")
                if not self._survives:
                    raise self._error(f"{block.error}. Executions undone: {undone}; earlier variables are there")
            return block

    def variables(self, *names: str) -> dict[str, Any]:
        """Return variables by name, all public ones without arguments. A value that does not cross is a
        `ValueUnavailable`. A tool may call this for the code that waits for it.

        Raises:
            Exception: The peer's error, as for `execute`.
        """
        if self._host in _running.get():
            assert self._repl is not None
            with self._refusals():
                return self._repl.variables(*names)
        with self.turn():
            repl = self._opened()
            with self._refusals():
                return repl.variables(*names)

    def close(self, why: str = "it was closed") -> None:
        """End the REPL with all its processes. Has no effect when repeated, or in a forked process."""
        self.why_closed = self.why_closed or why
        repl, self._repl = self._repl, None
        if repl is not None and self._pid == os.getpid():
            repl.close()

    # -- what holds for each use -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the object for this thread, for several executions. Raise the peer's error if it cannot be used now."""
        if self._pid not in (0, os.getpid()):  # before the lock, which may have been held when the process forked
            raise self._error(f"{self._name} was opened before the process was forked: make another one in here")
        if self._host in _running.get():
            raise self._error(f"{self._name} cannot execute recursively: its code waits for the tool that asks for it")
        if not self._one_at_a_time.acquire(blocking=self._waits):
            raise self._error(f"{self._name} runs code for another thread already: one execution at a time")
        try:
            yield
        finally:
            self._one_at_a_time.release()

    def _opened(self) -> SandboxedRepl:
        if self.why_closed is not None:
            raise self._error(f"{self._name} was shut down and its session has ended ({self.why_closed}): make another")
        if self._repl is None:
            with self._refusals():
                repl = self.sandbox.repl(limits=self._limits, scaffold=False, **self._options)
                self._pid = os.getpid()
                repl.__enter__()
                self._repl, self._tool_names = repl, frozenset()
                ends_with(self, repl)
        assert self._repl is not None
        return self._repl

    def _offer(self, repl: SandboxedRepl, names: frozenset[str]) -> None:
        if names != self._tool_names:
            repl.set_tools({name: self._host.caller(name) for name in names})
            self._tool_names = names

    def _provide(self, repl: SandboxedRepl, values: Mapping[str, Any]) -> None:
        try:
            repl.provide(values, restore=False)
        except ValueTooLarge:
            raise
        except ConfigurationError:
            if self._convert is None:
                raise
            repl.provide({name: self._convert(value) for name, value in values.items()}, restore=False)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raise the peer's error for one of rlm-broker's. What was refused before it began leaves the object usable."""
        try:
            yield
        except ConfigurationError as error:
            raise self._error(str(error)) from error
        except RlmBrokerError as error:
            if not self._survives:
                self._end(f"its process has ended: {error}")
            raise self._error(f"{self._name} has failed: {error}") from error

    def _end(self, why: str) -> None:
        """Close after a failure, which is what the caller has to see, and no failure of the closing."""
        with contextlib.suppress(RlmBrokerError):
            self.close(why)


class _HostTools:
    """The functions that code may call now. The REPL knows this object, and not the one that has the REPL.

    Attributes:
        escaped: What a tool has raised that is for the caller of `execute`, and not for code: KeyboardInterrupt, say.
    """

    def __init__(self) -> None:
        self.escaped: BaseException | None = None
        self._functions: Mapping[str, HostFunction] = {}
        self._repl: SandboxedRepl | None = None

    @contextlib.contextmanager
    def serving(self, repl: SandboxedRepl, functions: Mapping[str, HostFunction]) -> Iterator[None]:
        """Serve calls of these functions within the block."""
        self._repl, self._functions = repl, functions
        try:
            yield
        finally:
            self._repl, self._functions = None, {}

    def caller(self, name: str) -> HostFunction:
        """Return the function that a REPL calls for a tool."""

        def called(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, args, kwargs)

        return called

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a tool, in this thread and its context, which is a copy of that of the caller of `execute`."""
        repl, function = self._repl, self._functions.get(name)
        if repl is None or function is None:
            raise RuntimeError(f"{name} cannot be called: no code of this object runs")
        _running.set((*_running.get(), self))
        try:
            return awaited(function(*args, **kwargs))
        except (Exception, SystemExit):  # code gets these as errors
            raise
        except BaseException as error:
            self.escaped = error
            repl.interrupt()
            raise


def error_of(block: Block) -> str | None:
    """Return why a block failed: class and text of what code raised, or the sentence of a limit that ended it."""
    if block.error_type is None or (block.status == "interrupted" and block.limit is not None):
        return block.error
    return f"{block.error_type}: {block.error_text}"


def text_of(block: Block) -> str:
    """Return the text of a block's last expression; "" if it has none."""
    return "" if block.result is None else str(block.result.data.get("text/plain", ""))


def awaited(answer: Any) -> Any:
    """Return a tool's answer. That of an async tool is awaited on a loop of this thread's own."""
    return asyncio.run(_of(answer)) if inspect.isawaitable(answer) else answer


async def _of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def ends_with(owner: object, repl: SandboxedRepl) -> None:
    """Close a REPL when the object that has it is dropped. At exit its sandbox closes it."""
    weakref.finalize(owner, _drop, repl, os.getpid()).atexit = False


def _drop(repl: SandboxedRepl, pid: int) -> None:
    """Close a REPL, and wait for nothing, since any thread may collect garbage."""
    if pid == os.getpid() and repl.event_loop is not None and not repl.is_closed:
        with contextlib.suppress(ConfigurationError):  # the loop has ended, and the REPL with it
            repl.event_loop.job(repl.aclose()).start()
