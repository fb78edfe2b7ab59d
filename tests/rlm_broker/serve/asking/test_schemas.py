"""JSON Schemas of clients: what is too much to check is refused, and patterns become words."""

import asyncio
import threading
from typing import Any

import pytest

from rlm_broker.json_schema import Unfit
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.owner import Busy, Owner
from rlm_broker.serve.questions import schemas
from rlm_broker.serve.questions.schemas import MOST_CHARS, Room, checked_in_turn, safe_schema
from tests.support.waiting import WAIT_S


async def test_key_with_many_checks_that_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another key is not, and the first one is not when its checks are done."""
    monkeypatch.setattr(schemas, "MOST_WAITING", 3)
    eve, ann, goes_on = Owner("eve"), Owner("ann"), threading.Event()

    async def checked(owner: Owner) -> bool:
        return await checked_in_turn(owner, lambda: goes_on.wait(WAIT_S))

    begun = [asyncio.create_task(checked(eve)) for _ in range(2 + 3)]
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="3 requests of this key wait"):
        await checked(eve)
    honest = asyncio.create_task(checked(ann))
    await asyncio.sleep(0)
    goes_on.set()
    assert all(await asyncio.gather(*begun, honest))
    assert await checked(eve)


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
        ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, "has .anchor, which is not supported"),
        ({"$dynamicRef": "#a"}, "has .dynamicRef, which is not supported"),
        ({"$defs": {"a": {"$dynamicAnchor": "a"}}}, "has .dynamicAnchor, which is not supported"),
        ({"$recursiveRef": "#"}, "has .recursiveRef, which is not supported"),
        ({"items": {"$id": "http://a.b/c"}}, "has .id, which is not supported: give it at the root alone"),
        ({"items": {"$schema": "http://json-schema.org/draft-07/schema#"}}, "has .schema, which is not supported"),
        ({"unevaluatedProperties": False}, "has unevaluatedProperties, which is not supported"),
        ({"$ref": "#/%24defs/a", "$defs": {"a": {}}}, "refers to '#/%24defs/a'"),
        ({"$id": "http://a.b/c", "$ref": "http://a.b/c#/$defs/a", "$defs": {"a": {}}}, "does not define"),
        ({"$ref": "#/default/a", "default": {"a": {"pattern": "(a+)+$"}}}, "refers to '#/default/a'"),
    ],
)
def test_unsafe_schema_is_refused(schema: Any, why: str) -> None:
    with pytest.raises(ApiError, match=why) as error:
        safe_schema(schema, "here")
    assert (error.value.status, error.value.param) == (400, "here")


def test_patterns_of_dependencies_are_not_checked() -> None:
    """A pattern counts also below a name that is a keyword elsewhere."""
    draft_7 = "http://json-schema.org/draft-07/schema#"
    schema = {"$schema": draft_7, "dependencies": {"default": {"properties": {"default": {"pattern": "(a+)+$"}}}}}
    safe_schema(schema, "schema").checked.require({"default": "a" * 40 + "b"}, "it")


@pytest.mark.parametrize("pointer", ["#", "#/properties/a", "#/allOf/0", "#/$defs/a~1b"])
def test_plain_pointer_is_followed(pointer: str) -> None:
    a = {"type": ["object", "null"]}
    schema = {"properties": {"a": a, "b": {"$ref": pointer}}, "allOf": [a], "$defs": {"a/b": a}, "type": "object"}
    made = safe_schema(schema, "schema")
    assert made == schema
    made.checked.require({"b": {}}, "it")
    with pytest.raises(Unfit, match="b: 7 is not of type"):
        made.checked.require({"b": 7}, "it")


def test_schemas_share_the_room_of_their_request() -> None:
    room = Room("tools")
    schema = {"properties": {f"p{number}": {"type": "string"} for number in range(450)}}
    for _ in range(5):
        safe_schema(schema, "tools.0", room)
    with pytest.raises(ApiError, match="the tools have more than 100,000 characters, or 5,000 parts"):
        safe_schema(schema, "tools.0", room)


def test_schema_of_few_references_is_accepted() -> None:
    assert safe_schema(doubled(3), "schema") == doubled(3)
