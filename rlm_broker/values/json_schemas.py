"""JSON Schemas of users and clients: for answers, and for the arguments of tools.

The validator is jsonschema. A schema of a few references may ask it for a check of hours: each of them can be followed
from many places, once for each part of the value. No look at the schema alone shows that. So each keyword of an
untrusted schema costs steps when it is checked, more of them for larger values, and a check of more than `MOST_STEPS`
ends.
"""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from itertools import islice
from typing import Any, Final

from rlm_broker.errors import ConfigurationError
from rlm_broker.values.validation import Unfit

MOST_MISTAKES: Final = 10
"""Mistakes named in one error; further ones are left out, because a long list may be wrong in each of its places."""
_OWNER: ContextVar[Hashable] = ContextVar("owner", default=None)
"""Owner of the schemas made now. A check by them takes one of its turns."""
MOST_STEPS: Final = 300_000
"""Steps of one check, of a few microseconds each."""
_MESSAGE_CHARS_PER_STEP: Final = 64
_KEYS_PER_STEP: Final = 16
_ITEMS_PER_STEP: Final = 4
_COSTS: Final = dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), 5)
"""Steps of a slow keyword."""
_COMPARED: Final = ("const", "enum")
"""Keywords that compare a value with all parts of theirs."""
MOST_CHARS: Final = 100_000
"""Characters of an untrusted schema, as JSON; more is refused."""
MOST_NODES: Final = 1_000
"""Schemas within an untrusted schema, with each reference followed once on each way; more are refused.

The check of a new schema takes a millisecond or two for each.
"""
_OF_SCHEMAS: Final = frozenset({"properties", "$defs", "definitions", "dependentSchemas", "dependencies"})
"""Keywords with a map from names to schemas."""
_OF_VALUES: Final = frozenset({"const", "enum", "default", "examples", "required", "dependentRequired"})
"""Keywords with values that are no schemas."""
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
_DEFINITIONS: Final = frozenset({"$defs", "definitions"})
_POINTER: Final = re.compile(r"#(/[^/%]+)*")


class JsonSchema:
    """A JSON Schema that validates values.

    Bring only trusted schemas: `re` searches their patterns, and one such as `(a+)+$` keeps it busy for hours.

    Args:
        schema: Schema of the draft in its "$schema", else of draft 2020-12.
        what: Name of the schema's owner in errors about the schema.
        is_bounded: Whether the check of the schema, and each check of a value, ends after `MOST_STEPS` steps. Those
            take about a second: check in a thread.

    Attributes:
        text: Schema as JSON text.
        whose: Owner, whose turns its checks take, see `CheckedSchema.belong_to`.

    Raises:
        ConfigurationError: It is not a valid JSON Schema.
    """

    def __init__(self, schema: Mapping[str, Any], what: str, *, is_bounded: bool = False) -> None:
        import jsonschema  # 0.1 s, saved by runs without a schema

        self.is_bounded = is_bounded
        self.whose = _OWNER.get()
        try:
            self.text = json.dumps(schema, ensure_ascii=False)
            self._validator = _validator(self.text, is_bounded)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{what} is not a JSON Schema: {error}") from None
        except jsonschema.SchemaError as error:
            raise ConfigurationError(f"{what} is not a JSON Schema: {error.message}") from None
        except _TooManySteps:
            why = f"its check takes more than {MOST_STEPS:,} steps: give a simpler one"
            raise ConfigurationError(f"{what} is too large a JSON Schema: {why}") from None
        _require_references(schema, what)

    @classmethod
    def of(cls, schema: Mapping[str, Any], what: str) -> "JsonSchema":
        """Return the validator of a schema: its own, if it is a `CheckedSchema`. Raise ConfigurationError for an
        invalid schema."""
        return schema.checked if isinstance(schema, CheckedSchema) else cls(schema, what)

    def require(self, value: Any, whole: str) -> None:
        """Raise Unfit with up to `MOST_MISTAKES` wrong places of a plain value. `whole` stands for the value itself in
        them."""
        try:
            with _counted():
                errors = list(islice(self._validator.iter_errors(value), MOST_MISTAKES))
        except _TooManySteps:
            raise Unfit(f"{whole}: its check takes more than {MOST_STEPS:,} steps: give fewer values") from None
        if errors:
            told = (f"{'.'.join(map(str, each.absolute_path)) or whole}: {each.message}" for each in errors)
            raise Unfit("; ".join(told))


