"""What model code submits: by a call of `FINAL`, `FINAL_VAR` or `SUBMIT`, or by the dict `answer`.

A submission is noted when it is made. By default the block goes on. A block that ends where it submits has a
`SystemExit` raised in it, with `SUBMITTED` as its code: no `except Exception` stops it, asyncio lets it through, and a
thread ends by it without a word (`threading` says nothing of a SystemExit alone, and not of a subclass).
"""

import ast
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from sandbox_worker.repl import call_site
from sandbox_worker.repl.classes import class_name, is_a
from sandbox_worker.repl.crossing import Crossing, crossing
from sandbox_worker.repl.helpers import HELPERS
from sandbox_worker.wire.messages import MAX_DRAFT_CHARS
from sandbox_worker.wire.names import ANSWER, FINAL_VAR


class _ExitCode(int):
    """An exit code that is told from any other 0 by its identity."""


SUBMITTED: Final = _ExitCode(0)
"""Code of the SystemExit that ends a block which has submitted."""


class Submission:
    """The submission of the block that runs.

    Args:
        namespace: Where `answer` is.
        warn: Prints a line for the model to read.
        variables: Returns name → type of the variables that exist.
        check_fields: Has the orchestrator check fields; raises TypeError if they are not what it wants.

    Attributes:
        text: What was submitted, as text; None is nothing.
        value: The same as a value, where that is no text.
        draft: What stands in `answer["content"]` at the end of the block without being submitted; None is nothing.
    """

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
            submit: Names of the fields that it has to submit, none for any value; None lets it go on after submitting.
        """
        self.text: str | None = None
        self.value = Crossing()
        self.draft: str | None = None
        self._ends_block = submit is not None
        self._fields = submit or []
        self._restore_answer()

    # -- what model code calls ---------------------------------------------------------------------------------------

    def final(self, value: Any = None) -> None:
        """End the run: `value` is the answer."""
        if type(value) is dict and value.keys() == _fresh_answer().keys():
            value = value["content"]  # FINAL(answer) means what is in it
        self._note(self._named((value,), {}) if self._fields else value)
        self._end_block()

    def final_var(self, name: str) -> None:
        """End the run: the value of the variable called `name` is the answer; of `FINAL_VAR(result)` that of `result`.

        The source of the call decides. A string literal is a name, any other expression is the answer itself, whatever
        text it is. An f-string is a name if there is such a variable, and so is text of which the source is not known.
        """
        if not is_a(name, str):
            self.final(name)
            return
        source = call_site.argument(sys._getframe(1), FINAL_VAR)
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
        """End the run: one value, or named fields as a JSON object."""
        if self._fields:
            self._note(self._named(values, fields))
        elif fields:
            self._note(dict(zip((f"field_{i}" for i in range(len(values))), values, strict=False)) | fields)
        else:
            self._note(values[0] if len(values) == 1 else list(values))
        self._end_block()

    # -- the dict `answer` -------------------------------------------------------------------------------------------

    def take_answer(self) -> str | None:
        """Take what the block has left in `answer`. `answer["ready"] = True` submits `answer["content"]`.

        Returns:
            Why it cannot be taken, as the error of the block.
        """
        try:
            self._take_answer()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - what stands in `answer` is the model's, its `__str__` may raise
            self._namespace[ANSWER] = _fresh_answer()  # or each later block would end like this one
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
        """Make `answer` a dict again. What a block assigned to that name becomes its content: nothing is lost."""
        value = self._namespace.get(ANSWER)
        if type(value) is dict:
            return
        self._namespace[ANSWER] = _fresh_answer()
        if value is None:
            return
        if is_a(value, dict):  # of a class of the model's, whose methods may do anything: they are called once
            self._namespace[ANSWER] = dict(value)
            return
        self._namespace[ANSWER]["content"] = value
        if self.text is None:
            self._warn('`answer` is the dict that submits: your value is now in answer["content"]\n')

    # -- taking it ---------------------------------------------------------------------------------------------------

    def _note(self, value: Any) -> None:
        text = value if is_a(value, str) else _text(value)
        str.encode(text)  # a lone surrogate is an error where the answer is submitted
        self.value = Crossing() if text is value else crossing(value, "the final answer")
        self.text = text

    def _named(self, values: tuple[Any, ...], fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a submission by name, once the orchestrator has checked them."""
        if len(values) == 1 and not fields and self._is_whole(values[0]):
            named: dict[str, Any] = values[0]
        elif len(values) > len(self._fields):
            raise TypeError(f"SUBMIT() takes the fields {', '.join(self._fields)}, and was given {len(values)} values")
        else:
            named = dict(zip(self._fields, values, strict=False))
            if twice := sorted(named.keys() & fields.keys()):
                raise TypeError(f"SUBMIT() was given {', '.join(twice)} twice")
            named |= fields
        self._check_fields(named)
        return named

    def _is_whole(self, value: Any) -> bool:
        """Return whether a value is the dict of all fields, and not one field that is a dict."""
        return type(value) is dict and (len(self._fields) > 1 or [*value] == self._fields)

    def _end_block(self) -> None:
        if self._ends_block:
            raise SystemExit(SUBMITTED)


def _fresh_answer() -> dict[str, Any]:
    return {"content": "", "ready": False}


def _text(value: Any) -> str:
    if is_a(value, str):
        return str.__str__(value)
    if is_a(value, dict, list):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            pass  # not JSON: shown as Python shows it
    return str(value)
