"""Frozen values with named fields that are checked: limits, and descriptions of models.

msgspec checks each value by the type of its field. The values are no Structs, because a Struct cannot have two bases
with fields, as `Limits` has, and does not tell which fields were given.
"""

import inspect
import numbers
import re
import sys
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Never, Self, cast, dataclass_transform, get_args, get_origin

import msgspec
from msgspec import Meta

from rlm_broker.errors import ConfigurationError


def whole(least: int, most: int | None = None) -> Meta:
    """Return the bounds of a whole number, and words on them."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    return Meta(ge=least, le=most, description=f"a whole number {bounds}")


FINITE = sys.float_info.max
NonNegativeInt = Annotated[int, whole(0)]
PositiveInt = Annotated[int, whole(1)]
PositiveFloat = Annotated[float, Meta(gt=0, le=FINITE, description="a finite number above 0")]
Text = Annotated[str, Meta(description="text")]


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Fields:
    """A frozen value with named fields. A subclass annotates them, and says how it refuses values.

    The `Meta` of each type has the bounds, and words on what is accepted.

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
    _types: ClassVar[dict[str, Any]] = {}
    _given: ClassVar[tuple[str, ...]]  # of each value; `ClassVar` tells type checkers that it is no field
    _hidden: ClassVar[frozenset[str]] = frozenset()
    """Fields that may hold a secret: neither `repr` nor `to_dict` shows them."""

    def __init_subclass__(cls) -> None:
        cls._types = {}
        for base in reversed(cls.__mro__[:-2]):  # without this class and `object`
            cls._types |= inspect.get_annotations(base)
        cls.fields = {name: getattr(cls, name) for name in cls._types}

    def __init__(self, *unnamed: Never, **given: Any) -> None:
        if unnamed:
            first, kind = next(iter(self.fields)), type(self).__name__
            raise ConfigurationError(f"{kind} takes its fields by name: write {kind}({first}={unnamed[0]!r:.60})")
        self._fill(given, None)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], source: Any = None, /) -> Self:
        """Return the value with these fields, such as a table of a settings file has them."""
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
                made[name] = msgspec.convert(_plain(value), self._types[name], strict=False)
            except (AttributeError, OverflowError, ValueError) as error:  # of a range as a mapping, of a huge fraction
                mistakes[name] = _advice(self._types[name], str(error))
        if mistakes:
            self._refuse(mistakes, source)
        self.__dict__.update({**self.fields, **made}, _given=tuple(made))

    def _refuse(self, mistakes: Mapping[str, str], source: Any) -> Never:
        """Raise an error about fields. `mistakes` has words on what to give for each."""
        raise NotImplementedError

    def replace(self, **changes: Any) -> Self:
        """Return the value with these fields changed, after a check of them."""
        return self.from_dict(self.given | changes)

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were given, by name; the others have their defaults."""
        return {name: self.__dict__[name] for name in self._given}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, without those that may hold a secret."""
        return {name: self.__dict__[name] for name in self.fields if name not in self._hidden}

    @classmethod
    @cache
    def descriptions(cls) -> Mapping[str, str]:
        """Return the docstring of each field by name. The first call reads the source, which takes a while."""
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

    @classmethod
    def __get_pydantic_json_schema__(cls, source: object, handler: object) -> dict[str, Any]:
        """Return the schema of such a field. Texts with a unit are accepted beside it."""
        del source, handler
        properties = {name: msgspec.json.schema(kind) for name, kind in cls._types.items()}
        return {"type": "object", "properties": properties, "additionalProperties": False}


def _plain(value: Any) -> Any:
    """Return a number of numpy, or a fraction, as a number of Python: msgspec takes no other."""
    if isinstance(value, int) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _advice(kind: Any, error: str) -> str:
    """Return words on what to give for a type, with the place in a tuple that an error of msgspec names."""
    place = re.search(r"\$(\[\d+\])", error)
    return f"{f'at {place[1]}: ' if place else ''}give {', or '.join(_accepted(kind))}"


def _accepted(kind: Any) -> list[str]:
    if cast("object", get_origin(kind)) is Annotated:
        return [kind.__metadata__[0].description]
    return [words for part in get_args(kind) for words in _accepted(part)] or ["None"]
