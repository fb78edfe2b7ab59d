"""Execution of blocks, as at a prompt: the last expression is shown, and `await` works at the top level."""

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
from typing import TYPE_CHECKING, Any, NamedTuple

from sandbox_worker.repl.displays import NOTHING, Forms, all_forms_of, show_value
from sandbox_worker.repl.memory_reserve import Reserve
from sandbox_worker.repl.objects import class_name
from sandbox_worker.repl.submission import BLOCK, SUBMITTED
from sandbox_worker.wire.messages import Status
from sandbox_worker.wire.names import LAST_VALUE

if TYPE_CHECKING:
    import asyncio

OWN_FOLDER = str(Path(__file__).parent)
ERROR_CHARS = 1000
"""Maximum characters of the line with a block's error; the rest is cut. The block's output has the whole traceback."""
SHELL = ("!", "%", "pip install")
"""Beginnings of a line that is a command of IPython or of a shell, and not Python."""
NO_SHELL = "this is plain Python, without commands of IPython or a shell; `import` finds what is installed"
VALUE = "<value>"
"""Name of the last expression's value in the namespace, until it is shown. No name in a source is like this."""
EXIT_CODES = (1 << 31) - 1
"""Largest absolute value of an exit code, the largest C `int`; larger ones are replaced by it."""


class Raised(NamedTuple):
    """Name of the class, text and traceback of an exception that has ended a block."""

    error_type: str
    error_text: str
    traceback: str


class BlockOutcome:
    """End of a block.

    Attributes:
        status: End of the block, see `Result`.
        error: One line, for "error", "interrupted" and "exited"; for "exited" the argument of `sys.exit`.
        exit_code: Exit code, for "exited".
        value: Value of the last statement, if it was requested, the block ran through, and it is an expression.
        forms: Forms of that value; empty if it was shown, or there is none.
        raised: Exception of the code; None if it was printed, or there is none.
    """

    def __init__(
        self, status: Status, error: str | None = None, exit_code: int | None = None, value: object = None
    ) -> None:
        self.status: Status = status
        self.error = error
        self.exit_code = exit_code
        self.value = value
        self.forms = NOTHING
        self.raised: Raised | None = None


