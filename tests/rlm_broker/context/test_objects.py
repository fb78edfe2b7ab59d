"""Objects, tables and arrays as contexts: dicts of plain values if possible, else as they cross."""

import dataclasses
import datetime
import decimal
import enum
from typing import Any

import pydantic
import pytest

from rlm_broker.context.store import store
from rlm_broker.results import ContextInfo
from tests.support.contexts import form_of, loaded, refused, value_of
from tests.support.tables import table


class Color(enum.Enum):
    """An enumeration, which JSON has by its values alone."""

    RED = "red"


class Line(pydantic.BaseModel):
    """A part of an invoice."""

    text: str
    price: decimal.Decimal


class Invoice(pydantic.BaseModel):
    """A model with other models inside."""

    at: datetime.date
    lines: list[Line]
    color: Color = Color.RED
    key: pydantic.SecretStr = pydantic.SecretStr("hidden")


@dataclasses.dataclass
class Point:
    """A dataclass."""

    x: int
    label: str = "p"


INVOICE = Invoice(at=datetime.date(2026, 1, 2), lines=[Line(text="lens", price=decimal.Decimal("1.10"))])
PLAIN_INVOICE = {"at": "2026-01-02", "lines": [{"text": "lens", "price": "1.10"}], "color": "red", "key": "**********"}


OBJECTS: list[tuple[Any, Any, str, str]] = [
    (INVOICE, PLAIN_INVOICE, "dict", "Invoice"),
    ([INVOICE, INVOICE], [PLAIN_INVOICE, PLAIN_INVOICE], "list", ""),
    (Point(1), {"x": 1, "label": "p"}, "dict", "Point"),
    ({"a": [Point(1)], "b": "text"}, {"a": [{"x": 1, "label": "p"}], "b": "text"}, "dict", ""),
]


@table("value, expected, type_name, made_of", OBJECTS)
def test_objects_are_dicts_of_their_fields(value: Any, expected: Any, type_name: str, made_of: str) -> None:
    with store(value) as stored:
        assert loaded(stored) == stored.value() == expected
        assert (stored.info.type_name, stored.info.made_of) == (type_name, made_of)
        assert form_of(stored).kind == "json"
        names = expected if isinstance(expected, dict) else range(len(expected))
        assert [name for name, _ in stored.info.parts] == [*map(str, names)]


BEYOND_JSON: list[Any] = [
    {"a": {1, 2}, "b": "text", "c": (1, "x")},
    [1.5, float("inf")],
    {1: "a", (2, 3): b"bytes"},
    {"$set": [1]},
    {"$set": [{1}]},
    {"lone \ud83d": {1}},
    {"a\nb": {1}},
    [10**9_000, -(10**5_000)],
    {1, 2},
    (1, b"x"),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    [["\ud83d", {1}]],
]


def test_value_beyond_json_keeps_its_types() -> None:
    for value in BEYOND_JSON:
        with store(value) as stored:
            found = loaded(stored)
            assert found == stored.value() == value
            assert type(found) is type(value)
            assert stored.info.type_name == type(value).__name__
    assert str(value_of({"a": [float("nan")]})) == "{'a': [nan]}"


def test_table_or_array_keeps_type_and_shape() -> None:
    numpy, pandas = pytest.importorskip("numpy"), pytest.importorskip("pandas")
    frame = pandas.DataFrame({"n": range(1_000), "t": ["x"] * 1_000})
    with store(frame) as stored:
        assert loaded(stored).equals(frame)
        assert stored.value().equals(frame)
        assert form_of(stored).kind == "value"
        assert stored.info.headline() == "a DataFrame of shape (1000, 2)"
    with store(numpy.arange(6).reshape(2, 3)) as stored:
        assert loaded(stored).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert (stored.info.type_name, stored.info.shape) == ("ndarray", (2, 3))
    with store({"sales": frame, "note": "text"}) as stored:
        assert loaded(stored)["sales"].equals(frame)
        assert [name for name, _ in stored.info.parts] == ["sales", "note"]
    with store(frame) as one, store({"sales": one, "note": "text", "more": {1}}) as joined:
        assert loaded(joined)["sales"].equals(frame)
        assert joined.value()["more"] == {1}


UNSUPPORTED: list[tuple[Any, str]] = [
    ({"a": [Point(1), object()]}, "context['a'][1] is an object, which does not cross"),
    (Point(object()), "context['x'] is an object, which does not cross"),  # type: ignore[arg-type]
    (Point, "context is a type, which does not cross"),
    (lambda: None, "context is a function, which does not cross"),
    ({Color.RED: 1}, "a key of context is a Color, which does not cross"),
]


@table("value, sentence", UNSUPPORTED)
def test_unsupported_object_is_refused_with_its_place(value: Any, sentence: str) -> None:
    assert refused(value) == sentence


def test_model_that_cannot_be_json_is_refused() -> None:
    class Odd(pydantic.BaseModel):
        """Has a field that pydantic cannot write."""

        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        field: object

    for value in (Odd(field=object()), [Odd(field=object())]):
        refused(value, r"context(\[0\])? cannot be dumped as JSON")


def test_headline_says_what_an_object_was() -> None:
    with store(Point(1)) as stored:
        assert stored.info.headline() == "a dict made of an object of class Point, with 19 characters in all"
    assert ContextInfo("str", 1_000).headline() == "a str with 1,000 characters in all"