class CheckedSchema(dict[str, Any]):
    """Schema of one whom the process does not trust: its checks are bounded.

    `re` may need hours for a pattern such as `(a+)+$`. So patterns of texts become words for the model, in the
    description, and are not checked.

    Example:
        ```python
        schema = CheckedSchema({"type": "array", "items": {"type": "integer"}}, "the schema of the request")
        client = ScriptedClient(["```repl\\nFINAL([1, 2, 3])\\n```"])
        RLM(client).completion("1 2 3", "Which numbers are there?", output_type=schema).parsed  # [1, 2, 3]
        ```

    Args:
        schema: The schema, as it came.
        what: Name of the schema's owner in errors about the schema.
        take: Called with the characters and the parts of the schema before it is checked. It may refuse them.

    Attributes:
        checked: Its validator.

    Raises:
        ConfigurationError: It is not a valid JSON Schema, too large, or has keywords that are not supported.
    """

    def __init__(self, schema: Any, what: str, take: Callable[[int, int], None] | None = None) -> None:
        if not isinstance(schema, Mapping):
            raise ConfigurationError(f"{what} must be a JSON Schema, which is an object")
        if (chars := len(json.dumps(schema))) > MOST_CHARS:
            raise ConfigurationError(f"{what} has more than {MOST_CHARS:,} characters: give a smaller schema")
        if (nodes := _nodes(schema)) > MOST_NODES:
            why = f"{what} has more than {MOST_NODES:,} parts, with those that it refers to: give a simpler schema"
            raise ConfigurationError(why)
        if take is not None:
            take(chars, nodes)
        admission = _Admission(what)
        super().__init__(admission.schema(schema))
        admission.require_references(self)
        self.checked = JsonSchema(self, what, is_bounded=True)

    def below(self, pointer: str) -> dict[str, Any]:
        """Return the schema as a part of a larger one: its references begin at this place.

        Example:
            ```python
            item = CheckedSchema({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, "an item")
            CheckedSchema({"type": "array", "items": item.below("#/items")}, "the list")
            ```
        """
        return {key: each for key, each in _moved(self, pointer).items() if key != "$schema"}

    @staticmethod
    def belong_to(owner: Hashable) -> None:
        """Let the schemas that this context of variables makes from now on belong to an owner."""
        _OWNER.set(owner)


def _moved(schema: Any, to: str) -> Any:
    """Return a schema with references below `to`. A value, for example of `const`, has none."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _OF_VALUES:
            moved[key] = value
        elif key in _OF_SCHEMAS and isinstance(value, Mapping):
            moved[key] = {name: _moved(each, to) for name, each in value.items()}
        else:
            moved[key] = f"{to}{value.removeprefix('#')}" if key == "$ref" else _moved(value, to)
    return moved


@functools.lru_cache(maxsize=256)
def _validator(text: str, is_bounded: bool) -> Any:
    """Return the validator of a schema. It is kept, because the check of a schema takes a millisecond for each part."""
    import jsonschema

    schema = json.loads(text)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    made = _extended(kind, is_bounded)
    if not is_bounded:
        kind.check_schema(schema)
        return made(schema)
    with _counted():
        for error in made(kind.META_SCHEMA).iter_errors(_without_plain_parts(schema)):
            raise jsonschema.SchemaError.create_from(error)
    return made(schema)


_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})


def _without_plain_parts(schema: Any) -> Any:
    """Return a schema without those schemas in it that are valid in every draft: with no keyword but a description and
    the name of a type. The check of a schema takes a third of a millisecond for each part, and most parts are such."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for keyword in ("properties", "$defs", "definitions"):
        if isinstance(parts := schema.get(keyword), dict):
            thin = {name: _without_plain_parts(part) for name, part in parts.items()}
            made[keyword] = {name: part for name, part in thin.items() if not _is_plain(part)}
    if "items" in schema and _is_plain(items := _without_plain_parts(schema["items"])):
        del made["items"]
    elif "items" in schema:
        made["items"] = items
    return made


