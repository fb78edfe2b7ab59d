"""What crosses to or from a REPL arrives as it was, or is refused with its place."""

import dataclasses
import datetime
import decimal
from typing import Any

import numpy
import pydantic
import pytest

from rlm_broker import RLM, ConfigurationError, ContextRefused, Sandbox, ScriptedClient
from rlm_broker.plain import problem_with, require_name
from sandbox_worker.wire.names import CONTEXT, HISTORY, RESERVED, numbered

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
    ("a\ud800", "is text with a lone surrogate, '\\ud800' at 1: "),
    ({"\ud800": 1}, "has the key '\\ud800', text with a lone surrogate"),
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


@pytest.mark.parametrize("name", [*sorted(RESERVED), numbered(CONTEXT, 0), numbered(HISTORY, 12)])
def test_a_name_that_a_repl_has_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"a tool cannot be called '{name}': that name is taken in a REPL"):
        require_name(name, "a tool")


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


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("float('nan')", "args[0] is nan, which JSON does not have"),
        ("{1, 2}", "args[0] is a set"),
        ("{'x': [b'x']}", "args[0]['x'][0] is a bytes"),
        ("value={1: 2}", "kwargs['value'] has the key 1, which is no text"),
        ("[{'a': {2.5: 1}}]", "args[0][0]['a'] has the key 2.5, which is no text"),
        ("['a\\ud800']", "args[0][0] has a lone surrogate, '\\ud800'"),
        ("{'\\ud800': 1}", "args[0]['\\ud800'] has a lone surrogate, '\\ud800'"),
    ],
)
def test_an_argument_of_code_that_would_be_changed_is_a_type_error_with_its_place(argument: str, why: str) -> None:
    code = f"try: FINAL(echo({argument}))\nexcept TypeError as error: FINAL('refused: ' + str(error))"
    expected = f"refused: echo() takes plain values (text, numbers, lists, dicts): {why}"
    assert run_with_tools(code, echo=lambda value: value) == expected


def test_an_argument_of_code_that_contains_itself_is_a_type_error() -> None:
    code = "a = []\na.append(a)\ntry: echo(a)\nexcept TypeError as error: FINAL(error)"
    assert "an argument contains itself, or is too deep" in run_with_tools(code, echo=lambda value: value)


def test_arguments_of_code_arrive_as_they_are() -> None:
    code = "FINAL(repr(echo({'a': [1, -1.5, 2**70, True, None, 'é', {}]})))"
    assert run_with_tools(code, echo=lambda value: value) == repr({"a": [1, -1.5, 2**70, True, None, "é", {}]})


HALF = "a\ud800"
ASKED = "needs text without lone surrogates: 'utf-8' codec can't encode character '\\ud800' in position 1"


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("llm_query(HALF)", ASKED.replace("surrogates: ", "surrogates: prompts[0]: ")),
        ("llm_query_batched(['whole', HALF])", ASKED.replace("surrogates: ", "surrogates: prompts[1]: ")),
        ("llm_query([{'type': 'text', 'text': HALF}])", ASKED),
        ("llm_query('whole', system=HALF)", ASKED),
        ("rlm_query(HALF)", ASKED.replace("surrogates: ", "surrogates: prompts[0]: ")),
        ("FINAL(HALF)", "'utf-8' codec can't encode character '\\ud800' in position 1"),
        ("FINAL({'a': HALF})", "'utf-8' codec can't encode character '\\ud800'"),
    ],
)
def test_text_of_code_that_no_message_can_hold_is_an_error_where_it_is_used(call: str, why: str) -> None:
    code = f"HALF = 'a\\ud800'\ntry: {call}\nexcept ValueError as error: FINAL(error)"
    assert why in run_with_tools(code)


def test_code_that_no_message_can_hold_ends_as_in_any_python() -> None:
    with Sandbox() as sandbox, sandbox.repl() as repl:
        block = repl.execute(f"x = {HALF!r}\n# {HALF}")
        assert block.status == "error"
        assert str(block.error).startswith("UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800'")
        assert repl.execute("1 + 1").stdout == "2\n"


def test_what_is_printed_shows_what_it_cannot_hold() -> None:
    with Sandbox() as sandbox, sandbox.repl(HALF) as repl:
        block = repl.execute("print(context)\nraise ValueError(context)")
    assert (block.stdout, block.error) == ("a\\ud800\n", "ValueError: a\\ud800")


def test_a_later_context_arrives_as_it_is_or_is_refused_and_messages_are_written_out() -> None:
    replies = iter([f"```repl\n# {HALF}\n```", "FINAL(1)", "```repl\nFINAL(history_0[2]['content'])\n```"])
    with RLM(lambda _messages: next(replies), persistent=True) as rlm:
        assert rlm.completion(HALF, "q").response == "1"
        with pytest.raises(ContextRefused, match=r"a later context of a persistent RLM .* lone surrogates cannot"):
            rlm.completion(HALF, "q")
        assert "# a\\ud800" in str(rlm.completion("whole", "q").response)
