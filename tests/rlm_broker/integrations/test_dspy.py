"""The interpreter for DSPy, against a stand-in of its contract."""

import dataclasses
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from dspy.primitives.code_interpreter import CodeExecutionError, CodeInterpreterError, FinalOutput

from rlm_broker import ReplLimits, Sandbox
from rlm_broker.integrations.dspy import Interpreter
from rlm_broker.integrations.repl_base import LARGE_VALUES
from tests.support.tables import table


class Hit(pydantic.BaseModel):
    number: int
    tags: set[str] = pydantic.Field(default_factory=set)


@dataclasses.dataclass
class Box:
    width: float


class Opaque:
    def __str__(self) -> str:
        return "opaque"


class Unsendable(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    what: Opaque


@pytest.fixture
def interpreter(open_sandbox: Sandbox) -> Iterator[Interpreter]:
    with Interpreter(sandbox=open_sandbox, limits=LARGE_VALUES) as made:
        yield made


@table(
    "code, result",
    [
        ("n = 1", None),
        ("print('text')", "text\n"),
        ("print('text')\n6 * 7", 42),
        ("(1, {3, 2}, {'a': None})", [1, [2, 3], {"a": None}]),
        ("print", "<built-in function print>"),
        ("import datetime\ndatetime.date(2026, 1, 2)", "2026-01-02"),
        ("import sys\nprint('shown', file=sys.stderr)", "shown\n"),
        ("len(text) + data['hit']['number']", 100_000_002),
        ("sorted(box.items()), context", [[["width", 1.5]], "answer"]),
    ],
)
def test_result_of_a_cell(interpreter: Interpreter, code: str, result: object) -> None:
    variables = {
        "text": "x" * 100_000_000,
        "data": {"hit": Hit(number=2)},
        "box": Box(1.5),
        "context": "answer",
        "answer": 1,
    }
    assert interpreter.execute(code, variables if "text" in code or "box" in code else None) == result


@table(
    "code, error, sentence",
    [
        ("if", SyntaxError, "Invalid Python syntax. "),
        ("  1", SyntaxError, "Invalid Python syntax. "),
        ("1 / 0", CodeExecutionError, "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", CodeExecutionError, "SystemExit: 3"),
        ("raise KeyboardInterrupt('stop')", CodeExecutionError, "KeyboardInterrupt: stop"),
        (
            "class CodeInterpreterError(Exception): pass\nraise CodeInterpreterError('forged')",
            CodeExecutionError,
            "Code",
        ),
        ("SUBMIT(1, 2)", CodeExecutionError, "TypeError: SUBMIT() takes 1 positional argument but 2 were given"),
    ],
)
def test_failed_cell_leaves_the_session(
    interpreter: Interpreter, code: str, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error) as failed:
        interpreter.execute(code)
    assert (type(failed.value), str(failed.value)[: len(sentence)]) == (error, sentence)
    assert interpreter.execute("40 + 2") == 42


def test_submission_ends_the_cell_with_all_fields(interpreter: Interpreter) -> None:
    late: list[int] = []
    interpreter.tools["late"] = late.append
    code = "SUBMIT = None\nlate = None"
    assert interpreter.execute(code) is None
    submitted = interpreter.execute("try: SUBMIT(42)\nexcept Exception: pass\nlate(1)")
    assert isinstance(submitted, FinalOutput)
    assert (submitted.output, late) == ({"output": 42}, [])
    interpreter.output_fields = [{"name": "answer", "type": "str"}, {"name": "score"}]
    for code in ("SUBMIT('yes', {1, 2})", "SUBMIT(score=(1, 2), answer='yes')"):
        assert interpreter.execute(code).output == {"answer": "yes", "score": [1, 2]}
    with pytest.raises(CodeExecutionError, match="missing 1 required positional argument: 'score'"):
        interpreter.execute("SUBMIT('yes')")


@table(
    "answer, seen",
    [
        (3, "3"),
        (None, "None"),
        (Hit(number=1, tags={"b", "a"}), "{'number': 1, 'tags': ['a', 'b']}"),
        ([Box(1.0)], "[{'width': 1.0}]"),
        (Opaque(), "'opaque'"),
        (iter("ab"), "it returned a str_ascii_iterator, which code cannot be given: return a list"),
        (Unsendable(what=Opaque()), "Unable to serialize Unsendable as JSON"),
    ],
)
def test_answer_of_a_tool_is_as_json_has_it(open_sandbox: Sandbox, answer: Any, seen: str) -> None:
    with Interpreter({"ask": lambda: answer}, sandbox=open_sandbox) as interpreter:
        shown = interpreter.execute("try: print(repr(ask()))\nexcept RuntimeError as error: print(error)")
    if isinstance(answer, Hit):  # a set has no order, and pydantic's has none either
        shown = shown.replace("['b', 'a']", "['a', 'b']")
    assert seen in shown


def test_tools_take_keywords_and_may_change(interpreter: Interpreter) -> None:
    calls: list[Any] = []
    interpreter.callbacks.append(lambda name, args: calls.append((name, args)))

    def by_keyword(**given: int) -> int:
        return sum(given.values())

    by_keyword.__signature__ = inspect.signature(lambda left, right: left + right)  # type: ignore[attr-defined]

    async def waits(n: int) -> int:
        return n

    interpreter.tools.update({"add": by_keyword, "waits": waits, "most": max})
    assert interpreter.execute("add(1, right=2), waits(3), most(4, 5)") == [3, 3, 5]
    assert ("invoke_tool", ("waits", [], {"n": 3})) in calls
    interpreter.tools = {}
    with pytest.raises(CodeExecutionError, match="NameError"):
        interpreter.execute("add(1, 2)")


@table(
    "given, error, sentence",
    [
        ({"variables": {"class": 1}}, CodeInterpreterError, "Invalid variable name 'class'"),
        ({"variables": {"SUBMIT": 1}}, CodeInterpreterError, "invalid names: ['SUBMIT']"),
        ({"variables": {"tool": 1}}, CodeInterpreterError, "invalid names: ['tool']"),
        ({"variables": [1]}, CodeInterpreterError, "variables must be a dict"),
        ({"variables": {"n": Opaque()}}, CodeInterpreterError, "Unable to serialize Opaque as JSON"),
        ({"code": None}, CodeInterpreterError, "code must be a string"),
    ],
)
def test_arguments_that_cannot_be_used(
    open_sandbox: Sandbox, given: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with Interpreter({"tool": print}, sandbox=open_sandbox) as interpreter:
        with pytest.raises(error) as refused:
            interpreter.execute(**{"code": "1", **given})
        assert sentence in str(refused.value)
        assert interpreter.execute("2") == 2


@table(
    "given, sentence",
    [
        ({"tools": {"no name": print}}, "invalid names: ['no name']"),
        ({"tools": {"SUBMIT": print}}, "invalid names: ['SUBMIT']"),
        ({"output_fields": [{"name": "no name"}]}, "invalid names: ['no name']"),
        ({"output_fields": [{"name": "a"}, {"name": "a"}]}, "each name once"),
        ({"output_fields": ["a"]}, "output fields need names"),
        ({"output_fields": "ab"}, "output fields need names"),
        ({"output_fields": [{"name": "a", "default": print}]}, "as JSON has them"),
        ({"execution_timeout": 0}, "execution_timeout must be positive"),
    ],
)
def test_settings_that_cannot_be_used(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        Interpreter(**given)
    assert sentence in str(refused.value)


def test_time_of_an_execution_is_over_with_its_tools(open_sandbox: Sandbox) -> None:
    ends = threading.Event()
    interpreter = Interpreter({"hang": ends.wait}, execution_timeout=0.2, sandbox=open_sandbox)
    with pytest.raises(CodeInterpreterError, match=r"exceeded execution timeout of 0\.2 seconds"):
        interpreter.execute("hang()")
    ends.set()
    for use in (interpreter.start, lambda: interpreter.execute("1")):
        with pytest.raises(CodeInterpreterError, match="its session has ended"):
            use()


def test_limit_of_computing_is_said_and_leaves_the_session(open_sandbox: Sandbox) -> None:
    with Interpreter(limits=ReplLimits(block_timeout_s=0.2), sandbox=open_sandbox) as interpreter:
        with pytest.raises(CodeExecutionError, match=r"longer than block_timeout_s = 0\.2 s"):
            interpreter.execute("kept = 5\nwhile True: pass")
        assert interpreter.execute("kept") == 5


def test_shutdown_is_final(open_sandbox: Sandbox) -> None:
    interpreter = Interpreter(sandbox=open_sandbox)
    for _ in range(2):
        interpreter.shutdown()
    with pytest.raises(CodeInterpreterError, match="was shut down"):
        interpreter.start()
    assert Interpreter.execution_instructions
