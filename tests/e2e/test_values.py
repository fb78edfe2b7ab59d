"""Values cross the border between orchestrator and REPL as they are, both ways, or are refused with their place."""

import contextlib
import dataclasses
import datetime
import decimal
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pandas
import pydantic
import pytest

from rlm_broker import RLM, ConfigurationError, Limits, Sandbox, ScriptedClient, ValueUnavailable
from rlm_broker.sandbox.repl import SandboxedRepl
from tests.support.tables import table
from tests.support.waiting import WAIT_S

RunWithTools = Callable[..., str]

CROSSES: list[Any] = [
    {"text": "é\n", "numbers": [1, -1.5, 2**70, True, None], "empty": [{}, []]},
    (1, ("a", (None,))),
    {1: "one", 2.5: [True], None: "none", (1, "a"): {}, "text": 1},
    {"$tuple": [1]},
    [{1, 2}, frozenset({"a"}), set()],
    [float("inf"), float("-inf"), -0.0, 1 + 2j],
    [b"\x00\xff", bytearray(b"abc"), "a\ud800", 7**900],
    [decimal.Decimal("1.10"), Path("/tmp/x")],
    [datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), datetime.date(2026, 1, 1), datetime.timedelta(days=1)],
    numpy.float64(0.5),
]
REFUSED: list[tuple[str, str]] = [
    ("object()", "is an object, which does not cross"),
    ("print", "is a builtin_function_or_method, which does not cross"),
    ("iter([1])", "is a list_iterator, which does not cross"),
    ("type('Model', (), {})()", "is a Model, which does not cross"),
    ("range(3)", "is a range, which does not cross"),
]


@dataclasses.dataclass
class Point:
    x: float
    tags: list[str]


class Person(pydantic.BaseModel):
    name: str
    born: Any


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    limits = Limits(interrupt_grace_s=WAIT_S, max_repl_restarts=50, max_frame_bytes=4 << 20)
    with Sandbox(limits, warm=0) as opened:
        yield opened


@pytest.fixture
def repl(sandbox: Sandbox) -> Iterator[SandboxedRepl]:
    with sandbox.repl("the context") as opened:
        yield opened


# -- into a REPL -----------------------------------------------------------------------------------------------------


def test_values_cross_both_ways_unchanged(sandbox: Sandbox) -> None:
    """The values of a REPL arrive unchanged, and come back unchanged."""
    with sandbox.repl(values={"X": CROSSES}) as repl:
        assert repl.execute("X", value=True).value == CROSSES
        repl.provide({"Y": tuple(CROSSES), "N": float("nan")})
        block = repl.execute("(Y, type(Y[-1]).__module__, N != N)", value=True)
        assert block.value == (tuple(CROSSES), "numpy", True)
        repl.execute("import os; os._exit(1)")
        assert repl.get("X", "Y") == (CROSSES, tuple(CROSSES))


@table("code, why", REFUSED)
def test_value_that_does_not_cross_is_refused(sandbox: Sandbox, code: str, why: str) -> None:
    value = {"a": [eval(code)]}
    with pytest.raises(ConfigurationError) as refused:
        sandbox.repl(values={"X": value})
    assert str(refused.value) == f"the value X['a'][0] {why}"
    with sandbox.repl() as repl, pytest.raises(ConfigurationError, match=r"the value X\['a'\]\[0\] is a"):
        repl.provide({"X": value})
    with pytest.raises(ConfigurationError, match=r"tool 'X': neither .* it\['a'\]\[0\] is "):
        RLM(ScriptedClient([]), tools={"X": value})


def test_value_without_its_package_fails_its_block(repl: SandboxedRepl) -> None:
    """A value whose package is missing is the error of its block."""
    repl.execute("import sys; sys.modules['numpy'] = None")
    repl.provide({"X": numpy.arange(3)})
    block = repl.execute("print('ran')")
    assert (block.status, block.stdout) == ("error", "")
    assert block.error == "the value X cannot be loaded: it needs the package numpy, which is not installed here"
    assert repl.execute("print('ran')").stdout == "ran\n"


# -- tools -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_with_tools(sandbox: Sandbox) -> RunWithTools:
    def run(code: str, **tools: Any) -> str:
        rlm = RLM(lambda _messages: f"```repl\n{code}\n```", tools=tools, sandbox=sandbox)
        return str(rlm.completion("c", "q").response)

    return run


