"""Values on the wire: each arrives equal or is refused with the place of its fault; other bytes are one error."""

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import inspect
import json
import math
import pathlib
import resource
import subprocess
import sys
import time
import zoneinfo
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_worker.init.procfs import Proc
from sandbox_worker.isolation import rlimits
from sandbox_worker.loading.context import NO_MEMORY, ContextBroken
from sandbox_worker.wire.decoding import _DECODE
from sandbox_worker.wire.encoding import MAX_NESTING
from sandbox_worker.wire.errors import MessageInvalid, ValueInvalid, ValueRefused
from sandbox_worker.wire.values import MAX_DECODED_VALUES, decode, decode_context, encode, encode_json
from tests.support.forked_child import in_child
from tests.support.places import PROJECT
from tests.support.tables import table

MOST = 1 << 16
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(1 << 20_000), max_value=1 << 20_000)
    | st.floats()
    | st.text(st.characters())  # with lone surrogates
    | st.binary()
    | st.binary().map(bytearray)
    | st.complex_numbers()
    | st.datetimes(timezones=st.none() | st.just(datetime.UTC) | st.just(BERLIN))
    | st.dates()
    | st.times(timezones=st.none() | st.just(datetime.timezone(datetime.timedelta(hours=-3, microseconds=7))))
    | st.timedeltas()
    | st.decimals(places=3)
    | st.text(st.characters(exclude_characters="\0")).map(pathlib.Path)
    | st.text(st.characters(exclude_characters="\0")).map(pathlib.PurePosixPath)
)
KEYS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.tuples(st.text(), st.integers())
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.sampled_from(["$tuple", "$x", "$", "$dict"]), inner)
        | st.lists(inner).map(tuple)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
    max_leaves=20,
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text().filter(lambda key: not key.startswith("$")), inner),
)


def shown(value: Any) -> str:
    """Return a text that differs for values of different types, is equal for nan, and ignores the order of sets."""
    match value:
        case dict():
            return f"{{{', '.join(f'{shown(key)}: {shown(each)}' for key, each in value.items())}}}"
        case list() | tuple():
            return f"{type(value).__name__}({', '.join(map(shown, value))})"
        case set() | frozenset():
            return f"{type(value).__name__}({', '.join(sorted(map(shown, value)))})"
        case decimal.Decimal() if value.is_nan():
            return str(value)
        case datetime.datetime() | datetime.time():
            return f"{value!r} {value.fold}"
        case int():
            return f"{type(value).__name__} {value:x}"
    return f"{type(value).__name__} {value!r}"


def crossed(value: Any) -> Any:
    return decode(encode(value, "it"), MOST)


@given(VALUES)
def test_value_comes_out_unchanged(value: Any) -> None:
    assert shown(crossed(value)) == shown(value)
    assert shown(decode(encode([value], "it"))) == shown([value])


@given(PLAIN)
def test_plain_json_is_itself_on_the_wire(value: Any) -> None:
    assert json.loads(encode(value, "it")) == value
    assert b'{"$' not in encode(value, "it")


@given(PLAIN | st.dictionaries(st.sampled_from(["$tuple", "a"]), PLAIN) | st.lists(st.text(st.characters())))
def test_json_value_comes_out_unchanged(value: Any) -> None:
    assert shown(decode(encode_json(value, "it"))) == shown(value)


@table("encoder", [encode, encode_json])
@table(
    "value",
    [
        {"\ud800": 1},
        {"a": 1, "\udfff b": "\ud83d"},
        {"\ud83d\ude00": 1, "\U0001f600": 2},  # two halves are not the character
        {"$str": "\ud800", "\udc00": {"$": None}},
        {("\ud800", 1): {"\udfff": [{"\ud800": ()}]}},
    ],
)
def test_dict_key_with_half_a_character_crosses_whole(encoder: Any, value: dict[Any, Any]) -> None:
    found = decode(encoder(value, "it"))
    assert found == value
    assert [*found] == [*value]


@given(st.binary() | st.text().map(str.encode) | VALUES.map(lambda value: encode(value, "it")[:-1]))
def test_invalid_bytes_are_one_error(data: bytes) -> None:
    with contextlib.suppress(MessageInvalid):
        decode(data, MOST)


TAGS = st.sampled_from([*_DECODE, "$x"])
CONTENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["nan", "AAAA", "<f8", "|O", "2026-01-01"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TAGS, inner, max_size=2),
)


@given(st.dictionaries(TAGS, CONTENTS, min_size=1, max_size=1))
def test_tag_with_any_content_is_value_or_error(node: dict[str, Any]) -> None:
    with contextlib.suppress(ValueInvalid):
        decode(json.dumps(node, separators=(",", ":")).encode(), MOST)


class Colour(enum.IntEnum):
    RED = 1


