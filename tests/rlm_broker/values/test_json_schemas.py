"""JSON Schemas: which are taken, what their checks say, and that the check of one that is not trusted ends."""

from typing import Any

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.values import json_schemas
from rlm_broker.values.json_schemas import MOST_CHARS, CheckedSchema, JsonSchema
from rlm_broker.values.validation import Unfit
from tests.support.tables import table

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_4 = "http://json-schema.org/draft-04/schema#"


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"type": "nonsense"}, "not a JSON Schema"), ({"properties": 5}, "not a"), ({"const": {1, 2}}, "not a")),
    *(
        ({"properties": {"x": {"$ref": to}}}, f"refers to '{to}', which the schema does not define")
        for to in ("#/nix", "http://127.0.0.1:9/schema", "#nix")
    ),
]


@table("schema, why", REFUSED)
def test_invalid_schema_or_reference_is_refused(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"it (is )?{why}"):
        JsonSchema(schema, "it")


def test_references_within_a_schema_and_to_itself_hold() -> None:
    node = {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "$ref": "#/$defs/node",
    }
    JsonSchema(node, "it").require({"next": {"next": {}}}, "it")
    JsonSchema({"properties": {"all": {"$ref": "#"}}}, "it").require({"all": {}}, "it")
    for schema in (node, linked("", "#/$defs/", times=3)):
        assert CheckedSchema(schema, "it") == schema


def test_only_the_first_mistakes_are_named() -> None:
    schema = JsonSchema({"type": "array", "items": {"type": "string"}}, "it")
    with pytest.raises(Unfit) as raised:
        schema.require([1] * 1000, "it")
    assert str(raised.value).count("is not of type") == 10


def test_patterns_are_told_and_not_checked() -> None:
    """A pattern becomes a part of the description; a property of that name stays."""
    schema = {
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "pattern": "(a+)+$"},
            "rows": {"type": "array", "items": {"pattern": "x", "description": "A row."}},
        },
        "required": ["pattern"],
        "default": {"pattern": "stays"},
    }
    made = CheckedSchema(schema, "it")
    told = "(matches the regular expression (a+)+$)"
    assert made["properties"]["pattern"] == {"type": "string", "description": told}
    assert made["properties"]["rows"]["items"] == {"description": "A row. (matches the regular expression x)"}
    assert (made["required"], made["default"]) == (["pattern"], {"pattern": "stays"})


def linked(name: str, reference: str, keyword: str = "allOf", times: int = 40) -> dict[str, Any]:
    """Return a schema whose check takes 2^times steps."""
    definitions: dict[str, Any] = {
        f"a{n}": {**({name: f"a{n}"} if name else {}), keyword: [{"$ref": f"{reference}a{n + 1}"}] * 2}
        for n in range(times)
    }
    definitions[f"a{times}"] = {"type": "object", **({name: f"a{times}"} if name else {})}
    return {"$ref": f"{reference}a0", "$defs": definitions}


