"""Archives as dicts of the texts of their members. A member without text is left out, or refused."""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import stat
import sys
import tarfile
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from rlm_broker.context import archives, memfd
from rlm_broker.context.archives import ByteReader
from rlm_broker.context.found_files import FileUnfit
from rlm_broker.context.store import Encoded, Paths, store
from rlm_broker.errors import ContextRefused
from tests.support.contexts import found_in, loaded, refused, value_of, written

FILES = {"a.txt": "one", "deep/er/b.py": "\u017c" * 1000, "empty": "", "log.gz": "packed"}


def content(name: str, text: str) -> bytes:
    return gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()


def member(
    name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, io.BytesIO]:
    """Return what `TarFile.addfile` takes."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(data), kind, link
    return info, io.BytesIO(data)


def tarred(path: Path, files: dict[str, str], mode: str = "w", kind: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, mode, format=kind) as tar:  # type: ignore[call-overload]
        for name, text in files.items():
            tar.addfile(*member(name, content(name, text)))
    return path


def zipped(path: Path, files: dict[str, str], mode: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", mode) as archive:
        for name, text in files.items():
            archive.writestr(name, content(name, text))
    return path


MAKERS: dict[str, Callable[[Path, dict[str, str]], Path]] = {
    "tar": tarred,
    "tar.gz": lambda path, files: tarred(path, files, "w:gz"),
    "tar.bz2": lambda path, files: tarred(path, files, "w:bz2"),
    "tar.xz": lambda path, files: tarred(path, files, "w:xz"),
    "gnu.tar": lambda path, files: tarred(path, files, kind=tarfile.GNU_FORMAT),
    "zip": zipped,
    "stored.zip": lambda path, files: zipped(path, files, zipfile.ZIP_STORED),
    "bzip2.zip": lambda path, files: zipped(path, files, zipfile.ZIP_BZIP2),
}
each_maker = pytest.mark.parametrize("kind", MAKERS)


@each_maker
def test_archive_is_a_dict_and_below_a_folder_a_folder(tmp_path: Path, kind: str) -> None:
    files = FILES | {"long/" * 60 + "name": "long"}
    path = MAKERS[kind](tmp_path / f"a.{kind}", files)
    with store(path) as stored:
        assert loaded(stored) == files
        assert (stored.info.type_name, stored.info.parts_total, stored.info.skipped) == ("dict", len(files), {})
    written(tmp_path / "plain", "text")
    expected = {"plain": "text"} | {f"{path.name}/{name}": text for name, text in files.items()}
    for value in (tmp_path, Paths([tmp_path / "plain", path])):
        assert value_of(value) == expected


def test_binary_members_of_an_archive_are_counted(tmp_path: Path) -> None:
    inner = zipped(tmp_path / "x", {"a": "b"}).read_bytes()
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (("good", b"good"), ("picture", b"\x89PNG\0"), ("latin", b"\xe9\xe9"), ("inner.zip", inner)):
            tar.addfile(*member(name, data))
        for name, kind in (("link", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("fifo", tarfile.FIFOTYPE)):
            tar.addfile(*member(name, kind=kind, link="good"))
        tar.addfile(*member("folder", kind=tarfile.DIRTYPE))
        tar.addfile(*member("last", b"last"))
    with store(tmp_path / "a.tar") as stored:
        assert loaded(stored) == {"good": "good", "last": "last"}
        left_out = {"binary": 1, "not UTF-8": 1, "an archive inside something else": 1, "not a regular file": 3}
        assert stored.info.skipped == left_out
    assert value_of(Encoded(tmp_path / "a.tar", "latin-1"))["latin"] == "\xe9\xe9"


def test_zip_entries_other_than_files_are_counted(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("good", "good")
        archive.writestr("folder/", "")
        link = zipfile.ZipInfo("link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr(zipfile.ZipInfo("lzma"), "text", zipfile.ZIP_LZMA)
    data = bytearray((tmp_path / "a.zip").read_bytes())
    assert found_in(written(tmp_path / "b.zip", bytes(data))) == (
        {"good": "good"},
        {"not a regular file": 1, "compressed in a way that is not read": 1},
    )
    at = data.index(b"PK\x01\x02")
    data[at + 8] |= 1
    refused(written(tmp_path / "c.zip", bytes(data)), r"left out: .*1 encrypted")


STEERING = {
    "../../up": "../../up",
    "/etc/absolute": "etc/absolute",
    "a\nLeft out: 3": "a\\nLeft out: 3",
    "\x1b[2J": "\\x1b[2J",
    "./x//y": "x/y",
    "\u202e\u061c\u200e\u200f": "\\u202e\\u061c\\u200e\\u200f",
    "x" * 1_024: "x" * 1_024,
}
"""Name in an archive -> name of the text."""


@each_maker
def test_names_lead_nowhere_and_steer_nothing_and_very_long_ones_are_left_out(tmp_path: Path, kind: str) -> None:
    (tmp_path / "in").mkdir()
    path = MAKERS[kind](tmp_path / "in" / f"a.{kind}", {**{name: name for name in STEERING}, "y" * 1_025: "too long"})
    with store(path) as stored:
        assert loaded(stored) == {shown: name for name, shown in STEERING.items()}
        assert all(name.isprintable() for name, _ in stored.info.parts)
        assert stored.info.skipped == {"a name of more than 1,024 characters in an archive": 1}
    assert sorted(each.name for each in tmp_path.rglob("*")) == sorted([path.name, "in"])


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_of_equal_name_are_all_kept(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for text in ("one", "two", "three"):
            archive.writestr("a", text)
        archive.writestr("a (1)", "four")
    assert sorted(value_of(tmp_path / "a.zip").values()) == ["four", "one", "three", "two"]


def test_members_of_equal_name_are_read_linearly(tmp_path: Path) -> None:
    """Ten times the members of the same name take no thirty times the processor's time; their square is a hundred."""
    one = member("a", b"x")[0].tobuf() + b"x".ljust(512, b"\0")

    def spent_s(members: int) -> float:
        path = written(tmp_path / "a.tar.gz", gzip.compress(one * members + bytes(1_024)))
        began = time.thread_time()
        with store(path) as stored:
            spent = time.thread_time() - began
            assert [*loaded(stored)][-2:] == [f"a ({members - 2})", f"a ({members - 1})"]
        return spent

    assert spent_s(20_000) < 30 * spent_s(2_000)


