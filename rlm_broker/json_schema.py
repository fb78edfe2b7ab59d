"""JSON Schemas that the user brings: for an answer, or for the arguments of a tool."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

from rlm_broker.errors import ConfigurationError

MOST = 10
"""Mistakes that are named at a time; a long list may be wrong in each of its places."""


class Unfit(ValueError):
    """A value is not what its schema asks for; the text names each place."""


class JsonSchema:
    """A schema that values can be compared with.

    Its patterns are searched by `re`, which a pattern such as `(a+)+$` keeps busy for hours: bring trusted schemas.

    Args:
        schema: The draft that its "$schema" names; without one 2020-12.
        what: What it is for, for the error.

    Attributes:
        text: The schema as JSON.

    Raises:
        ConfigurationError: It is no JSON Schema.
    """

    def __init__(self, schema: Mapping[str, Any], what: str) -> None:
        import jsonschema  # 0.1 s that most runs need not pay

        try:
            self.text = json.dumps(schema, ensure_ascii=False)
            kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
            kind.check_schema(schema)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{what} is not a JSON Schema: {error}") from None
        except jsonschema.SchemaError as error:
            raise ConfigurationError(f"{what} is not a JSON Schema: {error.message}") from None
        self._validator = jsonschema.validators.extend(kind, {"uniqueItems": _unique_items})(dict(schema))
        _require_references(schema, what)

    def require(self, value: Any, whole: str) -> None:
        """Raise `Unfit` unless a value is what the schema asks for; `whole` stands for the value itself."""
        problems = []
        for error in self._validator.iter_errors(value):
            problems.append(f"{'.'.join(map(str, error.absolute_path)) or whole}: {error.message}")
            if len(problems) == MOST:
                break
        if problems:
            raise Unfit("; ".join(problems))


def _unique_items(_validator: Any, wanted: Any, instance: Any, _schema: Any) -> Iterator[Any]:
    """Check "uniqueItems" by a set. That of jsonschema compares each item with all others."""
    import jsonschema

    if wanted is True and isinstance(instance, list):
        known = {_comparable(item) for item in instance}
        if len(known) < len(instance):
            yield jsonschema.ValidationError(f"{len(instance) - len(known):,} items are there already")


def _comparable(value: Any) -> Any:
    """Return what is equal for equal values: 1 is 1.0 and not true, as in JSON."""
    if isinstance(value, Mapping):
        return "dict", frozenset((key, _comparable(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return "list", tuple(map(_comparable, value))
    if isinstance(value, bool) or not isinstance(value, int | float | str | None):
        return type(value).__name__, repr(value)
    return value


def _require_references(schema: Mapping[str, Any], what: str) -> None:
    """Refuse references that lead out of the schema, or nowhere: nothing is fetched, and a run is not to end by it."""
    import referencing
    import referencing.jsonschema

    default = referencing.jsonschema.DRAFT202012
    resource = referencing.Resource.from_contents(dict(schema), default_specification=default)
    resolver = referencing.Registry().with_resource(resource.id() or "", resource).resolver(resource.id() or "")
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except referencing.exceptions.Unresolvable:
            raise ConfigurationError(f"{what} refers to {reference!r}, which is not in it") from None


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        for name, value in schema.items():
            if name in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            else:
                yield from _references(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from _references(value)


class _LeftOut:
    """Stands for an optional argument that is not given: the function has a default of its own."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._shown = repr(schema["default"]) if "default" in schema else "..."

    def __repr__(self) -> str:
        return self._shown


def with_schema(function: Callable[..., Any], schema: Mapping[str, Any], what: str) -> Callable[..., Any]:
    """Return a function that is called with the properties of an object schema, and refuses what does not fit.

    Args:
        schema: Of type "object". Positional arguments are its properties in their order, the required ones first.
        what: Whose schema it is, for the error.

    Raises:
        ConfigurationError: It is no JSON Schema of an object whose properties can be parameters.
    """
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        raise ConfigurationError(f'{what} must be a JSON Schema with "type": "object"')
    checked = JsonSchema(schema, what)
    signature = _signature(schema, what)

    def bound(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        arguments = signature.bind(*args, **kwargs).arguments
        given = {name: value for name, value in arguments.items() if not isinstance(value, _LeftOut)}
        checked.require(given, "arguments")
        return given

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(**bound(args, kwargs))

    @wraps(function)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        return await function(**bound(args, kwargs))

    made: Any = awaited if inspect.iscoroutinefunction(function) else called
    del made.__wrapped__
    made.__signature__, made.__annotations__ = signature, {}
    return made  # type: ignore[no-any-return]


def _signature(schema: Mapping[str, Any], what: str) -> inspect.Signature:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    names = [*(name for name in properties if name in required), *(name for name in properties if name not in required)]
    try:
        return inspect.Signature(
            [
                inspect.Parameter(
                    name,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=inspect.Parameter.empty if name in required else _LeftOut(properties[name]),
                )
                for name in names
            ]
        )
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{what}: its properties cannot be parameters: {error}") from None