def test_tool_arguments_and_results_cross_unchanged(run_with_tools: RunWithTools) -> None:
    seen: list[Any] = []

    def echo(value: Any, **more: Any) -> Any:
        seen.append((value, more))
        return value

    code = "got = echo(GIVEN, more=(1, {2}))\nFINAL([got == GIVEN, type(got[-1]).__name__])"
    assert run_with_tools(code, echo=echo, GIVEN=CROSSES) == '[true, "float64"]'
    assert seen == [(CROSSES, {"more": (1, {2})})]


def test_array_is_a_typed_tool_argument(run_with_tools: RunWithTools) -> None:
    def mean(values: numpy.ndarray) -> float:
        return float(values.mean())

    code = "import numpy\ntry: mean([1, 2])\nexcept Exception as error: FINAL([mean(numpy.arange(5)), str(error)])"
    assert run_with_tools(code, mean=mean).startswith('[2.0, "mean(): 0: Input should be an instance of ndarray')


@table("code, why", REFUSED)
def test_tool_result_that_does_not_cross_fails(run_with_tools: RunWithTools, code: str, why: str) -> None:
    told = run_with_tools("try: bad()\nexcept RuntimeError as error: FINAL(error)", bad=lambda: {"a": [eval(code)]})
    assert told.startswith(f"bad(): its result['a'][0] {why}")


@table("code, why", REFUSED)
def test_tool_argument_that_does_not_cross_fails(run_with_tools: RunWithTools, code: str, why: str) -> None:
    for argument, place in ((f"[1, {code}]", "args[0][1]"), (f"x={{'a': {code}}}", "kwargs['x']['a']")):
        told = run_with_tools(f"try: echo({argument})\nexcept TypeError as error: FINAL(error)", echo=lambda x: x)
        assert told == f"echo(): {place} {why}"


def test_recursive_tool_argument_is_a_type_error(run_with_tools: RunWithTools) -> None:
    code = "a = [1]\na.append(a)\ntry: echo(a)\nexcept TypeError as error: FINAL(error)"
    assert run_with_tools(code, echo=lambda x: x) == "echo(): args[0][1] contains itself"


def test_models_and_dataclasses_become_dicts(run_with_tools: RunWithTools) -> None:
    code = "FINAL(repr([ONE, one(), many()]))"
    given = {"ONE": Point(1.5, ["a"]), "one": lambda: Person(name="Ada", born=None), "many": lambda: [Point(0, [])]}
    assert run_with_tools(code, **given) == repr(
        [{"x": 1.5, "tags": ["a"]}, {"name": "Ada", "born": None}, [{"x": 0, "tags": []}]]
    )
    code = "try: one()\nexcept Exception as error: FINAL(error)"
    told = run_with_tools(code, one=lambda: Person(name="Ada", born=threading.Lock()))
    assert told == "one(): its result['born'] is a lock, which does not cross"


# -- out of a REPL ---------------------------------------------------------------------------------------------------


@table(
    "code, value",
    [
        ("x = 1\n{'a': (x, {2})}", {"a": (1, {2})}),
        ("x = 1", None),
        ("None", None),
        ("'text'", "text"),
        ("import asyncio\nawait asyncio.sleep(0, (1, 2))", (1, 2)),
        ("", None),
        ("for _ in range(3): _", None),
    ],
)
def test_block_value_is_its_last_expression(repl: SandboxedRepl, code: str, value: Any) -> None:
    block = repl.execute(code, value=True)
    assert (block.status, block.value, block.value_problem) == ("ok", value, None)
    assert repl.execute(code).value is None


@table(
    "code, why",
    [
        *((f"[1, {code}]", f"the value[1] {why}") for code, why in REFUSED),
        ("'x' * (5 << 20)", "the value is too large: frame of 5,242,"),
        ("bytes(1 << 25)", "the value has more than 16,777,216 bytes"),
        ("[0] * (1 << 21)", "the value has more than 1,048,576 values"),
        ("a = []\nfor _ in range(300): a = [a]\na", "the value[0][0]"),
        (
            "class Meta(type):\n    def __hash__(cls): raise SystemExit\n[Meta('M', (), {})()]",
            "the value cannot be read",
        ),
        ("a = [1]\nwhile len(a) < 3: a.append(a)\na", "the value[1] contains itself"),
    ],
)
def test_value_that_cannot_come_says_why(repl: SandboxedRepl, code: str, why: str) -> None:
    block = repl.execute(f"print('before')\nFINAL('final')\n{code}", value=True)
    assert (block.status, block.value, block.final_answer) == ("ok", None, "final")
    assert block.stdout.startswith("before\n")
    assert str(block.value_problem).startswith(why)
    assert repl.execute("1 + 1", value=True).value == 2


