"""A type that a value has to have: any that pydantic can validate, or that a JSON Schema describes."""

import contextlib
import functools
import graphlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import pydantic

from rlm_broker.errors import ConfigurationError
from rlm_broker.json_schema import JsonSchema, Unfit
from rlm_broker.validation import complaints

MAX_RECURSION = 14
"""Levels of a value of a type that refers to itself."""


class WantedType:
    """Makes values of one type, or says why it cannot.

    Args:
        wanted: A pydantic model, or whatever else `pydantic.TypeAdapter` takes; or a JSON Schema, as a dict.
        what: Whose type it is, for the error.
        whole: Stands for the value in sentences on what is wrong with it.

    Raises:
        ConfigurationError: It is no JSON Schema, or pydantic cannot validate it.
    """

    def __init__(self, wanted: Any, what: str, whole: str) -> None:
        self._wanted = wanted
        self._what = what
        self._whole = whole
        if isinstance(wanted, Mapping):
            schema = JsonSchema(wanted, what)
            wanted = Annotated[Any, pydantic.AfterValidator(_fitting(schema, whole))]
        if isinstance(wanted, str):
            raise ConfigurationError(f"{what}: a type is given by itself, and not as the text {wanted!r:.60}")
        try:
            self._adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(wanted)
            self._adapter.rebuild()  # what it refers to by a text has to be known by now
        except Exception as error:  # noqa: BLE001 - it is the user's: pydantic may call anything of it
            why = _first_line(error)
            raise ConfigurationError(f"{what}: pydantic cannot validate {self._wanted!r:.80}: {why}") from None

    @functools.cached_property
    def _is_recursive(self) -> bool:
        schema: Any = self._adapter.core_schema
        references = {each["ref"]: set(_references(each)) for each in schema.get("definitions", ())}
        try:
            graphlib.TopologicalSorter(references).prepare()
        except graphlib.CycleError:
            return True
        return False

    def json_schema(self) -> str:
        """Return the JSON Schema of the type as text. Raises: ConfigurationError, if no JSON can describe it."""
        if isinstance(self._wanted, Mapping):
            return json.dumps(self._wanted, ensure_ascii=False)
        try:
            return json.dumps(self._adapter.json_schema(), ensure_ascii=False)
        except Exception as error:  # noqa: BLE001 - as above
            why = f"{self._what} {self._wanted!r} cannot be asked for as JSON: {_first_line(error)}"
            raise ConfigurationError(why) from None

    def of(self, value: Any) -> Any:
        """Return a value of the type, made of one that is like it. Raises: Unfit, with each place that is wrong."""
        self._require_shallow(value)
        return self._made(self._adapter.validate_python, value)

    def of_json(self, text: str) -> Any:
        """Return the value of the type that JSON text describes. Raises: Unfit, with each place that is wrong."""
        if self._is_recursive:
            with contextlib.suppress(ValueError, RecursionError):  # pydantic says what is wrong with it
                self._require_shallow(json.loads(text))
        return self._made(self._adapter.validate_json, text)

    def _require_shallow(self, value: Any) -> None:
        """Raises: Unfit. Where a type refers to itself, pydantic may try all ways at each level: 2, 4, 8 and so on."""
        if self._is_recursive and _is_deeper_than(value, MAX_RECURSION):
            raise Unfit(f"{self._whole}: nested deeper than {MAX_RECURSION} levels, in a type that refers to itself")

    def _made(self, validate: Callable[[Any], Any], value: Any) -> Any:
        try:
            return validate(value)
        except pydantic.ValidationError as error:
            raise Unfit(complaints(error, self._whole)) from None
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:  # of a validator of the user's own
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
    """Find the definitions that a part of a schema of pydantic's refers to."""
    if isinstance(schema, Mapping):
        if schema.get("type") == "definition-ref":
            yield schema["schema_ref"]
        for each in schema.values():
            yield from _references(each)
    elif isinstance(schema, list | tuple):
        for each in schema:
            yield from _references(each)


def _first_line(error: Exception) -> str:
    """Return what pydantic says, without its advice to those who extend it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _fitting(schema: JsonSchema, whole: str) -> Callable[[Any], Any]:
    def fitting(value: Any) -> Any:
        schema.require(value, whole)
        return value

    return fitting
