"""What crosses to or from a REPL arrives as it was, or is refused with its place."""

import dataclasses
import datetime
import decimal
from typing import Any

import numpy
import pydantic
import pytest

from rlm_broker import RLM, ConfigurationError, Sandbox, ScriptedClient
from rlm_broker.plain import problem_with

CHANGED: list[tuple[Any, str]] = [
    (float("nan"), "is nan, which JSON does not have"),
    (float("-inf"), "is -inf, which JSON does not have"),
    (b"abc", "is of type bytes: decode them to str first"),
    ({1, 2}, "is a set; plain values are str, dict, list, int, float, bool and None"),
    (decimal.Decimal("1.10"), "is a Decimal; plain values are"),
    (datetime.datetime(2026, 1, 1), "is a datetime; plain values are"),
    ({1: "a"}, "has the key 1, an int: keys are str"),
    (numpy.arange(3), "is a ndarray; plain values are"),
    (numpy.int64(3), "is an int64; plain values are"),
]
PLAIN = {"text": "é\n", "numbers": [1, -1.5, 2**70, True, None], "empty": [{}, []], "numpy": numpy.float64(0.5)}


@dataclasses.dataclass
class Point:
    x: float
    tags: list[str]


class Person(pydantic.BaseModel):
    name: str
    born: Any


@pytest.mark.parametrize(("value", "why"), CHANGED)
def test_a_value_that_would_be_changed_is_refused_with_its_place(value: Any, why: str) -> None:
    assert str(problem_with({"a": [value]}, "it")).startswith(f"it['a'][0] {why}")
    with pytest.raises(ConfigurationError, match=r"tool 'X': .*it\['a'\]\[0\] "):
        RLM(ScriptedClient([]), tools={"X": {"a": [value]}})


def test_values_of_a_repl_arrive_as_they_are_or_are_refused() -> None:
    with Sandbox() as sandbox:
        for value, why in CHANGED:
            with pytest.raises(ConfigurationError, match="the value X"):
                sandbox.repl(values={"X": [value]})
            assert why in str(problem_with(value, "the value X"))
        with sandbox.repl(values={"X": PLAIN}) as repl:
            assert repl.execute("print(X)").stdout == f"{ {**PLAIN, 'numpy': 0.5} }\n"
            with pytest.raises(ConfigurationError, match=r"the value Y\['a'\] is nan"):
                repl.provide({"Y": {"a": float("nan")}})
            with pytest.raises(ConfigurationError, match="a value cannot be called 'llm_query'"):
                repl.provide({"llm_query": 3})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"values": {"two words": 1}}, "a value cannot be called 'two words'"),
        ({"values": {5: 1}}, "a value cannot be called 5"),
        ({"values": {"context": 3}}, "a value cannot be called 'context': that name is taken in a REPL"),
        ({"values": {"context_1": 3}}, "a value cannot be called 'context_1': that name is taken"),
        ({"values": {"print": 3}}, "a value cannot be called 'print': that name is taken"),
        ({"tools": ["FINAL"]}, "a tool cannot be called 'FINAL': that name is taken in a REPL"),
        ({"values": [1]}, "values are a dict from name to value, and not list"),
        ({"tools": "look_up"}, "tools are names of functions, as a list"),
        ({"tools": [print]}, "tools are names of functions, as a list"),
    ],
)
def test_what_a_repl_cannot_be_given_is_refused_at_once(given: dict[str, Any], why: str) -> None:
    with Sandbox() as sandbox, pytest.raises(ConfigurationError, match=why):
        sandbox.repl(**given)


def run_with_tools(code: str, **tools: Any) -> str:
    return str(RLM(lambda _messages: f"```repl\n{code}\n```", tools=tools).completion("c", "q").response)


def test_a_result_of_a_tool_arrives_as_it_is_or_is_an_error_with_its_place() -> None:
    results = iter([value for value, _ in CHANGED])
    code = f"""
told = []
for _ in range({len(CHANGED)}):
    try: told.append(repr(bad()))
    except Exception as error: told.append(str(error))
FINAL("\\n".join(told))
"""
    told = run_with_tools(code, bad=lambda: {"a": next(results)}).splitlines()
    for line, (value, why) in zip(told, CHANGED, strict=True):
        assert line.startswith("bad() returned no plain value: its result['a'] "), value
        assert why in line
    assert run_with_tools("FINAL(repr(good()))", good=lambda: PLAIN) == repr({**PLAIN, "numpy": 0.5})


def test_models_and_dataclasses_become_dicts_and_what_is_in_them_is_looked_at() -> None:
    code = "FINAL(repr([ONE, one(), many()]))"
    given = {"ONE": Point(1.5, ["a"]), "one": lambda: Person(name="Ada", born=None), "many": lambda: [Point(0, [])]}
    assert run_with_tools(code, **given) == repr(
        [{"x": 1.5, "tags": ["a"]}, {"name": "Ada", "born": None}, [{"x": 0, "tags": []}]]
    )
    code = "try: one()\nexcept Exception as error: FINAL(str(error))"
    born = datetime.date(1815, 12, 10)
    assert "its result['born'] is a date" in run_with_tools(code, one=lambda: Person(name="Ada", born=born))


@pytest.mark.parametrize("argument", ["float('nan')", "{1, 2}", "b'x'", "{1: 2}", "[{'a': {2.5: 1}}]", "'\\ud800'"])
def test_an_argument_of_code_that_would_be_changed_is_a_type_error(argument: str) -> None:
    code = f"try: FINAL(echo({argument}))\nexcept TypeError as error: FINAL('refused: ' + str(error))"
    assert run_with_tools(code, echo=lambda value: value).startswith("refused: echo() takes plain values")


def test_arguments_of_code_arrive_as_they_are() -> None:
    code = "FINAL(repr(echo({'a': [1, -1.5, 2**70, True, None, 'é', {}]})))"
    assert run_with_tools(code, echo=lambda value: value) == repr({"a": [1, -1.5, 2**70, True, None, "é", {}]})