def test_get_returns_one_value_or_a_tuple(repl: SandboxedRepl) -> None:
    repl.execute("rows = [{'a': (1, 2)}]\nn = 3\n'shown'")
    assert repl.get("rows") == [{"a": (1, 2)}]
    assert repl.get("n", "rows", "n") == (3, [{"a": (1, 2)}], 3)
    assert repl.get("context", "_") == ("the context", "shown")
    repl.provide({"late": {1}})
    assert repl.get("late") == {1}


def test_get_leaves_no_trace(repl: SandboxedRepl) -> None:
    look = "print(_, sorted(name for name in globals() if not name.startswith('__')))"
    repl.execute("n = 1\n'last'")
    before = repl.execute(look).stdout
    repl.get("n")
    assert repl.execute(look).stdout == before


async def test_get_and_value_are_there_for_await() -> None:
    async with Sandbox(warm=0) as own, own.repl() as repl:
        assert (await repl.aexecute("n = {1}\nn", value=True)).value == {1}
        assert await repl.aget("n") == {1}
        with pytest.raises(ValueUnavailable, match="there is no variable 'm'"):
            await repl.aget("m")


@table(
    "names, error, why",
    [
        (("missing",), ValueUnavailable, "there is no variable 'missing'"),
        (("n", "missing"), ValueUnavailable, "there is no variable 'missing'"),
        (("wide",), ValueUnavailable, "wide has more than 1,048,576 values"),
        (("f",), ValueUnavailable, r"f\['a'\] is a function, which does not cross"),
        (("llm_query",), ValueUnavailable, "llm_query is a method, which does not cross"),
        (("n; import os",), ConfigurationError, "no variable can be called 'n; import os'"),
        (("",), ConfigurationError, "no variable can be called ''"),
        (("n.real",), ConfigurationError, "no variable can be called 'n.real'"),
        ((5,), ConfigurationError, "no variable can be called 5"),
        ((), ConfigurationError, r"get\(\) takes names of variables"),
    ],
)
def test_get_fails_with_one_error(
    repl: SandboxedRepl, names: tuple[Any, ...], error: type[Exception], why: str
) -> None:
    repl.execute("n = 1\nf = {'a': lambda: 1}\nwide = [1]\nfor _ in range(99): wide = [wide, wide]")
    with pytest.raises(error, match=why):
        repl.get(*names)
    assert repl.get("n") == 1


@table(
    "code, text, value",
    [
        ("FINAL({'a': (1, {2})})", "{'a': (1, {2})}", {"a": (1, {2})}),
        ("FINAL('text')", "text", "text"),
        ("FINAL(None)", "None", None),
        ("FINAL(3)", "3", 3),
        ("rows = [1, 2]\nFINAL_VAR('rows')", "[1, 2]", [1, 2]),
        ("answer['content'] = (1, 2)\nanswer['ready'] = True", "(1, 2)", (1, 2)),
        ("SUBMIT(a=1, b={2})", "{'a': 1, 'b': {2}}", {"a": 1, "b": {2}}),
        ("rows = [1]\nFINAL(rows)\nrows.append(2)", "[1]", [1]),
        ("1", None, None),
    ],
)
def test_submission_has_text_and_value(repl: SandboxedRepl, code: str, text: str | None, value: Any) -> None:
    block = repl.execute(code)
    assert (block.final_answer, block.final_value, block.final_value_problem) == (text, value, None)


def test_submission_that_does_not_cross_keeps_text(repl: SandboxedRepl) -> None:
    block = repl.execute("FINAL({'a': print})")
    assert (block.final_answer, block.final_value) == ("{'a': <built-in function print>}", None)
    assert block.final_value_problem == "the final answer['a'] is a builtin_function_or_method, which does not cross"
    block = repl.execute("class Short(bytes):\n    def __str__(self): return 'short'\nFINAL(Short(3 << 20))")
    assert (block.status, block.final_answer, block.final_value) == ("ok", "short", None)
    assert str(block.final_value_problem).startswith("the final value is too large: frame of ")


def test_value_and_final_value_share_the_frame(repl: SandboxedRepl) -> None:
    """If value and final value do not fit together, only the one that does not fit is lost."""
    block = repl.execute("FINAL([1.5] * 600_000)\n'y' * (1 << 20)", value=True)
    assert (block.status, block.value) == ("ok", "y" * (1 << 20))
    assert block.final_value is None
    assert "too large" in str(block.final_value_problem)


