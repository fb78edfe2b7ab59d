"""What class a value of model code's has, found out without running code of that class or of its metaclass."""

from typing import TypeGuard, TypeVar

T = TypeVar("T")
_name_of = type.__dict__["__name__"].__get__
"""Of a class. Its metaclass may have a `__name__` of its own, which `type.__getattribute__` would prefer."""


def class_name(value: object) -> str:
    """The name of its class: `type(value).__name__` would ask the metaclass."""
    return str.__str__(_name_of(type(value)))  # the name may be of a class of the model's, too


def is_a(value: object, *kinds: type[T]) -> TypeGuard[T]:
    """Whether it is an instance of one of these built-in classes: `isinstance` would ask its `__class__`."""
    return issubclass(type(value), kinds)
