import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.batch.status import locked_by, read_status
from rlm_broker.errors import ConfigurationError
from rlm_broker.usage import Usage
from tests.support.journals import Crash, dying, open_journal, paid_call, write

USED = {"total_calls": 2, "total_input_tokens": 30, "total_output_tokens": 4, "total_cost": 0.5}
RESULTS: list[dict[str, Any]] = [
    {"id": "a", "status": "answered", "usage": {"m": USED}, "replayed": {"total_calls": 1, "total_cost": 0.25}},
    {"id": "b", "status": "failed", "error": {"kind": "provider", "message": "busy"}, "usage": {"s": USED}},
    {"id": "c", "status": "failed", "error": {"kind": "sandbox", "message": "gone"}},
    {"id": "d", "status": "failed", "error": {"kind": "provider", "message": "busy"}},
    {"id": "e", "status": "limited", "limit": "max_iterations", "usage": {"m": USED}},
]
CALLS: list[dict[str, Any]] = [
    {"item": "a", "n": 1, "key": "00", "depth": 0, "model": "m", "used": USED},
    {"item": "x", "n": 2, "key": "00", "depth": 0, "model": "m", "used": USED},
    {"item": "x", "n": 3, "key": "01", "depth": 1, "model": "s", "used": USED},
    {"item": "y", "n": 4, "key": "00", "depth": 0, "model": "m", "used": USED},
    {"item": "y", "n": 5, "again": True},
]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A file of results with its journal. The last line of each file is torn."""
    out, folder = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    folder.mkdir()
    (folder / "header.json").write_text('{"rlm_broker_journal": 1, "seed": 7, "settings": {}}')
    for file, lines in (
        (out, RESULTS),
        (folder / "calls-000001.jsonl", CALLS),
        (folder / "calls-000002.jsonl", CALLS[1:3]),
        (folder / "spent.jsonl", [{"seconds": 5.0}, {"seconds": 9.5}, {"removed": "ff", "usage": {"s": USED}}]),
    ):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"id": "torn", "item"')
    return out


def test_items_and_usage_are_counted_from_the_files(out: Path) -> None:
    """Calls of a finished item are in its result. A line that was moved may be in two segments."""
    status = read_status(out)
    assert (status.done, status.answered, status.failed) == (5, 1, {"provider": 2, "sandbox": 1})
    assert status.limited == {"max_iterations": 1}
    assert (status.unfinished, status.unfinished_usage) == (1, Usage(4, 60, 8, 1.0))
    assert status.usage.model_usage_summaries == {"m": Usage(6, 90, 12, 1.5), "s": Usage(6, 90, 12, 1.5)}
    assert (status.replayed, status.seconds) == (Usage(1, 0, 0, 0.25), 9.5)
    assert status.process is None
    shown = json.loads(json.dumps(status.to_dict()))
    assert shown["unfinished"] == {
        "items": 1,
        "usage": {**USED, "total_calls": 4, "total_input_tokens": 60, "total_output_tokens": 8, "total_cost": 1.0},
    }


def test_process_that_has_the_lock_is_named(out: Path) -> None:
    with out.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert read_status(out).process == os.getpid()
    assert locked_by(out.stat()) is None


def test_files_are_not_changed(out: Path) -> None:
    files = [out, *out.with_name("out.jsonl.journal").iterdir()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    read_status(out)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files} == before


async def test_usage_counts_once_after_a_killed_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill at any operation of `retry_failed` leaves the usage in one file or in two."""
    kept = set()
    for number in range(1, 30):
        out = tmp_path / f"{number}" / "out.jsonl"
        out.parent.mkdir()
        await write(open_journal(out), ("a", "answered"), ("b", paid_call("1")), ("b", "failed"))
        ended = False
        with monkeypatch.context() as patched, contextlib.suppress(Crash):
            dying(patched, number)
            open_journal(out, retry_failed=True).close()
            ended = True
        status = read_status(out)
        assert status.usage.total_input_tokens == 20
        kept.add(status.done)
        if ended:
            break
    assert ended
    assert kept == {1, 2}


def test_link_to_the_results_is_followed(out: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(out)
    assert (read_status(link).done, read_status(link).out) == (5, link)


@pytest.mark.parametrize("name", ["header.json", "spent.jsonl", "calls-000009.jsonl"])
def test_pipe_is_refused_and_never_waited_for(out: Path, name: str) -> None:
    path = out.with_name("out.jsonl.journal") / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(ConfigurationError, match=f"{name} is not a regular file: remove it"):
        read_status(out)


def test_file_without_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read .*/nowhere.jsonl: No such file"):
        read_status(tmp_path / "nowhere.jsonl")
    (tmp_path / "plain.jsonl").write_text("{}\n")
    with pytest.raises(ConfigurationError, match=r"has no journal .*: it is not the file of a batch"):
        read_status(tmp_path / "plain.jsonl")
