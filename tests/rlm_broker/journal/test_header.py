"""The header of a journal: whole or missing, and compared in words."""

import contextlib
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.journal import disk
from rlm_broker.journal.header import FORMAT, Header, read_header, require_same, write_header
from tests.support.journals import Crash, dying


def test_header_is_read_as_it_was_written(tmp_path: Path) -> None:
    header = Header(FORMAT, 5, {"model": "m", "limits": {"max_depth": 1}})
    assert read_header(tmp_path) is None
    write_header(tmp_path, header)
    assert read_header(tmp_path) == header
    assert [path.name for path in tmp_path.iterdir()] == ["header.json"]
    assert (tmp_path / "header.json").stat().st_mode & 0o777 == 0o600


def test_format_is_the_first_one(tmp_path: Path) -> None:
    """Another number would have earlier journals refused."""
    (tmp_path / "header.json").write_bytes(b'{"rlm_broker_journal":1,"seed":null,"settings":{"a":[]}}')
    assert read_header(tmp_path) == Header(1, None, {"a": []})


@pytest.mark.parametrize("tears", [False, True])
def test_kill_leaves_no_half_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tears: bool) -> None:
    header = Header(FORMAT, 5, {"model": "m"})
    found = []
    for number in range(1, 8):
        with monkeypatch.context() as patched, contextlib.suppress(Crash):
            dying(patched, number, tears=tears)
            write_header(tmp_path, header)
        found.append(repr(read_header(tmp_path)))
        (tmp_path / "header.json").unlink(missing_ok=True)
    assert set(found) == {repr(None), repr(header)}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"rlm_broker_journal":99,"seed":null,"settings":{}}', "has another version of the format"),
        (b"{}", "is not the header of a journal"),
        (b"[" * 5_000, "is not the header of a journal"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "header.json").write_bytes(content)
    with pytest.raises(ConfigurationError, match=why):
        read_header(tmp_path)


def test_pipe_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "header.json")
    with pytest.raises(ConfigurationError, match=r"header\.json is not a regular file: remove it"):
        read_header(tmp_path)


def test_header_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path) -> BinaryIO:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(disk, "open_to_read", failing)
    with pytest.raises(ConfigurationError, match=r"^cannot read .*header\.json: Input/output error$"):
        read_header(tmp_path)


def test_header_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut would otherwise leave a header that is empty."""
    done: list[str] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            done.append(name)
            return real(*given)

        return call

    for name in ("append", "sync", "put_in_place"):
        monkeypatch.setattr(disk, name, noted(name, getattr(disk, name)))
    write_header(tmp_path, Header(FORMAT, None, {}))
    assert done == ["append", "sync", "put_in_place"]


def test_full_disk_leaves_no_part_of_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:20])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_header(tmp_path, Header(FORMAT, None, {}))
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]


def test_differences_are_named_and_counted(tmp_path: Path) -> None:
    before = {"model": "a", "tools": [], "limits": {"x": 1, "y": None}, "gone": "z" * 500}
    now = {"model": "b", "tools": ["t"], "limits": {"x": 1, "y": 2.5}}
    require_same(tmp_path, before, dict(before))
    with pytest.raises(ConfigurationError) as refused:
        require_same(tmp_path, before, now)
    said = str(refused.value)
    assert "model was 'a' and is 'b'; tools was [] and is ['t']; limits.y was None and is 2.5; and 1 more;" in said
    assert len(said) < 500


@pytest.mark.parametrize(("others", "more"), [(1, ""), (2, ""), (3, "; and 1 more")])
def test_three_differences_are_shown_each_cut(tmp_path: Path, others: int, more: str) -> None:
    before = {"long": "z" * 60} | {f"n{number}": "y" * 58 for number in range(others)}
    shown = "; ".join(f"n{number} was '{'y' * 58}' and is None" for number in range(min(others, 2)))
    with pytest.raises(ConfigurationError) as refused:
        require_same(tmp_path, before, {})
    assert str(refused.value) == (
        f"the journal {tmp_path} has results of other settings: long was '{'z' * 59}... and is None; {shown}{more}; "
        "give the same settings, or another file for the results"
    )


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"model": "m"}, {"model": "m", "routes": ["a"]}, "routes was None and is ['a'];"),
        ({"limits": {"x": 1}}, {"limits": {"x": 1, "y": 0}}, "limits.y was None and is 0;"),
        ({}, {"tools": []}, "tools was None and is [];"),
        ({"model": "m", "routes": ["a"]}, {"model": "m"}, "routes was ['a'] and is None;"),
    ],
)
def test_setting_that_one_side_alone_has_is_a_difference(
    tmp_path: Path, before: dict[str, object], now: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"results of other settings: {said}")):
        require_same(tmp_path, before, now)


def test_setting_that_is_new_and_not_set_is_no_difference(tmp_path: Path) -> None:
    """A later release knows more settings. A journal is gone on with if none of them is used."""
    require_same(tmp_path, {"model": "m"}, {"model": "m", "routes": None})
