"""Files opened for the orchestrator: which paths are in reach and which are not."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox_worker.init import files
from sandbox_worker.init.files import MAX_ENTRIES, FileNotOpened, Scratch, listed, open_to_read, open_to_write
from sandbox_worker.wire.bounds import ReplBounds
from sandbox_worker.wire.control import (
    MAX_PACKET_BYTES,
    ROOT,
    FileRequest,
    Listed,
    ListedEntry,
    ListFolder,
    Opened,
    OpenToRead,
    OpenToWrite,
    Refused,
    RemoveFile,
    pack,
)
from tests.support.exchanges import exchanged
from tests.support.tables import table

BOUNDS = ReplBounds(
    max_output_bytes=100,
    memory_bytes=1 << 20,
    max_processes=1,
    max_open_files=16,
    scratch_bytes=1 << 16,
    max_scratch_files=5,
    cpu_s=None,
    max_frame_bytes=1 << 12,
)
MOST = BOUNDS.scratch_bytes
SCRATCH = Scratch("/w", BOUNDS, is_counted=True)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, beside one that holds a secret. No descriptor is left open."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names
    yield folder
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def content(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()


def test_file_is_written_with_its_folders_and_read(scratch: Path) -> None:
    for data in (b"a longer text", b"short"):
        with open(open_to_write([b"a", b"b", b"file"], len(data), BOUNDS), "wb") as file:
            file.write(data)
        assert content(open_to_read([b"a", b"b", b"file"], MOST)) == data
    assert (scratch / "a").stat().st_mode & 0o777 == 0o700


def bind(name: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name.name)  # a longer path may be too long


MAKES: dict[str, Callable[[Path], object]] = {
    "link": lambda name: name.symlink_to("../outside/secret"),
    "link to a folder": lambda name: name.symlink_to("../outside"),
    "loop": lambda name: name.symlink_to(name.name),
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
    "socket": bind,
    "device": lambda name: name.symlink_to("/dev/zero"),
    "file": Path.touch,
}


@table("what", sorted(MAKES.keys() - {"file"}))
def test_irregular_file_is_refused(scratch: Path, what: str) -> None:
    MAKES[what](scratch / what)
    path = [what.encode()]
    calls: list[Callable[[], object]] = [lambda: open_to_read(path, MOST), lambda: open_to_write(path, 1, BOUNDS)]
    for call in calls:
        with pytest.raises(FileNotOpened, match=r"is a folder|is a link|is not a regular file"):
            call()
    (scratch / what).rename(scratch.parent / what)  # it would count for the next row
    assert (scratch.parent / "outside" / "secret").read_text() == "secret"


@table("what", ["link to a folder", "fifo", "file"])
def test_path_through_a_file_is_refused(scratch: Path, what: str) -> None:
    MAKES[what](scratch / what)
    name = what.encode()
    for call in (
        lambda: open_to_read([name, b"secret"], MOST),
        lambda: open_to_write([name, b"secret"], 1, None),
        lambda: open_to_write([name, b"more", b"secret"], 1, None),
        lambda: listed([name], b""),
    ):
        with pytest.raises(FileNotOpened, match=rf"goes through '{what}', which is (a link, and links|not a folder)"):
            call()


def test_path_that_changes_never_leads_outside(scratch: Path) -> None:
    """A folder and a file are exchanged for links, as fast as can be, while they are opened."""
    (scratch / "folder").mkdir()
    (scratch / "folder" / "secret").write_text("own")
    (scratch / "link").symlink_to("../outside")
    (scratch / "file-link").symlink_to("../outside/secret")
    (scratch / "file").write_text("own")
    opened = 0
    with exchanged((scratch / "folder", scratch / "link"), (scratch / "file", scratch / "file-link")):
        for path in ([b"folder", b"secret"], [b"file"]) * 3000:
            with contextlib.suppress(FileNotOpened, OSError):
                assert content(open_to_read(path, MOST)) in (b"own", b"")
                with open(open_to_write(path, 3, None), "wb") as file:
                    file.write(b"own")
                opened += 1
    assert opened
    assert (scratch.parent / "outside" / "secret").read_text() == "secret"


def test_file_without_room_keeps_the_old_one(scratch: Path) -> None:
    (scratch / "file").write_bytes(b"old")
    with pytest.raises(FileNotOpened, match=r"needs 70,000 bytes, and scratch_bytes leaves room for 6\d,\d{3}"):
        open_to_write([b"file"], 70_000, BOUNDS)
    assert (scratch / "file").read_bytes() == b"old"
    os.close(open_to_write([b"file"], 60_000, BOUNDS))


def test_file_count_past_limit_is_refused() -> None:
    for number in range(4):
        os.close(open_to_write([b"file%d" % number], 0, BOUNDS))
    for path in ([b"a", b"file"], [b"b", b"c", b"file"]):
        with pytest.raises(FileNotOpened, match="needs more folders than max_scratch_files allows"):
            open_to_write(path, 0, BOUNDS)
    os.close(open_to_write([b"file4"], 0, BOUNDS))
    with pytest.raises(FileNotOpened, match="one more file than max_scratch_files"):
        open_to_write([b"file5"], 0, BOUNDS)
    os.close(open_to_write([b"file0"], 0, BOUNDS))


def test_folder_is_listed_in_pages(scratch: Path) -> None:
    """A folder is listed page by page, with the kind and size of each entry."""
    odd = [b"\xff\xfe", b"\n", b" "]
    names = sorted([*(b"%04d-%s" % (number, b"x" * 200) for number in range(300)), *odd])
    for name in names:
        Path(os.fsdecode(name)).write_bytes(b"123")
    (scratch / "~link").symlink_to("nowhere")
    os.mkfifo("~other")
    (scratch / "~zfolder").mkdir()
    entries: list[ListedEntry] = []
    pages = 0
    while True:
        page = listed([], entries[-1].name if entries else b"")
        assert len(pack(page)) < MAX_PACKET_BYTES
        entries += page.entries
        pages += 1
        if page.is_all:
            break
    assert pages > 3
    kinds = {entry.name: entry.kind for entry in entries}
    assert len(kinds) == len(entries) == len(names) + 3
    assert (kinds[b"~link"], kinds[b"~other"], kinds[b"~zfolder"]) == ("link", "other", "folder")
    assert all(entry.size_bytes == 3 for entry in entries if entry.kind == "file")


def test_folder_page_of_short_names_fits_a_packet(scratch: Path) -> None:
    for number in range(3000):
        (scratch / str(number)).touch()
    assert len(pack(listed([], b""))) < MAX_PACKET_BYTES


def test_folder_with_too_many_entries_is_refused(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    monkeypatch.setattr(files, "MAX_ENTRIES", 3)
    for number in range(4):
        (scratch / str(number)).touch()
    with pytest.raises(FileNotOpened, match="more than 3 entries"):
        listed([], b"")
    assert MAX_ENTRIES == 10_000


def test_answers_pack_with_any_names() -> None:
    Path(os.fsdecode(b"\xff")).touch()
    for request in (OpenToRead([b"\xff", b"x"]), ListFolder([b"\xff"]), OpenToRead([b"x" * 300])):
        said, fds = files.answer(request, SCRATCH)
        assert not fds
        assert isinstance(said, Refused)
        pack(said)
    none = Refused("cannot be opened: No such file or directory", "missing")
    assert files.answer(OpenToRead([b"none"]), SCRATCH) == (none, [])
    opened, (fd,) = files.answer(OpenToRead([b"\xff"]), SCRATCH)
    assert opened == Opened()
    os.close(fd)


def absolute(path: Path) -> list[bytes]:
    return [ROOT, *os.fsencode(path).split(b"/")[1:]]


def test_absolute_path_leads_into_the_scratch_folder(scratch: Path) -> None:
    """By both names of the folder the rules of the folder hold: it is written, and no link is followed."""
    other = scratch.parent / "other"
    for folder in (scratch, other):
        said, (fd,) = files.answer(OpenToWrite(absolute(folder / "sub" / "file"), 3), Scratch(str(other), BOUNDS, True))
        assert said == Opened()
        os.write(fd, b"own")
        os.close(fd)
        assert (scratch / "sub" / "file").read_bytes() == b"own"
        (scratch / "link").symlink_to("sub/file")
        for request, kind in (
            (OpenToRead(absolute(folder / "link")), "permission"),
            (OpenToRead(absolute(folder)), "folder"),
            (OpenToWrite(absolute(folder), 1), "folder"),
            (OpenToWrite(absolute(folder / "large"), 1 << 20), "no_room"),
            (RemoveFile(absolute(folder / "sub")), "folder"),
            (RemoveFile(absolute(folder / "none")), "missing"),
        ):
            said, _ = files.answer(request, Scratch(str(other), BOUNDS, True))
            assert (isinstance(said, Refused) and said.kind) == kind, request
        files.answer(RemoveFile(absolute(folder / "link")), Scratch(str(other), BOUNDS, True))
    assert not other.exists()


def test_files_elsewhere_are_read_and_never_changed(scratch: Path) -> None:
    outside = scratch.parent / "outside"
    (outside / "link").symlink_to("secret")
    (outside / "large").write_bytes(bytes(BOUNDS.scratch_bytes + 1))
    (outside / "environ").symlink_to("/proc/self/environ")
    (outside / "stdin").symlink_to("/proc/self/fd/0")
    os.mkfifo(outside / "fifo")
    for name in ("secret", "link"):
        assert content(open_to_read(absolute(outside / name), MOST)) == b"secret"
    said, _ = files.answer(ListFolder(absolute(outside)), SCRATCH)
    assert isinstance(said, Listed)
    assert {each.name: each.kind for each in said.entries}[b"link"] == "link"
    os.close(files.open_folder(absolute(outside)))
    requests: list[tuple[FileRequest, str]] = [
        (OpenToRead([ROOT]), "folder"),
        (OpenToRead(absolute(outside)), "folder"),
        (OpenToRead(absolute(outside / "none")), "missing"),
        (OpenToRead(absolute(outside / "fifo")), "file"),
        (OpenToRead(absolute(outside / "large")), "too_large"),
        (OpenToRead(absolute(outside / "environ")), "permission"),
        (OpenToRead(absolute(outside / "stdin")), "permission"),
        (OpenToRead(absolute(Path("/proc/self/status"))), "permission"),
        (ListFolder(absolute(Path("/proc/self"))), "permission"),
        (OpenToWrite(absolute(outside / "secret"), 1), "permission"),
        (OpenToWrite(absolute(outside / "new"), 1), "permission"),
        (RemoveFile(absolute(outside / "secret")), "permission"),
    ]
    for request, kind in requests:
        said, fds = files.answer(request, SCRATCH)
        assert (isinstance(said, Refused) and said.kind, fds) == (kind, []), request
    assert (outside / "secret").read_text() == "secret"
    assert not (outside / "new").exists()
