"""Arrays, tables, images and time zones on the wire: of numpy, pandas, polars, pyarrow, PIL and zoneinfo.

- A time zone is its offset from UTC in microseconds, or its name.
- `$array`, `$scalar`: the dtype, the shape and the bytes.
- `$series`: a column, an index and a name. `$frame`: the columns, the axis of their names, and an index.
- `$polars`, `$arrow`: the names and the columns.
- `$image`: an image of PIL, as the bytes of a PNG picture. Its receiver decodes the picture when it is first looked at.

A column is a list of a kind and its content: an array for numbers, a list for all other types. The receiver imports the
package when a table arrives. Only cells and names cross; other data of a table, for example `attrs`, is left out.
"""

import datetime
import functools
import importlib
import io
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from sandbox_worker.wire.errors import ValueProblem

_ZONE_NAME: Final = re.compile(r"[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,2}")


def encoded_zone(zone: datetime.tzinfo | None) -> int | str | None:
    """Return the wire form of a zone: its offset in microseconds, its name, or None for no zone.

    Raises:
        ValueProblem: The zone is neither a `datetime.timezone` nor a `zoneinfo.ZoneInfo`.
    """
    if zone is None:
        return None
    if type(zone) is datetime.timezone:
        return zone.utcoffset(None) // datetime.timedelta(microseconds=1)
    zoneinfo: Any = sys.modules.get("zoneinfo")
    name = getattr(zone, "key", None) if zoneinfo is not None and type(zone) is zoneinfo.ZoneInfo else None
    if name is not None:
        return str(name)
    raise ValueProblem(f"has a time zone of another class, {zone!r:.60}: use datetime.timezone or zoneinfo.ZoneInfo")


def decoded_zone(zone: Any) -> datetime.tzinfo | None:
    """Return the zone of a wire form that `encoded` made.

    Raises:
        ValueProblem: This machine has no zone of that name.
        ValueError: The offset is a day or more.
    """
    if zone is None:
        return None
    if type(zone) is int:
        return datetime.timezone(datetime.timedelta(microseconds=zone)) if zone else datetime.UTC
    if type(zone) is not str or not _ZONE_NAME.fullmatch(zone):
        raise ValueProblem(f"there is no time zone {zone!r:.60}")
    return _zone_named(zone)


@functools.lru_cache(maxsize=1024)
def _zone_named(name: str) -> datetime.tzinfo:
    """Return the zone of a name.

    The name is checked first: for an unknown name, `zoneinfo` would import a module that the peer named.
    """
    import zoneinfo  # imported here because most processes never need it

    if not any(Path(folder, name).is_file() for folder in zoneinfo.TZPATH) and name not in _packaged_zones():
        raise ValueProblem(f"the time zone {name!r} is not known here: it needs the package tzdata")
    return zoneinfo.ZoneInfo(name)


@functools.cache
def _packaged_zones() -> set[str]:
    import zoneinfo

    return zoneinfo.available_timezones()


MAX_DIMENSIONS: Final = 32
"""Maximum dimensions of an array, as in numpy 1; an array with more is invalid."""
MAX_EMPTY_LENGTH: Final = 1 << 24
"""Maximum product of the nonzero lengths of an array without elements; a larger one is invalid. Such an array costs the
sender no bytes, but code that receives it may loop over as many rows."""
_ARRAY_KINDS: Final = "biufcmMSU"
_DTYPE: Final = re.compile(
    r"[<>|=]?[biufcmMSU][1-9]\d{0,8}(\[(\d{1,9})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?|[<>=]?[mM]8"
)
_LAST_CHARACTER: Final = 0x10FFFF


class Encoder(Protocol):
    """Encoder of the parts of an array or a table; `encoding.Encoding` is one."""

    def base64(self, data: memoryview | bytes) -> str:
        """Return bytes as base64 text."""
        ...

    def take(self, length: int) -> None:
        """Count bytes before they are copied."""
        ...

    def inside(self, key: object, value: Any) -> Any:
        """Encode the part at `key`."""
        ...


class Decoder(Protocol):
    """Decoder of the values in a table; `decoding.Decoding` is one."""

    def value(self, node: Any, depth: int) -> Any:
        """Return the object for a node of decoded JSON."""
        ...


def encoded_array(value: Any, encoding: Encoder) -> dict[str, Any] | None:
    """Return the tag for an array or a scalar of numpy; None for any other object.

    Raises:
        ValueProblem: The array has a dtype that cannot cross, or is of a subclass.
    """
    numpy = sys.modules.get("numpy")
    generic = getattr(numpy, "generic", None)
    if generic is None:
        return None
    kind = type(value)
    if kind is numpy.ndarray:  # type: ignore[union-attr]
        dtype, data = _raw(value, encoding)
        return {"$array": [dtype, list(value.shape), data]}
    if issubclass(kind, generic):
        return {"$scalar": _raw(numpy.asarray(value), encoding)}  # type: ignore[union-attr]
    if issubclass(kind, numpy.ndarray):  # type: ignore[union-attr]
        raise ValueProblem(f"is a {kind.__name__}, which does not cross: numpy.array() makes an array of it")
    return None