def test_global_headers_of_a_tar_are_bounded(tmp_path: Path) -> None:
    def tar_of(headers: int, size: int) -> Path:
        said = (tarfile.TarInfo.create_pax_global_header({f"key{each}": "x" * size}) for each in range(headers))
        return written(tmp_path / "a.tar", b"".join(each + member("a")[0].tobuf() for each in said) + bytes(1_024))

    assert len(value_of(tar_of(100, 40))) == 100
    for headers, size in ((1, 9_000), (300, 40)):
        refused(tar_of(headers, size), r"read as tar \(global headers of more than 8,192 characters\)")


@each_maker
def test_cut_archive_is_refused_and_counted_below_a_folder(tmp_path: Path, kind: str) -> None:
    data = MAKERS[kind](tmp_path / "whole", {"a": os.urandom(30_000).hex()}).read_bytes()
    (tmp_path / "whole").unlink()
    path = written(tmp_path / f"cut.{kind}", data[: len(data) // 2])
    refused(path, r"cut\..* is (cut|damaged)")
    written(tmp_path / "good", "text")
    with store(tmp_path) as stored:
        assert loaded(stored) == {"good": "text"}
        assert stored.info.skipped["damaged"] >= 1


@each_maker
def test_archive_that_is_damaged_anywhere_is_refused_or_read(tmp_path: Path, kind: str) -> None:
    data = MAKERS[kind](tmp_path / "whole", FILES).read_bytes()
    for at in range(0, len(data), max(1, len(data) // 150)):
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        path = written(tmp_path / f"a.{kind}", bytes(damaged))
        with contextlib.suppress(ContextRefused):
            store(path).close()


def test_number_of_members_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zip that states too few entries is refused unread."""
    monkeypatch.setattr(archives, "MAX_MEMBERS", 5)
    files = {f"{number}": "x" for number in range(6)}
    zip_path = zipped(tmp_path / "a.zip", files)
    for path in (tarred(tmp_path / "a.tar", files), zip_path):
        refused(path, "the archives of a context may have 5 entries together")
    data = bytearray(zip_path.read_bytes())
    at = data.rindex(b"PK\x05\x06")
    read: list[archives.Member] = []
    for stated in (0, 1, 5):
        data[at + 10 : at + 12] = stated.to_bytes(2, "little")
        with (
            written(zip_path, bytes(data)).open("rb") as file,
            pytest.raises(ContextRefused, match="5 entries together"),
        ):
            read += archives.zip_members(file.fileno(), "a.zip", archives.Unpacking())
    assert read == []


def test_zip_of_too_many_entries_is_refused_by_its_end_record(tmp_path: Path) -> None:
    """A zip of more than 65,535 entries, which a record of ZIP64 counts, is refused before its directory is read."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", allowZip64=True) as archive:
        for number in range(70_001):
            archive.writestr(zipfile.ZipInfo(f"{number}"), b"")
    unpacking = archives.Unpacking()
    unpacking.count_members(archives.MAX_MEMBERS - 70_000, "others")
    for comment in (b"", b"a comment" * 7_000):
        data = bytearray(made.getvalue()[:-2] + len(comment).to_bytes(2, "little") + comment)
        at = data.rindex(b"PK\x06\x06")
        data[at - 46 : at] = bytes(46)  # the end of the directory: it cannot be read
        with open(written(tmp_path / "b.zip", bytes(data)), "rb") as file:
            with pytest.raises(ContextRefused, match="may have 100,000 entries together"):
                next(archives.zip_members(file.fileno(), "b.zip", unpacking))
            with pytest.raises(FileUnfit, match="damaged"):
                next(archives.zip_members(file.fileno(), "b.zip", archives.Unpacking()))


def test_huge_header_or_directory_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 1 << 40
    path = written(tmp_path / "a.tar", info.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20))
    refused(path, "is damaged: it cannot be read as tar")
    monkeypatch.setattr(archives, "MAX_DIRECTORY_BYTES", 70_000)
    path = zipped(tmp_path / "a.zip", {f"{number:0>100}": "" for number in range(1_000)})
    refused(path, "its directory is more than 70,000 bytes")


def test_archive_without_text_or_from_a_stream_is_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", {})
    refused(path, r"there is no text in .*: it has no files$")
    for made in (zipped(tmp_path / "b.zip", FILES), tarred(tmp_path / "b.tar", FILES)):
        refused(io.BytesIO(made.read_bytes()), "the stream is an archive, which can be read only from a file")
    twice = written(tmp_path / "c.zip.gz", gzip.compress((tmp_path / "b.zip").read_bytes()))
    refused(twice, "is an archive, which can be read only from a file")


def test_oldest_kind_of_tar_is_told_by_its_name(tmp_path: Path) -> None:
    header = bytearray(tarfile.TarInfo("old").tobuf(tarfile.USTAR_FORMAT))
    header[257:265] = bytes(8)
    header[124:136] = b"00000000004\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    data = bytes(header) + b"text".ljust(512, b"\0") + bytes(1024)
    assert value_of(written(tmp_path / "a.tar", data)) == {"old": "text"}
    refused(written(tmp_path / "a.bin", data), "is binary")


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
    assert value_of(io.BytesIO(data)) == TEXT
    parts = [PACKERS[name](part.encode()) for part in ("one ", "", "two ")]
    written(tmp_path / "several", b"".join([*parts, data, bytes(5_000)]))
    assert value_of(tmp_path) == {path.name: TEXT, "several": f"one two {TEXT}"}


@each_packer
def test_damaged_file_is_refused_or_left_out(tmp_path: Path, name: str) -> None:
    data = PACKERS[name](os.urandom(100_000).hex().encode())
    written(tmp_path / "a_cut", data[:-3])
    written(tmp_path / "b_behind", data + b"something else")
    written(tmp_path / "c_damaged", data[:50_000] + bytes(byte ^ 255 for byte in data[50_000:50_100]) + data[50_100:])
    written(tmp_path / "good", "text")
    reasons = {"a_cut": "no end|needs|Truncated", "b_behind": "something else behind", "c_damaged": ""}
    for file, sentence in reasons.items():
        refused(tmp_path / file, f"{file} is damaged.*({sentence})")
    assert found_in(tmp_path) == ({"good": "text"}, {"damaged": 3})


@each_packer
def test_bomb_is_refused_before_it_takes_memory(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 20 << 20)
    path = written(tmp_path / "bomb", PACKERS[name](b" " * (60 << 20)))
    files = {f"{number}": " " * (10 << 20) for number in range(4)}
    bombs = [tarred(tmp_path / "a.tgz", files, "w:gz"), zipped(tmp_path / "a.zip", files)] if name == "gz" else []
    for value in (path, path.parent, io.BytesIO(path.read_bytes()), *bombs):
        tracemalloc.start()
        try:
            refused(value, "may be 20,971,520 bytes together when they are unpacked")
            assert tracemalloc.get_traced_memory()[1] < 30 << 20
        finally:
            tracemalloc.stop()


def test_bound_holds_for_all_files_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 1_000)
    for number in range(3):
        written(tmp_path / f"{number}.gz", gzip.compress(b"x" * 400))
    refused(tmp_path, r"2\.gz: the compressed files and documents of a context may be 1,000")


@pytest.mark.parametrize("kind", ["gz", "tar.gz", "zip"])
def test_bound_counts_the_stored_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def made(text: str, end: str) -> Path:
        data, path = text.encode(), tmp_path / f"a.{end}"
        if end in MAKERS:
            return MAKERS[end](path, {"a": text})
        return written(path, gzip.compress(data) if end == "gz" else data)

    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 4_000_000)
    wide = "a" * 1_500_000 + "\U0001f600"
    widened: list[int] = []
    monkeypatch.setattr(memfd.TextMemfd, "_widen", lambda _self, kind: widened.append(kind))
    refused(made(wide, kind), "4,000,000 bytes together when they are stored, each character as wide")
    assert not widened  # refused before it takes memory
    monkeypatch.undo()
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 4_000_000)
    for text, end in (("a" * 3_900_000, kind), ("a" * 900_000 + "\U0001f600", kind), (wide, "txt"), (wide, "tar")):
        with store(made(text, end)) as stored:
            assert stored.info.total_chars == len(text)


