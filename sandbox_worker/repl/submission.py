"""Submission of an answer by model code: a call of `FINAL`, `FINAL_VAR` or `SUBMIT`, or the dict `answer`.

A submission is recorded at once. By default the block continues. If a block shall end where it submits, then
`SystemExit` is raised in it, with `SUBMITTED` as its code. No `except Exception` catches a SystemExit, and asyncio lets
it through. A thread that raises it ends without a traceback: `threading.excepthook` ignores exactly this class, and
would print a traceback for a subclass.
"""

import ast
import functools
import itertools
import json
import linecache
import sys
import types
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Final

from sandbox_worker.repl.handles import SHOWN
from sandbox_worker.repl.helpers import HELPERS
from sandbox_worker.repl.objects import Crossing, class_name, crossing, is_a
from sandbox_worker.wire.messages import MAX_DRAFT_CHARS
from sandbox_worker.wire.names import ANSWER, FINAL_VAR, SUBMIT

BLOCK = "<block "
"""Beginning of the file name under which a block's code is compiled, for example "<block 3>"."""


_DEFINITIONS: Final = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)
"""Classes of objects that code defines or imports under the name `answer`, and that are not an answer."""


class _ExitCode(int):
    """Exit code that differs from any other 0 by its identity."""


SUBMITTED: Final = _ExitCode(0)
"""Code of the SystemExit that ends a block after its submission."""


