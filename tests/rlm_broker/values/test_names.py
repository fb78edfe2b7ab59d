"""Names of a REPL's tools and values, and text that no message can hold."""

from pathlib import Path
from typing import Any

import pytest

from rlm_broker import RLM, ConfigurationError, ContextRefused, Sandbox
from rlm_broker.context.objects import is_plain
from rlm_broker.values.names import require_name, require_variables
from sandbox_worker.wire.names import CONTEXT, HISTORY, RESERVED, numbered
from tests.support.tables import table


def test_context_is_plain_if_json_has_its_type() -> None:
    plain: list[Any] = ["text", (1, 2.5, None, False)]
    others: list[Any] = [float("nan"), b"abc", {1, 2}, {1: "a"}, 10**4_300, object()]
    assert [value for value in (*plain, *others) if is_plain({"a": [value], "b": "text"})] == plain


def test_path_inside_a_context_is_refused() -> None:
    with pytest.raises(ContextRefused, match=r"context\[1\]\['a'\] is a PosixPath: a Path is a context only by itself"):
        is_plain([{1}, {"a": Path("a")}])


def test_invalid_variable_is_refused() -> None:
    for names in ((), ("two words",), ("a", 5), ("class",), ("",)):
        with pytest.raises(ConfigurationError, match=r"no variable can be called|get\(\) takes names"):
            require_variables(names)


def test_a_name_that_a_repl_has_is_refused() -> None:
    for name in (*RESERVED, numbered(CONTEXT, 0), numbered(HISTORY, 12)):
        with pytest.raises(ConfigurationError, match=f"a tool cannot be called '{name}': that name is taken in a REPL"):
            require_name(name, "a tool")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"values": {"two words": 1}}, "a value cannot be called 'two words'"),
    ({"values": {5: 1}}, "a value cannot be called 5"),
    ({"values": {"context": 3}}, "a value cannot be called 'context': that name is taken in a REPL"),
    ({"values": {"context_1": 3}}, "a value cannot be called 'context_1': that name is taken"),
    ({"values": {"print": 3}}, "a value cannot be called 'print': that name is taken"),
    ({"tools": ["FINAL"]}, "a tool cannot be called 'FINAL': that name is taken in a REPL"),
    ({"values": [1]}, "values must be a dict from name to value, not list"),
    ({"tools": "look_up"}, "tools must be a dict from name to function, or a list of names"),
    ({"tools": [print]}, "tools must be a dict from name to function, or a list of names"),
    ({"tools": {"two words": print}}, "a tool cannot be called 'two words'"),
    ({"tools": {"FINAL": print}}, "a tool cannot be called 'FINAL': that name is taken in a REPL"),
    ({"tools": {"euro": 5}}, "euro: give what is no function in values="),
    ({"tools": {"f": lambda: 1}, "values": {"f": 1}, "scaffold": False}, "f: a name is that of a tool or of a value"),
    ({"values": {"__builtins__": 1}, "scaffold": False}, "a value cannot be called '__builtins__'"),
    ({"scaffold": "no"}, "scaffold must be a bool, not str"),
]


@table("given, why", REFUSED)
def test_value_a_repl_cannot_hold_is_refused_early(open_sandbox: Sandbox, given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        open_sandbox.repl(**given)


HALF = "a\ud800"
PLACE = "'utf-8' codec can't encode character '\\ud800' in position 1"
ASKED = f"needs text without lone surrogates: {PLACE}"
UNSENDABLE = {
    "llm_query(HALF)": ASKED.replace("surrogates: ", "surrogates: prompts[0]: "),
    "llm_query_batched(['whole', HALF])": ASKED.replace("surrogates: ", "surrogates: prompts[1]: "),
    "llm_query([{'type': 'text', 'text': HALF}])": ASKED,
    "llm_query('whole', system=HALF)": ASKED,
    "rlm_query(HALF)": ASKED.replace("surrogates: ", "surrogates: prompts[0]: "),
    "FINAL(HALF)": PLACE,
    "FINAL({'a': HALF})": PLACE.removesuffix(" in position 1"),
}


def test_unsendable_text_of_code_fails_where_used(open_sandbox: Sandbox) -> None:
    """Text of code that no message can hold is an error where it is used."""
    calls = "\n".join(f"try: {call}\nexcept ValueError as error: said.append(str(error))" for call in UNSENDABLE)
    code = f"```repl\nHALF, said = 'a\\ud800', []\n{calls}\nFINAL('\\n'.join(said))\n```"
    said = str(RLM(lambda _messages: code, sandbox=open_sandbox).completion("c", "q").response).split("\n")
    assert [why in each for why, each in zip(UNSENDABLE.values(), said, strict=True)] == [True] * len(UNSENDABLE)


def test_unsendable_code_ends_as_in_python(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl() as repl:
        block = repl.execute(f"x = {HALF!r}\n# {HALF}")
        assert block.status == "error"
        assert str(block.error).startswith("UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800'")
        assert repl.execute("1 + 1").stdout == "2\n"


def test_output_escapes_unprintable_surrogates(open_sandbox: Sandbox) -> None:
    with open_sandbox.repl(HALF) as repl:
        block = repl.execute("print(context)\nraise ValueError(context)")
    assert (block.stdout, block.error) == ("a\\ud800\n", "ValueError: a\\ud800")


def test_later_context_and_messages_arrive_in_full(open_sandbox: Sandbox) -> None:
    """A later context arrives unchanged, and messages are written out."""
    last = "```repl\nFINAL([history_0[2]['content'], ascii(context_1)])\n```"
    replies = iter([f"```repl\n# {HALF}\n```", "FINAL(1)", last])
    with RLM(lambda _messages: next(replies), persistent=True, sandbox=open_sandbox) as rlm:
        assert rlm.completion(HALF, "q").response == "1"
        response = str(rlm.completion(HALF, "q").response)
    assert "# a\\\\ud800" in response
    assert "'a\\\\ud800'" in response
