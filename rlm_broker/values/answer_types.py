"""The type of a value: any that pydantic can validate, or one described by a JSON Schema."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

from rlm_broker.errors import ConfigurationError
from rlm_broker.values.json_schemas import JsonSchema
from rlm_broker.values.validation import Unfit, complaints

MAX_RECURSION = 14
"""Maximum nesting of a value of a type that refers to itself; deeper values are refused.

Pydantic may try every branch of a union at each level, 2, 4, 8 and so on: 14 levels bound this to some 16,000 attempts.
"""


class WantedType:
    """Validates values of one type, or says what is wrong with them.

    Args:
        wanted: A type for `pydantic.TypeAdapter`, for example a pydantic model, or a JSON Schema as a dict.
        what: Name of the type's owner in errors about the type, for example "output_type".
        whole: Word standing for the value in errors about the value.

    Attributes:
        schema: Validator of the JSON Schema; None for a type of pydantic. A bounded one is slow: check in a thread.

    Raises:
        ConfigurationError: `wanted` is not a valid JSON Schema, or pydantic cannot validate it.
    """

    def __init__(self, wanted: Any, what: str, whole: str) -> None:
        import pydantic  # takes as long as all our modules, and few programs want a type

        self._wanted = wanted
        self._what = what
        self._whole = whole
        self.schema = JsonSchema.of(wanted, what) if isinstance(wanted, Mapping) else None
        if self.schema is not None:
            wanted = Annotated[Any, pydantic.AfterValidator(_fitting(self.schema, whole))]
        if isinstance(wanted, str):
            raise ConfigurationError(f"{what}: give the type itself, not the text {wanted!r:.60}")
        try:
            self._adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(wanted)
            self._adapter.rebuild()  # raises now, not at the first value, if a forward reference is not defined
        except Exception as error:  # noqa: BLE001 - pydantic calls hooks of the user's class
            why = _first_line(error)
            raise ConfigurationError(f"{what}: pydantic cannot validate {self._wanted!r:.80}: {why}") from None

    @functools.cached_property
    def _is_recursive(self) -> bool:
        import graphlib

        schema: Any = self._adapter.core_schema
        references = {each["ref"]: set(_references(each)) for each in schema.get("definitions", ())}
        try:
            graphlib.TopologicalSorter(references).prepare()
        except graphlib.CycleError:
            return True
        return False

    def json_schema(self) -> str:
        """Return the JSON Schema of the type as text. Raise ConfigurationError if none can describe the type."""
        if self.schema is not None:
            return self.schema.text
        try:
            return json.dumps(self._adapter.json_schema(), ensure_ascii=False)
        except Exception as error:  # noqa: BLE001 - as above
            why = f"{self._what} {self._wanted!r} has no JSON Schema: {_first_line(error)}"
            raise ConfigurationError(why) from None

    def of(self, value: Any) -> Any:
        """Convert a value to the type. Raise Unfit with each wrong place if it does not fit."""
        self._require_shallow(value)
        return self._made(self._adapter.validate_python, value)

    def of_json(self, text: str) -> Any:
        """Convert JSON text to a value of the type. Raise Unfit with each wrong place if it does not fit."""
        if self._is_recursive:
            with contextlib.suppress(ValueError, RecursionError):  # pydantic reports malformed JSON below
                self._require_shallow(json.loads(text))
        return self._made(self._adapter.validate_json, text)

    def _require_shallow(self, value: Any) -> None:
        """Raise Unfit for a value nested deeper than `MAX_RECURSION` if the type refers to itself."""
        if self._is_recursive and _is_deeper_than(value, MAX_RECURSION):
            raise Unfit(f"{self._whole}: nested deeper than {MAX_RECURSION} levels, in a type that refers to itself")

    def _made(self, validate: Callable[[Any], Any], value: Any) -> Any:
        from pydantic import ValidationError

        try:
            return validate(value)
        except ValidationError as error:
            raise Unfit(complaints(error, self._whole)) from None
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:  # raised by the user's own validator
            raise Unfit(f"{type(error).__name__}: {error}") from None


def _is_deeper_than(value: Any, levels: int) -> bool:
    inside = [value]
    for _ in range(levels):
        inside = [
            each
            for outer in inside
            if isinstance(outer, Mapping | list | tuple | set | frozenset)
            for each in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        if not inside:
            return False
    return any(isinstance(each, Mapping | list | tuple | set | frozenset) for each in inside)


def _references(schema: Any) -> Iterator[str]:
    """Yield the names of the definitions that a part of a pydantic core schema refers to."""
    if isinstance(schema, Mapping):
        if schema.get("type") == "definition-ref":
            yield schema["schema_ref"]
        for each in schema.values():
            yield from _references(each)
    elif isinstance(schema, list | tuple):
        for each in schema:
            yield from _references(each)


def _first_line(error: Exception) -> str:
    """Return the first line of pydantic's message; the others are advice for authors of extensions."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _fitting(schema: JsonSchema, whole: str) -> Callable[[Any], Any]:
    def fitting(value: Any) -> Any:
        schema.require(value, whole)
        return value

    return fitting
