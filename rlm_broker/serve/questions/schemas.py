"""JSON Schemas that clients send. They are not trusted: no schema may keep the server busy."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from rlm_broker.errors import ConfigurationError
from rlm_broker.json_schema import CheckedSchema, aside, waiting
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.owner import Busy, Owner

MOST_CHARS: Final = 100_000
"""Characters of one schema as JSON, and of all tools of a request; more is refused."""
MOST_NODES: Final = 1_000
"""Schemas within one schema, with each reference followed once on each way; more would take too long to check.

The check of a new schema takes a millisecond or two for each. So call `safe_schema` by `checked_in_turn`.
"""
MOST_NODES_OF_ALL: Final = 5_000
"""Schemas within all tools of a request."""
MOST_WAITING: Final = 64
"""Checks of schemas of one key that wait for their turn."""
RETRY_AFTER_S: Final = 1.0
"""Seconds after which another attempt is reasonable."""
T = TypeVar("T")
_OF_SCHEMAS: Final = frozenset({"properties", "$defs", "definitions", "dependentSchemas", "dependencies"})
"""Keywords whose values map names to schemas."""
_OF_VALUES: Final = frozenset({"const", "enum", "default", "examples", "required", "dependentRequired"})
"""Keywords whose values are no schemas."""
_REFUSED: Final = {
    "patternProperties": "name them",
    "unevaluatedProperties": "give additionalProperties",
    "unevaluatedItems": "give items",
    **dict.fromkeys(
        ("$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef"),
        "refer by $ref to #/$defs/NAME",
    ),
}
"""Keyword → what to give in its place. Some would lead a check around the count of the schema, or to a pattern."""
_POINTER: Final = re.compile(r"#(/[^/%]+)*")


class Room:
    """Room for all schemas of one request together.

    Args:
        param: Field of the request that has them.
    """

    def __init__(self, param: str) -> None:
        self._param = param
        self._chars = MOST_CHARS
        self._nodes = MOST_NODES_OF_ALL

    def take(self, *, chars: int = 0, nodes: int = 0) -> None:
        """Count a schema or a text.

        Raises:
            ApiError: 400: it does not fit.
        """
        self._chars -= chars
        self._nodes -= nodes
        if self._chars < 0 or self._nodes < 0:
            why = f"have more than {MOST_CHARS:,} characters, or {MOST_NODES_OF_ALL:,} parts in their schemas"
            raise ApiError(400, f"the {self._param} {why}: give fewer, or simpler ones", param=self._param)


async def checked_in_turn(owner: Owner, check: Callable[[], T]) -> T:
    """Check the schemas of a request in a thread, in the turn of its owner, and return what `check` returns.

    Raises:
        Busy: Many requests of the owner wait for it already.
        ApiError: As for `safe_schema`.
    """
    if waiting(owner.name) >= MOST_WAITING:
        said = f"{MOST_WAITING} requests of this key wait for a check of their schemas: try again later"
        raise Busy(said, RETRY_AFTER_S)
    return await aside(check, owner.name)


def safe_schema(schema: Any, param: str, room: Room | None = None) -> CheckedSchema:
    """Return a schema that can be checked in bounded time, with the patterns of texts as words for the model.

    `re` may need hours for a pattern such as `(a+)+$`. So patterns are told to the model, and not checked.

    Args:
        schema: Schema of a client.
        param: Place of the schema in the request.
        room: Room that it takes its part of, or None.

    Raises:
        ApiError: 400: it is no valid schema, too large, or has keywords that are not supported.
    """
    if not isinstance(schema, Mapping):
        raise ApiError(400, f"{param} must be a JSON Schema, which is an object", param=param)
    if (chars := len(json.dumps(schema))) > MOST_CHARS:
        raise ApiError(400, f"{param} has more than {MOST_CHARS:,} characters: give a smaller schema", param=param)
    if (nodes := _nodes(schema)) > MOST_NODES:
        why = f"{param} has more than {MOST_NODES:,} parts, with those that it refers to: give a simpler schema"
        raise ApiError(400, why, param=param)
    if room is not None:
        room.take(chars=chars, nodes=nodes)
    made = _Made(param)
    plain = made.schema(schema)
    made.require_references(plain)
    try:
        return CheckedSchema(plain, param)
    except ConfigurationError as error:
        raise ApiError(400, str(error), param=param) from None


def _nodes(schema: Mapping[str, Any]) -> int:
    try:
        return _Counted(schema).nodes(schema, frozenset())
    except RecursionError:
        return MOST_NODES + 1


class _Counted:
    """Counts the schemas that a check of a value may visit."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, int] = {}

    def nodes(self, schema: Any, above: frozenset[int]) -> int:
        if isinstance(schema, list):
            return sum(self.nodes(each, above) for each in schema)
        if not isinstance(schema, Mapping) or id(schema) in above:  # a type that refers to itself ends with the value
            return 1
        if (known := self._known.get(id(schema))) is not None:
            return known
        inside = above | {id(schema)}
        total = 1 + sum(self.nodes(each, inside) for key, each in schema.items() if key not in _DEFINITIONS)
        if (target := self._target(schema.get("$ref"))) is not None:
            total += self.nodes(target, inside)
        self._known[id(schema)] = total
        return total

    def _target(self, reference: Any) -> Any:
        return _found(self._root, reference) if isinstance(reference, str) and _POINTER.fullmatch(reference) else None


_DEFINITIONS: Final = frozenset({"$defs", "definitions"})


def _found(root: Any, pointer: str) -> Any:
    """Return the part of a schema that a plain pointer leads to, or None."""
    found = root
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if re.fullmatch("[0-9]{1,6}", name) and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


class _Made:
    """Makes a schema without patterns, and knows all schemas within.

    Args:
        param: Place of the schema in the request.
    """

    def __init__(self, param: str) -> None:
        self._param = param
        self._known: set[int] = set()
        self._references: list[str] = []

    def schema(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema, whose only "$id" and "$schema" are at its root.

        Raises:
            ApiError: 400: a keyword in it is not supported.
        """
        made = self._made({name: value for name, value in given.items() if name not in ("$id", "$schema")})
        assert isinstance(made, dict)
        return made | {name: given[name] for name in ("$schema",) if name in given}

    def require_references(self, root: Mapping[str, Any]) -> None:
        """Refuse references to other places than schemas that were made, for example to patterns in values.

        Raises:
            ApiError: 400: there is one.
        """
        for reference in self._references:
            found = _found(root, reference) if _POINTER.fullmatch(reference) else None
            if not isinstance(found, bool) and id(found) not in self._known and found is not root:
                said = f"{self._param} refers to {reference[:60]!r}, which the schema does not define as #/$defs/NAME"
                raise ApiError(400, said, param=self._param)

    def _made(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self._made(each) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _REFUSED or key in ("$id", "$schema"):
                instead = _REFUSED.get(key, "give it at the root alone")
                said = f"{self._param} has {key}, which is not supported: {instead}"
                raise ApiError(400, said, param=self._param)
            if key == "$ref" and isinstance(value, str):
                self._references.append(value)
            if key in _OF_SCHEMAS and isinstance(value, Mapping):
                made[key] = {name: self._made(each) for name, each in value.items()}
            elif key in _OF_VALUES:
                made[key] = value
            elif key != "pattern":
                made[key] = self._made(value)
        if isinstance(pattern := schema.get("pattern"), str):
            told = f"{made['description']} " if isinstance(made.get("description"), str) else ""
            made["description"] = f"{told}(matches the regular expression {pattern})"
        self._known.add(id(made))
        return made
