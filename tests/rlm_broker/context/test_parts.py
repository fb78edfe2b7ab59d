"""Contexts that come out of a REPL: any bytes may be in the file; they are bounded, and no descriptor is left open."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.context.parts import PIECE_BYTES, store_part
from rlm_broker.context.stored import StoredContext
from rlm_broker.errors import ContextRefused
from tests.support.contexts import loaded

MOST = 1 << 24


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def stored(path: Path, data: bytes, *, is_json: bool = False, most: int = MOST) -> StoredContext:
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        return store_part(fd, is_json, most, threading.Event())
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "text", ["", "short", "é中𝄞" * PIECE_BYTES, "x" + "𝄞" * PIECE_BYTES, "lone \ud800", "\udfff" * (PIECE_BYTES + 1)]
)
def test_text_survives_pieces_that_cut_characters(tmp_path: Path, text: str) -> None:
    """A text comes out as it went in, also where a piece ends within a character."""
    with stored(tmp_path / "file", text.encode("utf-8", "surrogatepass")) as part:
        assert ascii(loaded(part)) == ascii(text)  # lone surrogates could not be printed
        assert (part.info.type_name, part.info.total_chars) == ("str", len(text))


@pytest.mark.parametrize(
    ("data", "value", "kind"),
    [
        (b'{"a":[1,2.5,null,true]}', {"a": [1, 2.5, None, True]}, "dict"),
        (b"[]", [], "list"),
        (b'"text"', "text", "str"),
        (b"-5", -5, "number"),
        (b"true", True, "bool"),
        (b"null", None, "NoneType"),
    ],
)
def test_json_is_told_by_its_first_character(tmp_path: Path, data: bytes, value: Any, kind: str) -> None:
    with stored(tmp_path / "file", data, is_json=True) as part:
        assert loaded(part) == value
        assert (part.info.type_name, part.info.total_chars) == (kind, len(data))


@pytest.mark.parametrize("data", [b"", b"{no json", b"[" * 100_000, b"\xff\xfe", b"[1] [2]", b'{"a":'])
def test_invalid_json_is_stored_unparsed(tmp_path: Path, data: bytes) -> None:
    with stored(tmp_path / "file", data, is_json=True) as part:
        assert part.size_bytes == len(data)


@pytest.mark.parametrize("data", [b"\xff", b"cut \xe4\xb8", b"x" * PIECE_BYTES + b"\xf0\x9d"])
def test_bytes_that_are_no_utf8_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ContextRefused, match=r"a context is not UTF-8: (invalid start byte|unexpected end of data)"):
        stored(tmp_path / "file", data)


@pytest.mark.parametrize("is_json", [False, True])
def test_file_above_its_bound_is_refused(tmp_path: Path, is_json: bool) -> None:
    with pytest.raises(ContextRefused, match="a context takes more than scratch_bytes = 1,000"):
        stored(tmp_path / "file", b"1" * 1_001, is_json=is_json, most=1_000)
    with stored(tmp_path / "file", b"1" * 1_000, is_json=is_json, most=1_000) as part:
        assert part.info.total_chars == 1_000


def test_a_file_that_grows_for_ever_is_refused() -> None:
    with open("/dev/zero", "rb", buffering=0) as endless, pytest.raises(ContextRefused, match="more than"):
        store_part(endless.fileno(), False, MOST, threading.Event())


def test_unwanted_text_is_not_read() -> None:
    stop = threading.Event()
    stop.set()
    with open("/dev/zero", "rb", buffering=0) as endless, store_part(endless.fileno(), False, MOST, stop) as part:
        assert part.info.total_chars == 0


def test_text_wider_than_its_bound_is_refused(tmp_path: Path) -> None:
    """A text is refused if a wide character makes its stored form exceed `scratch_bytes`."""
    narrow = b"x" * 600_000
    with stored(tmp_path / "narrow", narrow, most=1 << 20) as part:
        assert part.size_bytes < 1 << 20
    with pytest.raises(ContextRefused, match="takes more than scratch_bytes"):
        stored(tmp_path / "wide", narrow + "𝄞".encode(), most=1 << 20)
