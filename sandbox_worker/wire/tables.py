"""Tables of pandas, polars and pyarrow on the wire: columns of values, with their names.

A column is a list of a kind and its content: an array for numbers, a list for all other types. The tags have:

- `$series`: a column, an index and a name.
- `$frame`: the columns, the axis of their names, and an index.
- `$polars`, `$arrow`: the names and the columns.

The receiver imports the package when a table arrives. Only cells and names cross; other data of a table, such as
`attrs`, is left out.
"""

import re
import sys
from collections.abc import Callable
from typing import Any, Final, Protocol

from sandbox_worker.wire import arrow, zones
from sandbox_worker.wire.arrays import MAX_EMPTY_LENGTH, module
from sandbox_worker.wire.errors import ValueProblem

MAX_CATEGORIES: Final = 10_000
"""Maximum categories of one column; more are refused. pandas searches them for duplicates by their hash, which takes
quadratic time if a sender chose them to collide."""
_KINDS: Final = "biufcmM"
_LISTED: Final = re.compile(r"object|str|string|boolean|U?Int(8|16|32|64)|Float(32|64)")
_OF_A_ZONE: Final = re.compile(r"datetime64\[(s|ms|us|ns), .*\]")


class Inside(Protocol):
    """Encoder of the values in a table; `encoding.Encoding` is one."""

    def inside(self, key: object, value: Any) -> Any:
        """Encode the part of the table that stands at `key`."""
        ...


class Values(Protocol):
    """Decoder of the values in a table; `decoding.Decoding` is one."""

    def value(self, node: Any, depth: int) -> Any:
        """Return the object for a node of decoded JSON."""
        ...


def encoded(value: Any, encoding: Inside) -> dict[str, Any] | None:
    """Return the tag for a table; None for any other object.

    Raises:
        ValueProblem: A column has a type that cannot cross.
    """
    kind = type(value)
    pandas: Any = sys.modules.get("pandas")
    if pandas is not None:
        if kind is getattr(pandas, "Series", None):
            return {"$series": [_column(pandas, "values", value, encoding), *_labels(pandas, value, encoding)]}
        if kind is getattr(pandas, "DataFrame", None):
            columns = [_column(pandas, name, value.iloc[:, at], encoding) for at, name in enumerate(value.columns)]
            axes = [_axis(pandas, axis, encoding) for axis in (value.columns, value.index)]
            return {"$frame": [columns, *axes]}
        if kind in (getattr(pandas, "Timestamp", None), type(getattr(pandas, "NaT", None))):
            raise ValueProblem(f"is a {kind.__name__}, which does not cross by itself: use its to_pydatetime()")
        if kind is getattr(pandas, "Timedelta", None):
            raise ValueProblem("is a Timedelta, which does not cross by itself: use its to_pytimedelta()")
    return arrow.encoded(value, encoding)


def _labels(pandas: Any, series: Any, encoding: Inside) -> list[Any]:
    return [_axis(pandas, series.index, encoding), encoding.inside("name", series.name)]


def _column(pandas: Any, name: object, series: Any, encoding: Inside) -> list[Any]:
    dtype = series.dtype
    if getattr(dtype, "kind", "") in _KINDS and type(dtype).__module__.startswith("numpy"):
        return ["", encoding.inside(name, series.to_numpy())]
    if isinstance(dtype, pandas.CategoricalDtype):
        if len(dtype.categories) > MAX_CATEGORIES:
            raise ValueProblem(f"has the column {name!r:.60} of more than {MAX_CATEGORIES:,} categories")
        categories = _column(pandas, name, pandas.Series(dtype.categories), encoding)
        return ["category", encoding.inside(name, series.cat.codes.to_numpy()), categories, bool(dtype.ordered)]
    text = str(dtype)
    if _OF_A_ZONE.fullmatch(text):
        moments = series.dt.tz_convert("UTC").dt.tz_localize(None).to_numpy()
        return ["zone", encoding.inside(name, moments), zones.encoded(dtype.tz)]
    if not _LISTED.fullmatch(text):
        raise ValueProblem(f"has the column {name!r:.60} of dtype {text:.60}, which does not cross")
    values = series.tolist()
    if text != "object":
        values = [None if value is pandas.NA else value for value in values]
    return [text, encoding.inside(name, values)]


def _axis(pandas: Any, index: Any, encoding: Inside) -> list[Any]:
    names = encoding.inside("names", list(index.names))
    if isinstance(index, pandas.RangeIndex):
        return ["range", [index.start, index.stop, index.step], names]
    if isinstance(index, pandas.MultiIndex):
        levels = [_column(pandas, "index", pandas.Series(level), encoding) for level in index.levels]
        codes = [encoding.inside("index", code) for code in map(_plain_array, index.codes)]
        return ["levels", [levels, codes], names]
    return ["labels", _column(pandas, "index", pandas.Series(index), encoding), names]


