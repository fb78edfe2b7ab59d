"""Checks by schemas that are not trusted: a check of too many steps ends, for each keyword that can ask for them."""

import threading
from typing import Any

import pytest

from rlm_broker import schema_steps
from rlm_broker.errors import ConfigurationError
from rlm_broker.json_schema import CheckedSchema, JsonSchema, Unfit
from rlm_broker.run.output_type import OutputType

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_4 = "http://json-schema.org/draft-04/schema#"


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow fewer steps, so that the tests are quick."""
    monkeypatch.setattr(schema_steps, "MOST_STEPS", 20_000)


def doubled(name: str, reference: str, keyword: str = "allOf") -> dict[str, Any]:
    """Return a schema whose check takes 2^40 steps."""
    definitions: dict[str, Any] = {
        f"a{n}": {**({name: f"a{n}"} if name else {}), keyword: [{"$ref": f"{reference}a{n + 1}"}] * 2}
        for n in range(40)
    }
    definitions["a40"] = {"type": "object", **({name: "a40"} if name else {})}
    return {"$ref": f"{reference}a0", "$defs": definitions}


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def each(schema: Any, times: int, keyword: str = "allOf") -> dict[str, Any]:
    return {"$defs": {"a": schema}, keyword: [{"$ref": "#/$defs/a"}] * times}


MANY = list(range(3_000))
NAMES = {f"name {n}": 1 for n in range(5_000)}
LONG = "x" * 400_000


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (doubled("", "#/$defs/"), {}),
        (doubled("", "#/$defs/", "anyOf"), 7),
        (doubled("", "#/%24defs/"), {}),
        (doubled("$anchor", "#"), {}),
        (doubled("$dynamicAnchor", "#"), {}),
        ({"allOf": [{"items": {"$ref": "#"}}] * 2}, nested(40)),
        ({"$schema": DRAFT_7, "allOf": [{"items": {"$ref": "#"}}] * 2}, nested(40)),
        ({"$schema": DRAFT_4, "anyOf": [{"not": {"items": {"$ref": "#"}}}] * 2}, nested(40)),
        (each({"items": True}, 200), MANY),
        (each({"contains": {"type": "string"}}, 200, "anyOf"), MANY),
        (each({"uniqueItems": True}, 200), MANY),
        (each({"const": MANY}, 200), MANY),
        (each({"enum": [LONG[:9]] * 20_000}, 20), "y"),
        (each({"propertyNames": {"type": "string"}}, 200), NAMES),
        (each({"additionalProperties": True}, 200), NAMES),
        (each({"additionalProperties": False}, 200, "anyOf"), NAMES),
        (each({"type": "integer"}, 200, "anyOf"), LONG),
        ({"anyOf": [False] * 200}, LONG),
        ({"oneOf": [False] * 200}, LONG),
        (each({"required": [str(n) for n in range(500)]}, 200), {str(n): 1 for n in range(500)}),
    ],
)
def test_check_of_many_steps_ends(schema: dict[str, Any], value: Any) -> None:
    checked = CheckedSchema(schema, "it").checked
    with pytest.raises(Unfit, match="the answer: its check takes more than 300,000 steps"):
        checked.require(value, "the answer")


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{n}": {"type": "string", "minLength": n} for n in range(2_000)}},
        {"$schema": DRAFT_4, "enum": [{str(n): n} if n % 2 else [n] for n in range(20_000)]},
    ],
    ids=["many parts", "many unequal values"],
)
def test_schema_of_many_steps_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="its check takes more than 300,000 steps: give a simpler one"):
        CheckedSchema(schema, "it")


def test_usual_values_are_checked_as_ever() -> None:
    """A check within the bound has the same errors as one without a bound."""
    row = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    schema = {"type": "array", "items": {"$ref": "#/$defs/row"}, "$defs": {"row": row}, "uniqueItems": True}
    value: list[Any] = [{"n": n} for n in range(500)]
    CheckedSchema(schema, "it").checked.require(value, "it")
    value += [{"n": "x"}, {}, {"n": 1, "m": 2}, {"n": 1}]
    said = []
    for checked in (CheckedSchema(schema, "it").checked, JsonSchema(schema, "it")):
        with pytest.raises(Unfit) as unfit:
            checked.require(value, "it")
        said.append(str(unfit.value))
    assert said[0] == said[1]
    assert "500.n: 'x' is not of type 'integer'" in said[0]


def test_each_check_has_its_own_steps() -> None:
    checked = CheckedSchema({"items": {"type": "integer"}}, "it").checked
    for _ in range(10):
        checked.require(MANY, "it")


async def test_answer_of_client_is_judged_in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop goes on meanwhile. A type that the caller of the process has given is judged at once."""
    monkeypatch.setattr(OutputType, "judge", lambda *_: (None, threading.get_ident()))
    _, thread = await OutputType(CheckedSchema({}, "it")).judged("7", 1)
    assert thread != threading.get_ident()
    assert await OutputType({}).judged("7", 1) == (None, threading.get_ident())
