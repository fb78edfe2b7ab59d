"""Blocks that end where they submit, tools that come and go, and values that are given once: as a caller has them."""

import datetime
import decimal
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pydantic
import pytest

from rlm_broker import ConfigurationError, FunctionClient, LMHandler, ReplClosed, Sandbox
from rlm_broker.sandbox.repl import SandboxedRepl
from sandbox_worker.wire.messages import MAX_RESULT_BYTES
from tests.support.tables import table


class Person(pydantic.BaseModel):
    name: str
    born: datetime.date


def even(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number


@pytest.fixture
def repl(open_sandbox: Sandbox) -> Iterator[SandboxedRepl]:
    with open_sandbox.repl("text") as opened:
        yield opened


def test_submit_ends_its_block(repl: SandboxedRepl) -> None:
    block = repl.execute("try: SUBMIT([1, 2])\nexcept Exception: pass\nprint('after')", submit=True)
    assert (block.status, block.stdout, block.final_answer, block.final_value) == ("ok", "", "[1, 2]", [1, 2])
    block = repl.execute("SUBMIT(1)\nprint('after')")
    assert (block.stdout, block.final_answer) == ("after\n", "1")


@table(
    "submit, code, value",
    [
        ({"n": int, "why": str}, "SUBMIT(n=1, why='x')", {"n": 1, "why": "x"}),
        ({"n": int}, "SUBMIT('7')", {"n": 7}),
        (
            {"who": Person},
            "SUBMIT(who={'name': 'Ada', 'born': '1815-12-10'})",
            {"who": Person(name="Ada", born=datetime.date(1815, 12, 10))},
        ),
        (
            {"day": datetime.date},
            "import datetime\nSUBMIT(datetime.date(2026, 1, 2))",
            {"day": datetime.date(2026, 1, 2)},
        ),
        ({"pair": tuple[int, str]}, "SUBMIT((1, 'a'))", {"pair": (1, "a")}),
        ({"rows": {"type": "array", "items": {"type": "integer"}}}, "SUBMIT([1, 2])", {"rows": [1, 2]}),
        ({"any": Any}, "SUBMIT({1: b'x'})", {"any": {1: b"x"}}),
    ],
)
def test_submit_fields_have_types(repl: SandboxedRepl, submit: dict[str, Any], code: str, value: Any) -> None:
    block = repl.execute(f"{code}\nprint('after')", submit=submit)
    assert (block.status, block.error, block.stdout, block.final_value) == ("ok", None, "", value)
    assert block.final_value_problem is None


@table(
    "submit, code, problem",
    [
        ({"n": int}, "SUBMIT(n='many')", "n: Input should be a valid integer"),
        ({"n": int, "m": int}, "SUBMIT(n=1)", "SUBMIT() missing 1 required positional argument: 'm'"),
        ({"n": int}, "SUBMIT(n=1, m=2)", "SUBMIT() got an unexpected keyword argument 'm'"),
        ({"n": pydantic.PositiveInt}, "SUBMIT(-1)", "n: Input should be greater than 0"),
        ({"n": Annotated[int, pydantic.AfterValidator(even)]}, "SUBMIT(3)", "3 is odd"),
        ({"n": {"type": "integer"}}, "SUBMIT('x')", "n: 'x' is not of type 'integer'"),
        ({"way": Literal["up", "down"]}, "SUBMIT('left')", "way: Input should be 'up' or 'down'"),
        ({"text": str}, f"SUBMIT('x' * {MAX_RESULT_BYTES})", f"more than {MAX_RESULT_BYTES:,}"),
    ],
)
def test_submit_error_lets_code_go_on(repl: SandboxedRepl, submit: dict[str, Any], code: str, problem: str) -> None:
    block = repl.execute(f"try:\n    {code}\nexcept TypeError as error:\n    print(error)", submit=submit)
    assert problem in block.stdout
    assert (block.status, block.final_answer, block.final_value) == ("ok", None, None)


def test_submission_without_check_is_refused(repl: SandboxedRepl) -> None:
    forge = (
        "import gc\n"
        "own = next(each for each in gc.get_objects() if type(each).__name__ == 'Submission')\n"
        "own.text = '{\"n\": 1}'"
    )
    block = repl.execute(forge, submit={"n": int})
    assert (block.status, block.final_answer, block.final_value) == ("ok", None, None)
    asked = (
        "import msgspec\nfrom sandbox_worker.wire.messages import Submit\n"
        "channel = next(each for each in gc.get_objects() if type(each).__name__ == 'Channel')\n"
        "print(channel.ask(Submit('', msgspec.Raw(b'{\"m\": 1}'))).slots)"
    )
    assert "no fields to submit" in repl.execute(asked).stdout
    assert "give the fields n, each once; given were m" in repl.execute(asked, submit={"n": int}).stdout


@table(
    "submit, problem",
    [
        ("n", "submit must be True or a dict from field to type, such as {'answer': str}, not str"),
        ({}, "submit has no fields"),
        ({"n": "Nope"}, "the field n: give the type itself, not the text 'Nope'"),
        ({"n": list["Nope"]}, "the field n: pydantic cannot validate .* is not defined"),  # type: ignore[name-defined]  # noqa: F821
        ({"a b": int}, "a field cannot be called 'a b'"),
        ({1: int}, "a field cannot be called 1"),
        ({"n": object()}, "the field n: pydantic cannot validate"),
        ({"n": {"type": "nonsense"}}, "the field n is not a JSON Schema"),
    ],
)
def test_unusable_submit_is_refused(repl: SandboxedRepl, submit: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as refused:
        repl.execute("x = 1", submit=submit)
    assert "\n" not in str(refused.value)
    assert repl.execute("'x' in globals()").stdout == "False\n"


def test_tools_come_and_go(open_sandbox: Sandbox) -> None:
    with LMHandler(FunctionClient(lambda _: "")) as handler:
        answers = handler.answers(tools={"one": lambda: 1})
        with open_sandbox.repl("text", answer=answers, tools=answers.tools) as repl:
            assert repl.execute("one()").stdout == "1\n"
            answers.set_tools({"two": lambda: 2, "LIMIT": 3})
            repl.set_tools(answers.tools)
            repl.provide(answers.values)
            assert repl.execute("two() + LIMIT").stdout == "5\n"
            assert "NameError" in (repl.execute("one()").error or "")
            repl.execute("import os; os.kill(os.getpid(), 9)")
            assert repl.execute("two() + LIMIT; 'one' in globals()").stdout == "False\n"
            repl.set_tools([])
            assert "NameError" in (repl.execute("two()").error or "")


def test_names_of_tools_and_values_are_apart(repl: SandboxedRepl) -> None:
    repl.provide({"x": 1})
    with pytest.raises(ConfigurationError, match="x: a name is that of a tool or of a value, not of both"):
        repl.set_tools(["x"])
    repl.set_tools(["search"])
    with pytest.raises(ConfigurationError, match="search: a name is that of a tool or of a value, not of both"):
        repl.provide({"search": 1})
    with pytest.raises(ConfigurationError, match="a tool cannot be called 'a b'"):
        repl.set_tools(["a b"])
    with pytest.raises(ConfigurationError, match="restore must be a bool, not int"):
        repl.provide({"y": 1}, restore=1)  # type: ignore[arg-type]
    assert repl.execute("x, 'y' in globals(), callable(search)").stdout == "(1, False, True)\n"


def test_value_given_once_is_the_codes_own(repl: SandboxedRepl) -> None:
    repl.provide({"rows": [1]}, restore=False)
    repl.provide({"fixed": [1]})
    assert json.loads(repl.execute("rows.append(2); fixed = None; FINAL(rows)").final_answer or "") == [1, 2]
    assert repl.execute("rows, fixed").stdout == "([1, 2], [1])\n"
    repl.execute("import os; os.kill(os.getpid(), 9)")
    assert repl.execute("rows, fixed").stdout == "([1, 2], [1])\n"


def test_closed_repl_takes_no_tools_or_values(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl() as repl:
        pass
    with pytest.raises(ReplClosed):
        repl.set_tools(["search"])


class Tree(pydantic.BaseModel):
    left: "Tree | None" = None


def test_recursive_type_limits_the_depth(repl: SandboxedRepl) -> None:
    """A value of a type that refers to itself may be at most 14 levels deep."""
    code = "tree = None\nfor _ in range({}): tree = {{'left': tree}}\nSUBMIT(tree)"
    block = repl.execute(code.format(100), submit={"tree": Tree})
    assert "nested deeper than 14 levels, in a type that refers to itself" in (block.error or "")
    assert isinstance(repl.execute(code.format(10), submit={"tree": Tree}).final_value["tree"], Tree)
    deep = code.format(100)  # of another type it may be deep
    assert repl.execute(deep, submit={"tree": dict[str, Any]}).status == "ok"


def test_long_numbers_are_refused_early(repl: SandboxedRepl) -> None:
    block = repl.execute("SUBMIT(1 << 4_000_000)", submit={"n": decimal.Decimal})
    assert block.error == "TypeError: SUBMIT()['n'] is a number of more than 10,000 digits, which does not cross"
    forged = (
        "import gc, msgspec\nfrom sandbox_worker.wire.messages import Submit\n"
        "channel = next(each for each in gc.get_objects() if type(each).__name__ == 'Channel')\n"
        "text = '{\"n\":{\"$int\":\"1' + '0' * 100_000 + '\"}}'\n"
        "print(channel.ask(Submit('', msgspec.Raw(text.encode()))).slots[0].error)"
    )
    assert "an integer is too long" in repl.execute(forged, submit={"n": decimal.Decimal}).stdout


def test_unique_items_are_found_in_linear_time(repl: SandboxedRepl) -> None:
    submit = {"rows": {"type": "array", "uniqueItems": True}}
    block = repl.execute("SUBMIT([{'n': number} for number in range(20_000)])", submit=submit)
    assert (block.status, block.error) == ("ok", None)
    block = repl.execute("SUBMIT([{'n': 1}, {'n': 1.0}, True, 1])", submit=submit)
    assert "1 items repeat earlier ones" in (block.error or "")


def test_field_text_is_of_the_checked_value(repl: SandboxedRepl) -> None:
    block = repl.execute("SUBMIT(n='7', day='2026-01-02')", submit={"n": int, "day": datetime.date})
    assert block.final_answer == '{"n": 7, "day": "2026-01-02"}'
    forge = (
        "import gc\n"
        "own = next(each for each in gc.get_objects() if type(each).__name__ == 'Submission')\n"
        "try: SUBMIT('no')\nfinally: own.text = '\"yes\"'"
    )
    assert repl.execute(forge, submit={"verdict": Literal["yes", "no"]}).final_answer == '{"verdict": "no"}'
