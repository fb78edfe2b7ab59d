"""Contexts of every kind come out of a worker's `load` equal. A value that cannot cross is refused with its place."""

import collections
import dataclasses
import enum
import gc
import io
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.context import memfd
from rlm_broker.context.found_files import PIECE_BYTES
from rlm_broker.context.store import STREAM_BYTES, Paths, store, store_part
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import ContextRefused
from sandbox_worker.loading.form import ContextForm
from sandbox_worker.wire.encoding import MAX_NESTING
from tests.support.contexts import fd_of, form_of, loaded, refused, value_of, written
from tests.support.tables import table


def test_closed_context_is_not_its_numbers_new_owner() -> None:
    """A forgotten context gives its descriptor back; a closed one leaves the number alone."""
    closed = store("mine")
    number = fd_of(closed)
    closed.close()
    with store("another") as other:
        assert fd_of(other) == number
        with pytest.raises(ContextRefused, match="this context was closed: store it again"):
            closed.value()
        refused({"a": closed}, "was closed: store it again")
        closed.close()
        del closed
        gc.collect()
        assert other.value() == "another"
    fd = fd_of(store("text"))
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_file_keeps_its_line_ends(tmp_path: Path) -> None:
    path = written(tmp_path / "notes.txt", "one\r\ntwo\n\u017c")
    for value in (path, Paths([path]), Paths([str(path)])):
        with store(value) as stored:
            assert loaded(stored) == "one\r\ntwo\n\u017c"
            assert (stored.info.type_name, stored.info.parts) == ("str", (("notes.txt", 10),))
    (tmp_path / "link").symlink_to(path)  # followed, since the user names it
    assert value_of(tmp_path / "link") == "one\r\ntwo\n\u017c"


def test_several_paths_are_one_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one/x.txt", "two/x.txt", "two/y.txt", "three/one/x.txt", "z.log"):
        written(Path(name), name)
    cases: list[tuple[list[str], dict[str, str]]] = [
        (["one/x.txt", "two/y.txt"], {"x.txt": "one/x.txt", "y.txt": "two/y.txt"}),
        (["one/x.txt", "two"], {"one/x.txt": "one/x.txt", "two/x.txt": "two/x.txt", "y.txt": "two/y.txt"}),
        (["one", "one/x.txt", "./one"], {"x.txt": "one/x.txt"}),
        (["z.log", "z.log"], {"z.log": "z.log"}),
        (["*.log", "one"], {"x.txt": "one/x.txt", "z.log": "z.log"}),
        (
            ["one/x.txt", "two/x.txt", "three"],
            {f"{tmp_path}/{name}": name for name in ("one/x.txt", "three/one/x.txt")} | {"two/x.txt": "two/x.txt"},
        ),
    ]
    for paths, expected in cases:
        assert value_of(Paths(paths)) == expected


@pytest.mark.parametrize("names", [[], ["picture.png"]], ids=["empty", "only_binary"])
def test_a_folder_or_glob_without_text_is_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        written(tmp_path / name, b"\0")
    refused(tmp_path, f"there is no text in {tmp_path}" + ("; left out: 1 binary" if names else ": it has no files"))
    refused(tmp_path / "none.*", r"none\.\* matches no file")
    refused(Paths([tmp_path, tmp_path / "missing"]), "missing does not exist")
    refused(Paths([]), "Paths has no path: name a file or a folder")
    for path in ("logs", Path("logs")):
        with pytest.raises(ContextRefused, match=r"Paths takes a list of paths: write Paths\(\['logs'\]\)"):
            Paths(path)  # type: ignore[arg-type]


class Color(enum.StrEnum):
    """A str that is not exactly a str."""

    RED = "red"


class Text(str):
    """A plain subclass of str."""

    __slots__ = ()


class Number(enum.IntEnum):
    """An int that is not exactly an int."""

    ONE = 1


class Odd(str):
    """A str whose methods report other characters than it has."""

    __slots__ = ()

    def __len__(self) -> int:
        return 5

    def __getitem__(self, at: object) -> str:
        return "odd"


Point = collections.namedtuple("Point", "x y")


def test_text_of_a_subclass_is_its_characters() -> None:
    for character in ("a", "\u017c"):
        text = character * (memfd._PIECE_CHARS + 1)
        for value, expected in ((Odd(text), text), ([Odd(text)], [text]), ([Odd(text), 1], [text, 1])):
            assert value_of(value) == expected