def test_replaced_builtins_give_value_or_reason(repl: SandboxedRepl) -> None:
    for name in ("type", "set", "len", "map", "isinstance", "str", "list", "dict"):
        repl.execute("n = {'a': [1, (2,)]}")
        repl.execute(f"import builtins\nkept = builtins.{name}\nbuiltins.{name} = None")
        with contextlib.suppress(ValueUnavailable):
            repl.get("n")
        repl.execute("import os; os._exit(1)")
    repl.execute("n = 1")
    assert repl.get("n") == 1


def test_table_crosses_both_ways(run_with_tools: RunWithTools, sandbox: Sandbox) -> None:
    table = pandas.DataFrame({"name": ["Ada", "Alan"], "born": [1815, 1912]}, index=["a", "b"])
    with sandbox.repl(values={"table": table}) as repl:
        repl.execute("old = table[table.born < 1900]")
        pandas.testing.assert_frame_equal(repl.get("old"), table[table.born < 1900])
    told = run_with_tools("FINAL(count(TABLE))", count=lambda given: len(given) + given.born.sum(), TABLE=table)
    assert told == str(2 + 1815 + 1912)


@table("value", [1, None, "yes"])
def test_value_flag_must_be_a_bool(repl: SandboxedRepl, value: Any) -> None:
    with pytest.raises(ConfigurationError, match="value must be a bool, not"):
        repl.execute("1", value=value)


HALF_HTML = (
    "class Half:\n    def _repr_html_(self): return '<i>half</i>'\n    def __repr__(self): return 'half'\nHalf()"
)
UNPRINTED: dict[str, tuple[object, ...]] = {  # code: status, error, error_type, error_text, last line of the traceback
    "raise ValueError('a\\nb')": ("error", "ValueError: a", "ValueError", "a\nb", "b"),
    "raise KeyboardInterrupt('x')": ("error", "KeyboardInterrupt", "KeyboardInterrupt", "x", "KeyboardInterrupt: x"),
    "class Bye(SystemExit): pass\nraise Bye('now')": ("exited", "now", "Bye", "now", "Bye: now"),
    "raise SystemExit(3)": ("exited", "sys.exit(3)", "SystemExit", "3", "SystemExit: 3"),
}


def test_block_without_echo_has_value_and_error_apart_from_what_is_printed(repl: SandboxedRepl) -> None:
    block = repl.execute(f"print('printed')\n{HALF_HTML}", echo=False)
    assert (block.stdout, block.displays) == ("printed\n", ())
    assert block.result is not None
    assert block.result.data == {"text/plain": "half", "text/html": "<i>half</i>"}
    block = repl.execute("'é\\ud800'", value=True, echo=False)
    assert block.result is not None
    assert (block.stdout, block.value, block.result.data) == ("", "é\ud800", {"text/plain": "'é\\ud800'"})
    assert repl.execute("_", echo=False).result == block.result
    for code, expected in UNPRINTED.items():
        block = repl.execute(code, echo=False)
        assert block.traceback is not None
        told = block.status, block.error, block.error_type, block.error_text, block.traceback.splitlines()[-1]
        assert told == expected
        assert (block.stderr, block.result) == ("", None)
        assert pickle.loads(pickle.dumps(block)).traceback == block.traceback
    block = repl.execute("1/0")
    assert (block.result, block.error_type, block.error_text, block.traceback) == (None, None, None, None)
    assert "ZeroDivisionError" in block.stderr


def test_result_without_echo_keeps_to_the_bounds_of_output() -> None:
    with Sandbox(Limits(max_output_bytes=1000)) as sandbox, sandbox.repl() as repl:
        result = repl.execute("'a' * 10**6", echo=False).result
        assert result is not None
        assert "more cut" in str(result.data["text/plain"])
        assert len(result.data["text/plain"]) < 1100
        assert len(repl.execute("raise ValueError('b' * 10**6)", echo=False).traceback or "") < 1100


def test_result_without_echo_keeps_to_the_bound_of_a_frame() -> None:
    """Its texts are cut once more, before the final answer is: bounds of output may be wider than a frame."""
    code = "class Wide:\n    def __repr__(self): return 'a' * (1 << 25)\nkept = 1\nFINAL('b' * (8 << 20))\n"
    with Sandbox(Limits(max_output_bytes=1 << 25)) as sandbox, sandbox.repl() as repl:
        for last, status in (("Wide()", "ok"), ("raise ValueError(repr(Wide()))", "error")):
            block = repl.execute(code + last, echo=False)
            assert (block.status, len(block.final_answer or "")) == (status, 8 << 20)
            told = block.traceback if block.result is None else str(block.result.data["text/plain"])
            assert told is not None
            assert "more cut" in told
        assert repl.execute("kept", echo=False).status == "ok"
