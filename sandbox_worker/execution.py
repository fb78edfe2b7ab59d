"""Running one block as a person at a prompt expects: its last expression is shown, `await` works at the top level."""

import ast
import asyncio
import inspect
import linecache
import sys
import traceback
from types import CodeType
from typing import Any

from sandbox_worker import interrupts
from sandbox_worker.wire.messages import Status

FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
OWN_FILES = frozenset({__file__, interrupts.__file__, ast.__file__, asyncio.base_events.__file__})
"""Not the model's: frames of these files are left out of a traceback."""


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
    """Runs blocks in one namespace."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, number: int, code: str) -> Outcome:
        """Run one block. Whatever it raises is printed as a traceback of its own lines and returned as an outcome."""
        file = f"<block {number}>"
        # Tracebacks of functions that outlive their block still show their lines.
        linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
        try:
            statements, last = _compiled(code, file)
            self._evaluate(statements)
            if last is not None:
                self._show(self._evaluate(last))
        except SystemExit as request:
            return _exited(request)
        except KeyboardInterrupt as interrupt:
            _print_traceback(interrupt)
            return Outcome("interrupted", "KeyboardInterrupt")
        except BaseException as error:  # noqa: BLE001 - whatever model code raises ends its block, never the REPL
            _print_traceback(error)
            return Outcome("error", _one_line(error))
        return Outcome("ok")

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
        except KeyboardInterrupt:
            if task.done():  # it was raised inside of the coroutine itself
                raise
            task.cancel()
            self._loop.run_until_complete(asyncio.wait({task}))
            raise

    def _show(self, value: Any) -> None:
        if value is not None:
            self._namespace["_"] = value
            print(repr(value))


def _compiled(code: str, file: str) -> tuple[CodeType, CodeType | None]:
    """The statements, and the last one apart if it is an expression whose value is to be shown."""
    tree = ast.parse(code, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    statements = compile(tree, file, "exec", FLAGS, dont_inherit=True)
    if last is None:
        return statements, None
    assert isinstance(last, ast.Expr)
    return statements, compile(ast.Expression(last.value), file, "eval", FLAGS, dont_inherit=True)


def _exited(request: SystemExit) -> Outcome:
    if request.code is None or isinstance(request.code, int):
        return Outcome("exited", f"sys.exit({request.code or 0})", int(request.code or 0))
    text = str(request.code)
    print(text, file=sys.stderr)  # as the interpreter itself would
    return Outcome("exited", text, 1)


def _print_traceback(error: BaseException) -> None:
    try:
        shown = traceback.TracebackException(type(error), error, error.__traceback__)
        shown.stack = traceback.StackSummary.from_list([f for f in shown.stack if f.filename not in OWN_FILES])
        sys.stderr.write("".join(shown.format()))
    except BaseException as broken:  # noqa: BLE001 - model code may have given its exception a `__str__` that raises
        sys.stderr.write(f"{type(error).__name__} (its traceback cannot be shown: {type(broken).__name__})\n")


def _one_line(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1]
    except BaseException:  # noqa: BLE001 - as above
        text = type(error).__name__
    return text[:1000]