PLAIN: list[tuple[Any, Any, int]] = [
    ({"a": "four", "b": "\u017c"}, None, 5),
    (["one", "two", ""], None, 6),
    (("one", "two"), ["one", "two"], 6),
    ({}, None, 2),
    ([], None, 2),
    ({"a": [1, 2]}, None, 11),
    ([{"role": "user", "content": "hi"}], None, 32),
    (17, None, 2),
    (2**80, None, 25),
    (-0.5, None, 4),
    (True, None, 4),
    (None, None, 4),
    (collections.Counter("aab"), {"a": 2, "b": 1}, 13),
    (Point(1, [2.5]), [1, [2.5]], 9),
    ([Color.RED, Text("sub"), {Text("k"): Number.ONE}], ["red", "sub", {"k": 1}], 21),
    ({"lone \ud83d": "\ud83d\ude00"}, None, 2),
    ([["\ud83d\ude00", "\udfff"]], None, 18),
]


@table("value, other, total_chars", PLAIN)
def test_a_plain_value_comes_out_equal(value: Any, other: Any, total_chars: int) -> None:
    expected = value if other is None else other
    with store(value) as stored:
        assert loaded(stored) == expected
        assert type(loaded(stored)).__name__ == stored.info.type_name == type(expected).__name__
        assert stored.info.total_chars == total_chars
        assert form_of(stored) == ContextForm("json", os.fstat(fd_of(stored)).st_size)


MANY_TEXTS: list[Any] = [
    {"a": "x" * 1000},
    {"b": "\u017c" * 3000, "a": "", "lone \ud83d": "\ud83d\ude00" * 600, "k" * 500: "\U0001f600" * 500},
    ["one" * 900, "two", "", "\xe9" * 5000],
    ("one" * 900,),
    {str(number): chr(97 + number % 700) * (900 + number) for number in range(1500)},
    [Text("sub" * 500), "plain" * 500],
    {Text("key"): Text("sub" * 500), Color.RED: "x" * 1000},
    collections.OrderedDict(b="x" * 2000, a="y" * 2000),
    Point("x" * 2000, "y" * 2000),
]


def test_long_texts_are_mapped_and_nothing_else_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = [store(value) for value in MANY_TEXTS]
    monkeypatch.setattr("rlm_broker.context.objects.MAPPED_CHARS", 1 << 60)
    for value, stored in zip(MANY_TEXTS, mapping, strict=True):
        with stored as mapped, store(value) as decoded:
            assert (form_of(mapped).kind, form_of(decoded).kind) == ("texts", "json")
            assert mapped.info == decoded.info
            found = loaded(mapped)
            assert found == loaded(decoded) == decoded.value() == mapped.value()
            assert type(found) is type(loaded(decoded))
            assert list(found) == list(loaded(decoded))
            assert {type(text) for text in (found.values() if isinstance(found, dict) else found)} == {str}


KINDS: list[tuple[Any, str]] = [
    (["x" * 1000, "y" * 1000], "texts"),
    (["x" * 1000, "y" * 999], "json"),
    (["x" * 2000, ""], "texts"),
    (["x" * 5000, 1], "json"),
    (["x" * 5000, None], "json"),
    (["x" * 5000, ["y" * 5000]], "json"),
    ({"a": "x" * 5000, "b": {"c": "y"}}, "json"),
    ([], "json"),
    ({}, "json"),
]


@table("value, kind", KINDS)
def test_short_or_non_text_value_stays_json(value: Any, kind: str) -> None:
    with store(value) as stored:
        assert (form_of(stored).kind, loaded(stored)) == (kind, value)


def test_parts_beyond_one_hundred_are_only_counted() -> None:
    with store([str(number) for number in range(1000)]) as stored:
        assert stored.info.parts[:2] == (("0", 1), ("1", 1))
        assert stored.info.parts[-1] == ("99", 2)
        assert (len(stored.info.parts), stored.info.parts_total, stored.info.total_chars) == (100, 1000, 2890)
    with store({"k" * 500: {"a": 1}, "\ud83d": "text"}) as stored:
        assert stored.info.parts == (("k" * 197 + "...", 7), ("\\ud83d", 4))
        assert dataclasses.asdict(stored.info)["parts_total"] == 2


def nested(levels: int) -> object:
    value: object = "core"
    for _ in range(levels):
        value = [value]
    return value


