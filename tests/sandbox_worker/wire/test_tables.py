"""Tables on the wire: each arrives equal or is refused with the place of its fault; other content is one error."""

import datetime
import json
from typing import Any

import numpy
import pandas
import pytest

from sandbox_worker.wire.errors import ValueInvalid, ValueRefused
from sandbox_worker.wire.values import decode, encode
from tests.support.tables import table

MOST = 1 << 16
COLUMNS: dict[str, Any] = {
    "integers": numpy.array([1, 2, 3], "i4"),
    "floats": [0.5, float("nan"), float("inf")],
    "truths": [True, False, True],
    "text": ["a", "é", "c"],
    "missing_text": pandas.Series(["a", None, "c"]),
    "objects": pandas.Series([(1, 2), {3}, "\ud800"], dtype=object),
    "moments": pandas.to_datetime(["2026-01-01", None, "2026-01-03"]),
    "moments_of_a_zone": pandas.to_datetime(["2026-01-01", None, "2026-07-03"]).tz_localize("Europe/Berlin"),
    "moments_of_utc": pandas.to_datetime(["2026-01-01", "2026-01-02", "2026-01-03"], utc=True),
    "lengths": pandas.to_timedelta([1, 2, 3], unit="s"),
    "nullable": pandas.array([1, None, 3], dtype="Int64"),
    "nullable_truths": pandas.array([True, None, False], dtype="boolean"),
    "strings": pandas.array(["a", None, "c"], dtype="string"),
    "categories": pandas.Categorical(["a", None, "b"], categories=["b", "a", "unused"], ordered=True),
    "categories_of_numbers": pandas.Categorical([1.5, 2.5, 1.5]),
}
INDEXES: list[Any] = [
    None,
    pandas.RangeIndex(5, 11, 2, name="rows"),
    pandas.Index(["x", "y", "x"], name="labels"),
    pandas.date_range("2026-01-01", periods=3, tz="UTC"),
    pandas.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1)], names=["letter", None]),
    pandas.Index([1.5, None, 2.5]),
]


def crossed(value: Any) -> Any:
    return decode(encode({"a": value}, "it"), MOST)["a"]


@table("name", COLUMNS)
def test_series_comes_out_unchanged(name: str) -> None:
    series = pandas.Series(COLUMNS[name], name=("any", name))
    pandas.testing.assert_series_equal(crossed(series), series)


@table("index", INDEXES)
def test_data_frame_comes_out_unchanged(index: Any) -> None:
    frame = pandas.DataFrame(COLUMNS)
    if index is not None:
        frame.index = index
    pandas.testing.assert_frame_equal(crossed(frame), frame, check_freq=False)
    changed = crossed(frame)
    changed.iloc[0, 0] = 7


@table(
    "frame",
    [
        pandas.DataFrame(),
        pandas.DataFrame(index=range(3)),
        pandas.DataFrame([[1, 2.5], [3, 4.5]], columns=["same", "same"]),
        pandas.DataFrame([[1, 2]], columns=pandas.MultiIndex.from_tuples([("a", 1), ("a", 2)])),
        pandas.DataFrame({1: [1], "b": ["c"]}),
        pandas.DataFrame({"a": numpy.array([], "f4")}),
    ],
)
def test_odd_data_frame_comes_out_unchanged(frame: Any) -> None:
    pandas.testing.assert_frame_equal(crossed(frame), frame)


@table(
    "value, why",
    [
        (pandas.DataFrame({"b": [print]}), "it['b'][0] is a builtin_function_or_method, which does not cross"),
        (pandas.Series(pandas.period_range("2026", periods=1)), "it has the column 'values' of dtype period"),
        (pandas.DataFrame({"a": pandas.Categorical(range(10_001))}), "it has the column 'a' of more than 10,000 categ"),
        (pandas.Timestamp("2026-01-01"), "it is a Timestamp, which does not cross by itself"),
        (pandas.NaT, "it is a NaTType, which does not cross by itself"),
        (pandas.NA, "it is a NAType, which does not cross"),
    ],
)
def test_table_that_does_not_cross_is_refused(value: Any, why: str) -> None:
    with pytest.raises(ValueRefused) as refused:
        encode(value, "it")
    assert str(refused.value).startswith(why)


