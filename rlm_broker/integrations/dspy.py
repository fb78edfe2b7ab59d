"""DSPy: an interpreter for `dspy.RLM`, `Flex`, `CodeAct` and `ProgramOfThought` that runs code in a sandbox."""

import contextlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, NoReturn, Self

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from rlm_broker.integrations.peers import require
from rlm_broker.integrations.repl_base import PeerRepl, awaited, error_of, text_of
from rlm_broker.limits import ReplLimits
from rlm_broker.results import Block
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.values.names import is_identifier

require("dspy", "dspy", tested=("3.3", "3.5"))

from dspy.primitives.code_interpreter import CodeExecutionError, CodeInterpreterError, FinalOutput
from dspy.utils.callback import with_callbacks

OWN_NAMES: Final = ("SUBMIT", "__builtins__")
"""Names that neither a tool nor a variable may have."""
SYNTAX_ERRORS: Final = ("SyntaxError", "IndentationError", "TabError")


class Interpreter:
    """A DSPy code interpreter in a sandbox of its own. The session ends with `shutdown`, or with its variables.

    Example:
        ```python
        dspy.configure(interpreter_factory=rlm_broker.integrations.dspy.Interpreter)
        rlm = dspy.RLM("context, query -> answer")
        ```

    Args:
        tools: Name → function of this process that code may call. Async ones are awaited.
        output_fields: Fields of `SUBMIT`, each a dict with its `name`. None is one value, the field "output".
        execution_timeout: Seconds of one execution with its tools. Then the session ends. None has the limits of the
            sandbox alone, which interrupt code that computes for a minute and leave its variables.
        callbacks: Callbacks of DSPy's for this interpreter.
        sandbox: An open `Sandbox`, for example one with packages; None shares one of the process.
        limits: Limits of the session; None takes the sandbox's.

    Raises:
        ValueError: A name of a tool or a field cannot be used, or the timeout is not positive.
    """

    execution_instructions = (
        "Code runs as CPython in an isolated process of its own. Variables, imports and functions persist for this "
        "session. Installed packages can be imported. There is no network, and the only files that can be written are "
        "those in the current folder. Host tools and SUBMIT are global functions."
    )

    def __init__(
        self,
        tools: dict[str, Callable[..., Any]] | None = None,
        output_fields: list[dict[str, Any]] | None = None,
        *,
        execution_timeout: float | None = None,
        callbacks: list[Any] | None = None,
        sandbox: Sandbox | None = None,
        limits: ReplLimits | None = None,
    ) -> None:
        if execution_timeout is not None and execution_timeout <= 0:
            raise ValueError("execution_timeout must be positive or None")
        self.tools = dict(tools or {})
        self.output_fields = output_fields and [
            dict(field) if isinstance(field, dict) else field for field in output_fields
        ]
        self.execution_timeout = execution_timeout
        self.callbacks = list(callbacks or [])
        self._require_names()
        self._repl = PeerRepl(
            "the interpreter", CodeInterpreterError, sandbox=sandbox, limits=limits, convert=_variable
        )

    @with_callbacks  # type: ignore[untyped-decorator]
    def start(self) -> None:
        """Open the session, unless it is open."""
        self._repl.open()

    @with_callbacks  # type: ignore[untyped-decorator]
    def execute(self, code: str, variables: dict[str, Any] | None = None) -> Any:
        """Run code with these variables.

        Returns:
            `FinalOutput` with the fields if code called `SUBMIT`. Else the value of the last expression, as JSON has it
            or as its `repr`; without a value, what was printed; None if there is neither.

        Raises:
            SyntaxError: The code is not Python.
            CodeExecutionError: It raised, or was interrupted by a limit. The session goes on.
            CodeInterpreterError: An argument cannot be used. Or the session has ended: its process has died, it was
                shut down, or `execution_timeout` is over.
        """
        fields = self._require_names()
        if not isinstance(code, str):
            raise CodeInterpreterError("code must be a string")
        variables = {} if variables is None else variables
        self._require_variables(variables)
        block = self._repl.execute(
            code,
            values={key: _variable(each) if isinstance(each, BaseModel) else each for key, each in variables.items()},
            tools={name: partial(self._answer, name) for name in self.tools},
            submit=dict.fromkeys(fields, Any),
            wall_timeout_s=self.execution_timeout,
        )
        if block.status != "ok":
            self._fail(block)
        if block.final_value is not None:
            return FinalOutput({name: _jsonable(value) for name, value in block.final_value.items()})
        if block.result is not None:
            return text_of(block) if block.value is None else _jsonable(block.value, lambda _: text_of(block))
        return block.stdout + block.stderr or None

    @with_callbacks  # type: ignore[untyped-decorator]
    def invoke_tool(self, tool_name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a tool, and return its answer."""
        return awaited(self.tools[tool_name](*args, **kwargs))

    @with_callbacks  # type: ignore[untyped-decorator]
    def shutdown(self) -> None:
        """End the session with all its processes."""
        self._repl.close("shutdown() was called")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __call__(self, code: str, variables: dict[str, Any] | None = None) -> Any:
        """Run code as `execute` does."""
        return self.execute(code, variables)

    # -- names -------------------------------------------------------------------------------------------------------

    def _require_names(self) -> list[str]:
        """Return the names of the fields. DSPy changes tools and fields between executions, so they are read anew."""
        if wrong := _unusable(self.tools):
            raise ValueError(f"tools need names that are Python identifiers and not reserved; invalid names: {wrong!r}")
        if self.output_fields is None:
            return ["output"]
        names = [field.get("name") if isinstance(field, dict) else None for field in self.output_fields]
        if wrong := [name for name in names if not is_identifier(name)]:
            raise ValueError(f"output fields need names that are Python identifiers; invalid names: {wrong!r}")
        if len(set(names)) < len(names) or not names:
            raise ValueError("output_fields must be a list of fields, each name once, or None")
        try:
            json.dumps(self.output_fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"output fields must be as JSON has them: {error}") from None
        return [str(name) for name in names]

    def _require_variables(self, variables: object) -> None:
        if not isinstance(variables, dict):
            raise CodeInterpreterError("variables must be a dict from name to value")
        if wrong := [*_unusable(variables), *(self.tools.keys() & variables.keys())]:
            raise CodeInterpreterError(
                f"Invalid variable name {wrong[0]!r}: variables need names that are Python identifiers, not reserved, "
                f"and no tool's; invalid names: {wrong!r}"
            )

    # -- tools and failures ------------------------------------------------------------------------------------------

    def _answer(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a tool for code. DSPy's tools take keywords, so arguments by position get the names of its signature."""
        signature = None
        with contextlib.suppress(TypeError, ValueError):  # some functions in C have none
            signature = inspect.signature(self.tools[name]) if args else None
        if signature and all(each.kind in _BY_NAME for each in signature.parameters.values()):
            args, kwargs = (), signature.bind(*args, **kwargs).arguments
        answer = self.invoke_tool(name, list(args), kwargs)
        if isinstance(answer, Iterator):
            raise TypeError(f"it returned a {type(answer).__name__}, which code cannot be given: return a list")
        return _jsonable(answer._asdict() if hasattr(answer, "_asdict") else answer, _text)

    def _fail(self, block: Block) -> NoReturn:
        """Raise what became of code that did not succeed."""
        if self.execution_timeout is not None and block.limit == "block_wall_timeout_s":
            self._repl.close("an execution took too long")
            raise CodeInterpreterError(f"the code exceeded execution timeout of {self.execution_timeout:g} seconds")
        if block.error_type in SYNTAX_ERRORS:
            raise SyntaxError(f"Invalid Python syntax. {block.error_text}")
        raise CodeExecutionError(error_of(block))


_BY_NAME: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _unusable(names: Iterable[object]) -> list[object]:
    return [name for name in names if not is_identifier(name) or name in OWN_NAMES]


def _text(answer: Any) -> str:
    """Return the text of a tool's answer that JSON has no form for; of a model, that would hide a mistake."""
    return str(_variable(answer) if isinstance(answer, BaseModel) else answer)


def _variable(value: Any) -> Any:
    """Return a variable as JSON has it. Raise CodeInterpreterError if there is no such form."""
    try:
        return _as_json(value)
    except _NO_JSON as error:
        raise CodeInterpreterError(f"Unable to serialize {type(value).__name__} as JSON: {error}") from None


def _jsonable(value: Any, other: Callable[[Any], Any] = repr) -> Any:
    """Return a value as JSON has it. One without such a form is `other` of it, as in DSPy's own interpreters."""
    try:
        return _as_json(value)
    except _NO_JSON:
        return other(value)


def _as_json(value: Any) -> Any:
    """Return a value as JSON has it: lists for tuples and sets, fields for models and dataclasses."""
    is_plain = value is None or type(value) in (str, int, float, bool)
    return value if is_plain else json.loads(json.dumps(value, default=_part))


def _part(value: Any) -> Any:
    """Return what `json` takes in the place of an object that it does not know. Sets are sorted, if they can be."""
    if isinstance(value, set | frozenset):
        with contextlib.suppress(TypeError):
            return sorted(value)
        return list(value)
    return to_jsonable_python(value)


_NO_JSON: Final = (TypeError, ValueError, RecursionError)
"""Errors of `json` and pydantic for objects that they do not know, circles and deep values."""
