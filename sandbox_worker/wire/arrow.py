"""Tables of polars and pyarrow on the wire: names, and columns with the names of their types. (See also `tables`.)"""

import re
import sys
from typing import Any, Final

from sandbox_worker.wire.arrays import module
from sandbox_worker.wire.errors import ValueProblem

_UNITS: Final = ("s", "ms", "us", "ns")
_ZONE: Final = re.compile(r"[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,2}|[+-]\d\d:\d\d")


def encoded(value: Any, encoding: Any) -> dict[str, Any] | None:
    """Return the tag for a table of polars or pyarrow; None for any other object.

    Raises:
        ValueProblem: A column has a type that cannot cross.
    """
    kind = type(value)
    polars: Any = sys.modules.get("polars")
    if polars is not None and kind is getattr(polars, "DataFrame", None):
        columns = [_polars_column(polars, column, encoding) for column in value.get_columns()]
        return {"$polars": [encoding.inside("columns", value.columns), columns]}
    pyarrow: Any = sys.modules.get("pyarrow")
    if pyarrow is not None and kind is getattr(pyarrow, "Table", None):
        names = value.column_names
        columns = [_arrow_column(pyarrow, name, value.column(at), encoding) for at, name in enumerate(names)]
        return {"$arrow": [encoding.inside("columns", names), columns]}
    return None


# -- polars ----------------------------------------------------------------------------------------------------------


def _polars_types(polars: Any) -> dict[str, Any]:
    numbers = (polars.Int8, polars.Int16, polars.Int32, polars.Int64, polars.UInt8, polars.UInt16, polars.UInt32)
    others = (polars.UInt64, polars.Float32, polars.Float64, polars.Boolean, polars.String, polars.Binary)
    return {str(kind): kind for kind in (*numbers, *others, polars.Date, polars.Time, polars.Null)}


def _polars_column(polars: Any, column: Any, encoding: Any) -> list[Any]:
    kind, name = column.dtype, column.name
    if isinstance(kind, polars.Datetime):
        return ["Datetime", encoding.inside(name, column.to_physical().to_list()), kind.time_unit, kind.time_zone]
    if isinstance(kind, polars.Duration):
        return ["Duration", encoding.inside(name, column.to_physical().to_list()), kind.time_unit, None]
    if str(kind) not in _polars_types(polars):
        raise ValueProblem(f"has the column {name!r:.60} of type {kind!s:.60}, which does not cross")
    is_array = kind.is_numeric() and not column.null_count()
    return [str(kind), encoding.inside(name, column.to_numpy() if is_array else column.to_list()), None, None]


def polars_frame(content: Any) -> Any:
    """Return the data frame for a tag's decoded content."""
    names, columns = content
    polars = module("polars")
    made = []
    for name, (kind, values, unit, zone) in zip(_texts(names), columns, strict=True):
        if kind in ("Datetime", "Duration"):
            _require_time(unit, zone)
            wanted = polars.Datetime(unit, zone) if kind == "Datetime" else polars.Duration(unit)
            made.append(polars.Series(name, values, dtype=polars.Int64).cast(wanted))
        else:
            made.append(polars.Series(name, values, dtype=_known(kind, _polars_types(polars))))
    return polars.DataFrame(made)


# -- pyarrow ---------------------------------------------------------------------------------------------------------


def _arrow_types(pyarrow: Any) -> dict[str, Any]:
    integers = (pyarrow.int8(), pyarrow.int16(), pyarrow.int32(), pyarrow.int64(), pyarrow.uint8(), pyarrow.uint16())
    numbers = (*integers, pyarrow.uint32(), pyarrow.uint64(), pyarrow.float32(), pyarrow.float64())
    texts = (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.large_binary())
    others = (pyarrow.bool_(), pyarrow.null(), pyarrow.date32(), pyarrow.time64("us"))
    return {str(kind): kind for kind in (*numbers, *texts, *others)}


def _arrow_column(pyarrow: Any, name: str, column: Any, encoding: Any) -> list[Any]:
    kind, types = column.type, pyarrow.types
    if types.is_timestamp(kind) or types.is_duration(kind):
        values = encoding.inside(name, column.cast(pyarrow.int64()).to_pylist())
        is_moment = types.is_timestamp(kind)
        return ["timestamp" if is_moment else "duration", values, kind.unit, kind.tz if is_moment else None]
    if str(kind) not in _arrow_types(pyarrow):
        raise ValueProblem(f"has the column {name!r:.60} of type {kind!s:.60}, which does not cross")
    is_array = (types.is_integer(kind) or types.is_floating(kind)) and not column.null_count
    return [str(kind), encoding.inside(name, column.to_numpy() if is_array else column.to_pylist()), None, None]


def arrow_table(content: Any) -> Any:
    """Return the table for a tag's decoded content."""
    names, columns = content
    pyarrow = module("pyarrow")
    made = []
    for kind, values, unit, zone in columns:
        if kind in ("timestamp", "duration"):
            _require_time(unit, zone)
            wanted = pyarrow.timestamp(unit, zone) if kind == "timestamp" else pyarrow.duration(unit)
            made.append(pyarrow.array(values, pyarrow.int64()).cast(wanted))
        else:
            made.append(pyarrow.array(values, _known(kind, _arrow_types(pyarrow))))
    return pyarrow.table(made, names=_texts(names))


def _texts(names: Any) -> list[str]:
    if type(names) is not list or not all(type(name) is str for name in names):
        raise ValueProblem("a table has column names that are not texts")
    return names


def _known(kind: Any, types: dict[str, Any]) -> Any:
    if type(kind) is not str or kind not in types:
        raise ValueProblem(f"a table has a column of the unknown kind {kind!r:.60}")
    return types[kind]


def _require_time(unit: Any, zone: Any) -> None:
    if unit not in _UNITS or not (zone is None or (type(zone) is str and _ZONE.fullmatch(zone))):
        raise ValueProblem("a table has times of an unknown unit or zone")
