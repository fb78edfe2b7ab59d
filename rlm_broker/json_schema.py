"""JSON Schemas that users bring: for answers, and for the arguments of tools."""

import asyncio
import contextlib
import functools
import inspect
import json
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

from rlm_broker.concurrency.threads import DaemonThreads
from rlm_broker.concurrency.turns import FairSemaphore
from rlm_broker.errors import ConfigurationError
from rlm_broker.schema_steps import MOST_STEPS, TooManySteps, bounded, counted

MOST = 10
"""Mistakes named in one error; further ones are left out, because a long list may be wrong in each of its places."""


_PLACES = 2
"""Checks that may take seconds, at the same time. They are few, so that many checks leave time to other work."""
_THREADS = DaemonThreads(_PLACES)
_TURNS: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, FairSemaphore]" = weakref.WeakKeyDictionary()
"""Turns of the checks of each event loop."""
_WHOSE: ContextVar[Hashable] = ContextVar("whose", default=None)
"""Owner of the schemas that are made now."""
T = TypeVar("T")


async def aside(work: Callable[[], T], whose: Hashable) -> T:
    """Check by a schema that is not trusted in a thread, so that the event loop goes on.

    Args:
        work: The check. Schemas that it makes are those of `whose`.
        whose: Owner of the schema. Owners take turns.

    Returns:
        What `work` returns. It is not begun if the caller is cancelled while it waits for its turn.
    """
    loop, turns = asyncio.get_running_loop(), _turns()
    await turns.acquire(whose)

    def check() -> T:
        _WHOSE.set(whose)  # in the thread's copy of the caller's variables
        return work()

    try:
        checking = _THREADS.submit(check)
    except BaseException:
        turns.release()
        raise
    checking.add_done_callback(lambda _: _pass_on(loop, turns))  # also if the caller is cancelled: a thread goes on
    done: T = await asyncio.wrap_future(checking)
    return done


def waiting(whose: Hashable) -> int:
    """Return how many checks of an owner wait for their turn on this event loop."""
    return _turns().waiting_of(whose)


def _turns() -> FairSemaphore:
    return _TURNS.setdefault(asyncio.get_running_loop(), FairSemaphore(_PLACES))


def _pass_on(loop: asyncio.AbstractEventLoop, turns: FairSemaphore) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and no turn of it waits
        loop.call_soon_threadsafe(turns.release)


class Unfit(ValueError):
    """A value does not fit its schema; the message names each wrong place."""


class JsonSchema:
    """A JSON Schema that validates values.

    Bring only schemas that you trust: `re` searches their patterns, and one such as `(a+)+$` keeps it busy for hours.

    Args:
        schema: Schema of the draft that its "$schema" names, else of draft 2020-12.
        what: Name of the schema's owner in errors about the schema.
        is_bounded: Whether the check of the schema, and each check of a value, ends after `MOST_STEPS` steps. Those
            take about a second: check in a thread.

    Attributes:
        text: Schema as JSON text.
        is_bounded: As given.
        whose: Owner whose turn a check by it takes, where `aside` has made it.

    Raises:
        ConfigurationError: It is not a valid JSON Schema.
    """

    def __init__(self, schema: Mapping[str, Any], what: str, *, is_bounded: bool = False) -> None:
        import jsonschema  # its import takes 0.1 s, which runs without a schema save

        self.is_bounded = is_bounded
        self.whose = _WHOSE.get()
        try:
            self.text = json.dumps(schema, ensure_ascii=False)
            self._validator = _validator(self.text, is_bounded)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{what} is not a JSON Schema: {error}") from None
        except jsonschema.SchemaError as error:
            raise ConfigurationError(f"{what} is not a JSON Schema: {error.message}") from None
        except TooManySteps:
            why = f"its check takes more than {MOST_STEPS:,} steps: give a simpler one"
            raise ConfigurationError(f"{what} is too large a JSON Schema: {why}") from None
        _require_references(schema, what)

    @classmethod
    def of(cls, schema: Mapping[str, Any], what: str) -> "JsonSchema":
        """Return the validator of a schema: that which it has, if it is a `CheckedSchema`.

        Raises:
            ConfigurationError: It is not a valid JSON Schema.
        """
        return schema.checked if isinstance(schema, CheckedSchema) else cls(schema, what)

    def require(self, value: Any, whole: str) -> None:
        """Check a value.

        Args:
            value: Plain value.
            whole: Word that stands for the value itself in the error.

        Raises:
            Unfit: The value does not fit; the message names up to `MOST` places.
        """
        if not self.is_bounded:
            return self._require(value, whole)
        try:
            with counted():
                return self._require(value, whole)
        except TooManySteps:
            raise Unfit(f"{whole}: its check takes more than {MOST_STEPS:,} steps: give fewer values") from None

    def _require(self, value: Any, whole: str) -> None:
        problems = []
        for error in self._validator.iter_errors(value):
            problems.append(f"{'.'.join(map(str, error.absolute_path)) or whole}: {error.message}")
            if len(problems) == MOST:
                break
        if problems:
            raise Unfit("; ".join(problems))


