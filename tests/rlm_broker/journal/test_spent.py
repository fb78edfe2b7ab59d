"""The means that a batch has used: written down, and counted once."""

import os
from pathlib import Path

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.journal.lines import Used
from rlm_broker.journal.spent import SpentFile

USED = {"m": Used(2, 30, 4, 0.5)}


def test_file_cut_at_any_byte_keeps_whole_lines(tmp_path: Path) -> None:
    file = SpentFile(tmp_path)
    file.add_seconds(1.5)
    file.add_removed(b"line", USED)
    file.add_seconds(3.5)
    file.close()
    path = tmp_path / "spent.jsonl"
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        again = SpentFile(tmp_path)
        lines = whole[:length].count(b"\n")
        assert again.spent.seconds == [0.0, 1.5, 1.5, 3.5][lines]
        assert again.spent.usage["m"].usage.total_input_tokens == (30 if lines > 1 else 0)
        again.add_seconds(9.0)
        again.close()
        assert path.read_bytes().endswith(b'{"seconds":9.0}\n')


def test_hole_of_a_power_cut_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "spent.jsonl"
    path.write_bytes(b'{"seconds":1.5}\n{"sec\0\0\0}\n{"seconds":3.5}\n\0\0\n\0\0')
    file = SpentFile(tmp_path)
    file.add_seconds(9.0)
    file.close()
    assert file.spent.seconds == 3.5
    assert path.read_bytes().endswith(b'{"seconds":3.5}\n{"seconds":9.0}\n')


@pytest.mark.parametrize(
    "line",
    [b"notes\n", b'{"removed":"00","usage":{"m":{"total_calls":-5}}}\n', b'{"seconds":-1}\n'],
)
def test_whole_line_of_another_kind_is_refused(tmp_path: Path, line: bytes) -> None:
    """Usage that was forgotten would let a batch go beyond its limits."""
    written = b'{"seconds":1.5}\n' + line + b'{"seconds":3.5}\n'
    (tmp_path / "spent.jsonl").write_bytes(written)
    with pytest.raises(ConfigurationError, match=r"line 2 of .*spent\.jsonl tells no usage: remove the line"):
        SpentFile(tmp_path)
    assert (tmp_path / "spent.jsonl").read_bytes() == written


@pytest.mark.parametrize("is_link", [True, False])
def test_link_and_pipe_are_refused(tmp_path: Path, is_link: bool) -> None:
    other, path = tmp_path / "other", tmp_path / "spent.jsonl"
    other.write_text("the user's")
    if is_link:
        path.symlink_to(other)
    else:
        os.mkfifo(path)
    with pytest.raises(ConfigurationError, match=r"spent\.jsonl is not a regular file: remove it"):
        SpentFile(tmp_path)
    assert other.read_text() == "the user's"


def test_result_that_is_removed_twice_counts_once(tmp_path: Path) -> None:
    for _ in range(2):
        file = SpentFile(tmp_path)
        file.add_removed(b"line", USED)
        file.add_removed(b"line", USED)
        assert file.spent.usage["m"].usage.total_calls == 2
        assert file.has_removed(b"line")
        assert not file.has_removed(b"other")
        file.close()