class Executor:
    """Executor of blocks in one namespace.

    Args:
        namespace: Variables of model code.
        complain: Function that prints the text of a traceback. (Model code may have replaced `sys.stderr`.)
        reserve: Reserve that is closed while a block's code runs.

    Attributes:
        compiled: Code object of the last block; None if its source could not be compiled.
        last_values: Namespace that gets the value of each last expression, as `_`.
    """

    def __init__(self, namespace: dict[str, Any], complain: Callable[[str], object], reserve: Reserve) -> None:
        self._reserve = reserve
        self._namespace = self.last_values = namespace
        self._complain = complain
        self._flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self._loop: asyncio.AbstractEventLoop | None = None
        self.compiled: CodeType | None = None
        self._echo = True
        self._forms: Forms = NOTHING

    def run(self, number: int, code: str, wants_value: bool = False, echo: bool = True) -> BlockOutcome:
        """Run one block. If it raises, then print a traceback of model code's lines, and return one line of it.

        Args:
            number: Number of the block, for the file name in tracebacks.
            code: Source of the block.
            wants_value: Whether the outcome shall have the value of the last expression.
            echo: Whether the last expression and a traceback are printed. If not, the outcome has them.
        """
        self.compiled = None
        self._echo, self._forms = echo, NOTHING
        file = f"{BLOCK}{number}>"
        # Keep the source, so that tracebacks of functions that outlive their block still show lines. Each line ends in
        # a newline, as in a file: `traceback` relies on this when it places its carets.
        linecache.cache[file] = (len(code), None, io.StringIO(f"{code}\n", newline=None).readlines(), file)
        try:
            self.compiled = self._compiled(code, file)
            self._reserve.close()
            try:
                value = self._evaluate(self.compiled)
            finally:
                self._reserve.end_block()
        except SystemExit as request:
            return BlockOutcome("ok") if request.code is SUBMITTED else self._exited(request)
        except KeyboardInterrupt as interrupt:
            return self._raised(BlockOutcome("interrupted", "KeyboardInterrupt"), interrupt)
        except BaseException as error:  # noqa: BLE001 - any exception of model code ends its block, never the REPL
            return self._raised(BlockOutcome("error", _one_line(error)), error)
        outcome = BlockOutcome("ok", value=value if wants_value else None)
        outcome.forms = self._forms
        return outcome

    def _raised(self, outcome: BlockOutcome, error: BaseException, printed: str | None = None) -> BlockOutcome:
        """Print the traceback, or the text in its place; or add what was raised to the outcome."""
        if not self._echo:
            outcome.raised = Raised(class_name(error), _text_of(error), _traceback_of(error))
        elif complaint := _traceback_of(error) if printed is None else printed:
            self._complain(complaint)
        return outcome

    def _compiled(self, code: str, file: str) -> CodeType:
        """Return the code of a block. If its last statement is an expression, then it leaves the value as `VALUE`."""
        try:
            tree = ast.parse(code, file)
            if tree.body and isinstance(last := tree.body[-1], ast.Expr):
                place = ast.copy_location(ast.Name(VALUE, ast.Store()), last)
                tree.body[-1] = ast.copy_location(ast.Assign([place], last.value), last)
            compiled: CodeType = compile(tree, file, "exec", self._flags, dont_inherit=True)
            # `from __future__ import annotations` holds for later blocks as well, as at any prompt.
            self._flags |= compiled.co_flags & __future__.annotations.compiler_flag
            return compiled
        except SyntaxError as error:
            if error.text is None and error.lineno:  # the compiler reads the line from a file, which does not exist
                error.text = linecache.getline(file, error.lineno)
            if (error.text or "").lstrip().startswith(SHELL):
                error.add_note(NO_SHELL)
            raise

    def _evaluate(self, code: CodeType) -> Any:
        self._namespace.pop(VALUE, None)  # of a block that was interrupted just then
        if code.co_flags & inspect.CO_COROUTINE:
            return self._await(code)
        eval(code, self._namespace)  # model code runs here, and in `_awaiting`
        return self._shown(self._namespace.pop(VALUE, None))

    async def _awaiting(self, code: CodeType) -> Any:
        await eval(code, self._namespace)
        return self._shown(self._namespace.pop(VALUE, None))

    def _await(self, code: CodeType) -> Any:
        """Run a block in one task, on one event loop for all blocks.

        So tasks that a line of code starts still run while a later line awaits.
        """
        # An interrupted import leaves submodules of asyncio in sys.modules without the package. A later import would
        # not set them as attributes of the package.
        if "asyncio" not in sys.modules:
            for name in [name for name in sys.modules if name.startswith("asyncio.")]:
                del sys.modules[name]
        # Import asyncio here: with its imports it takes a quarter of a fork server's memory, which each fork would pay.
        import asyncio

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(self._awaiting(code))
        try:
            return self._loop.run_until_complete(task)
        except (KeyboardInterrupt, SystemExit) as request:
            if not task.done():  # the exception was raised in the event loop's own code, not in the coroutine
                task.cancel()
                self._loop.run_until_complete(asyncio.wait({task}))
            try:
                task.result()
            except asyncio.CancelledError as cancelled:  # its traceback shows the line of model code that was waiting
                raise request.with_traceback(cancelled.__traceback__) from None
            except BaseException:  # noqa: BLE001, S110 - retrieved, since asyncio reports exceptions that never are
                pass
            raise

    def _shown(self, value: Any) -> Any:
        if value is not None:
            self.last_values[LAST_VALUE] = value
            if self._echo:
                show_value(value)
            else:
                self._forms = all_forms_of(value)
        return value

    def _exited(self, request: SystemExit) -> BlockOutcome:
        code = 0 if request.code is None else request.code
        if type(code) in (int, bool):
            known = max(-EXIT_CODES, min(EXIT_CODES, int(code)))  # Python refuses to print more than 4,300 digits
            return self._raised(BlockOutcome("exited", f"sys.exit({known})", known), request, "")
        try:
            text = str(code)
        except BaseException as broken:  # noqa: BLE001 - an object of model code: its `__str__` may raise any class
            text = f"a {class_name(request.code)} whose text cannot be shown: {class_name(broken)}"
        # The interpreter also prints an argument that is not an integer.
        return self._raised(BlockOutcome("exited", text[:ERROR_CHARS], 1), request, f"{text}\n")


def _traceback_of(error: BaseException) -> str:
    try:
        shown = traceback.TracebackException.from_exception(error)
        for part in _parts(shown):
            part.stack = traceback.StackSummary.from_list(_without_ours(part.stack))
        return "".join(shown.format())
    except BaseException as broken:  # noqa: BLE001 - an exception of model code: its `__str__` may raise any class
        return f"{class_name(error)} (its traceback cannot be shown: {class_name(broken)})\n"


def _parts(shown: traceback.TracebackException) -> list[traceback.TracebackException]:
    """Return an exception with its causes, its contexts, and the members of its group."""
    parts = [shown]
    for part in parts:  # the list grows during the loop
        parts += [more for more in (part.__cause__, part.__context__, *(part.exceptions or ())) if more is not None]
    return parts


def _without_ours(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return frames without our own modules', and of functions that these called, up to model code's next."""
    kept, in_ours = [], False
    for frame in frames:
        in_ours = frame.filename.startswith(OWN_FOLDER) or (in_ours and not frame.filename.startswith(BLOCK))
        if not in_ours:
            kept.append(frame)
    return kept


def _text_of(error: BaseException) -> str:
    try:
        return str.__str__(str(error))
    except BaseException as broken:  # noqa: BLE001 - see `_traceback_of`
        return f"(its text cannot be shown: {class_name(broken)})"


def _one_line(error: BaseException) -> str:
    try:
        # The text of a SyntaxError begins with indented lines that show the place. Notes follow the message.
        lines = traceback.format_exception_only(error)
        text = next(line for line in lines if not line.startswith(" ")).splitlines()[0]
    except BaseException:  # noqa: BLE001 - see `_traceback_of`
        text = class_name(error)
    return text[:ERROR_CHARS]
