"""JSON Schemas that clients send. They are not trusted: no schema may keep the server busy."""

import json
from collections.abc import Mapping
from typing import Any, Final

from rlm_broker.errors import ConfigurationError
from rlm_broker.json_schema import JsonSchema
from rlm_broker.service.errors import ApiError

MOST_CHARS: Final = 100_000
"""Characters of one schema as JSON, and of all tools of a request; more is refused."""
MOST_NODES: Final = 1_000
"""Schemas within one schema, with each reference followed once on each way; more would take too long to check.

The check of a new schema takes a millisecond or two for each. So call `safe_schema` in a thread.
"""
_OF_SCHEMAS: Final = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values map names to schemas."""
_OF_VALUES: Final = frozenset({"const", "enum", "default", "examples", "required"})
"""Keywords whose values are no schemas."""


def safe_schema(schema: Any, param: str) -> dict[str, Any]:
    """Return a schema that can be checked in bounded time, with the patterns of texts as words for the model.

    `re` may need hours for a pattern such as `(a+)+$`. So patterns are told to the model, and not checked.

    Args:
        schema: Schema of a client.
        param: Place of the schema in the request.

    Raises:
        ApiError: 400: it is no valid schema, too large, or has `patternProperties`.
    """
    if not isinstance(schema, Mapping):
        raise ApiError(400, f"{param} must be a JSON Schema, which is an object", param=param)
    if len(json.dumps(schema)) > MOST_CHARS:
        raise ApiError(400, f"{param} has more than {MOST_CHARS:,} characters: give a smaller schema", param=param)
    if not _is_small(schema):
        why = f"{param} has more than {MOST_NODES:,} parts, with those that it refers to: give a simpler schema"
        raise ApiError(400, why, param=param)
    made = _without_patterns(schema, param)
    assert isinstance(made, dict)
    try:
        JsonSchema(made, param)
    except ConfigurationError as error:
        raise ApiError(400, str(error), param=param) from None
    return made


def _is_small(schema: Mapping[str, Any]) -> bool:
    try:
        return _Counted(schema).nodes(schema, frozenset()) <= MOST_NODES
    except RecursionError:
        return False


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
        total += self.nodes(self._target(schema.get("$ref")), inside)
        self._known[id(schema)] = total
        return total

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self._root
        for part in reference[1:].split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found


_DEFINITIONS: Final = frozenset({"$defs", "definitions"})


def _without_patterns(schema: Any, param: str) -> Any:
    if isinstance(schema, list):
        return [_without_patterns(each, param) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "patternProperties":
            raise ApiError(400, f"{param} has patternProperties, which are not supported: name them", param=param)
        if key in _OF_SCHEMAS and isinstance(value, Mapping):
            made[key] = {name: _without_patterns(each, param) for name, each in value.items()}
        elif key in _OF_VALUES:
            made[key] = value
        elif key != "pattern":
            made[key] = _without_patterns(value, param)
    if isinstance(pattern := schema.get("pattern"), str):
        told = f"{made['description']} " if isinstance(made.get("description"), str) else ""
        made["description"] = f"{told}(matches the regular expression {pattern})"
    return made