def _raw(array: Any, encoding: Encoder) -> list[str]:
    """Return the dtype, and the bytes as base64."""
    if array.dtype.kind not in _ARRAY_KINDS:
        raise ValueProblem(f"is an array of dtype {array.dtype!s:.60}, which does not cross")
    if not array.dtype.itemsize:  # an array of empty texts: "U0" has no bytes, from which no length would follow
        array = array.astype(f"{array.dtype.kind}1")
    encoding.take(array.nbytes)
    return [array.dtype.str, encoding.base64(array.tobytes())]


def array(content: Any, bytes_of: Any) -> Any:
    """Return the array for a tag's content.

    Args:
        content: List of dtype, shape and base64.
        bytes_of: Function that decodes base64.

    Raises:
        ValueProblem, ValueError, TypeError: The content does not describe an array.
    """
    dtype, shape, data = content
    numpy = module("numpy")
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueProblem("an array has an invalid shape")
    elements = _elements(numpy, dtype, bytes_of(data))
    if elements.size != math.prod(shape):
        raise ValueProblem(f"an array of shape {tuple(shape)!s:.80} has {elements.size:,} elements")
    if not elements.size and math.prod(n for n in shape if n) > MAX_EMPTY_LENGTH:
        raise ValueProblem(f"an array without elements has the shape {tuple(shape)!s:.80}, which is too large")
    return elements.reshape(shape)


def scalar(content: Any, bytes_of: Any) -> Any:
    """Return the scalar for a tag's content, see `array`."""
    dtype, data = content
    elements = _elements(module("numpy"), dtype, bytes_of(data))
    if elements.size != 1:
        raise ValueProblem(f"a scalar has {elements.size:,} elements, expected 1")
    return elements[0]


def _elements(numpy: Any, dtype: Any, data: bytes) -> Any:
    """Return a flat, writable array."""
    made = numpy.dtype(dtype) if type(dtype) is str and _DTYPE.fullmatch(dtype) else None
    if made is None or made.kind not in _ARRAY_KINDS or not made.itemsize or made.hasobject:
        raise ValueProblem(f"an array has the unsupported dtype {dtype!r:.60}")
    if len(data) % made.itemsize:
        raise ValueProblem(f"an array of dtype {dtype} has {len(data):,} bytes, no multiple of {made.itemsize:,}")
    elements = numpy.frombuffer(bytearray(data), made)
    if made.kind == "b" and data and elements.view("u1").max() > 1:
        raise ValueProblem("a boolean array has a byte that is neither 0 nor 1")
    if made.kind == "U" and data and elements.view(f"{made.str[0]}u4").max() > _LAST_CHARACTER:
        raise ValueProblem("an array of text has a code point above U+10FFFF")
    return elements


MAX_PIXELS: Final = 1 << 26
"""Maximum pixels of an image; larger ones are refused. A few kilobytes can hold a picture of gigabytes."""
DRAWN_MODES: Final = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
"""Modes of PIL images that PNG can store. Images of other modes are converted."""


def encoded_image(value: Any, encoding: Encoder) -> dict[str, Any] | None:
    """Return the tag for an image of PIL, the bytes of a PNG picture; None for any other object."""
    kind = getattr(sys.modules.get("PIL.Image"), "Image", None)
    if not isinstance(kind, type) or not issubclass(type(value), kind):
        return None
    file = io.BytesIO()
    drawable(value).save(file, "PNG")
    return {"$image": encoding.base64(file.getvalue())}


def image(data: bytes) -> Any:
    """Return the image of PIL for a tag's content. No pixel is decoded here, since the picture may be a worker's.

    Raises:
        ValueProblem: The bytes are no PNG picture, it has too many pixels, or the package is not installed here.
    """
    _require_few_pixels(int.from_bytes(data[16:20]), int.from_bytes(data[20:24]))  # the first chunk of a PNG has them
    pil = module("PIL.Image")
    try:
        opened = pil.open(io.BytesIO(data), formats=("PNG",))
    except Exception as error:  # noqa: BLE001 - PIL raises a dozen classes for broken pictures
        raise ValueProblem(f"it has an invalid picture: {type(error).__name__}: {error!s:.200}") from None
    _require_few_pixels(*opened.size)  # of a later chunk that a worker has put there
    return opened


