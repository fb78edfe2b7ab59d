"""Pipes as what is asked about."""

import os
import re
import threading
from pathlib import Path

import pytest

from rlm_broker.cli import sources
from rlm_broker.cli.settings.settings import Settings
from rlm_broker.errors import ConfigurationError


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_pipe_without_a_writer_is_waited_for_and_that_is_said(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def say(text: str, *, err: bool) -> None:
        assert err
        told.append(text)
        threading.Thread(target=pipe.write_text, args=("late text",)).start()

    monkeypatch.setattr(sources, "say", say)
    with sources.stored([str(pipe)], Settings({})) as context:
        assert context.value() == "late text"
    assert told == [f"reading {pipe} to its end; it is a pipe, and its writer ends it"]


def test_a_pipe_beside_a_file_is_a_part_of_a_dict(pipe: Path) -> None:
    (pipe.parent / "file").write_text("of the file")
    writer = threading.Thread(target=pipe.write_text, args=("of the pipe",))
    writer.start()
    paths = [str(pipe), str(pipe.parent / "file")]
    with sources.stored(paths, Settings({})) as context:
        assert context.value() == {paths[0]: "of the pipe", paths[1]: "of the file"}
    writer.join()


def test_what_is_left_out_of_a_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / ".gitignore").write_text("ignored\n")
    for name in ("ignored", ".env", "below/.env"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("KEY=1")
    for number in range(25):
        (tmp_path / f"{number:02}.bin").write_bytes(b"\0")
    sources.stored([str(tmp_path)], Settings({})).close()
    told = capsys.readouterr().err.splitlines()
    assert "warning: left out: 1 (ignored by .gitignore): ignored" in told
    assert any(re.fullmatch(r"warning: left out: 2 \(likely a secret.*\): \.env, below/\.env", line) for line in told)
    binary = ", ".join(f"{number:02}.bin" for number in range(10))
    assert f"warning: left out: 25 (binary): {binary}, 15 more" in told


def test_a_pipe_without_a_byte_is_refused(pipe: Path) -> None:
    writer = threading.Thread(target=pipe.write_text, args=("",))
    writer.start()
    with pytest.raises(ConfigurationError, match=f"{pipe} is empty: a question needs a text"):
        sources.stored([str(pipe)], Settings({}))
    writer.join()


def test_a_pipe_without_an_end_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_BYTES", 10_000)
    reader, writer = os.pipe()
    try:
        os.write(writer, b"x" * 20_000)
        with pytest.raises(ConfigurationError, match="has more than 10,000 bytes: save a part of it as a file"):
            sources.stored([f"/dev/fd/{reader}"], Settings({}))
    finally:
        os.close(reader)
        os.close(writer)
