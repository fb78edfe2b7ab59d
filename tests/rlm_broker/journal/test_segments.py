"""The segments of a journal: read at any length, and removed with their last item."""

import errno
import json
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.journal import disk
from rlm_broker.journal.lines import Again, CallLine, digest, line_of
from rlm_broker.journal.segments import Segments
from rlm_broker.usage import Tally
from tests.support.journals import paid_call, texts


def line(item: str, n: int, text: str = "answer") -> tuple[bytes, bytes]:
    return digest(item), CallLine.of(item, n, paid_call(str(n), text)).encoded()


def scanned(folder: Path, *finished: str) -> tuple[Segments, Tally]:
    segments, used = Segments(folder), Tally()
    done = {digest(id) for id in finished}
    segments.scan(done.__contains__, lambda _, each: used.add(each.usage()))
    return segments, used


def test_segment_cut_at_any_byte_keeps_the_lines_before(tmp_path: Path) -> None:
    writing = Segments(tmp_path)
    writing.append([line("a", 1, "one"), line("b", 2, "\ud800 é"), line("a", 3, "three")])
    writing.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        segments, used = scanned(tmp_path)
        lines = whole[:length].count(b"\n")
        found = texts(segments.earlier(digest("a"))) + texts(segments.earlier(digest("b")))
        assert sorted(found) == sorted(["one", "\ud800 é", "three"][:lines])
        assert used.usage.total_calls == lines


def test_lines_that_are_no_calls_are_passed_over(tmp_path: Path) -> None:
    """A power cut may leave zeros, and older data, within a file."""
    (tmp_path / "calls-000004.jsonl").write_bytes(
        b"\0\0\0\n"
        + line("a", 1, "one")[1]
        + b'{"item":3}\n'
        + b"[" * 3000
        + b"\n"
        + line("a", 2, "two")[1]
        + b"\0" * 20
    )
    (tmp_path / "notes.txt").write_text("the user's")
    segments, _ = scanned(tmp_path)
    assert texts(segments.earlier(digest("a"))) == ["one", "two"]
    segments.append([line("a", 3, "three")])
    segments.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "calls-000004.jsonl",
        "calls-000005.jsonl",
        "notes.txt",
    ]


def test_line_that_is_in_two_segments_counts_once(tmp_path: Path) -> None:
    """A kill may come after lines were moved, and before the old segment is removed."""
    (tmp_path / "calls-000001.jsonl").write_bytes(line("a", 1, "one")[1] + line("a", 2, "two")[1])
    (tmp_path / "calls-000002.jsonl").write_bytes(line("a", 3, "three")[1] + line("a", 1, "one")[1])
    segments, used = scanned(tmp_path)
    assert texts(segments.earlier(digest("a"))) == ["one", "two", "three"]
    assert used.usage.total_calls == 3


def test_calls_before_a_new_beginning_are_void(tmp_path: Path) -> None:
    (tmp_path / "calls-000001.jsonl").write_bytes(
        line("a", 1, "old")[1] + line_of(Again("a", 5)) + line("a", 6, "new")[1] + line("a", 2, "moved")[1]
    )
    segments, used = scanned(tmp_path)
    assert texts(segments.earlier(digest("a"))) == ["new"]
    assert used.usage.total_calls == 1
    assert segments.last_number == 6


def test_segments_of_finished_items_are_removed(tmp_path: Path) -> None:
    writing = Segments(tmp_path, most_bytes=1)
    writing.append([line("a", 1)])
    writing.append([line("b", 2)])
    writing.close()
    assert len(list(tmp_path.iterdir())) == 2
    scanned(tmp_path, "a")
    (left,) = tmp_path.iterdir()
    assert json.loads(left.read_text())["item"] == "b"


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_segment_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    """The segments before it and after it stay, and so does what stands in its place."""
    paths = [tmp_path / f"calls-00000{number}.jsonl" for number in (1, 2, 3)]
    paths[0].write_bytes(line("a", 1)[1])
    paths[2].write_bytes(line("a", 2)[1])
    {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(paths[0]), "folder": Path.mkdir}[kind](paths[1])
    segments = Segments(tmp_path)
    with pytest.raises(ConfigurationError, match=r"calls-000002\.jsonl is not a regular file: remove it"):
        segments.scan(lambda _: False, lambda *_: None)
    segments.close()
    assert sorted(tmp_path.iterdir()) == paths


def test_segment_that_cannot_be_read_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "calls-000001.jsonl").write_bytes(line("a", 1)[1])

    def failing(path: Path) -> BinaryIO:
        raise OSError(errno.EIO, "Input/output error", str(path))

    segments = Segments(tmp_path)
    monkeypatch.setattr(disk, "open_to_read", failing)
    with pytest.raises(OSError, match="Input/output error"):
        segments.scan(lambda _: False, lambda *_: None)
    segments.close()
    assert (tmp_path / "calls-000001.jsonl").exists()


def test_moved_calls_of_waiting_items_are_found(tmp_path: Path) -> None:
    """An item of an earlier process may begin after its calls were moved to another segment."""
    writing = Segments(tmp_path)
    writing.append(
        [line("early", 1, "first"), *[line("other", 2 + n, "x" * 50) for n in range(40)], line("early", 99, "last")]
    )
    writing.close()
    segments = Segments(tmp_path, most_bytes=300)
    segments.scan(lambda _: False, lambda *_: None)
    segments.finish([digest("other")])
    for number in range(30):
        segments.append([line(f"{number}", 100 + number)])
        segments.finish([digest(f"{number}")])
        segments.append([line(f"open {number}", 200 + number)])
    assert not (tmp_path / "calls-000001.jsonl").exists()
    assert texts(segments.earlier(digest("early"))) == ["first", "last"]
    segments.close()
    again, _ = scanned(tmp_path)
    assert texts(again.earlier(digest("early"))) == ["first", "last"]


def test_calls_share_a_segment_until_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full one is on the disk before the next begins, and its descriptor is closed."""
    synced: list[int] = []

    def sync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)

    writing = Segments(tmp_path)
    for number in range(3):
        writing.append([line("a", number)])
    assert [path.name for path in tmp_path.iterdir()] == ["calls-000001.jsonl"]
    writing.close()
    monkeypatch.setattr(disk, "sync", sync)
    writing = Segments(tmp_path, most_bytes=1)
    before = None
    for number in range(3, 9):
        writing.append([line("a", number)])
        held = len(list(Path("/proc/self/fd").iterdir()))
        before = before or held
        assert held == before
    size = len(line("a", 3)[1])
    assert synced == [size] * 6
    writing.close()
