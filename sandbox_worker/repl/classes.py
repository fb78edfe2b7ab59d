"""Class of a value of model code, determined without running code of that class or of its metaclass."""

from typing import TypeGuard, TypeVar

T = TypeVar("T")
_name_of = type.__dict__["__name__"].__get__
"""Getter of a class's name. A plain `kind.__name__` would run code of a metaclass that defines `__name__`."""


def class_name(value: object) -> str:
    """Return the name of the class of a value."""
    return str.__str__(_name_of(type(value)))  # the name itself may be an instance of a `str` subclass of model code


def is_a(value: object, *kinds: type[T]) -> TypeGuard[T]:
    """Whether a value is an instance of one of these built-in classes.

    `isinstance` would also accept a value whose attribute `__class__` names such a class, and so run its code.
    """
    return issubclass(type(value), kinds)
