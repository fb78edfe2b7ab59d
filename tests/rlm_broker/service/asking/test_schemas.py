"""JSON Schemas of clients: what is too much to check is refused, and patterns become words."""

from typing import Any

import pytest

from rlm_broker.service.asking.schemas import MOST_CHARS, safe_schema
from rlm_broker.service.errors import ApiError


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
    made = safe_schema(schema, "schema")
    assert made["properties"]["pattern"] == {
        "type": "string",
        "description": "(matches the regular expression (a+)+$)",
    }
    assert made["properties"]["rows"]["items"] == {"description": "A row. (matches the regular expression x)"}
    assert (made["required"], made["default"]) == (["pattern"], {"pattern": "stays"})


def test_type_that_refers_to_itself_is_accepted() -> None:
    tree = {"$ref": "#/$defs/node", "$defs": {"node": {"properties": {"left": {"$ref": "#/$defs/node"}}}}}
    assert safe_schema(tree, "schema") == tree


def doubled(times: int) -> dict[str, Any]:
    definitions = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(times)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{times}": {}}}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (7, "must be a JSON Schema"),
        ({"patternProperties": {"x": {}}}, "patternProperties"),
        ({"description": "x" * MOST_CHARS}, "more than 100,000 characters"),
        (doubled(40), "more than 1,000 parts"),
        (
            {"$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(1_500)}, "$ref": "#/$defs/d0"},
            "more than 1,000 parts",
        ),
        ({"$ref": "#/$defs/none"}, "does not define"),
        ({"$ref": "https://a.b/c"}, "does not define"),
        ({"type": "nothing"}, "is not a JSON Schema"),
    ],
)
def test_unsafe_schema_is_refused(schema: Any, why: str) -> None:
    with pytest.raises(ApiError, match=why) as error:
        safe_schema(schema, "here")
    assert (error.value.status, error.value.param) == (400, "here")


def test_schema_of_few_references_is_accepted() -> None:
    assert safe_schema(doubled(3), "schema") == doubled(3)