def _is_plain(schema: Any) -> bool:
    """Whether a schema needs no check: it has no keyword but harmless ones."""
    return isinstance(schema, dict) and all(
        (keyword in ("description", "title") and isinstance(value, str))
        or (keyword == "type" and isinstance(value, str) and value in _TYPES)
        or (keyword in ("properties", "$defs", "definitions") and value == {})
        for keyword, value in schema.items()
    )


@functools.cache
def _extended(kind: Any, is_bounded: bool) -> Any:
    import jsonschema

    made = jsonschema.validators.extend(kind, {"uniqueItems": _unique_items})
    return _bounded(made) if is_bounded else made


def _unique_items(_validator: Any, wanted: Any, instance: Any, _schema: Any) -> Iterator[Any]:
    """Check "uniqueItems" with a set, in linear time. The check of jsonschema compares each item with all others."""
    import jsonschema

    if wanted is True and isinstance(instance, list):
        known = {_comparable(item) for item in instance}
        if len(known) < len(instance):
            yield jsonschema.ValidationError(f"{len(instance) - len(known):,} items repeat earlier ones")


def _comparable(value: Any) -> Any:
    """Return a hashable key that is the same for values equal in JSON: 1 equals 1.0, and not true."""
    if isinstance(value, Mapping):
        return "dict", frozenset((key, _comparable(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return "list", tuple(map(_comparable, value))
    if isinstance(value, bool) or not isinstance(value, int | float | str | None):
        return type(value).__name__, repr(value)
    return value


def _require_references(schema: Mapping[str, Any], what: str) -> None:
    """Refuse references that cannot be resolved within the schema. Those to other documents are never fetched. Without
    this check a missing target would end the run at the first value."""
    import referencing
    import referencing.jsonschema

    default = referencing.jsonschema.DRAFT202012
    resource = referencing.Resource.from_contents(dict(schema), default_specification=default)
    resolver = referencing.Registry().with_resource(resource.id() or "", resource).resolver(resource.id() or "")
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except referencing.exceptions.Unresolvable:
            raise ConfigurationError(f"{what} refers to {reference!r}, which the schema does not define") from None


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, list | tuple):
        for each in schema:
            yield from _references(each)
    for name, value in schema.items() if isinstance(schema, Mapping) else ():
        if name in ("$ref", "$dynamicRef") and isinstance(value, str):
            yield value
        elif name in _OF_SCHEMAS and isinstance(value, Mapping):
            yield from _references([*value.values()])
        elif name not in _OF_VALUES:
            yield from _references(value)


class _TooManySteps(Exception):
    """A check has taken `MOST_STEPS`."""


class _Steps:
    """Steps that are left to one check, and the sizes of the values it has met."""

    def __init__(self) -> None:
        self.left = MOST_STEPS
        self._sizes: dict[int, int] = {}

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise _TooManySteps

    def size(self, value: Any) -> int:
        """Return about how many characters the value has as text. Containers live as long as the check."""
        known = self._sizes.get(id(value))
        if known is None:
            known = self._sizes[id(value)] = _size(value)
        return known


_STEPS: ContextVar[_Steps | None] = ContextVar("steps", default=None)


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    """Count the steps of the checks within the block. Raise _TooManySteps beyond `MOST_STEPS`."""
    token = _STEPS.set(_Steps())
    try:
        yield
    finally:
        _STEPS.reset(token)


def _bounded(kind: Any) -> Any:
    """Return a class of validators of jsonschema whose checks cost steps. Use them within `_counted`."""
    import attrs  # jsonschema makes its classes with it
    import jsonschema

    made: Any = jsonschema.validators.extend(
        kind, {name: _costly(name, check) for name, check in kind.VALIDATORS.items()}
    )
    fields = [(field.alias, field.name) for field in attrs.fields(made) if field.init]

    def evolve(self: Any, **changes: Any) -> Any:
        return made(**{alias: getattr(self, name) for alias, name in fields} | changes)

    made.evolve = evolve  # jsonschema's takes another class if a part of the schema has "$schema"
    return made


def _costly(keyword: str, check: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    def checked(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
        steps = _STEPS.get()
        assert steps is not None
        steps.spend(_COSTS.get(keyword, 1) + _keys(wanted) // _KEYS_PER_STEP + _keys(instance) // _ITEMS_PER_STEP)
        if keyword in _COMPARED:
            steps.spend(steps.size(wanted) // _ITEMS_PER_STEP)
        elif keyword == "uniqueItems":
            steps.spend(steps.size(instance) // _ITEMS_PER_STEP)
        elif refusals := _refusals(wanted):  # each of them writes the value into an error, before it gets here
            steps.spend(refusals * steps.size(instance) // _MESSAGE_CHARS_PER_STEP)
        for error in check(validator, wanted, instance, schema) or ():
            steps.spend(len(error.message) // _MESSAGE_CHARS_PER_STEP)
            yield error

    return checked


def _keys(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _refusals(wanted: Any) -> int:
    """Return how many schemas right below a keyword are `false`."""
    if isinstance(wanted, list | dict):
        return sum(each is False for each in (wanted if isinstance(wanted, list) else wanted.values()))
    return int(wanted is False)


def _size(value: Any) -> int:
    total, inside = 0, [value]
    while inside:
        each = inside.pop()
        total += 1
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, Mapping):
            inside += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            inside += each
    return total


def _nodes(root: Mapping[str, Any]) -> int:
    """Return how many schemas a check of a value may visit."""
    known: dict[int, int] = {}

    def nodes(schema: Any, above: frozenset[int]) -> int:
        if isinstance(schema, list):
            return sum(nodes(each, above) for each in schema)
        if not isinstance(schema, Mapping) or id(schema) in above:  # a type that refers to itself ends with the value
            return 1
        if id(schema) not in known:
            inside = above | {id(schema)}
            total = 1 + sum(nodes(each, inside) for key, each in schema.items() if key not in _DEFINITIONS)
            if (target := _found(root, schema.get("$ref"))) is not None:
                total += nodes(target, inside)
            known[id(schema)] = total
        return known[id(schema)]

    try:
        return nodes(root, frozenset())
    except RecursionError:
        return MOST_NODES + 1


def _found(root: Any, pointer: Any) -> Any:
    """Return the part of a schema at a plain pointer, or None."""
    if not isinstance(pointer, str) or not _POINTER.fullmatch(pointer):
        return None
    found = root
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if re.fullmatch("[0-9]{1,6}", name) and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


class _Admission:
    """Makes a schema without patterns, and knows all schemas within it. Errors name its owner as `what`."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._known: set[int] = set()
        self._references: list[str] = []

    def schema(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema, with "$id" and "$schema" at its root alone. Raise ConfigurationError for unsupported
        keywords."""
        made = self._made({name: value for name, value in given.items() if name not in ("$id", "$schema")})
        assert isinstance(made, dict)
        return made | {name: given[name] for name in ("$schema",) if name in given}

    def require_references(self, root: Mapping[str, Any]) -> None:
        """Raise ConfigurationError for references to other places than schemas, for example to patterns in values."""
        for reference in self._references:
            found = _found(root, reference)
            if not isinstance(found, bool) and id(found) not in self._known and found is not root:
                said = f"{self._what} refers to {reference[:60]!r}, which the schema does not define as #/$defs/NAME"
                raise ConfigurationError(said)

    def _made(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self._made(each) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _REFUSED or key in ("$id", "$schema"):
                instead = _REFUSED.get(key, "give it at the root alone")
                said = f"{self._what} has {key}, which is not supported: {instead}"
                raise ConfigurationError(said)
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