def _require_few_pixels(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueProblem(f"a picture of {width:,} x {height:,} pixels has more than {MAX_PIXELS:,}")


def drawable(image: Any) -> Any:
    """Return an image of PIL in a mode that PNG can store."""
    return image if image.mode in DRAWN_MODES else image.convert(sys.modules["PIL.Image"].getmodebase(image.mode))


def module(name: str) -> Any:
    """Import the package of a value. `name` is a constant of our code, never a text from a message.

    Raises:
        ValueProblem: The package is not installed here.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueProblem(f"it needs the package {name}, which is not installed here") from None


MAX_CATEGORIES: Final = 10_000
"""Maximum categories of one column; more are refused. pandas searches them for duplicates by their hash, which takes
quadratic time if a sender chose them to collide."""
_COLUMN_KINDS: Final = "biufcmM"
_LISTED: Final = re.compile(r"object|str|string|boolean|U?Int(8|16|32|64)|Float(32|64)")
_OF_A_ZONE: Final = re.compile(r"datetime64\[(s|ms|us|ns), .*\]")


def encoded_table(value: Any, encoding: Encoder) -> dict[str, Any] | None:
    """Return the tag for a table; None for any other object.

    Raises:
        ValueProblem: A column has a type that cannot cross.
    """
    kind = type(value)
    pandas: Any = sys.modules.get("pandas")
    if pandas is not None:
        if kind is getattr(pandas, "Series", None):
            column, axis = _column(pandas, "values", value, encoding), _axis(pandas, value.index, encoding)
            return {"$series": [column, axis, encoding.inside("name", value.name)]}
        if kind is getattr(pandas, "DataFrame", None):
            columns = [_column(pandas, name, value.iloc[:, at], encoding) for at, name in enumerate(value.columns)]
            axes = [_axis(pandas, axis, encoding) for axis in (value.columns, value.index)]
            return {"$frame": [columns, *axes]}
        if kind in (getattr(pandas, "Timestamp", None), type(getattr(pandas, "NaT", None))):
            raise ValueProblem(f"is a {kind.__name__}, which does not cross by itself: use its to_pydatetime()")
        if kind is getattr(pandas, "Timedelta", None):
            raise ValueProblem("is a Timedelta, which does not cross by itself: use its to_pytimedelta()")
    return _encoded_arrow(value, encoding)


def _column(pandas: Any, name: object, series: Any, encoding: Encoder) -> list[Any]:
    dtype = series.dtype
    if getattr(dtype, "kind", "") in _COLUMN_KINDS and type(dtype).__module__.startswith("numpy"):
        return ["", encoding.inside(name, series.to_numpy())]
    if isinstance(dtype, pandas.CategoricalDtype):
        if len(dtype.categories) > MAX_CATEGORIES:
            raise ValueProblem(f"has the column {name!r:.60} of more than {MAX_CATEGORIES:,} categories")
        categories = _column(pandas, name, pandas.Series(dtype.categories), encoding)
        return ["category", encoding.inside(name, series.cat.codes.to_numpy()), categories, bool(dtype.ordered)]
    text = str(dtype)
    if _OF_A_ZONE.fullmatch(text):
        moments = series.dt.tz_convert("UTC").dt.tz_localize(None).to_numpy()
        return ["zone", encoding.inside(name, moments), encoded_zone(dtype.tz)]
    if not _LISTED.fullmatch(text):
        raise ValueProblem(f"has the column {name!r:.60} of dtype {text:.60}, which does not cross")
    values = series.tolist()
    if text != "object":
        values = [None if value is pandas.NA else value for value in values]
    return [text, encoding.inside(name, values)]


def _axis(pandas: Any, index: Any, encoding: Encoder) -> list[Any]:
    names = encoding.inside("names", list(index.names))
    if isinstance(index, pandas.RangeIndex):
        return ["range", [index.start, index.stop, index.step], names]
    if isinstance(index, pandas.MultiIndex):
        levels = [_column(pandas, "index", pandas.Series(level), encoding) for level in index.levels]
        codes = [encoding.inside("index", code) for code in map(module("numpy").array, index.codes)]
        return ["levels", [levels, codes], names]
    return ["labels", _column(pandas, "index", pandas.Series(index), encoding), names]


# -- decoding --------------------------------------------------------------------------------------------------------


def decoded_table(tag: str, content: Any, decoding: Decoder, depth: int) -> Any:
    """Return the table for a tag's content.

    Args:
        tag: "$series", "$frame", "$polars" or "$arrow".
        content: Content of the tag, as decoded JSON.
        decoding: Decoder of the values inside.
        depth: Number of containers around the tag.

    Raises:
        ValueProblem: The content does not describe such a table, or the package is not installed here.
    """
    content = decoding.value(content, depth)
    try:
        return _TABLES[tag](content)
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
        return pandas.Series(_array(values, _COLUMN_KINDS))
    if kind == "zone":
        zone = decoded_zone(more[0])
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


_UNITS: Final = ("s", "ms", "us", "ns")
_ZONE: Final = re.compile(rf"{_ZONE_NAME.pattern}|[+-]\d\d:\d\d")


def _encoded_arrow(value: Any, encoding: Any) -> dict[str, Any] | None:
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


def _polars_frame(content: Any) -> Any:
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


def _arrow_table(content: Any) -> Any:
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


_TABLES: Final[dict[str, Callable[[Any], Any]]] = {
    "$series": _series,
    "$frame": _frame,
    "$polars": _polars_frame,
    "$arrow": _arrow_table,
}
