"""State of a batch and of its shards, read from their files."""

import json
import os
import sqlite3
from pathlib import Path

import pytest

from rlm_broker.batch.journal import journal_of
from rlm_broker.batch.shards import Shard, merge, shard_of, shards_of
from rlm_broker.batch.status import locked_by, read_status
from rlm_broker.errors import ConfigurationError
from rlm_broker.usage import Usage
from tests.support.journals import answered_call, line_of, open_journal, write

WORK = (
    ("a", answered_call("1")),
    ("a", "answered"),
    ("b", answered_call("2")),
    ("b", "failed:provider"),
    ("c", "failed:sandbox"),
    ("d", "failed:provider"),
    ("e", "limited:max_iterations"),
    ("x", answered_call("3", tokens=30)),
    ("x", answered_call("4")),
)


@pytest.fixture
async def out(tmp_path: Path) -> Path:
    """A file of results with its journal, on which no process works."""
    out = tmp_path / "out.jsonl"
    journal = open_journal(out)
    journal.begin(print)
    journal.tell_seconds(9.5)
    await write(journal, *WORK)
    return out


def test_items_and_usage_are_counted(out: Path) -> None:
    """Calls of a finished item count once, also where they stay since it may be asked again."""
    status = read_status(out)
    assert (status.done, status.answered, status.failed) == (5, 1, {"provider": 2, "sandbox": 1})
    assert status.limited == {"max_iterations": 1}
    assert (status.unfinished, status.unfinished_usage) == (1, Usage(2, 31, 2, 1.0))
    assert status.usage.model_usage_summaries == {"m": Usage(4, 33, 4, 2.0)}
    assert (status.replayed, status.seconds, status.process) == (Usage(), 9.5, None)
    shown = json.loads(json.dumps(status.to_dict()))
    assert shown["unfinished"]["items"] == 1
    assert "shards" not in shown


async def test_batch_that_goes_on_is_read_as_it_is_now(out: Path, tmp_path: Path) -> None:
    journal = open_journal(out)
    journal.begin(print)
    await journal.keep(b"y", answered_call("5"))
    (tmp_path / "link.jsonl").symlink_to(out)
    for path in (out, tmp_path / "link.jsonl"):
        status = read_status(path)
        assert (status.out, status.process, status.unfinished) == (path, os.getpid(), 2)
    await journal.aclose()
    assert locked_by(out.stat()) is None


def test_results_that_were_cut_are_told(out: Path) -> None:
    """The journal has their items, so nothing asks them again."""
    assert read_status(out).cut_bytes == 0
    size = out.stat().st_size
    os.truncate(out, size - 7)
    status = read_status(out)
    assert (status.cut_bytes, status.to_dict()["cut_bytes"], status.done) == (7, 7, 5)


def test_files_are_not_changed(out: Path) -> None:
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.parent.iterdir()}
    read_status(out)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.parent.iterdir()} == before


def test_files_that_are_of_no_batch_are_refused(out: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read .*/nowhere\.jsonl: No such file"):
        read_status(tmp_path / "nowhere.jsonl")
    (tmp_path / "plain.jsonl").write_text("{}\n")
    with pytest.raises(ConfigurationError, match=r"has no journal .*: it is not the file of a batch"):
        read_status(tmp_path / "plain.jsonl")
    journal_of(out).write_bytes(b"notes\n" * 100)
    with pytest.raises(ConfigurationError, match=r"the journal .* is damaged \(file is not a database\): put back"):
        read_status(out)
    journal_of(out).unlink()
    with sqlite3.connect(journal_of(out)) as database:
        database.execute("CREATE TABLE notes (a)")
    with pytest.raises(
        ConfigurationError, match=r"is not a file that this user alone|is a database of another program"
    ):
        read_status(out)


# -- shards ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "variables", "shard"),
    [
        ("3/100", {}, Shard(3, 100)),
        ("100/100", {}, Shard(100, 100)),
        ("0/100", {}, Shard(100, 100)),
        ("auto/4", {"SLURM_ARRAY_TASK_ID": "4", "JOB_COMPLETION_INDEX": "3"}, Shard(4, 4)),
        ("auto/4", {"JOB_COMPLETION_INDEX": "3"}, Shard(3, 4)),
        ("1/1", {}, Shard(1, 1)),
        ("auto/4", {"SLURM_ARRAY_TASK_ID": "x", "JOB_COMPLETION_INDEX": "3"}, "none of SLURM"),
        ("auto/4", {}, "none of SLURM_ARRAY_TASK_ID, JOB_COMPLETION_INDEX has a number: give 3/4"),
        ("5/4", {}, "there is no shard 5 of 4"),
        ("3", {}, "give a number and the number of all shards, such as 3/100"),
        ("1/0", {}, "give a number and the number of all shards"),
        ("-1/4", {}, "give a number and the number of all shards"),
    ],
)
def test_shard_is_named_by_its_number(text: str, variables: dict[str, str], shard: Shard | str) -> None:
    if isinstance(shard, Shard):
        assert shard_of(text, variables) == shard
        return
    with pytest.raises(ConfigurationError, match=shard):
        shard_of(text, variables)


def test_shards_share_all_items_and_no_file() -> None:
    shards = [shard_of(f"{number}/7") for number in range(1, 8)]
    assert [sum(shard.has(number) for shard in shards) for number in range(1, 50)] == [1] * 49
    names = {shard.file(Path("a.b.jsonl")).name for shard in shards}
    assert {"a.b.1-of-7.jsonl", "a.b.7-of-7.jsonl"} <= names
    assert len(names) == 7
    last, same = Shard(7, 7), shards[-1]
    assert (last.has(14), last.has(15), last.file(Path("a"))) == (True, False, same.file(Path("a")))


async def test_shards_are_counted_and_merged(tmp_path: Path) -> None:
    """Only whole lines are taken, and no file that belongs to another batch."""
    out = tmp_path / "all.jsonl"
    (tmp_path / "all.x.1-of-2.jsonl").write_text("another's")
    with pytest.raises(ConfigurationError, match=r"there is no shard of .* beside it, such as all\.1-of-100\.jsonl"):
        merge(out)
    for number, ids in ((10, "ab"), (2, "c")):
        await write(open_journal(Shard(number, 10).file(out)), *[(id, "answered") for id in ids])
    status = read_status(out)
    assert (status.done, status.shards) == (3, (2, 10))
    assert status.to_dict()["shards"] == {"there": 2, "of": 10}
    assert list(shards_of(out)) == [Shard(2, 10), Shard(10, 10)]
    with Shard(2, 10).file(out).open("ab") as file:
        file.write(b'{"id":"torn')
    out.with_name("all.jsonl.merged").mkdir()
    with pytest.raises(ConfigurationError, match=r"cannot merge into .*all\.jsonl: Is a directory"):
        merge(out)
    out.with_name("all.jsonl.merged").rmdir()
    assert merge(out) == 3
    assert out.stat().st_mode & 0o777 == 0o600
    assert out.read_bytes() == line_of("c") + line_of("a") + line_of("b")
    assert read_status(out, of_shards=True).done == read_status(out).done == 3
    with pytest.raises(ConfigurationError, match=r"all\.jsonl exists: remove it, or name another file for all results"):
        merge(out)
    Shard(1, 9).file(out).touch()
    with pytest.raises(ConfigurationError, match="are of several batches"):
        shards_of(out)
