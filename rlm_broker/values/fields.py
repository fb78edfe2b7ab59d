"""Frozen values with named fields that are checked: limits, and descriptions of models.

Every program makes them, so they need no library: the import of pydantic alone takes as long as that of all our
modules. The sentences on wrong values are pydantic's, as for the other values that users give.
"""

import inspect
import math
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from typing import (
    Annotated,
    Any,
    ClassVar,
    Never,
    Self,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

from rlm_broker.errors import ConfigurationError

Check = Callable[[Any], Any]
"""Converts a value, or raises `FieldRefused`. The `Annotated` type of a field, or of a part of one, has its check."""
MOST_DIGITS = 4_300
"""Maximum digits of a whole number given as text: more take long to read."""


class FieldRefused(ValueError):
    """A value is not allowed for its field.

    Args:
        mistakes: Place within the value, and what is wrong there, for each mistake. The place is empty for the value
            itself.
        is_unread: Whether the value is text that is no number.
    """

    def __init__(self, *mistakes: tuple[str, str], is_unread: bool = False) -> None:
        super().__init__(mistakes[0][1])
        self.mistakes = mistakes
        self.is_unread = is_unread


def _refused(what: str, *, is_unread: bool = False) -> FieldRefused:
    return FieldRefused(("", f": Input should be {what}"), is_unread=is_unread)


def number(kind: type, *, least: float = 0, above: bool = False, most: float | None = None) -> Check:
    """Return the check of a number of a kind, int or float. Text that is one is accepted.

    Args:
        kind: Type of the number.
        least: Smallest allowed value.
        above: Whether `least` itself is refused.
        most: Largest allowed value, or None.
    """
    read = _integer if kind is int else _real

    def check(value: Any) -> Any:
        made = read(value)
        if made < least or (above and made == least):
            raise _refused(f"greater than {'' if above else 'or equal to '}{least}")
        if most is not None and made > most:
            raise _refused(f"less than or equal to {most}")
        return made

    return check


def several(of: Check, *, least: int = 0, most: int | None = None) -> Check:
    """Return the check of a tuple. A list or a set is accepted.

    Args:
        of: Check of each value.
        least: Minimum number of values.
        most: Maximum number of values, or None.
    """

    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple | set | frozenset):
            raise _refused("a valid tuple")
        if most is not None and len(value) > most:
            raise FieldRefused(("", f": Tuple should have at most {most} items after validation, not {len(value)}"))
        made, mistakes = _each_checked((index, of, each) for index, each in enumerate(value))
        mistakes += [(str(index), " is missing") for index in range(len(value), least)]
        if mistakes:
            raise FieldRefused(*mistakes)
        return tuple(made.values())

    return check


def mapping(of: Check) -> Check:
    """Return the check of a mapping from texts to values, each with the check `of`."""

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise FieldRefused(("", " must be an object"))
        _, mistakes = _each_checked((f"{key}.[key]", text, key) for key in value)
        made, more = _each_checked((key, of, each) for key, each in value.items())
        if mistakes or more:
            raise FieldRefused(*mistakes, *more)
        return made

    return check


def text(value: Any) -> str:
    """Check a text."""
    if not isinstance(value, str):
        raise _refused("a valid string")
    return value


def anything(value: Any) -> Any:
    """Return a value that needs no check."""
    return value


def _integer(value: Any) -> int:
    if isinstance(value, str):
        if len(value) > MOST_DIGITS:
            raise FieldRefused(("", ": Unable to parse input string as an integer, exceeded maximum size"))
        try:
            return int(value)
        except ValueError:
            raise _refused("a valid integer, unable to parse string as an integer", is_unread=True) from None
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _refused("a finite number")
        if not value.is_integer():
            raise _refused("a valid integer, got a number with a fractional part")
        return int(value)
    try:
        made = operator.index(value)
    except TypeError:
        made = None
    if made is None or isinstance(value, bool):
        raise _refused("a valid integer")
    return made


def _real(value: Any) -> float:
    if isinstance(value, str):
        try:
            made = float(value)
        except ValueError:
            raise _refused("a valid number, unable to parse string as a number", is_unread=True) from None
    else:
        try:
            made = value.__float__()
        except (AttributeError, TypeError, OverflowError):  # a type, or too large an int
            made = None
    if isinstance(value, bool) or not isinstance(made, float):
        raise _refused("a valid number")
    if not math.isfinite(made):
        raise _refused("a finite number")
    return made


