"""Running one block as a person at a prompt expects: its last expression is shown, `await` works at the top level."""

import __future__

import ast
import inspect
import io
import linecache
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from sandbox_worker.repl.call_site import BLOCK
from sandbox_worker.repl.classes import class_name
from sandbox_worker.repl.displays import show_value
from sandbox_worker.repl.memory_reserve import Reserve
from sandbox_worker.repl.submission import SUBMITTED
from sandbox_worker.wire.messages import Status
from sandbox_worker.wire.names import LAST_VALUE

if TYPE_CHECKING:
    import asyncio

OWN_FOLDER = str(Path(__file__).parent)
ERROR_CHARS = 1000
"""Of the line that says how a block ended. The whole traceback is in its output."""
EXIT_CODES = (1 << 31) - 1
"""Largest exit code, either way: what a C `int` holds."""


class Outcome:
    """How a block ended.

    Attributes:
        error: One line; for `exited` what `sys.exit` was given.
        exit_code: For `exited`.
        value: Of the last statement, if the block ran through, that is an expression, and its value was asked for.
    """

    def __init__(
        self, status: Status, error: str | None = None, exit_code: int | None = None, value: object = None
    ) -> None:
        self.status: Status = status
        self.error = error
        self.exit_code = exit_code
        self.value = value


class Executor:
    """Runs blocks in one namespace.

    Args:
        complain: Called with the text of a traceback. (`sys.stderr` is whatever the block made of it.)
        reserve: Closed while a block's code runs.

    Attributes:
        compiled: The code of the last block; empty if it is no Python.
    """

    def __init__(self, namespace: dict[str, Any], complain: Callable[[str], object], reserve: Reserve) -> None:
        self._reserve = reserve
        self._namespace = namespace
        self._complain = complain
        self._flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self._loop: asyncio.AbstractEventLoop | None = None
        self.compiled: list[CodeType] = []

    def run(self, number: int, code: str, wants_value: bool = False) -> Outcome:
        """Run one block. Whatever it raises is printed as a traceback of its own lines and returned as an outcome.

        Args:
            wants_value: Whether the outcome has the value of the last expression.
        """
        self.compiled = []
        file = f"{BLOCK}{number}>"
        # Tracebacks of functions that outlive their block still show their lines. Each ends in a newline, as those of
        # a file do: `traceback` counts on it when it places its carets.
        linecache.cache[file] = (len(code), None, io.StringIO(f"{code}\n", newline=None).readlines(), file)
        try:
            statements, last = self._compiled(code, file)
            self.compiled = [part for part in (statements, last) if part is not None]
            self._reserve.close()
            try:
                value = self._evaluate(statements, last)
            finally:
                self._reserve.end_block()
        except SystemExit as request:
            return Outcome("ok") if request.code is SUBMITTED else self._exited(request)
        except KeyboardInterrupt as interrupt:
            self._complain(_traceback_of(interrupt))
            return Outcome("interrupted", "KeyboardInterrupt")
        except BaseException as error:  # noqa: BLE001 - whatever model code raises ends its block, never the REPL
            self._complain(_traceback_of(error))
            return Outcome("error", _one_line(error))
        return Outcome("ok", value=value if wants_value else None)

    def _compiled(self, code: str, file: str) -> tuple[CodeType, CodeType | None]:
        """The statements, and the last one apart if it is an expression whose value is to be shown."""
        try:
            tree = ast.parse(code, file)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            statements = compile(tree, file, "exec", self._flags, dont_inherit=True)
            # `from __future__ import annotations` holds for the blocks that follow, as at any prompt.
            self._flags |= statements.co_flags & __future__.annotations.compiler_flag
            if not isinstance(last, ast.Expr):
                return statements, None
            return statements, compile(ast.Expression(last.value), file, "eval", self._flags, dont_inherit=True)
        except SyntaxError as error:
            if error.text is None and error.lineno:  # the compiler looks for a file of that name
                error.text = linecache.getline(file, error.lineno)
            raise

    def _evaluate(self, statements: CodeType, last: CodeType | None) -> Any:
        if any(part is not None and part.co_flags & inspect.CO_COROUTINE for part in (statements, last)):
            return self._await(statements, last)
        eval(statements, self._namespace)  # running model code is what this process is for
        return None if last is None else self._shown(eval(last, self._namespace))

    async def _awaiting(self, statements: CodeType, last: CodeType | None) -> Any:
        ran = eval(statements, self._namespace)
        if statements.co_flags & inspect.CO_COROUTINE:
            await ran
        if last is None:
            return None
        value = eval(last, self._namespace)
        return self._shown(await value if last.co_flags & inspect.CO_COROUTINE else value)

    def _await(self, statements: CodeType, last: CodeType | None) -> Any:
        """In one go, so that tasks live from line to line."""
        if "asyncio" not in sys.modules:  # an import that was interrupted leaves parts that no later one puts together
            for name in [name for name in sys.modules if name.startswith("asyncio.")]:
                del sys.modules[name]
        import asyncio  # with what it needs a quarter of a fork server's memory, which each fork would pay for

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(self._awaiting(statements, last))
        try:
            return self._loop.run_until_complete(task)
        except (KeyboardInterrupt, SystemExit) as request:
            if not task.done():  # it was raised beside the coroutine, not in it
                task.cancel()
                self._loop.run_until_complete(asyncio.wait({task}))
            try:
                task.result()
            except asyncio.CancelledError as cancelled:  # it knows the line that was waiting
                raise request.with_traceback(cancelled.__traceback__) from None
            except BaseException:  # noqa: BLE001, S110 - looked at, or asyncio would report it
                pass
            raise

    def _shown(self, value: Any) -> Any:
        if value is not None:
            self._namespace[LAST_VALUE] = value
            show_value(value)
        return value

    def _exited(self, request: SystemExit) -> Outcome:
        code = 0 if request.code is None else request.code
        if type(code) in (int, bool):
            known = max(-EXIT_CODES, min(EXIT_CODES, int(code)))  # Python refuses to print one of 5,000 digits
            return Outcome("exited", f"sys.exit({known})", known)
        try:
            text = str(code)
        except BaseException as broken:  # noqa: BLE001 - the object is the model's, and its `__str__` may raise
            text = f"a {class_name(request.code)} whose text cannot be shown: {class_name(broken)}"
        self._complain(f"{text}\n")  # as the interpreter itself would
        return Outcome("exited", text[:ERROR_CHARS], 1)