def cyclic() -> object:
    value: dict[str, object] = {}
    value["a"] = [1, {"b": value}]
    return value


TOO_DEEP = f"context{'[0]' * 18}"[:60] + "... is nested deeper than 200 levels"
UNSUPPORTED: list[tuple[Any, str]] = [
    ({"a": [0, 1, 2, object()]}, "context['a'][3] is an object, which does not cross"),
    (object(), "context is an object, which does not cross"),
    (b"bytes", "context is of type bytes: decode them to str first, or hand in a stream of them, io.BytesIO(data)"),
    ([10**10_001], "context[0] is a number of more than 10,000 digits, which does not cross"),
    (cyclic(), "context['a'][1]['b'] contains itself"),
    ([Path("a")], "context[0] is a PosixPath: a Path is a context only by itself; several are Paths([...])"),
    (nested(MAX_NESTING + 1), TOO_DEEP),
    (nested(50_000), TOO_DEEP),
]


@table("value, sentence", UNSUPPORTED)
def test_unsupported_value_is_refused_with_its_place(value: Any, sentence: str) -> None:
    assert refused(value) == sentence


def test_deepest_accepted_value_can_be_loaded() -> None:
    for value in (nested(MAX_NESTING), [shared := ["shared"], {"again": shared}]):
        assert value_of(value) == value


# -- several stored ones as one dict ---------------------------------------------------------------------------------


def test_several_contexts_are_one_dict_without_a_copy() -> None:
    with store("x" * 100_000) as one, store({"n": [1, 2]}) as other:
        joined = store({"log": one, "table": other, "note": "plain", "empty": None})
        inodes = [os.fstat(fd).st_ino for fd, _ in joined.pieces()]
        assert inodes[:2] == [os.fstat(fd_of(each)).st_ino for each in (one, other)]
        with store({"a": one, "b": "three"}) as of_texts:
            assert of_texts.info.total_chars == 100_005
    expected = {"log": "x" * 100_000, "table": {"n": [1, 2]}, "note": "plain", "empty": None}
    with joined, joined.another() as again:  # those that it was made of are closed
        assert joined.value() == loaded(joined) == again.value() == expected
        assert (joined.info.type_name, [name for name, _ in joined.info.parts]) == ("dict", [*expected])
        assert joined.info.parts[0] == ("log", 100_000)


UNJOINABLE: list[tuple[Any, str]] = [
    (lambda one: {"a": one, "b": object()}, "an object"),
    (lambda one: {1: one}, "the key 1, beside a StoredContext, must be printable text"),
    (lambda one: {"a" * 201: one}, "must be printable text of up to 200 characters"),
    (lambda one: {"a": store({"b": one})}, "'a' is a dict of stored contexts itself: put them into one dict"),
    (lambda one: {str(number): one for number in range(65)}, "has 65 keys, more than 64"),
    (lambda one: [one], "a StoredContext"),
]


@table("made, problem", UNJOINABLE)
def test_unjoinable_contexts_are_refused_without_a_leak(made: Any, problem: str) -> None:
    with store("text") as one:
        given = made(one)
        before = set(Path("/proc/self/fd").iterdir())
        refused(given, problem)
        assert set(Path("/proc/self/fd").iterdir()) <= before


MOST = 1 << 24


def stored(path: Path, data: bytes, *, is_json: bool = False, most: int = MOST) -> StoredContext:
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        return store_part(fd, is_json, most, threading.Event())
    finally:
        os.close(fd)


def test_text_survives_pieces_that_cut_characters(tmp_path: Path) -> None:
    long = ("é中𝄞" * PIECE_BYTES, "x" + "𝄞" * PIECE_BYTES, "\udfff" * (PIECE_BYTES + 1))
    for text in ("", "short", "lone \ud800", *long):
        with stored(tmp_path / "file", text.encode("utf-8", "surrogatepass")) as part:
            assert ascii(loaded(part)) == ascii(text)  # lone surrogates could not be printed
            assert (part.info.type_name, part.info.total_chars) == ("str", len(text))


JSON: list[tuple[bytes, Any, str]] = [
    (b'{"a":[1,2.5,null,true]}', {"a": [1, 2.5, None, True]}, "dict"),
    (b"[]", [], "list"),
    (b'"text"', "text", "str"),
    (b"-5", -5, "number"),
    (b"true", True, "bool"),
    (b"null", None, "NoneType"),
]


