"""Bytes become text by a byte order mark, by a named encoding, or as UTF-8. Replaced bytes are counted and reported."""

import codecs
import io
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.context.found_files import FileUnfit
from rlm_broker.context.store import Encoded, Paths, store
from rlm_broker.context.text import JUDGED_BYTES, DecodedText, TextDecoding
from rlm_broker.errors import ConfigurationError, ContextRefused
from tests.support.contexts import loaded, refused, value_of, written
from tests.support.tables import table

TEXT = "caf\xe9 \u017c\u20ac\U0001f600\n"


class Drops:
    """Gives bytes a few at a time."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data = io.BytesIO(data)
        self._size = size

    def read(self, _: int) -> bytes:
        return self._data.read(self._size)


MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
}


def test_byte_order_mark_says_the_encoding() -> None:
    for (mark, encoding), size in product(MARKS.items(), (1, 3, 1 << 20)):
        data = mark + ("\ufeff" + TEXT * 100).encode(encoding)
        named = Encoded(Drops(data, size), "cp1252"), Encoded(Drops(data, size), errors="strict")
        for value in (Drops(data, size), *named):
            with store(value) as stored:
                assert loaded(stored) == "\ufeff" + TEXT * 100
                assert stored.info.replaced_bytes == 0


ENCODINGS = [
    ("latin-1", "caf\xe9"),
    ("cp1251", "\u043f\u0440\u0438\u0432\u0435\u0442"),
    ("shift_jis", "\u65e5\u672c" * 1_000),
    ("utf-16", "caf\xe9 \u20ac"),
    ("utf-16-le", "caf\xe9 \u20ac"),
    ("iso2022_jp", "\u65e5\u672c a"),
    ("UTF_8", TEXT),
]


@table("encoding, text", ENCODINGS)
def test_named_encoding_is_how_files_and_streams_are_read(tmp_path: Path, encoding: str, text: str) -> None:
    data = text.encode(encoding)
    path = written(tmp_path / "folder" / "file", data)
    for source in (path, Paths([path]), io.BytesIO(data), Drops(data, 1)):
        assert value_of(Encoded(source, encoding, errors="strict")) == text
    assert value_of(Encoded(path.parent, encoding)) == {"file": text}


REPLACED = [
    (b"a stray \xff byte", "a stray \ufffd byte", 1),
    (b"cut at the end \xe2\x82", "cut at the end \ufffd", 2),
    (b"a real one \xef\xbf\xbd and \x80", "a real one \ufffd and \ufffd", 1),
    ("caf\xe9, na\xefve, gar\xe7on\n".encode("latin-1") * 10, "caf\ufffd, na\ufffdve, gar\ufffdon\n" * 10, 30),
]


def test_bytes_that_are_not_utf8_are_replaced_and_counted() -> None:
    for (data, text, replaced), size in product(REPLACED, (1, 2, 5, 1 << 20)):
        with store(Drops(data, size)) as stored:
            assert loaded(stored) == text
            found = stored.info.replaced_bytes, stored.info.replaced_parts, stored.info.total_chars
            assert found == (replaced, 1, len(text))


def test_replaced_bytes_equal_those_of_python() -> None:
    """Compares with a count by a handler of errors, in pieces of any size."""
    counted = 0

    def count(error: UnicodeError) -> tuple[str, int]:
        nonlocal counted
        assert isinstance(error, UnicodeDecodeError)
        counted += error.end - error.start
        return "\ufffd", error.end

    codecs.register_error("test_text.count", count)
    draw = random.Random(5)
    whole = "\u017c\u20ac\U0001f600\ufffd".encode()
    units = [b"plain text ", whole, b"\xff", b"\xe2\x82", b"\xf0\x9f", b"\xef", b"\xed\xa0\x80"]
    for _ in range(300):
        data = b"plain text " * 40 + b"".join(draw.choices(units, k=30))
        counted = 0
        expected = data.decode("utf-8", "test_text.count")
        size = draw.choice([1, 2, 3, 7, len(data)])
        text = DecodedText((data[at : at + size] for at in range(0, len(data), size)), "data", TextDecoding())
        found = "".join(each if isinstance(each, str) else each.decode() for each in text)
        assert (found, text.replaced) == (expected, counted)


@pytest.mark.parametrize("encoding", [None, "ascii", "utf-16-le"])
def test_binary_bytes_are_not_decoded_to_the_end(encoding: str | None) -> None:
    read = 0

    def pieces() -> Iterator[bytes]:
        nonlocal read
        yield b"\xdd" * 4
        while read < 64 * JUDGED_BYTES:
            read += JUDGED_BYTES // 4
            yield b"\xdd" * (JUDGED_BYTES // 4)

    with pytest.raises(FileUnfit, match=r"[\d,]+ of the first 1,048,580 bytes cannot be decoded; name its encoding"):
        list(DecodedText(pieces(), "data", TextDecoding(encoding)))
    assert read == JUDGED_BYTES


def test_utf8_bytes_are_replaced_without_a_call_each() -> None:
    def called(_: UnicodeError) -> tuple[str, int]:
        raise AssertionError

    ours = codecs.lookup_error("rlm_broker.counted")
    codecs.register_error("rlm_broker.counted", called)
    try:
        text = DecodedText([b"some text \xff\xff\xff"] * 1_000, "data", TextDecoding())
        assert len([*text]) >= 1_000
    finally:
        codecs.register_error("rlm_broker.counted", ours)
    assert text.replaced == 3_000


def test_replaced_bytes_are_counted_for_all_files(tmp_path: Path) -> None:
    written(tmp_path / "clean", "text")
    written(tmp_path / "one", b"a long line \xff")
    written(tmp_path / "two", b"another long line \xfe\xff")
    written(tmp_path / "refused", b"\xff\x00")
    with store(tmp_path) as stored:
        assert sorted(loaded(stored)) == ["clean", "one", "two"]
        assert stored.info.remarks() == [
            "left out: 1 (binary)",
            "replaced by U+FFFD: 3 (bytes that cannot be decoded, in 2 texts)",
        ]


BINARY = [
    (bytes(range(128, 256)) * 10, "the stream is not UTF-8 text: 1,280 of its 1,280 bytes cannot be decoded"),
    ("\u043f\u0440\u0438".encode("cp1251") * 9, "name its encoding"),
    (b"\x7fELF\2\1\1\0\0\0", "the stream is binary (a zero byte at offset 7)"),
    (codecs.BOM_UTF16_LE + b"a\0\0\0b\0", "the stream is binary (a zero character, read as utf-16-le)"),
    ("no mark".encode("utf-16-le"), "the stream is binary (a zero byte at offset 1)"),
]


@table("data, sentence", BINARY)
def test_binary_data_is_refused_and_not_replaced(data: bytes, sentence: str) -> None:
    assert sentence in refused(io.BytesIO(data))


def test_strict_text_is_refused_with_the_place() -> None:
    refused(
        Encoded(io.BytesIO(codecs.BOM_UTF16_LE + b"a\x00\x3d\xd8\x61\x00"), errors="strict"),
        "is not UTF-16-LE text: byte 0x3d at offset 4",
    )
    refused(Encoded(io.BytesIO(b"caf\xe9"), "ascii", "strict"), "is not ASCII text: byte 0xe9 at offset 3; convert it")


def test_wrong_arguments_are_refused() -> None:
    encodings: list[Any] = ["no-such", "base64", "punycode", "undefined", "", "rot13", 5, b"utf-8"]
    for encoding in encodings:
        with pytest.raises(ConfigurationError, match="there is no text encoding"):
            TextDecoding(encoding)
    ways: list[Any] = ["ignore", "", None, []]
    for errors in ways:
        with pytest.raises(ConfigurationError, match="errors must be one of replace, strict"):
            Encoded(Path("x"), errors=errors)
    for source in ("server.log", b"text", None, {"a": "b"}, Encoded(Path("x"))):
        with pytest.raises(ContextRefused, match="Encoded takes a path, Paths or a stream, not "):
            Encoded(source)
    refused(Encoded(io.StringIO("text"), "utf-8"), "a stream of text is decoded already")
