"""Running one block as a person at a prompt expects: its last expression is shown, `await` works at the top level."""

import __future__

import ast
import asyncio
import inspect
import io
import linecache
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from sandbox_worker.wire.messages import Status

OWN_FOLDER = str(Path(__file__).parent)
OWN_FILES = frozenset({ast.__file__, asyncio.base_events.__file__})
"""Not the model's: frames of these files, and of ours, are left out of a traceback."""


class Outcome:
    """How a block ended.

    Attributes:
        error: One line; for `exited` what `sys.exit` was given.
        exit_code: For `exited`.
    """

    def __init__(self, status: Status, error: str | None = None, exit_code: int | None = None) -> None:
        self.status: Status = status
        self.error = error
        self.exit_code = exit_code


class Executor:
    """Runs blocks in one namespace.

    Args:
        complain: Called with the text of a traceback. (`sys.stderr` is whatever the block made of it.)
    """

    def __init__(self, namespace: dict[str, Any], complain: Callable[[str], object]) -> None:
        self._namespace = namespace
        self._complain = complain
        self._flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, number: int, code: str) -> Outcome:
        """Run one block. Whatever it raises is printed as a traceback of its own lines and returned as an outcome."""
        file = f"<block {number}>"
        # Tracebacks of functions that outlive their block still show their lines. Each ends in a newline, as those of
        # a file do: `traceback` counts on it when it places its carets.
        linecache.cache[file] = (len(code), None, io.StringIO(f"{code}\n", newline=None).readlines(), file)
        try:
            statements, last = self._compiled(code, file)
            self._evaluate(statements)
            if last is not None:
                self._show(self._evaluate(last))
        except SystemExit as request:
            return self._exited(request)
        except KeyboardInterrupt as interrupt:
            self._complain(_traceback_of(interrupt))
            return Outcome("interrupted", "KeyboardInterrupt")
        except BaseException as error:  # noqa: BLE001 - whatever model code raises ends its block, never the REPL
            self._complain(_traceback_of(error))
            return Outcome("error", _one_line(error))
        return Outcome("ok")

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

    def _evaluate(self, code: CodeType) -> Any:
        result = eval(code, self._namespace)  # running model code is what this process is for
        if code.co_flags & inspect.CO_COROUTINE:
            return self._await(result)
        return result

    def _await(self, coroutine: Any) -> Any:
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(task)
        except (KeyboardInterrupt, SystemExit):
            if not task.done():  # it was raised beside the coroutine, not in it
                task.cancel()
                self._loop.run_until_complete(asyncio.wait({task}))
            if not task.cancelled():
                task.exception()  # asyncio reports what nobody has looked at
            raise

    def _show(self, value: Any) -> None:
        if value is not None:
            self._namespace["_"] = value
            print(repr(value))

    def _exited(self, request: SystemExit) -> Outcome:
        if request.code is None or isinstance(request.code, int):
            return Outcome("exited", f"sys.exit({request.code or 0})", int(request.code or 0))
        try:
            text = str(request.code)
        except BaseException as broken:  # noqa: BLE001 - the object is the model's, and its `__str__` may raise
            text = f"a {type(request.code).__name__} whose text cannot be shown: {type(broken).__name__}"
        self._complain(f"{text}\n")  # as the interpreter itself would
        return Outcome("exited", text, 1)


def _traceback_of(error: BaseException) -> str:
    try:
        shown = traceback.TracebackException.from_exception(error)
        for part in _parts(shown):
            own = [frame for frame in part.stack if not _is_ours(frame.filename)]
            part.stack = traceback.StackSummary.from_list(own)
        return "".join(shown.format())
    except BaseException as broken:  # noqa: BLE001 - model code may have given its exception a `__str__` that raises
        return f"{type(error).__name__} (its traceback cannot be shown: {type(broken).__name__})\n"


def _parts(shown: traceback.TracebackException) -> list[traceback.TracebackException]:
    """An exception, those that caused it, and those in its group."""
    parts = [shown]
    for part in parts:  # grows while it is walked
        parts += [more for more in (part.__cause__, part.__context__, *(part.exceptions or ())) if more is not None]
    return parts


def _is_ours(file: str) -> bool:
    return file in OWN_FILES or file.startswith(OWN_FOLDER)


def _one_line(error: BaseException) -> str:
    try:
        # A SyntaxError's text begins with lines that show the place, indented; a note comes after the message.
        lines = traceback.format_exception_only(error)
        text = next(line for line in lines if not line.startswith(" ")).splitlines()[0]
    except BaseException:  # noqa: BLE001 - as above
        text = type(error).__name__
    return text[:1000]