class Submission:
    """Submission of the block that runs.

    Args:
        namespace: Variables of model code, among them `answer`.
        warn: Function that prints a line for the model to read.
        variables: Function that returns name → type of the existing variables.
        check_fields: Function that has the orchestrator check fields. It raises TypeError if they are refused.

    Attributes:
        text: Submitted text, or text of the submitted value; None if the block has submitted no answer. It is empty for
            fields, which the orchestrator has from their check.
        value: Submitted value, if it is neither a text nor fields.
        draft: Text in `answer["content"]` at the end of the block without being submitted; or None.
        has_answer: Whether the variable `answer` submits; otherwise it is a variable like any other.
    """

    has_answer = True

    def __init__(
        self,
        namespace: dict[str, Any],
        warn: Callable[[str], object],
        variables: Callable[[], Mapping[str, str]],
        check_fields: Callable[[dict[str, Any]], None],
    ) -> None:
        self._namespace = namespace
        self._warn = warn
        self._variables = variables
        self._check_fields = check_fields
        self.begin(None)

    def begin(self, submit: list[str] | None) -> None:
        """Begin a block.

        Args:
            submit: Names of the fields that the block must submit; it ends where it submits. An empty list permits any
                value. With None the block continues after a submission of any value.
        """
        self.text: str | None = None
        self.value = Crossing()
        self.draft: str | None = None
        self._ends_block = submit is not None
        self._fields = submit or []
        if self.has_answer:
            self._restore_answer()

    # -- functions of model code -------------------------------------------------------------------------------------

    def final(self, value: Any = None) -> None:
        """End the run with `value` as the answer."""
        if type(value) is dict and value.keys() == _fresh_answer().keys():
            value = value["content"]  # FINAL(answer) means the content of `answer`
        self._note(self._named((value,), {}) if self._fields else value)
        self._end_block()

    def final_var(self, name: str) -> None:
        """End the run with the value of the variable called `name` as the answer.

        Models also write `FINAL_VAR(result)`. So the source of the call decides: a string literal is a name, and any
        other expression is the answer itself. An f-string is a name if such a variable exists, and so is text whose
        source is unknown.
        """
        if not is_a(name, str):
            self.final(name)
            return
        source = argument(sys._getframe(1), FINAL_VAR)
        key = str.strip(str.strip(name), "\"'`")
        is_name = isinstance(source, ast.Constant)
        if is_name or (self._is_variable(key) and (source is None or isinstance(source, ast.JoinedStr))):
            self.final(self._value_of(key))
        else:
            self.final(name)

    def _value_of(self, key: str) -> Any:
        if not self._is_variable(key):
            known = ", ".join(self._variables()) or "none yet"
            raise NameError(f"FINAL_VAR: there is no variable {key!r}; variables: {known}")
        return self._namespace[key]

    def _is_variable(self, key: str) -> bool:
        return key in self._namespace and self._namespace[key] is not HELPERS.get(key)

    def submit(self, *values: Any, **fields: Any) -> None:
        """End the run with one value as the answer, or with named fields as a JSON object."""
        if self._fields:
            self._note(self._named(values, fields))
        elif fields:
            self._note(dict(zip((f"field_{i}" for i in range(len(values))), values, strict=False)) | fields)
        else:
            self._note(values[0] if len(values) == 1 else list(values))
        self._end_block()

    # -- the dict `answer` -------------------------------------------------------------------------------------------

    def take_answer(self) -> str | None:
        """Submit `answer["content"]` if the block has set `answer["ready"]`; otherwise keep it as the draft.

        Returns:
            Error of the block, if the answer cannot be read; or None.
        """
        try:
            if self.has_answer:
                self._take_answer()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - `answer` holds objects of model code, whose methods may raise
            self._namespace[ANSWER] = _fresh_answer()  # otherwise each later block would fail in the same way
            why = f": {error}" if self._fields and type(error) is TypeError else ""
            return f"the answer cannot be read: {class_name(error)}{why}"
        return None

    def _take_answer(self) -> None:
        self._restore_answer()
        answer = self._namespace[ANSWER]
        content = answer.get("content")
        is_empty = content is None or content == ""
        if self.text is not None:
            return
        if not answer.get("ready"):
            if not is_empty:
                self.draft = _text(content)[:MAX_DRAFT_CHARS]
        elif is_empty:
            self._warn('answer["ready"] is set, but answer["content"] is empty: nothing was submitted\n')
        else:
            self._note(self._named((content,), {}) if self._fields else content)
            answer["ready"] = False

    def _restore_answer(self) -> None:
        """Make `answer` a dict again. If a block assigned another value to this name, then it becomes the content."""
        value = self._namespace.get(ANSWER)
        if type(value) is dict:
            return
        self._namespace[ANSWER] = _fresh_answer()
        if value is None:
            return
        # An instance of a subclass of model code: its methods may do anything, so they are called only once, here.
        if is_a(value, dict):
            self._namespace[ANSWER] = dict(value)
            return
        if is_a(value, *_DEFINITIONS):
            self._warn(
                "`answer` is the dict that submits, so your definition of this name is gone: choose another one\n"
            )
            return
        self._namespace[ANSWER]["content"] = value
        if self.text is None:
            self._warn('`answer` is the dict that submits: your value is now in answer["content"]\n')

    # -- recording ---------------------------------------------------------------------------------------------------

    def _note(self, value: Any) -> None:
        text = value if is_a(value, str) else _text(value)
        if text is not value and SHOWN in text:
            raise TypeError("the answer has a child in place of what it found: submit child.result()")
        str.encode(text)  # raise UnicodeEncodeError for lone surrogates here, at the line that submits
        self.value = Crossing() if text is value or self._fields else crossing(value, "the final answer")
        self.text = "" if self._fields else text

    def _named(self, values: tuple[Any, ...], fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a submission by name, after the orchestrator has checked them.

        Raises:
            TypeError: A field is missing, unknown or given twice, in Python's words; or the orchestrator refuses it.
        """
        if len(values) == 1 and not fields and self._is_whole(values[0]):
            named: dict[str, Any] = values[0]
        else:
            named = _function_of(tuple(self._fields))(*values, **fields)
        self._check_fields(named)
        return named

    def _is_whole(self, value: Any) -> bool:
        """Whether a value is the dict of all fields. Otherwise it is the value of one field, which may be a dict."""
        return type(value) is dict and (len(self._fields) > 1 or [*value] == self._fields)

    def _end_block(self) -> None:
        if self._ends_block:
            raise SystemExit(SUBMITTED)


@functools.lru_cache(8)
def _function_of(fields: tuple[str, ...]) -> Callable[..., dict[str, Any]]:
    """Return a function with these fields as its parameters, which returns them by name."""
    made: dict[str, Any] = {}
    source = f"def {SUBMIT}({', '.join(fields)}): return {{{', '.join(f'{each!r}: {each}' for each in fields)}}}"
    exec(source, made)
    return made[SUBMIT]  # type: ignore[no-any-return]


def argument(caller: FrameType, function: str) -> ast.expr | None:
    """Return the expression of the only argument of the call `function(argument)` that `caller` evaluates.

    Args:
        caller: Frame of the code that made the call.
        function: Name of the called function.

    Returns:
        The expression, given by position or by name. None if it is unknown: the code belongs to no block, its source is
        gone, the call is of another function (for example `map`, which calls this one), or it has `*args`.
    """
    source = _source_of_call(caller)
    try:
        call = ast.parse(source, mode="eval").body if source else None
    except (SyntaxError, ValueError):  # ValueError is raised for a null character
        return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != function:
        return None
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg is not None)]
    return given[0] if len(given) == 1 and not isinstance(given[0], ast.Starred) else None


def _source_of_call(caller: FrameType) -> str:
    """Return the source of the expression that `caller` evaluates just now; "" if it is unknown.

    Positions of instructions come from PEP 657. An instruction takes two bytes, so half of `f_lasti` is its index.
    """
    code = caller.f_code
    kept = linecache.cache.get(code.co_filename) if code.co_filename.startswith(BLOCK) else None
    place = next(itertools.islice(code.co_positions(), caller.f_lasti // 2, None), None)
    if kept is None or place is None or len(kept) != 4:
        return ""
    first, last, begin, end = place
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = [line.encode() for line in kept[2][first - 1 : last]]  # columns count bytes of UTF-8
    if len(lines) != last - first + 1:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode(errors="replace")


def _fresh_answer() -> dict[str, Any]:
    return {"content": "", "ready": False}


def _text(value: Any) -> str:
    if is_a(value, str):
        return str.__str__(value)
    if is_a(value, dict, list):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            pass  # JSON cannot express it: return its `str`
    return str(value)
