"""Files opened for the orchestrator: which paths are in reach and which are not."""

import ctypes
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_worker.init import files
from sandbox_worker.init.files import MAX_ENTRIES, FileNotOpened, listed, open_to_read, open_to_write
from sandbox_worker.wire.bounds import ReplBounds
from sandbox_worker.wire.control import MAX_PACKET_BYTES, ListedEntry, ListFolder, Opened, OpenToRead, Refused, pack
from tests.support.waiting import WAIT_S

AT_FDCWD, RENAME_EXCHANGE = -100, 2
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


def test_file_is_opened_to_read(scratch: Path) -> None:
    (scratch / "a").mkdir()
    (scratch / "a" / "file").write_bytes(b"text")
    assert content(open_to_read([b"a", b"file"])) == b"text"


def test_file_is_written_with_its_folders(scratch: Path) -> None:
    for data in (b"a longer text", b"short"):
        with open(open_to_write([b"a", b"b", b"file"], len(data), BOUNDS), "wb") as file:
            file.write(data)
        assert (scratch / "a" / "b" / "file").read_bytes() == data
    assert (scratch / "a").stat().st_mode & 0o777 == 0o700


def make(scratch: Path, what: str) -> None:
    name = scratch / "it"
    match what:
        case "link":
            name.symlink_to("../outside/secret")
        case "loop":
            name.symlink_to("it")
        case "folder":
            name.mkdir()
        case "fifo":
            os.mkfifo(name)
        case "socket":
            with socket.socket(socket.AF_UNIX) as unix:
                unix.bind("it")
        case "device":
            name.symlink_to("/dev/zero")


@pytest.mark.parametrize("what", ["link", "loop", "folder", "fifo", "socket", "device"])
def test_irregular_file_is_refused(scratch: Path, what: str) -> None:
    make(scratch, what)
    with pytest.raises(FileNotOpened, match=r"is a folder|is a link|is not a regular file"):
        open_to_read([b"it"])
    with pytest.raises(FileNotOpened, match=r"is a folder|is a link|is not a regular file"):
        open_to_write([b"it"], 1, BOUNDS)
    assert (scratch.parent / "outside" / "secret").read_text() == "secret"


@pytest.mark.parametrize("what", ["link", "fifo", "file"])
def test_path_through_a_file_is_refused(scratch: Path, what: str) -> None:
    match what:
        case "link":
            (scratch / "it").symlink_to("../outside")
        case "fifo":
            os.mkfifo(scratch / "it")
        case "file":
            (scratch / "it").touch()
    for call in (
        lambda: open_to_read([b"it", b"secret"]),
        lambda: open_to_write([b"it", b"secret"], 1, None),
        lambda: open_to_write([b"it", b"more", b"secret"], 1, None),
        lambda: listed([b"it"], b""),
    ):
        with pytest.raises(FileNotOpened, match=r"goes through 'it', which is (a link, and links|not a folder)"):
            call()


def test_path_that_changes_never_leads_outside(scratch: Path) -> None:
    """A folder and a file are exchanged for links, as fast as can be, while they are opened."""
    (scratch / "folder").mkdir()
    (scratch / "folder" / "secret").write_text("own")
    (scratch / "link").symlink_to("../outside")
    (scratch / "file-link").symlink_to("../outside/secret")
    (scratch / "file").write_text("own")
    done = threading.Event()
    libc = ctypes.CDLL(None)

    def swap() -> None:
        while not done.is_set():
            for one, other in ((b"folder", b"link"), (b"file", b"file-link")):
                assert libc.renameat2(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE) == 0

    thread = threading.Thread(target=swap)
    thread.start()
    opened = 0
    try:
        for _ in range(3000):
            for path in ([b"folder", b"secret"], [b"file"]):
                try:
                    assert content(open_to_read(path)) in (b"own", b"")
                    with open(open_to_write(path, 3, None), "wb") as file:
                        file.write(b"own")
                    opened += 1
                except (FileNotOpened, OSError):
                    pass
    finally:
        done.set()
        thread.join(WAIT_S)
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
    for request in (
        OpenToRead([b"\xff", b"x"]),
        OpenToRead([b"none"]),
        ListFolder([b"\xff"]),
        OpenToRead([b"x" * 300]),
    ):
        said, fds = files.answer(request, BOUNDS)
        assert not fds
        assert isinstance(said, Refused)
        pack(said)
    opened, (fd,) = files.answer(OpenToRead([b"\xff"]), None)
    assert opened == Opened()
    os.close(fd)


def test_kernel_error_is_the_reason() -> None:
    refused, _ = files.answer(OpenToRead([b"none"]), None)
    assert isinstance(refused, Refused)
    assert re.fullmatch("cannot be opened: No such file or directory", refused.reason)