def _traceback_of(error: BaseException) -> str:
    try:
        shown = traceback.TracebackException.from_exception(error)
        for part in _parts(shown):
            part.stack = traceback.StackSummary.from_list(_without_ours(part.stack))
        return "".join(shown.format())
    except BaseException as broken:  # noqa: BLE001 - model code may have given its exception a `__str__` that raises
        return f"{class_name(error)} (its traceback cannot be shown: {class_name(broken)})\n"


def _parts(shown: traceback.TracebackException) -> list[traceback.TracebackException]:
    """An exception, those that caused it, and those in its group."""
    parts = [shown]
    for part in parts:  # grows while it is walked
        parts += [more for more in (part.__cause__, part.__context__, *(part.exceptions or ())) if more is not None]
    return parts


def _without_ours(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Leave out our own frames, and those of what we called, up to the next line of model code."""
    kept, in_ours = [], False
    for frame in frames:
        in_ours = frame.filename.startswith(OWN_FOLDER) or (in_ours and not frame.filename.startswith(BLOCK))
        if not in_ours:
            kept.append(frame)
    return kept


def _one_line(error: BaseException) -> str:
    try:
        # A SyntaxError's text begins with lines that show the place, indented; a note comes after the message.
        lines = traceback.format_exception_only(error)
        text = next(line for line in lines if not line.startswith(" ")).splitlines()[0]
    except BaseException:  # noqa: BLE001 - as above
        text = class_name(error)
    return text[:ERROR_CHARS]
