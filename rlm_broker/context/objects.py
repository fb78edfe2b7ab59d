"""Storing of Python values: as JSON if it holds them, else as values cross (see `sandbox_worker.wire.values`)."""

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

from rlm_broker.context.memfd import JsonMemfd, TextMemfd, pieces_of
from rlm_broker.context.stored_context import StoredContext, StoredParts, sealed
from rlm_broker.errors import ContextRefused
from sandbox_worker.loading.form import ContextForm
from sandbox_worker.wire.encoding import MAX_INT_BITS, MAX_NESTING, is_like_a_tag, with_article
from sandbox_worker.wire.errors import ValueProblem, ValueRefused
from sandbox_worker.wire.names import CONTEXT
from sandbox_worker.wire.values import encode, has_tags

MAPPED_CHARS: Final = 1_000
"""Smallest mean length, in characters, of mapped texts of a dict or list. Shorter ones are decoded from JSON in less
time than their headers take."""


_Place = tuple["_Place", object] | None
"""Keys on the way to a value, as a linked list from the last key to the first. None is the context itself. So each
value costs one tuple, and the text is made only for an error."""


def store_value(value: object) -> StoredContext:
    """Store a value other than a text, a path or a stream. Raise ContextRefused if some value in it does not cross."""
    return _store_plain(value) if is_plain(value) else _store_encoded(value)


def _store_encoded(value: object) -> StoredContext:
    """Store a value that is not plain. An object whose fields are plain values is stored as JSON."""
    made_of = type(value).__name__ if _has_fields(value) else ""
    shape = getattr(value, "shape", ())
    parts = StoredParts()
    with JsonMemfd() as memfd:
        try:
            has_any_tag = _write_encoded(memfd, _fields(value) if made_of else value, parts)
        except (ValueRefused, ValueProblem) as refused:
            raise ContextRefused(
                f"{CONTEXT} {refused}" if isinstance(refused, ValueProblem) else str(refused)
            ) from None
        form = ContextForm("value" if has_any_tag else "json", memfd.size_bytes)
        info = parts.info("dict" if made_of else _type_name(value), form.length)
        shape = tuple(map(int, shape)) if isinstance(shape, tuple) else ()
        return sealed(memfd, form, dataclasses.replace(info, made_of=made_of, shape=shape))


def _write_encoded(memfd: JsonMemfd, value: Any, parts: StoredParts) -> bool:
    """Write a value as it crosses, item by item if it has items; return whether it is more than JSON."""
    has_any_tag = False

    def add(child: object, place: str) -> int:
        nonlocal has_any_tag
        data = encode(child, place, others=_fields)
        has_any_tag = has_any_tag or has_tags(data)
        memfd.write(data)
        return len(child) if isinstance(child, str) else len(data)

    has_names = type(value) is dict and all(type(key) is str and key.isprintable() for key in value)
    if (has_names and not is_like_a_tag(value)) or type(value) is list:
        _write_items(memfd, value, parts, lambda child, key: add(child, f"{CONTEXT}[{key!r:.60}]"))
    else:
        add(value, CONTEXT)
    return has_any_tag


def _write_items(memfd: JsonMemfd, value: Any, parts: StoredParts, add: Callable[[object, object], int]) -> None:
    """Write a dict or a list. `add` writes an item, which it gets with its key, and returns its length."""
    is_dict = isinstance(value, dict)
    items: Iterable[tuple[Any, Any]] = value.items() if is_dict else enumerate(value)
    memfd.write(b"{" if is_dict else b"[")
    for key, child in items:
        if is_dict:
            memfd.add_key(key, first=not parts.total)
        elif parts.total:
            memfd.write(b",")
        parts.add(str(key), add(child, key), isinstance(child, str))
    memfd.write(b"}" if is_dict else b"]")


