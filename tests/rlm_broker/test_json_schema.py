"""JSON Schemas of the user's: for answers, and for arguments of tools."""

import asyncio
import threading
from typing import Any

import pytest

from rlm_broker import RLM, ConfigurationError, OutputInvalid, ScriptedClient, schema_steps
from rlm_broker.json_schema import CheckedSchema, JsonSchema, Unfit, aside, waiting, with_schema
from rlm_broker.run.output_type import OutputType
from tests.support.waiting import WAIT_S

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


async def test_checks_go_round_the_owners() -> None:
    """One owner's checks leave each second turn to another, also if their callers have left; a bound is told."""
    goes_on, order = threading.Event(), list[str]()

    def check(owner: str) -> None:
        goes_on.wait(WAIT_S)
        order.append(owner)

    greedy = [asyncio.create_task(aside(lambda: check("eve"), "eve")) for _ in range(20)]
    await asyncio.sleep(0)
    assert waiting("eve") == 18
    for begun in greedy[:2]:
        begun.cancel()
    honest = [asyncio.create_task(aside(lambda: check("ann"), "ann")) for _ in range(3)]
    await asyncio.sleep(0)
    assert (waiting("eve"), waiting("ann")) == (18, 3)  # the threads of those that were cancelled go on
    goes_on.set()
    await asyncio.gather(*honest)
    assert order.count("eve") <= 2 + 3 + 2
    await asyncio.gather(*greedy, return_exceptions=True)
    assert waiting("eve") == 0


def test_check_of_plain_parts_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts without keywords take no step, however many they are, and wrong ones are found among them."""
    monkeypatch.setattr(schema_steps, "MOST_STEPS", 2_000)
    plain: dict[str, Any] = {f"p{number}": {"type": "string", "description": "?"} for number in range(500)}
    CheckedSchema({"type": "array", "items": {"type": "object", "properties": plain, "title": "T"}}, "it")
    with pytest.raises(ConfigurationError, match="too large"):
        CheckedSchema({"properties": {name: {"minimum": 1} for name in plain}}, "it")
    for wrong in ({"type": "nothing"}, {"type": ["nothing"]}, {"description": 7}, {"properties": 7}, {"items": 7}):
        for at in ({"properties": {**plain, "a": wrong}}, {"items": wrong}, {"$defs": {"a": {"items": wrong}}}):
            with pytest.raises(ConfigurationError, match="is not a JSON Schema"):
                CheckedSchema(at, "it")


def test_answer_of_a_schema_is_its_value() -> None:
    done = RLM(ScriptedClient(['FINAL({"age": 36})', 'FINAL({"name": "Ada"})'])).completion(
        "x", "?", output_type=PERSON
    )
    assert done.parsed == {"name": "Ada"}


def test_answer_against_the_schema_is_named_with_place() -> None:
    """An answer that does not fit the schema is named with its place."""
    problem, value = OutputType(PERSON).judge('{"name": "Ada", "age": "old"}', 1)
    assert value is None
    assert problem is not None
    assert "age: 'old' is not of type 'integer'" in problem
    with pytest.raises(OutputInvalid, match="is not of type"):
        OutputType(PERSON).judge("[]", 0)


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"properties": 5}, {"const": {1, 2}}])
def test_invalid_schema_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="output_type is not a JSON Schema"):
        OutputType(schema)


@pytest.mark.parametrize("reference", ["#/nix", "http://127.0.0.1:9/schema", "#nix"])
def test_reference_that_leads_nowhere_is_refused(reference: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"output_type refers to '{reference}', which the schema does not define"
    ):
        OutputType({"properties": {"x": {"$ref": reference}}})


def test_references_within_a_schema_and_to_itself_hold() -> None:
    schema = {"$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}}
    JsonSchema({**schema, "$ref": "#/$defs/node"}, "it").require({"next": {"next": {}}}, "it")
    JsonSchema({"properties": {"all": {"$ref": "#"}}}, "it").require({"all": {}}, "it")


def test_only_the_first_mistakes_are_named() -> None:
    schema = JsonSchema({"type": "array", "items": {"type": "string"}}, "it")
    with pytest.raises(Unfit) as raised:
        schema.require([1] * 1000, "it")
    assert str(raised.value).count("is not of type") == 10


def tool(**given: Any) -> dict[str, Any]:
    """Say what was given."""
    return given


async def atool(**given: Any) -> dict[str, Any]:
    return given


@pytest.mark.parametrize("function", [tool, atool])
def test_tool_is_called_by_the_properties_of_its_schema(function: Any) -> None:
    code = (
        "```repl\n"
        "print(say('Ada', age=36), say(name='Eve'))\n"
        "try:\n    say(36)\nexcept Exception as error:\n    print(error)\n"
        "try:\n    say()\nexcept Exception as error:\n    print(error)\n"
        "FINAL('done')\n```"
    )
    rlm = RLM(ScriptedClient([code]), tools={"say": {"tool": function, "description": "Says.", "schema": PERSON}})
    done = rlm.completion("x", "?")
    printed = done.trajectory[0].blocks[0].stdout
    assert "{'name': 'Ada', 'age': 36} {'name': 'Eve'}" in printed
    assert "say(): name: 36 is not of type 'string'" in printed
    assert "say(): name: Missing required argument" in printed
    assert "`say(name, age=...)`: Says." in str(done.messages[0].content)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "string"}, 'must be a JSON Schema with "type": "object"'),
        ({"type": "object", "properties": {"not a name": {}}}, "cannot be parameters"),
        ({"type": "object", "properties": {"x": {"type": "nonsense"}}}, "is not a JSON Schema"),
        ([], 'must be a JSON Schema with "type": "object"'),
    ],
)
def test_bad_schema_of_a_tool_is_refused(schema: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        with_schema(tool, schema, "the schema")


def test_schema_of_a_value_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a schema needs a function, whose arguments it describes"):
        RLM(tools={"x": {"tool": 5, "schema": PERSON}})
