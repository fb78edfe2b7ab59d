"""Compressed files and streams as text. Cut or damaged ones, and bombs, are refused and take little memory."""

import bz2
import gzip
import io
import lzma
import os
import sys
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from rlm_broker.context import memfd, packed
from rlm_broker.context.packed import Reader
from rlm_broker.context.store import store
from rlm_broker.errors import ContextRefused
from tests.support.contexts import loaded, written

TEXT = "a line of a log, caf\xe9 \u20ac\n" * 20_000


def zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    compressed: bytes = zstandard.ZstdCompressor().compress(data)
    return compressed


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lambda data: lzma.compress(data, preset=0),
    "zst": zstd,
}
each_packer = pytest.mark.parametrize("name", PACKERS)


@each_packer
def test_compressed_file_or_stream_is_its_text(tmp_path: Path, name: str) -> None:
    data = PACKERS[name](TEXT.encode())
    path = written(tmp_path / f"app.log.{name}", data)
    with store(path) as stored:
        assert loaded(stored) == TEXT
        assert stored.info.parts == ((f"app.log.{name}", len(TEXT)),)
    with store(io.BytesIO(data)) as stored:
        assert loaded(stored) == TEXT
    written(tmp_path / "plain", "text")
    with store(tmp_path) as stored:
        assert loaded(stored) == {f"app.log.{name}": TEXT, "plain": "text"}


@each_packer
def test_concatenated_streams_are_one_text(tmp_path: Path, name: str) -> None:
    """Streams behind each other, and zeros at the end, are one text."""
    parts = [PACKERS[name](part.encode()) for part in ("one ", "", "two ", TEXT)]
    with store(written(tmp_path / "file", b"".join(parts) + bytes(5_000))) as stored:
        assert loaded(stored) == f"one two {TEXT}"


@each_packer
def test_damaged_file_is_refused_or_left_out(tmp_path: Path, name: str) -> None:
    """A cut or damaged file is refused, and left out of a folder."""
    data = PACKERS[name](os.urandom(100_000).hex().encode())
    written(tmp_path / "a_cut", data[:-3])
    written(tmp_path / "b_behind", data + b"something else")
    written(tmp_path / "c_damaged", data[:50_000] + bytes(byte ^ 255 for byte in data[50_000:50_100]) + data[50_100:])
    written(tmp_path / "good", "text")
    for file, sentence in (
        ("a_cut", "no end|needs|Truncated"),
        ("b_behind", "something else behind"),
        ("c_damaged", ""),
    ):
        with pytest.raises(ContextRefused, match=f"{file} is damaged.*({sentence})"):
            store(tmp_path / file)
    with store(tmp_path) as stored:
        assert loaded(stored) == {"good": "text"}
        assert stored.info.skipped == {"damaged": 3}


@each_packer
def test_bomb_is_refused_before_unpacking(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb is refused before it takes memory."""
    monkeypatch.setattr(packed, "MAX_UNPACKED_BYTES", 20 << 20)
    path = written(tmp_path / "bomb", PACKERS[name](b" " * (60 << 20)))
    for value in (path, tmp_path, io.BytesIO(path.read_bytes())):
        tracemalloc.start()
        try:
            with pytest.raises(ContextRefused, match="may be 20,971,520 bytes together when they are unpacked"):
                store(value)
            assert tracemalloc.get_traced_memory()[1] < 30 << 20
        finally:
            tracemalloc.stop()


def test_bound_holds_for_all_files_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MAX_UNPACKED_BYTES", 1_000)
    for number in range(3):
        written(tmp_path / f"{number}.gz", gzip.compress(b"x" * 400))
    with pytest.raises(ContextRefused, match=r"2\.gz: the compressed files and documents of a context may be 1,000"):
        store(tmp_path)


@pytest.mark.parametrize("kind", ["gz", "tar.gz", "zip"])
def test_bound_counts_the_stored_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The bound holds for the bytes of a text as it is stored."""

    def made(text: str, end: str) -> Path:
        data, path = text.encode(), tmp_path / f"a.{end}"
        if end == "zip":
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("a", data)
            return path
        if end.startswith("tar"):
            tar = tarfile.TarInfo("a")
            tar.size = len(data)
            data = tar.tobuf() + data.ljust(-(-len(data) // 512) * 512, b"\0") + bytes(1_024)
        return written(path, gzip.compress(data) if end.endswith("gz") else data)

    monkeypatch.setattr(packed, "MAX_UNPACKED_BYTES", 4_000_000)
    wide = "a" * 1_500_000 + "\U0001f600"
    widened: list[int] = []
    monkeypatch.setattr(memfd.TextMemfd, "_widen", lambda _self, kind: widened.append(kind))
    with pytest.raises(ContextRefused, match="4,000,000 bytes together when they are stored, each character as wide"):
        store(made(wide, kind))
    assert not widened  # refused before it takes memory
    monkeypatch.undo()
    monkeypatch.setattr(packed, "MAX_UNPACKED_BYTES", 4_000_000)
    for text, end in (("a" * 3_900_000, kind), ("a" * 900_000 + "\U0001f600", kind), (wide, "txt"), (wide, "tar")):
        with store(made(text, end)) as stored:
            assert stored.info.total_chars == len(text)


def test_xz_that_wants_much_memory_is_refused(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 29}]
    path = written(tmp_path / "file.xz", lzma.compress(b"text", filters=filters))
    with pytest.raises(ContextRefused, match="cannot be unpacked as xz"):
        store(path)


def test_many_small_streams_are_read_in_linear_time(tmp_path: Path) -> None:
    with store(written(tmp_path / "file", gzip.compress(b"x") * 100_000)) as stored:
        assert stored.info.total_chars == 100_000


def test_compressed_twice_or_binary_inside_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContextRefused, match="is compressed twice: unpack it first"):
        store(written(tmp_path / "twice", gzip.compress(bz2.compress(b"text"))))
    with pytest.raises(ContextRefused, match=r"binary \(a zero byte at offset 1\)"):
        store(written(tmp_path / "binary", gzip.compress(b"a\0b")))
    with pytest.raises(ContextRefused, match="empty: give a file"):
        store(written(tmp_path / "empty", gzip.compress(b"")))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python has zstd itself")
def test_zstd_without_its_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "file.zst", zstd(b"text"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ContextRefused, match=r"is compressed by zstd: pip install 'rlm-broker\[zstd\]'"):
        store(path)


def test_text_that_begins_like_something_compressed_stays_text(tmp_path: Path) -> None:
    for text in ("BZh9 is a name", "PK is another", "\x1f\x8b", "%PD"):
        with store(written(tmp_path / "file", text)) as stored:
            assert loaded(stored) == text


def test_reader_gives_back_what_was_not_needed() -> None:
    reader = Reader([b"abc", b"def", b"g"])
    assert (reader.peek(4), reader.read(5), reader.peek(9)) == (b"abcd", b"abcde", b"fg")
    reader.read(2)
    reader.unread(1)
    assert (b"".join(reader), reader.read(5), reader.peek(1)) == (b"g", b"", b"")


def test_zlib_data_without_a_header_is_no_gzip(tmp_path: Path) -> None:
    with pytest.raises(ContextRefused, match="is damaged: it cannot be unpacked as gzip"):
        store(written(tmp_path / "file", b"\x1f\x8b\x08" + zlib.compress(b"text")))