NonNegativeInt = Annotated[int, number(int)]
PositiveInt = Annotated[int, number(int, above=True)]
PositiveFloat = Annotated[float, number(float, above=True)]


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Fields:
    """A frozen value with named fields. A subclass annotates them with checked types, and says how it refuses values.

    Example:
        ```python
        limits = Limits.from_dict({"memory_bytes": "64MB"})
        limits.replace(max_depth=2).given  # {'memory_bytes': 67108864, 'max_depth': 2}
        limits.to_dict()["max_depth"]  # 1
        ```

    Attributes:
        fields: Default of each field of the class, by name.
    """

    fields: ClassVar[Mapping[str, Any]] = {}
    _checks: ClassVar[Mapping[str, Check]] = {}
    _given: ClassVar[tuple[str, ...]]  # of each value; `ClassVar` says that it is no field
    _hidden: ClassVar[frozenset[str]] = frozenset()
    """Fields that may hold a secret: neither `repr` nor `to_dict` shows them."""

    def __init_subclass__(cls) -> None:
        fields: dict[str, Any] = {}
        checks: dict[str, Check] = {}
        for base in reversed(cls.__mro__[1:]):
            fields |= getattr(base, "fields", {})
            checks |= getattr(base, "_checks", {})
        for name, kind in inspect.get_annotations(cls).items():
            if cast("object", get_origin(kind)) is not ClassVar:
                fields[name], checks[name] = cls.__dict__[name], _check_of(kind)
        cls.fields, cls._checks = fields, checks

    def __init__(self, *unnamed: Never, **given: Any) -> None:
        if unnamed:
            first, kind = next(iter(self.fields)), type(self).__name__
            raise ConfigurationError(f"{kind} takes its fields by name: write {kind}({first}={unnamed[0]!r:.60})")
        self._fill(given, None)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Return the value with these fields, such as a table of a settings file has them."""
        return cls._made(given, None)

    @classmethod
    def _made(cls, given: Any, source: Any) -> Self:
        made = cls.__new__(cls)
        made._fill(given, source)
        return made

    def _fill(self, given: Any, source: Any) -> None:
        """Set all fields.

        Args:
            given: Values by the names of fields, which a subclass has looked at.
            source: Where they come from, in a form of the subclass.
        """
        made, mistakes = {}, {}
        for name, value in given.items():
            try:
                made[name] = self._checks[name](value)
            except FieldRefused as refused:
                mistakes[name] = refused
        if mistakes:
            self._refuse(mistakes, source)
        self.__dict__.update({**self.fields, **made})
        self.__dict__["_given"] = tuple(made)

    def _refuse(self, mistakes: Mapping[str, FieldRefused], source: Any) -> Never:
        """Raise an error about the values that are not allowed for their fields."""
        raise NotImplementedError

    def replace(self, **changes: Any) -> Self:
        """Return the value with these fields changed, after a check of them."""
        return type(self)._made(self.given | changes, None)

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were given, by name; the others have their defaults."""
        return {name: self.__dict__[name] for name in self._given}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, without those that may hold a secret."""
        return {name: self.__dict__[name] for name in self.fields if name not in self._hidden}

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return the docstring of each field by name. They are read from the source, so this takes a while."""
        import ast
        import itertools

        found = {}
        for base in cls.__mro__:
            if "fields" not in base.__dict__:
                continue
            (body,) = (node.body for node in ast.parse(inspect.getsource(base)).body if isinstance(node, ast.ClassDef))
            for field, words in itertools.pairwise(body):
                match field, words:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(described))):
                        found[name] = inspect.cleandoc(described)
        return {name: found[name] for name in cls.fields}

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed: {type(self).__name__}.replace returns another")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(self.__dict__[name] == other.__dict__[name] for name in self.fields)

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__[name] for name in self.fields))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> Any:
        """Let a field of a pydantic model have this type."""
        from pydantic_core import core_schema

        del source, handler
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else cls.from_dict(value),
            serialization=core_schema.plain_serializer_function_ser_schema(cls.to_dict),
        )


def _check_of(kind: Any) -> Check:
    """Return the check of an annotated type. Of a union, the first type says what is wrong."""
    if get_origin(kind) is Annotated:
        check: Check = kind.__metadata__[0]
        return check
    if kind is str:
        return text
    assert get_origin(kind) in (Union, types.UnionType), kind
    checks = [_check_of(each) for each in get_args(kind) if each is not type(None)]
    return _either(checks, allows_none=type(None) in get_args(kind))


def _either(checks: list[Check], *, allows_none: bool) -> Check:
    def check(value: Any) -> Any:
        if value is None and allows_none:
            return None
        first: FieldRefused | None = None
        for each in checks:
            try:
                return each(value)
            except FieldRefused as refused:
                first = first or refused
        assert first is not None
        raise first

    return check


def _each_checked(parts: Iterable[tuple[Any, Check, Any]]) -> tuple[dict[Any, Any], list[tuple[str, str]]]:
    """Return the converted parts by place, and the mistakes in them."""
    made: dict[Any, Any] = {}
    mistakes: list[tuple[str, str]] = []
    for place, check, value in parts:
        try:
            made[place] = check(value)
        except FieldRefused as refused:
            mistakes += [(f"{place}.{within}" if within else str(place), why) for within, why in refused.mistakes]
    return made, mistakes