class CheckedSchema(dict[str, Any]):
    """Schema of one whom the process does not trust: its checks are bounded.

    Args:
        schema: The schema.
        what: Name of the schema's owner in errors about the schema.

    Attributes:
        checked: Its validator.

    Raises:
        ConfigurationError: It is not a valid JSON Schema, or too large.
    """

    def __init__(self, schema: Mapping[str, Any], what: str) -> None:
        super().__init__(schema)
        self.checked = JsonSchema(schema, what, is_bounded=True)


@functools.lru_cache(maxsize=256)
def _validator(text: str, is_bounded: bool) -> Any:
    """Return the validator of a schema. It is kept, because the check of a schema takes a millisecond for each part.

    Raises:
        jsonschema.SchemaError: It is not a valid JSON Schema.
        TooManySteps: Its check takes too many.
    """
    import jsonschema

    schema = json.loads(text)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    made = _extended(kind, is_bounded)
    if not is_bounded:
        kind.check_schema(schema)
        return made(schema)
    with counted():
        for error in made(kind.META_SCHEMA).iter_errors(_without_plain_parts(schema)):
            raise jsonschema.SchemaError.create_from(error)
    return made(schema)


_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})


def _without_plain_parts(schema: Any) -> Any:
    """Return a schema without those schemas in it that are valid in every draft.

    These have no keyword but a description and the name of a type. The check of a schema takes a third of a
    millisecond for each part, and most parts are such.
    """
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
    return bounded(made) if is_bounded else made


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
    """Refuse references that cannot be resolved within the schema.

    References to other documents are never fetched. Without this check a missing target would end the run at the first
    value.
    """
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
    """Placeholder default of an optional argument: if the caller omits it, the function's own default holds."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._shown = repr(schema["default"]) if "default" in schema else "..."

    def __repr__(self) -> str:
        return self._shown


def with_schema(function: Callable[..., Any], schema: Mapping[str, Any], what: str) -> Callable[..., Any]:
    """Return a function that takes the properties of an object schema as arguments and validates them.

    Args:
        function: Called with the given arguments by keyword. An async function stays async.
        schema: Schema of type "object". Positional arguments are its properties in order, the required ones first.
        what: Name of the schema's owner in errors.

    Raises:
        ConfigurationError: It is not a valid JSON Schema of an object, or its properties cannot be parameter names.
    """
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        raise ConfigurationError(f'{what} must be a JSON Schema with "type": "object"')
    checked = JsonSchema.of(schema, what)
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
        if checked.is_bounded:
            return await function(**await aside(lambda: bound(args, kwargs), checked.whose))
        return await function(**bound(args, kwargs))

    made: Any = awaited if inspect.iscoroutinefunction(function) else called
    del made.__wrapped__
    made.__signature__, made.__annotations__ = signature, {}
    return made  # type: ignore[no-any-return]


def _signature(schema: Mapping[str, Any], what: str) -> inspect.Signature:
    properties, required = schema.get("properties", {}), set(schema.get("required", []))
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