class Word(enum.StrEnum):
    YES = "yes"


class Pair(collections.namedtuple("Pair", "a b")):
    pass


@table(
    "value, kind",
    [
        (collections.Counter("abca"), dict),
        (collections.OrderedDict(a=1), dict),
        (collections.defaultdict(list, {1: [2]}), dict),
        (Colour.RED, int),
        (Word.YES, str),
        (Pair(1, 2), tuple),
        (type("Some", (list,), {})([1, {2}]), list),
        (type("Some", (float,), {})("nan"), float),
    ],
)
def test_subclass_arrives_as_built_in_class(value: Any, kind: type[Any]) -> None:
    arrived: Any = crossed({"a": [value]})["a"][0]
    assert type(arrived) is kind
    assert arrived == value or math.isnan(arrived)


@dataclasses.dataclass
class Point:
    x: Any


LOOP: list[Any] = [1]
LOOP.append({"a": LOOP})
DEEP: Any = 1
for _ in range(MAX_NESTING + 1):
    DEEP = [DEEP]
WIDE: Any = 1
for _ in range(60):
    WIDE = [WIDE, WIDE]


@table(
    "value, why",
    [
        (object(), "it is an object, which does not cross"),
        ({"a": [1, 2, (3, print)]}, "it['a'][2][1] is a builtin_function_or_method, which does not cross"),
        ({Point: 1}, "a key of it is a type, which does not cross"),
        ({"a": {(1, Point): 1}}, "a key of it['a'] is a type, which does not cross"),
        ([{frozenset([Point])}], "an element of it[0] is a type, which does not cross"),
        (Point(1), "it is a Point, which does not cross"),
        (LOOP, "it[1]['a'] contains itself"),
        (DEEP, "it[0][0]"),
        (WIDE, "it has more than 1,000,000 values"),
        ([b"x" * 600, b"x" * 600], "it[1] has more than 1,000 bytes"),
        (numpy.array([object()]), "it is an array of dtype object, which does not cross"),
        (numpy.zeros(2, [("a", "f8")]), "it is an array of dtype [('a', '<f8')], which does not cross"),
        (numpy.ma.array([1]), "it is a MaskedArray, which does not cross"),
        ([10**10_001], "it[0] is a number of more than 10,000 digits, which does not cross"),
        (decimal.Decimal("1E+10001"), "it is a Decimal of more than 10,000 digits"),
        (
            datetime.datetime(2026, 1, 1, tzinfo=type("Zone", (datetime.tzinfo,), {"__repr__": lambda _: "Z"})()),
            "it has a time zone of another class, Z: use datetime.timezone or zoneinfo.ZoneInfo",
        ),
    ],
)
def test_value_that_does_not_cross_is_refused(value: Any, why: str) -> None:
    with pytest.raises(ValueRefused) as refused:
        encode(value, "it", most_values=1_000_000, most_bytes=1000)
    assert str(refused.value).startswith(why)
    assert len(str(refused.value)) < 400


def test_value_that_does_not_cross_is_replaced() -> None:
    """A value that does not cross is replaced by what the caller's function makes of it."""
    shown = [repr(Point(2)), "<built-in function print>"]
    assert decode(encode({"a": [Point(2), print]}, "it", others=repr)) == {"a": shown}
    fields = {"a": {1: Point(Point({2}))}}
    assert decode(encode(fields, "it", others=vars)) == {"a": {1: {"x": {"x": {2}}}}}


def test_value_that_cannot_be_walked_through_is_refused() -> None:
    """The stack may be full before the value is too deep, and another thread may change the value meanwhile."""

    def below(frames: int) -> bytes:
        return below(frames - 1) if frames else encode(DEEP, "it")

    with pytest.raises(ValueRefused, match="it is nested too deeply"):
        below(sys.getrecursionlimit() - len(inspect.stack()) - 100)
    changing: dict[Any, Any] = {"a": print}
    with pytest.raises(ValueRefused, match="it cannot be read: dictionary changed size"):
        encode(changing, "it", others=lambda _: changing.setdefault("b"))


def test_containers_as_deep_as_allowed_cross() -> None:
    for wrap in (lambda value: [value], lambda value: (value,), lambda value: {1: value}, lambda value: {"$a": value}):
        value: Any = 1
        for _ in range(MAX_NESTING):
            value = wrap(value)
        assert crossed(value) == value


ARRAYS = [
    numpy.arange(6).reshape(2, 3).astype(dtype)
    for dtype in ("?", "i1", "u2", "<i8", ">i4", "f2", "f4", ">f8", "c8", "c16", "M8[ns]", "m8[D]", "U3", "S2", "g")
]
ODD_ARRAYS = [
    numpy.array(3.5),
    numpy.zeros((0, 5)),
    numpy.zeros((2, 0, 3), "i4"),
    numpy.array([float("nan"), float("inf")]),
    numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    numpy.arange(10)[::-3],
    numpy.array(["a\ud800", "\U0010ffff"]),
    numpy.array(["NaT", "2026-01-01"], "M8[s]"),
    numpy.array(["2026"], "M8[25s]"),
]


