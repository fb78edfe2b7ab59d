"""Times of our interpreter for DSPy beside those of its own, by turns."""

from collections.abc import Callable
from typing import Any

import dspy

from rlm_broker.integrations.dspy import Interpreter
from scripts.integrations.inside.turns import by_turns

OURS = "ours"


def interpreters() -> None:
    """Print a line for each figure."""
    kinds: dict[str, Callable[..., Any]] = {OURS: Interpreter, "LocalInterpreter": dspy.LocalInterpreter}
    made = {name: _maker(kind) for name, kind in kinds.items()}
    print("made to first result:", by_turns(OURS, made, 40, _shut_down))
    theirs = {OURS: made[OURS], "PythonInterpreter": _maker(dspy.PythonInterpreter)}
    try:
        print("made to first result:", by_turns(OURS, theirs, 5, _shut_down))
    except dspy.CodeInterpreterError as error:
        print("PythonInterpreter cannot be started here:", str(error).strip().partition("\n")[0])
    text = "x" * 10_000_000
    tools = {"add": lambda left, right: left + right}
    opened = {name: kind(tools=tools) for name, kind in kinds.items()}
    for what, code, variables in (
        ("a cell with a value", "n + 1", {"n": 1}),
        ("a cell with a host tool", "add(left=1, right=2)", None),
        ("10 MB given again", "len(text)", {"text": text}),
    ):
        cells = {name: _cell(interpreter, code, variables) for name, interpreter in opened.items()}
        print(f"{what}:", by_turns(OURS, cells, 20 if variables and "text" in variables else 300))
    for interpreter in opened.values():
        interpreter.shutdown()


def _maker(kind: Callable[..., Any]) -> Callable[[], object]:
    def make() -> object:
        interpreter = kind()
        interpreter.execute("40 + 2")
        return interpreter

    return make


def _shut_down(interpreter: Any) -> None:
    interpreter.shutdown()


def _cell(interpreter: Any, code: str, variables: dict[str, Any] | None) -> Callable[[], object]:
    return lambda: interpreter.execute(code, variables)