ARRAY = {"$array": ["<i8", [1], "AAAAAAAAAAA="]}
TWO = {"$array": ["<i8", [2], "AAAAAAAAAAAAAAAAAAAAAA=="]}
RANGE = ["range", [0, 1, 1], [None]]


@table(
    "tag, content",
    [
        ("$series", 5),
        ("$series", [["", ARRAY], RANGE]),
        ("$series", [["", ARRAY], ["range", [0, 10**15, 1], [None]], None]),
        ("$series", [["", ARRAY], ["range", [0, 1, 0], [None]], None]),
        ("$series", [["", ARRAY], ["range", ["a", 1, 1], [None]], None]),
        ("$series", [["", [1]], RANGE, None]),
        ("$series", [["", ARRAY], RANGE, [1]]),
        ("$series", [["eval", [1]], RANGE, None]),
        ("$series", [["Int64", ["x"]], RANGE, None]),
        ("$series", [["zone", ARRAY, "../x"], RANGE, None]),
        ("$series", [["category", TWO, ["Int64", [1]], 1], ["range", [0, 2, 1], [None]], {"a": 1}]),
        ("$series", [["category", ARRAY, ["", {"$array": ["<i8", [0], ""]}], 1], RANGE, None]),
        ("$series", [["category", ARRAY, ["Int64", list(range(10_001))], True], RANGE, None]),
        ("$series", [["", ARRAY], ["levels", [[["", ARRAY]], [TWO]], [None]], None]),
        ("$series", [["", ARRAY], ["levels", [[], []], [None]], None]),
        ("$series", [["", ARRAY], ["other", [], [None]], None]),
        ("$frame", [[["", ARRAY], ["", TWO]], ["range", [0, 2, 1], [None]], RANGE]),
        ("$frame", [[["", ARRAY]], ["range", [0, 2, 1], [None]], RANGE]),
        ("$frame", [[], ["range", [0, 0, 1], [None]], ["range", [0, 10**15, 1], [None]]]),
        ("$polars", [["a"], [["Object", [1], None, None]]]),
        ("$arrow", [["a"], [["extension", [1], None, None]]]),
    ],
)
def test_invalid_table_is_one_error(tag: str, content: Any) -> None:
    with pytest.raises(ValueInvalid) as invalid:
        decode(json.dumps({tag: content}, separators=(",", ":")).encode(), MOST)
    assert len(str(invalid.value)) < 400


MIXED: dict[str, list[Any]] = {
    "integers": [1, 2],
    "holes": [1, None],
    "floats": [0.5, float("inf")],
    "text": ["a", None],
    "raw": [b"a", b"\xff"],
    "truths": [True, None],
    "days": [datetime.date(2026, 1, 1), None],
    "moments": [datetime.datetime(2026, 1, 1, 2, 3), None],
    "lengths": [datetime.timedelta(microseconds=7), None],
    "nothing": [None, None],
}


def test_polars_table_comes_out_unchanged() -> None:
    polars = pytest.importorskip("polars")
    table = polars.DataFrame(MIXED).with_columns(
        polars.col("moments").dt.replace_time_zone("Europe/Berlin").alias("of_a_zone"),
        polars.col("integers").cast(polars.UInt8).alias("small"),
    )
    crosses_but_for_lists(table, polars.DataFrame({"a": [[1]]}))


def test_pyarrow_table_comes_out_unchanged() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table(MIXED).append_column("small", pyarrow.array([1, 2], pyarrow.uint8()))
    table = table.append_column("zoned", pyarrow.array([1, None], pyarrow.timestamp("ns", "Europe/Berlin")))
    crosses_but_for_lists(table, pyarrow.table({"a": [[1]]}))


def crosses_but_for_lists(table: Any, of_lists: Any) -> None:
    arrived = crossed(table)
    assert arrived.schema == table.schema
    assert arrived.equals(table)
    with pytest.raises(ValueRefused, match=r"it has the column 'a' of type [Ll]ist"):
        encode(of_lists, "it")
