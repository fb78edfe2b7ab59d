"""A bound on the work of one check by a JSON Schema: its steps are counted while it goes on.

A schema of a few references may ask for a check of hours: each of them can be followed from many places, once for each
part of the value. No look at the schema alone tells that. So each keyword of the schema costs steps when it is checked,
more of them for larger values, and a check with more than `MOST_STEPS` ends.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final

MOST_STEPS: Final = 300_000
"""Steps of one check, of a few microseconds each."""
_MESSAGE_CHARS_PER_STEP: Final = 64
_KEYS_PER_STEP: Final = 16
_ITEMS_PER_STEP: Final = 4
_COSTS: Final = dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), 5)
"""Steps of a keyword that takes more time than others."""
_COMPARED: Final = ("const", "enum")
"""Keywords that compare a value with all parts of theirs."""


class TooManySteps(Exception):
    """A check has taken `MOST_STEPS`."""


class _Steps:
    """Steps that are left to one check, and the sizes of the values that it has met."""

    def __init__(self) -> None:
        self.left = MOST_STEPS
        self._sizes: dict[int, int] = {}

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooManySteps

    def size(self, value: Any) -> int:
        """Return about how many characters the value has as text. Containers live as long as the check."""
        known = self._sizes.get(id(value))
        if known is None:
            known = self._sizes[id(value)] = _size(value)
        return known


_STEPS: ContextVar[_Steps | None] = ContextVar("steps", default=None)


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Count the steps of the checks within the block.

    Raises:
        TooManySteps: They are more than `MOST_STEPS`.
    """
    token = _STEPS.set(_Steps())
    try:
        yield
    finally:
        _STEPS.reset(token)


def bounded(kind: Any) -> Any:
    """Return a class of validators of jsonschema whose checks cost steps. Use them within `counted`."""
    import attrs  # jsonschema makes its classes with it
    import jsonschema

    made: Any = jsonschema.validators.extend(
        kind, {name: _costly(name, check) for name, check in kind.VALIDATORS.items()}
    )
    fields = [(field.alias, field.name) for field in attrs.fields(made) if field.init]

    def evolve(self: Any, **changes: Any) -> Any:
        return made(**{alias: getattr(self, name) for alias, name in fields} | changes)

    made.evolve = evolve  # that of jsonschema makes a validator of another class if a part of the schema has "$schema"
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