def _type_name(value: object) -> str:
    """Return the name of the built-in type of a value that is an instance of a subclass, else of its own type."""
    kinds = (dict, list, tuple, set, frozenset, bool, int, float, complex)
    return next((kind.__name__ for kind in kinds if isinstance(value, kind)), type(value).__name__)


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, or of a pydantic model as the JSON it makes. Raise ValueProblem for anything
    else."""
    if not _has_fields(value):
        raise ValueProblem(f"is {with_article(type(value))}, which does not cross")
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    try:
        fields: dict[str, Any] = value.model_dump(mode="json")
    except Exception as error:  # noqa: BLE001 - the serializers of the user's model may raise anything
        raise ValueProblem(f"cannot be dumped as JSON: {error!s:.200}") from None
    return fields


def _has_fields(value: object) -> bool:
    pydantic = sys.modules.get("pydantic")  # a program with a model has imported it; others need not pay for it
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _store_plain(value: object) -> StoredContext:
    if isinstance(value, dict) and _are_worth_mapping(value.values()):
        return _store_texts(list(value), value.values())
    if isinstance(value, list | tuple) and _are_worth_mapping(value):
        return _store_texts(None, value)
    parts = StoredParts()
    with JsonMemfd() as memfd:
        if isinstance(value, dict | list | tuple):
            _write_items(memfd, value, parts, lambda child, _key: memfd.add(child))
        else:
            memfd.add(value)
        form = memfd.form
        name = "list" if isinstance(value, tuple) else _type_name(value)  # JSON has no tuples
        return sealed(memfd, form, parts.info(name, form.length))


def _are_worth_mapping(values: Collection[object]) -> bool:
    """Whether all values are texts, and long ones on average."""
    chars = 0
    for value in values:
        if not isinstance(value, str):
            return False
        chars += len(value)
    return chars >= max(1, len(values)) * MAPPED_CHARS


def _store_texts(names: list[str] | None, texts: Iterable[str]) -> StoredContext:
    with TextMemfd() as memfd:
        parts = StoredParts()
        for number, text in enumerate(texts):
            length = memfd.add_text(pieces_of(text))
            parts.add(str(number) if names is None else names[number], length, is_text=True)
        form = memfd.add_names(names)
        return sealed(memfd, form, parts.info("list" if names is None else "dict", form.length))


def is_plain(context: object) -> bool:
    """Whether JSON holds the context without a change. Tuples count as lists. Raise ContextRefused if it contains
    itself, is nested too deeply, or is or holds bytes or paths, where most likely their content is meant."""
    return _is_plain(context, None, ())


def _is_plain(value: object, place: _Place, around: tuple[int, ...]) -> bool:
    if isinstance(value, dict):
        inside: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
    else:
        return _is_plain_leaf(value, place)
    if id(value) in around:
        raise ContextRefused(f"{_shown(place)} contains itself")
    if len(around) >= MAX_NESTING:
        raise ContextRefused(f"{_shown(place)[:60]}... is nested deeper than {MAX_NESTING} levels")
    around = (*around, id(value))
    are_plain = True
    for key, child in inside:
        if type(key) is not str and isinstance(value, dict) and not isinstance(key, str):
            are_plain = False
        if type(child) is not str:  # the common case, skipped early: most of a large context is text
            are_plain &= _is_plain(child, (place, key), around)
    return are_plain


def _is_plain_leaf(value: object, place: _Place) -> bool:
    match value:
        case None | bool() | str():
            return True
        case int():
            return value.bit_length() <= MAX_INT_BITS
        case float():
            return math.isfinite(value)
        case bytes() | bytearray() | memoryview() if place is None:
            instead = "decode them to str first, or hand in a stream of them, io.BytesIO(data)"
            raise ContextRefused(f"{_shown(place)} is of type {type(value).__name__}: {instead}")
        case os.PathLike():
            instead = "a Path is a context only by itself; several are Paths([...])"
            raise ContextRefused(f"{_shown(place)} is {with_article(type(value))}: {instead}")
        case _:
            return False


def _shown(place: _Place) -> str:
    keys: list[str] = []
    while place is not None:
        place, key = place
        keys.append(f"[{key!r:.60}]")
    return CONTEXT + "".join(reversed(keys))