def _plain_array(codes: Any) -> Any:
    return module("numpy").array(codes)


# -- decoding --------------------------------------------------------------------------------------------------------


def series(content: Any, decoding: Values, depth: int) -> Any:
    """Return the series of pandas for a tag's content.

    Args:
        content: Content of the tag, as decoded JSON.
        decoding: Decoder of the values inside.
        depth: Number of containers around the tag.

    Raises:
        ValueProblem: The content does not describe such a table, or the package is not installed here.
    """
    return _checked(_series, content, decoding, depth)


def frame(content: Any, decoding: Values, depth: int) -> Any:
    """Return the data frame of pandas for a tag's content, see `series`."""
    return _checked(_frame, content, decoding, depth)


def polars_frame(content: Any, decoding: Values, depth: int) -> Any:
    """Return the data frame of polars for a tag's content, see `series`."""
    return _checked(arrow.polars_frame, content, decoding, depth)


def arrow_table(content: Any, decoding: Values, depth: int) -> Any:
    """Return the table of pyarrow for a tag's content, see `series`."""
    return _checked(arrow.arrow_table, content, decoding, depth)


def _checked(made: Callable[[Any], Any], content: Any, decoding: Values, depth: int) -> Any:
    """Decode the values inside, make the table of them, and turn any exception of its package into `ValueProblem`."""
    content = decoding.value(content, depth)
    try:
        return made(content)
    except (ValueProblem, MemoryError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001 - pandas alone raises a dozen classes of its own
        raise ValueProblem(f"it has an invalid table: {type(error).__name__}: {error!s:.200}") from None


def _series(content: Any) -> Any:
    column, axis, name = content
    pandas = module("pandas")
    made = _decoded_column(pandas, column)
    index = _decoded_axis(pandas, axis)
    _require_length(len(made), len(index))
    made.index, made.name = index, name
    return made


def _frame(content: Any) -> Any:
    columns, names, rows = content
    pandas = module("pandas")
    index, labels = _decoded_axis(pandas, rows), _decoded_axis(pandas, names)
    if len(index) > MAX_EMPTY_LENGTH and not columns:
        raise ValueProblem(f"a table without columns has {len(index):,} rows, more than {MAX_EMPTY_LENGTH:,}")
    made = {at: _decoded_column(pandas, column) for at, column in enumerate(columns)}
    for column in made.values():
        _require_length(len(column), len(index))
    _require_length(len(made), len(labels))
    table = pandas.DataFrame(made, index=pandas.RangeIndex(len(index)))
    table.index, table.columns = index, labels
    return table


def _decoded_column(pandas: Any, content: Any) -> Any:
    kind, values, *more = content
    if kind == "":
        return pandas.Series(_array(values, _KINDS))
    if kind == "zone":
        zone = zones.decoded(more[0])
        return pandas.Series(_array(values, "M")).dt.tz_localize("UTC").dt.tz_convert(zone)
    if kind == "category":
        categories = _decoded_column(pandas, more[0])
        _require_length(min(len(categories), MAX_CATEGORIES), len(categories))
        index = pandas.Index(categories)
        return pandas.Series(pandas.Categorical.from_codes(_array(values, "i"), index, ordered=more[1] is True))
    if type(kind) is not str or not _LISTED.fullmatch(kind) or type(values) is not list:
        raise ValueProblem(f"a table has a column of the unknown kind {kind!r:.60}")
    return pandas.Series(values, dtype=kind)


def _decoded_axis(pandas: Any, content: Any) -> Any:
    kind, values, names = content
    if kind == "range":
        start, stop, step = values
        made = pandas.RangeIndex(start, stop, step)
    elif kind == "labels":
        made = pandas.Index(_decoded_column(pandas, values))
    elif kind == "levels":
        levels = [pandas.Index(_decoded_column(pandas, level)) for level in values[0]]
        codes = [_array(code, "i") for code in values[1]]
        for level, code in zip(levels, codes, strict=True):
            _require_length(len(code), len(codes[0]))
            if len(code) and not -1 <= code.min() <= code.max() < len(level):
                raise ValueProblem("a table has an index with a code that points to no label")
        made = pandas.MultiIndex(levels, codes, verify_integrity=False)
    else:
        raise ValueProblem(f"a table has an index of the unknown kind {kind!r:.60}")
    made.names = names
    return made


def _array(values: Any, kinds: str) -> Any:
    numpy = module("numpy")
    if type(values) is not numpy.ndarray or values.ndim != 1 or values.dtype.kind not in kinds:
        raise ValueProblem("a table has a column that is not an array of one dimension and of the expected kind")
    return values


def _require_length(length: int, wanted: int) -> None:
    if length != wanted:
        raise ValueProblem(f"a table has {length:,} values in one place, expected {wanted:,}")