@table("array", [*ARRAYS, *ODD_ARRAYS])
def test_array_comes_out_equal_and_writable(array: Any) -> None:
    arrived = crossed({"a": array})["a"]
    assert (arrived.dtype, arrived.shape) == (array.dtype, array.shape)
    assert arrived.tobytes() == array.tobytes()
    arrived[...] = arrived
    for scalar in array.flat:
        assert type(crossed(scalar)) is type(scalar)
        assert numpy.asarray(crossed(scalar)).tobytes() == numpy.asarray(scalar).tobytes()


def test_empty_text_scalar_crosses() -> None:
    assert crossed([numpy.str_(""), numpy.bytes_(b"")]) == ["", b""]
    assert type(crossed(numpy.str_(""))) is numpy.str_


def tag(name: str, *content: Any) -> bytes:
    return json.dumps({name: content[0] if len(content) == 1 else content}, separators=(",", ":")).encode()


TWO_SIZES = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAADUlIRFIAACMoAAAjKAgAAAAASL4tZgAAAABJREFUNa8GHg=="
"""A PNG picture of one pixel that says later that it has 9,000 by 9,000."""


@table(
    "data, why",
    [
        (tag("$x", 1), "it has the unknown tag '$x'"),
        (tag("$__class__", 1), "unknown tag"),
        (tag("$tuple", 1), "a tag with content of type int, expected list"),
        (tag("$dict", [1]), "a dict has a key without a value"),
        (tag("$dict", [[1], 1]), "unhashable type: 'list'"),
        (tag("$set", [{}]), "unhashable"),
        (tag("$float", "1e5"), "it does not encode a value"),
        (tag("$int", "ff_ff"), "an integer has characters that are not hexadecimal digits"),
        (tag("$bytes", "a"), "it does not encode a value"),
        (tag("$bytes", "####"), "it does not encode a value"),
        (tag("$str", "/w=="), "it does not encode a value"),
        (tag("$complex", [1.0]), "it does not encode a value"),
        (tag("$date", "2026-02-30"), "it does not encode a value"),
        (tag("$datetime", ["2026-01-01", 0, "../../etc/passwd"]), "there is no time zone '../../etc/passwd'"),
        (tag("$datetime", ["2026-01-01", 0, "os.path"]), "there is no time zone 'os.path'"),
        (tag("$datetime", ["2026-01-01", 0, "No/Where"]), "the time zone 'No/Where' is not known here"),
        (tag("$datetime", ["2026-01-01", 0, 10**15]), "it does not encode a value"),
        (tag("$datetime", ["2026-01-01T00:00+01:00", 0, None]), "a datetime has two time zones"),
        (tag("$datetime", ["2026-01-01", 7, None]), "it does not encode a value"),
        (tag("$timedelta", [10**15, 0, 0]), "it does not encode a value"),
        (tag("$decimal", "1E+999999999"), "a Decimal is too long"),
        (tag("$decimal", "9" * 20_001), "a Decimal is too long"),
        (tag("$decimal", "x"), "it does not encode a value"),
        (tag("$path", 1), "a tag with content of type int, expected str"),
        (tag("$array", ["|O", [1], "AAAAAAAAAAA="]), "an array has the unsupported dtype '|O'"),
        (tag("$array", ["V8", [1], "AAAAAAAAAAA="]), "an array has the unsupported dtype 'V8'"),
        (tag("$array", ["f8,f8", [1], ""]), "an array has the unsupported dtype 'f8,f8'"),
        (tag("$array", ["U0", [10**9], ""]), "an array has the unsupported dtype 'U0'"),
        (tag("$array", ["f9", [1], ""]), "it does not encode a value"),
        (tag("$array", [["f8"], [1], ""]), "an array has the unsupported dtype"),
        (tag("$array", ["<f8", [2], "AAAAAAAAAAA="]), "an array of shape (2,) has 1 elements"),
        (tag("$array", ["<f8", [1 << 62, 1 << 62], "AAAAAAAAAAA="]), "has 1 elements"),
        (tag("$array", ["<f8", [1], "AAAA"]), "an array of dtype <f8 has 3 bytes"),
        (tag("$array", ["<f8", [-1], "AAAAAAAAAAA="]), "an array has an invalid shape"),
        (tag("$array", ["<f8", [1.0], "AAAAAAAAAAA="]), "an array has an invalid shape"),
        (tag("$array", ["<f8", [True], "AAAAAAAAAAA="]), "an array has an invalid shape"),
        (tag("$array", ["<f8", [1] * 33, "AAAAAAAAAAA="]), "an array has an invalid shape"),
        (tag("$array", ["<f8", [10**12, 0], ""]), "an array without elements has the shape"),
        (tag("$array", ["|b1", [1], "Ag=="]), "a boolean array has a byte that is neither 0 nor 1"),
        (tag("$array", ["<U1", [1], "////fw=="]), "an array of text has a code point above U+10FFFF"),
        (tag("$array", ["M8[xx]", [1], ""]), "an array has the unsupported dtype"),
        (tag("$scalar", ["<f8", ""]), "a scalar has 0 elements, expected 1"),
        (tag("$image", "AAAA"), "it has an invalid picture: UnidentifiedImageError"),
        (tag("$image", "iVBORw0KGgoAAAANSUhEUgAAJxAAACcQ"), "a picture of 10,000 x 10,000 pixels has more than"),
        (tag("$image", TWO_SIZES), "a picture of 9,000 x 9,000 pixels has more than"),
        (tag("$image", 1), "a tag with content of type int, expected str"),
        (b'{"$tuple":' * 300 + b"[]" + b"}" * 300, "it "),
        (b'{"$tuple":[' * 300 + b"]}" * 300, "it is nested deeper than 200 levels"),
        (b'{"$tuple":[' * 20_000, "it is nested too deeply"),
        (b"[" * 201 + b"]" * 201, "it is nested deeper than 200 levels"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "it is nested deeper than 200 levels"),
        (b"[" * 100_000, "it "),
        (b"[" + b"[]," * MOST + b"1]", "it holds more than 65,536 values"),
        (b"", "it does not encode a value"),
        (b"\xff", "it does not encode a value"),
        (b"NaN", "it does not encode a value"),
        (b"9" * 5000, "it does not encode a value"),
    ],
)
def test_hostile_input_is_one_named_error(data: bytes, why: str) -> None:
    with pytest.raises(ValueInvalid) as invalid:
        decode(data, MOST)
    assert why in str(invalid.value)


