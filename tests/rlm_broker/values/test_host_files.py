"""Files of the host: a refusal is one sentence, and a file is whole or absent."""

import os
import stat
from pathlib import Path

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.values.host_files import refusal_told, replacement


def test_file_is_replaced_once_its_successor_is_written(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("old")
    with pytest.raises(TypeError), replacement(file) as fresh:
        fresh.writelines([b"half", None])  # type: ignore[list-item]
    assert ([*tmp_path.iterdir()], file.read_text()) == ([file], "old")
    with replacement(file) as fresh:
        fresh.write(b"new")
    assert ([*tmp_path.iterdir()], file.read_text()) == ([file], "new")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_link_and_pipe_stay(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "a", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(file)
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device or address"), replacement(pipe):
        pass
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        for target in (link, pipe):
            with replacement(target) as fresh:
                fresh.write(b"new")
        assert (link.is_symlink(), file.read_bytes(), reader.read()) == (True, b"new", b"new")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    ours, theirs = os.pipe()
    with open(ours, "rb") as reader, open(theirs, "wb"), replacement(Path(f"/dev/fd/{theirs}")) as fresh:
        fresh.write(b"new")
        fresh.flush()
        assert reader.read(3) == b"new"
    with pytest.raises(IsADirectoryError), replacement(tmp_path):
        pass


def test_refusal_of_a_file_is_a_sentence(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none" / "a", "No such file or directory"), (Path("a\0b"), "embedded null byte")):
        with (
            pytest.raises(ConfigurationError, match=f"^it cannot be written: {why}, alas$"),
            refusal_told("it cannot be written", ", alas"),
            replacement(path),
        ):
            pass
