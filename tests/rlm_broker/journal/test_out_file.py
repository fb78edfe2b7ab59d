"""The file of results: locked, cut to whole lines, and never mistaken for another file."""

import contextlib
from pathlib import Path

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.journal.lines import Finished
from rlm_broker.journal.out_file import OutFile
from tests.support.journals import Crash, dying, result


def ids_in(path: Path) -> list[str]:
    file = OutFile(path)
    ids: list[str] = []
    try:
        file.read(lambda finished, _: ids.append(finished.id))
    finally:
        file.close()
    return ids


def test_file_cut_at_any_byte_keeps_whole_lines(tmp_path: Path) -> None:
    whole = result("a", answer="é\ud800") + result("b", "failed") + result("c")
    path = tmp_path / "out.jsonl"
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        lines = whole[:length].count(b"\n")
        assert ids_in(path) == ["a", "b", "c"][:lines]
        assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:lines])


def test_zeros_at_the_end_are_cut_off(tmp_path: Path) -> None:
    """Some file systems leave zeros at the end after a power cut."""
    path = tmp_path / "out.jsonl"
    for torn in (b"\0\0\n\0\0", result("b")[:9] + b"\0" * 9 + result("b")[18:]):
        path.write_bytes(result("a") + torn)
        assert ids_in(path) == ["a"]
        assert path.read_bytes() == result("a")


WITHOUT_DIGEST = result("b").replace(b'"digest"', b'"other"')


@pytest.mark.parametrize(
    "lines",
    [
        b"{}\n" + result("b"),
        result("b")[:9] + b"\0\0\0\n" + result("b"),
        WITHOUT_DIGEST,
        WITHOUT_DIGEST + result("c")[:9],
        b"notes\nof the user\n",
        b"x\n\0\0\n",
        result("b").decode().encode("utf-16"),
        result("b").replace(b'"digest":"62"', b'"digest":"zzz"'),
        result("b").replace(b'"total_calls":1', b'"total_calls":-5'),
    ],
)
def test_whole_line_that_is_no_result_is_refused(tmp_path: Path, lines: bytes) -> None:
    """A kill leaves no such line, so its text is the user's, and is not cut off."""
    path = tmp_path / "out.jsonl"
    path.write_bytes(result("a") + lines)
    with pytest.raises(ConfigurationError, match=r"line 2 of .* is not a result of a batch"):
        ids_in(path)
    assert path.read_bytes() == result("a") + lines


@pytest.mark.parametrize("name", ["/dev/full", "/dev/null", "{}", "{}/missing/out.jsonl"])
def test_other_than_a_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a regular file|No such file"):
        OutFile(Path(name.format(tmp_path)))


def test_file_is_private_and_locked(tmp_path: Path) -> None:
    file = OutFile(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigurationError, match="another process writes"):
        OutFile(tmp_path / "out.jsonl")
    file.close()
    OutFile(tmp_path / "out.jsonl").close()


def test_file_that_was_replaced_stays_locked(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(result("a") + result("b", "failed"))
    path.chmod(0o644)
    file = OutFile(path)
    file.keep_only(lambda finished: finished.status != "failed")
    with pytest.raises(ConfigurationError, match="another process writes"):
        OutFile(path)
    file.append(result("c"))
    file.close()
    assert ids_in(path) == ["a", "c"]
    assert path.stat().st_mode & 0o777 == 0o644
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]


def test_kill_while_results_are_removed_leaves_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kill leaves the old file or the new one, and the next process removes what is left beside it."""
    path = tmp_path / "out.jsonl"
    before, after = result("a") + result("b", "failed"), result("a")
    seen = set()
    for number in range(1, 12):
        path.write_bytes(before)
        file = OutFile(path)
        with monkeypatch.context() as patched, contextlib.suppress(Crash):
            dying(patched, number)
            file.keep_only(is_wanted)
        file.close()
        assert path.read_bytes() in (before, after)
        seen.add(path.read_bytes())
        again = OutFile(path)
        again.keep_only(is_wanted)
        again.close()
        assert path.read_bytes() == after
        assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]
    assert seen == {before, after}


def is_wanted(finished: Finished) -> bool:
    return finished.status != "failed"