UNSAFE: list[tuple[Any, str]] = [
    (7, "must be a JSON Schema"),
    ({"patternProperties": {"x": {}}}, "patternProperties"),
    ({"description": "x" * MOST_CHARS}, "more than 100,000 characters"),
    (linked("", "#/$defs/"), "more than 1,000 parts"),
    ({"$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(1_500)}, "$ref": "#/$defs/d0"}, "1,000 parts"),
    ({"$ref": "#/$defs/none"}, "does not define"),
    ({"$ref": "https://a.b/c"}, "does not define"),
    ({"type": "nothing"}, "is not a JSON Schema"),
    ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, "has .anchor, which is not supported"),
    ({"$dynamicRef": "#a"}, "has .dynamicRef, which is not supported"),
    ({"$defs": {"a": {"$dynamicAnchor": "a"}}}, "has .dynamicAnchor, which is not supported"),
    ({"$recursiveRef": "#"}, "has .recursiveRef, which is not supported"),
    ({"items": {"$id": "http://a.b/c"}}, "has .id, which is not supported: give it at the root alone"),
    ({"items": {"$schema": DRAFT_7}}, "has .schema, which is not supported"),
    ({"unevaluatedProperties": False}, "has unevaluatedProperties, which is not supported"),
    ({"$ref": "#/%24defs/a", "$defs": {"a": {}}}, "refers to '#/%24defs/a'"),
    ({"$id": "http://a.b/c", "$ref": "http://a.b/c#/$defs/a", "$defs": {"a": {}}}, "does not define"),
    ({"$ref": "#/default/a", "default": {"a": {"pattern": "(a+)+$"}}}, "refers to '#/default/a'"),
]


@table("schema, why", UNSAFE)
def test_unsafe_schema_is_refused(schema: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        CheckedSchema(schema, "it")


def test_patterns_of_dependencies_are_not_checked() -> None:
    """A pattern counts also below a name that is a keyword elsewhere."""
    schema = {"$schema": DRAFT_7, "dependencies": {"default": {"properties": {"default": {"pattern": "(a+)+$"}}}}}
    CheckedSchema(schema, "it").checked.require({"default": "a" * 40 + "b"}, "it")


def test_plain_pointer_is_followed() -> None:
    a = {"type": ["object", "null"]}
    for pointer in ("#", "#/properties/a", "#/allOf/0", "#/$defs/a~1b"):
        schema = {"properties": {"a": a, "b": {"$ref": pointer}}, "allOf": [a], "$defs": {"a/b": a}, "type": "object"}
        made = CheckedSchema(schema, "it")
        assert made == schema
        made.checked.require({"b": {}}, "it")
        with pytest.raises(Unfit, match="b: 7 is not of type"):
            made.checked.require({"b": 7}, "it")


def test_check_of_plain_parts_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts without keywords take no step, however many they are, and wrong ones are found among them."""
    monkeypatch.setattr(json_schemas, "MOST_STEPS", 2_000)
    plain: dict[str, Any] = {f"p{number}": {"type": "string", "description": "?"} for number in range(300)}
    CheckedSchema({"type": "array", "items": {"type": "object", "properties": plain, "title": "T"}}, "it")
    with pytest.raises(ConfigurationError, match="too large"):
        CheckedSchema({"properties": {name: {"minimum": 1} for name in plain}}, "it")
    for wrong in ({"type": "nothing"}, {"type": ["nothing"]}, {"description": 7}, {"properties": 7}, {"items": 7}):
        for at in ({"properties": {**plain, "a": wrong}}, {"items": wrong}, {"$defs": {"a": {"items": wrong}}}):
            with pytest.raises(ConfigurationError, match="is not a JSON Schema"):
                CheckedSchema(at, "it")


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


LONG_CHECKS: list[tuple[dict[str, Any], Any]] = [
    (linked("", "#/$defs/"), {}),
    (linked("", "#/$defs/", "anyOf"), 7),
    (linked("", "#/%24defs/"), {}),
    (linked("$anchor", "#"), {}),
    (linked("$dynamicAnchor", "#"), {}),
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
]
LONG_SCHEMAS: list[dict[str, Any]] = [
    {"properties": {f"p{n}": {"type": "string", "minLength": n} for n in range(2_000)}},
    {"$schema": DRAFT_4, "enum": [{str(n): n} if n % 2 else [n] for n in range(20_000)]},
]


def test_check_of_many_steps_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_schemas, "MOST_STEPS", 20_000)
    for schema, value in LONG_CHECKS:
        checked = JsonSchema(schema, "it", is_bounded=True)
        with pytest.raises(Unfit, match="the answer: its check takes more than 20,000 steps"):
            checked.require(value, "the answer")
    for schema in LONG_SCHEMAS:
        with pytest.raises(ConfigurationError, match="its check takes more than 20,000 steps: give a simpler one"):
            JsonSchema(schema, "it", is_bounded=True)


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