def test_compressed_in_an_unfit_way_is_refused(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 29}]  # takes much memory
    for data, why in (
        (gzip.compress(bz2.compress(b"text")), "is compressed twice: unpack it first"),
        (gzip.compress(b"a\0b"), r"binary \(a zero byte at offset 1\)"),
        (gzip.compress(b""), "empty: give a file"),
        (lzma.compress(b"text", filters=filters), "cannot be unpacked as xz"),
        (b"\x1f\x8b\x08" + zlib.compress(b"text"), "is damaged: it cannot be unpacked as gzip"),
    ):
        refused(written(tmp_path / "file", data), why)


def test_many_small_streams_are_read_in_linear_time(tmp_path: Path) -> None:
    with store(written(tmp_path / "file", gzip.compress(b"x") * 50_000)) as stored:
        assert stored.info.total_chars == 50_000


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python has zstd itself")
def test_zstd_without_its_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "file.zst", zstd(b"text"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    refused(path, r"is compressed by zstd: pip install 'rlm-broker\[zstd\]'")


def test_text_that_begins_like_something_compressed_stays_text(tmp_path: Path) -> None:
    for text in ("BZh9 is a name", "PK is another", "\x1f\x8b", "%PD"):
        assert value_of(written(tmp_path / "file", text)) == text


def test_reader_gives_back_what_was_not_needed() -> None:
    reader = ByteReader([b"abc", b"def", b"g"])
    assert (reader.peek(4), reader.read(5), reader.peek(9)) == (b"abcd", b"abcde", b"fg")
    reader.read(2)
    reader.unread(1)
    assert (b"".join(reader), reader.read(5), reader.peek(1)) == (b"g", b"", b"")