def test_json_is_told_by_its_first_character_and_stored_unparsed(tmp_path: Path) -> None:
    for data, value, kind in JSON:
        with stored(tmp_path / "file", data, is_json=True) as part:
            assert loaded(part) == value
            assert (part.info.type_name, part.info.total_chars) == (kind, len(data))
    for data in (b"", b"{no json", b"[" * 100_000, b"\xff\xfe", b"[1] [2]", b'{"a":'):
        with stored(tmp_path / "file", data, is_json=True) as part:
            assert part.size_bytes == len(data)


def test_bytes_that_are_no_utf8_are_refused(tmp_path: Path) -> None:
    for data in (b"\xff", b"cut \xe4\xb8", b"x" * PIECE_BYTES + b"\xf0\x9d"):
        with pytest.raises(ContextRefused, match=r"context is not UTF-8: (invalid start byte|unexpected end of data)"):
            stored(tmp_path / "file", data)


def test_file_above_its_bound_is_refused(tmp_path: Path) -> None:
    """The bound holds for what is stored: a wide character widens all of its text."""
    for is_json in (False, True):
        with pytest.raises(ContextRefused, match="a context takes more than scratch_bytes = 1,000"):
            stored(tmp_path / "file", b"1" * 1_001, is_json=is_json, most=1_000)
        with stored(tmp_path / "file", b"1" * 1_000, is_json=is_json, most=1_000) as part:
            assert part.info.total_chars == 1_000
    narrow = b"x" * 600_000
    with stored(tmp_path / "narrow", narrow, most=1 << 20) as part:
        assert part.size_bytes < 1 << 20
    with pytest.raises(ContextRefused, match="takes more than scratch_bytes"):
        stored(tmp_path / "wide", narrow + "𝄞".encode(), most=1 << 20)


def test_file_that_grows_for_ever_is_refused_and_unwanted_text_not_read() -> None:
    stop = threading.Event()
    with open("/dev/zero", "rb", buffering=0) as endless:
        with pytest.raises(ContextRefused, match="more than"):
            store_part(endless.fileno(), False, MOST, stop)
        stop.set()
        with store_part(endless.fileno(), False, MOST, stop) as part:
            assert part.info.total_chars == 0


TEXT = "a line of text\n" * 100_000


class Endless:
    """Gives so many pieces, each of `STREAM_BYTES`."""

    def __init__(self, pieces: int) -> None:
        self.left = pieces

    def read(self, size: int) -> bytes:
        self.left -= 1
        return b"x" * size if self.left >= 0 else b""


def test_stream_of_bytes_or_text_is_its_text() -> None:
    for text in ("short", TEXT, TEXT + "\u00e9\u4e2d\U0001f600", "\ufeffmarked"):
        stream = io.BytesIO(text.encode())
        with store(stream) as stored:
            assert loaded(stored) == text.removeprefix("\ufeff")
            assert stored.info.total_chars == len(text.removeprefix("\ufeff"))
        assert not stream.closed
        assert value_of(io.StringIO(text)) == text


def test_stream_is_never_held_as_a_whole() -> None:
    tracemalloc.start()
    try:
        with store(Endless(200)) as stored:
            assert stored.info.total_chars == 200 * STREAM_BYTES
        assert tracemalloc.get_traced_memory()[1] < 8 * STREAM_BYTES
    finally:
        tracemalloc.stop()


STREAMS: list[tuple[list[Any], str]] = [
    ([b"a", "b"], "must give only bytes or only text, not str"),
    (["a", b"b"], "must give only bytes or only text, not bytes"),
    ([5], "must give only bytes or only text, not int"),
    ([b"half", None], "gave None: it has no data just now, so give one that blocks"),
    ([b"\xff"], "the stream is not UTF-8 text: 1 of its 1 bytes cannot be decoded"),
    ([b"a", b"\x00"], "the stream is binary"),
    ([b"a", ConnectionError("gone")], "the stream cannot be read: ConnectionError: gone"),
]


def test_stream_of_something_else_is_refused() -> None:
    class Stream:
        def __init__(self, pieces: list[Any]) -> None:
            self.pieces = iter(pieces)

        def read(self, _: int) -> Any:
            piece = next(self.pieces, b"")
            if isinstance(piece, Exception):
                raise piece
            return piece

    for pieces, why in STREAMS:
        refused(Stream(pieces), why)