def test_context_that_cannot_be_decoded_is_broken() -> None:
    assert decode_context(encode({1: (2,)}, "it")) == {1: (2,)}
    with pytest.raises(ContextBroken, match="it does not encode a value"):
        decode_context(b"{")

    def without_memory() -> None:
        data = b'"' + b"x" * (16 << 20) + b'"'
        rlimits.set_hard(resource.RLIMIT_AS, Proc().mapped_bytes()[0] + (16 << 20))
        with pytest.raises(ContextBroken, match=NO_MEMORY):
            decode_context(data)

    in_child(without_memory)


def test_bound_of_values_from_a_worker_is_exact() -> None:
    for beyond in (0, 1):
        data = b"[" + b"1," * ((1 << 20) - 2 + beyond) + b"1]"  # the list itself is a value
        with pytest.raises(ValueInvalid, match="more than 1,048,576 values") if beyond else contextlib.nullcontext():
            assert len(decode(data, MAX_DECODED_VALUES)) == (1 << 20) - 1


MODULUS = sys.hash_info.modulus


def test_colliding_keys_are_refused_in_linear_time() -> None:
    same = [n * MODULUS for n in range(MOST // 4)]
    for value in (tag("$set", same), tag("$dict", [each for key in same for each in (key, 0)])):
        started = time.process_time()
        with pytest.raises(ValueInvalid, match="more than 32 keys of the same hash"):
            decode(value, MOST)
        collided = time.process_time() - started
        started = time.process_time()
        decode(value.replace(b'{"$set":', b"[").replace(b'{"$dict":', b"[").replace(b"}", b"]"), MOST)
        assert collided < 20 * (time.process_time() - started) + 1


def test_honest_keys_cross_in_any_number() -> None:
    for keys in (range(-9000, 9000), [n / 7 for n in range(9000)], [(n, str(n)) for n in range(9000)]):
        assert crossed(dict.fromkeys(keys, 1)) == dict.fromkeys(keys, 1)


def test_plain_value_imports_nothing() -> None:
    """A plain value imports no package, and a missing package is named."""
    code = """
import sys
from sandbox_worker.wire import values
data = values.encode({"a": [1, (2,), {3}]}, "it")
assert values.decode(data) == {"a": [1, (2,), {3}]}
assert not {"numpy", "pandas", "pyarrow", "polars", "zoneinfo"} & sys.modules.keys(), sys.modules.keys()
sys.modules["numpy"] = None
try: values.decode(b'{"$array":["<f8",[1],"AAAAAAAAAAA="]}')
except values.ValueInvalid as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout == "it needs the package numpy, which is not installed here\n"


def test_subclass_methods_are_not_called() -> None:
    class Lies(dict[Any, Any]):
        def items(self) -> Any:
            return []

    assert crossed(Lies(a=1)) == {"a": 1}
