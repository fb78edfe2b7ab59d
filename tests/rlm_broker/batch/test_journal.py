"""The journal of a batch: what is finished, what was paid, and both after any kill."""

import asyncio
import itertools
import json
import os
import re
import resource
import shutil
import sqlite3
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.batch.journal import GO_ON, AnsweredCall, Journal, journal_of, key_of
from rlm_broker.errors import ConfigurationError
from rlm_broker.usage import Usage
from tests.support.journals import (
    DyingDisk,
    answered_call,
    kill_this_process,
    line_of,
    open_journal,
    texts,
    was_killed,
    write,
)

WORK: tuple[tuple[str, Any], ...] = (
    ("a", answered_call("1", "one")),
    ("b", answered_call("2", "two \ud800")),
    ("a", answered_call("3", "three")),
    ("a", "answered"),
    ("b", answered_call("4", "four")),
    ("c", answered_call("5", "five")),
    ("c", "failed:provider"),
    ("d", answered_call("6", "six")),
    ("d", "failed:context"),
)
"""Three items that end, two of them as failures, and one that does not end."""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "batch").mkdir()
    return tmp_path / "batch" / "out.jsonl"


def ids_in(out: Path) -> list[str]:
    return [json.loads(line)["id"] for line in out.read_text().splitlines()]


def files_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.parent.iterdir()}


def called(work: Any, id: str) -> list[str]:
    return [what.call.response for each, what in work if each == id and isinstance(what, AnsweredCall)]


async def test_further_process_finds_results_and_paid_calls(out: Path) -> None:
    """Calls of a failed item stay if it is not at fault, and are no calls of an unfinished one."""
    first = open_journal(out)
    await write(first, *WORK)
    assert ids_in(out) == ["a", "c", "d"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["out.jsonl", "out.jsonl.journal"]
    assert {path.stat().st_mode & 0o777 for path in out.parent.iterdir()} == {0o600}
    again = open_journal(out)
    assert again.finished == {key_of(id): id.encode() for id in "acd"}
    assert (again.seed, again.failed) == (1, 2)
    calls = await again.earlier(key_of("b"))
    assert calls == [what for id, what in WORK if id == "b"]
    assert [await again.earlier(key_of(id)) for id in "abcd"] == [[]] * 4
    assert again.spent == {"m": Usage(6, 6, 6, 3.0)}
    await again.aclose()


async def test_seconds_and_unknown_costs_are_those_of_all_processes(out: Path) -> None:
    journal = open_journal(out)
    journal.begin(print)
    journal.tell_seconds(12.5)
    await journal.aclose()
    unpriced = answered_call("x")
    object.__setattr__(unpriced.call, "usage", Usage(1, 1, 1, None))
    for call in (answered_call("y"), unpriced, answered_call("z")):
        await write(open_journal(out), ("a", call))
    again = open_journal(out)
    assert (again.seconds, again.spent) == (12.5, {"m": Usage(3, 3, 3, None)})
    await again.aclose()


async def test_failed_items_run_again_with_the_calls_that_stayed(out: Path) -> None:
    await write(open_journal(out), *WORK)
    for _ in range(2):  # the second finds what the first has left
        again = open_journal(out, retry_failed=True)
        assert set(again.finished) == {key_of("a")}
        assert [texts(await again.earlier(key_of(id))) for id in "cd"] == [["five"], []]
        assert again.spent["m"].total_calls == 6
        await again.aclose()
        assert ids_in(out) == ["a"]
    await write(open_journal(out), ("c", answered_call("7", "seven")), ("c", "answered"), ("d", "failed:context"))
    await write(open_journal(out, retry_failed=True), ("d", "answered"))
    assert ids_in(out) == ["a", "c", "d"]


async def test_failed_item_is_found_by_the_id_in_its_line(out: Path) -> None:
    """JSON has two lone surrogates as one character."""
    ids = ("\ud83d\ude00", "\ude00\ud83d", "\udead", "ü")
    assert key_of(ids[0]) == key_of("\U0001f600")
    await write(open_journal(out), *[(id, "failed:context") for id in ids])
    await open_journal(out, retry_failed=True).aclose()
    assert out.read_bytes() == b""


async def test_second_process_on_a_file_is_refused(out: Path) -> None:
    journal = open_journal(out)
    with pytest.raises(ConfigurationError, match=r"another process writes to .*out\.jsonl: wait"):
        open_journal(out)
    await journal.aclose()
    await open_journal(out).aclose()


async def test_what_comes_meanwhile_is_one_transaction(out: Path) -> None:
    """A transaction with a result is synced; one of calls alone is not."""
    seen: list[str] = []
    journal, go_on = open_journal(out), threading.Event()
    assert journal._database is not None
    journal._database.set_trace_callback(seen.append)
    journal.begin(print)
    journal._thread.submit(go_on.wait)
    keeping = [asyncio.ensure_future(journal.keep(key_of("a"), answered_call(f"{number}"))) for number in range(9)]
    await asyncio.sleep(0)
    assert not any(each.done() for each in keeping)
    go_on.set()
    await asyncio.gather(*keeping)
    assert journal._execute("PRAGMA synchronous").fetchone() == (1,)
    await journal.finish(key_of("a"), b"a", "answered", None, Usage(), lambda: line_of("a"))
    assert journal._execute("PRAGMA synchronous").fetchone() == (2,)
    assert [each.split()[0] for each in seen if " calls " in each] == ["INSERT", "DELETE"]
    assert seen.count("COMMIT") == 2
    await journal.aclose()


# -- settings ----------------------------------------------------------------------------------------------------------


def test_other_settings_are_refused_with_the_difference(out: Path) -> None:
    before = {"model": "a", "limits": {"x": 1}}
    open_journal(out, before).close()
    files = files_of(out)
    with pytest.raises(
        ConfigurationError, match=r"out\.jsonl\.journal has results of other settings: model was 'a' and"
    ):
        open_journal(out, {**before, "model": "b"}, takes_others=True)
    assert files_of(out) == files


def test_limits_that_were_taken_once_are_taken_again(out: Path) -> None:
    """Those of the first command, too. Lines tell a change by what holds now."""
    flag = {"takes_others": True}
    for x, flags in ((1, {}), (2, flag), (2, {}), (1, {}), (3, flag), (2, {}), (1, flag), (3, {})):
        journal = open_journal(out, {"model": "a", "limits": {"x": x}}, **flags)
        assert journal.changed == ({} if x == 1 else {"limits.x": x})
        journal.close()
    with pytest.raises(ConfigurationError, match=r"limits\.x was 3 and is 4"):
        open_journal(out, {"model": "a", "limits": {"x": 4}})


async def test_other_seed_is_refused_and_no_seed_is_not(out: Path) -> None:
    await open_journal(out, seed=7).aclose()
    with pytest.raises(ConfigurationError, match="seed was 7 and is 8"):
        open_journal(out, seed=8, takes_others=True)
    await open_journal(out, seed=None).aclose()


def test_no_id_is_that_of_a_sample() -> None:
    """An item with NUL in its id would else count as finished with a sample of another one."""
    named = [("a", 0), ("a", 1), ("a\0001", 0), ("a\0001", 1), ("a\0001\0000", 0), ("a\0000", 0)]
    assert len({key_of(*each) for each in named}) == len(named)


# -- files of others ---------------------------------------------------------------------------------------------------


def foreign_database(path: Path, mark: int, version: int) -> None:
    with sqlite3.connect(path) as database:
        database.executescript(f"CREATE TABLE t (a); PRAGMA application_id = {mark}; PRAGMA user_version = {version};")


def writable(path: Path) -> None:
    path.touch()
    path.chmod(0o666)


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "an earlier format": (Path.mkdir, "is a journal of an earlier release: go on with that release, or name another"),
    "a link": (lambda path: path.symlink_to("other"), "is not a file that this user alone can write to"),
    "a pipe": (os.mkfifo, "is not a file that this user alone can write to"),
    "writable": (writable, "is not a file that this user alone can write to"),
    "a text": (lambda path: path.write_text("notes\n" * 100), r"journal is damaged \(file is not a database\): put"),
    "a program's": (lambda path: foreign_database(path, 7, 2), "is a database of another program: name another"),
    "a later format": (lambda path: foreign_database(path, 0x524C4D4A, 3), "has another version of the format: go on"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_journal_that_is_none_of_ours_is_refused(out: Path, kind: str) -> None:
    """The file stays as it is, and the lock is given back."""
    make, said = FOREIGN[kind]
    make(journal_of(out))
    before = journal_of(out).read_bytes() if journal_of(out).is_file() else b""
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=said):
            Journal(out)
    assert not journal_of(out).is_file() or journal_of(out).read_bytes() == before


def test_files_beside_a_journal_are_refused_of_another_user(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite would take what the log of another user says."""
    open_journal(out).close()
    out.with_name("out.jsonl.journal-wal").symlink_to(out)
    with pytest.raises(ConfigurationError, match=r"journal-wal is not a file that this user alone can write to"):
        Journal(out)
    out.with_name("out.jsonl.journal-wal").unlink()
    monkeypatch.setattr(os, "geteuid", lambda: out.stat().st_uid + 1)
    with pytest.raises(ConfigurationError, match=r"out\.jsonl\.journal is not a file that this user alone"):
        Journal(out)


@pytest.mark.parametrize("name", ["/dev/full", "/dev/null", "{}", "{}/missing/out.jsonl", "{}/pipe", "{}/link"])
def test_results_that_are_no_file_are_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("elsewhere")
    with pytest.raises(ConfigurationError, match=r"is not a regular file|No such file"):
        Journal(Path(name.format(tmp_path)))


def test_results_without_a_journal_are_refused(out: Path) -> None:
    out.write_bytes(line_of("a"))
    with pytest.raises(ConfigurationError, match=r"exists, and has no journal .*out.jsonl.journal: name another file"):
        Journal(out)
    assert files_of(out) == {"out.jsonl": line_of("a")}


async def test_damaged_value_of_a_journal_is_told_in_one_sentence(out: Path) -> None:
    """SQLite itself tells of broken pages alone: a value in a row may have any type."""
    await write(open_journal(out), ("a", answered_call("1", "one")))
    whole = files_of(out)
    for damage in (
        "INSERT OR REPLACE INTO header VALUES ('synced', '\"x\"')",
        "INSERT OR REPLACE INTO header VALUES ('seconds', 5)",
        "UPDATE header SET value = x'ff00' WHERE name = 'settings'",
        "INSERT INTO lines (line) VALUES (5)",
        "UPDATE calls SET answer = x'00'",
    ):
        put_back(out, whole)
        with sqlite3.connect(journal_of(out)) as database:
            database.execute(damage)
        with pytest.raises(ConfigurationError, match=r"journal is damaged \(.*\): put back a copy"):
            await open_journal(out).earlier(key_of("a"))


# -- kills, power cuts, a full disk --------------------------------------------------------------------------------------


def written(out: Path, dies_at: int = 0, *, tears: bool = False, dies_after: str = "") -> None:
    """Do the work, and put down what was told to be written.

    Args:
        dies_at: Number of the operation of the disk that ends this process.
        tears: Whether half of what it writes is written before.
        dies_after: Id of the item whose result is the last that is told.
    """
    DyingDisk(dies_at, tears=tears).patch()

    def told(place: int) -> None:
        with out.with_name("told").open("a") as file:
            file.write(f"{place}\n")
        if WORK[place][0] == dies_after and isinstance(WORK[place][1], str):
            kill_this_process()

    asyncio.run(write(open_journal(out), *WORK, told=told))


def put_back(out: Path, files: dict[str, bytes]) -> None:
    """Put files into the folder of the results, in place of all that is there."""
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir()
    for name, content in files.items():
        out.with_name(name).write_bytes(content)
        out.with_name(name).chmod(0o600)


@pytest.mark.parametrize("tears", [False, True])
def test_kill_at_any_operation_leaves_a_valid_journal(out: Path, tears: bool) -> None:
    """Whatever was told to be written is there, and the same call goes on."""
    for number in itertools.count(1):
        put_back(out, {"told": b""})
        if not was_killed(partial(written, out, number, tears=tears)):
            break
        told = [WORK[int(place)] for place in out.with_name("told").read_text().split()]
        again = open_journal(out)
        assert {key_of(id) for id, what in told if isinstance(what, str)} <= set(again.finished)
        assert ids_in(out) == [id for id in "acd" if key_of(id) in again.finished]
        for id in {*"abcd"} - set(ids_in(out)):
            kept = texts(again._calls_of(key_of(id)))
            assert called(told, id) == kept[: len(called(told, id))]
            assert kept == called(WORK, id)[: len(kept)]
        asyncio.run(write(again, *[(id, "answered") for id in "abcd" if key_of(id) not in again.finished]))
        assert sorted(ids_in(out)) == ["a", "b", "c", "d"]
    assert number > 60


@pytest.mark.parametrize("tears", [False, True])
def test_kill_while_failures_are_taken_back_loses_no_result(out: Path, tears: bool) -> None:
    def taken_back(number: int) -> None:
        DyingDisk(number, tears=tears).patch()
        open_journal(out, retry_failed=True).close()

    asyncio.run(write(open_journal(out), ("f", "failed:x"), *WORK))
    whole = files_of(out)
    for number in itertools.count(1):
        put_back(out, whole)
        if not was_killed(partial(taken_back, number)):
            break
        again = open_journal(out)
        assert ids_in(out) in (["f", "a", "c", "d"], ["a"])
        assert {key_of(id) for id in ids_in(out)} == set(again.finished)
        again.close()
        open_journal(out, retry_failed=True).close()
        assert ids_in(out) == ["a"]
    assert number > 20


def test_log_that_is_cut_at_any_byte_keeps_what_was_before(out: Path) -> None:
    """As a power cut leaves it: each state is one that the journal had, and the results are repaired from it."""
    assert was_killed(partial(written, out, dies_after="d"))
    files, states = files_of(out), set()
    log, results = files["out.jsonl.journal-wal"], files["out.jsonl"]
    del files["out.jsonl.journal-shm"]
    frames = range(32, len(log) + 1, 4_096 + 24)  # pages of the database, each with a header, behind that of the log
    for length in sorted({*range(0, len(log), 1_501), *frames, *(frame - 1 for frame in frames)}):
        put_back(out, {**files, "out.jsonl.journal-wal": log[:length], "out.jsonl": results[: length % 40]})
        try:
            again = open_journal(out)
        except ConfigurationError:  # the log has not even the results that are in the file
            continue
        assert ids_in(out) == [id for id in "acd" if key_of(id) in again.finished]
        states.add("".join(ids_in(out)))
        again.close()
    assert states == {"", "a", "ac", "acd"}


def test_journal_whose_log_was_lost_goes_on_when_it_is_put_back(out: Path) -> None:
    """Without the log the journal has no tables; new ones would make the log worthless."""
    assert was_killed(partial(written, out, dies_after="d"))
    files = files_of(out)
    del files["out.jsonl.journal-shm"]
    put_back(out, {name: content for name, content in files.items() if not name.endswith("-wal")})
    with pytest.raises(ConfigurationError, match=r"exists, and has no journal"):
        Journal(out)
    log = out.with_name("out.jsonl.journal-wal")
    log.write_bytes(files[log.name])
    log.chmod(0o600)
    open_journal(out).close()
    assert ids_in(out) == ["a", "c", "d"]


def test_end_of_the_results_is_put_in_place(out: Path) -> None:
    """A kill may have left it torn, and a power cut with zeros. What another program has written is not touched."""
    assert was_killed(partial(written, out, dies_after="c"))
    before, whole = files_of(out), out.read_bytes()
    for torn in [*(whole[:cut] for cut in range(len(whole) + 1)), whole[:20] + bytes(40), bytes(900)]:
        put_back(out, {**before, "out.jsonl": torn})
        again = open_journal(out)
        assert out.read_bytes() == whole
        again.close()
    for changed in (b"", whole[:10], whole + b"notes of the user\n"):
        out.write_bytes(changed)
        with pytest.raises(ConfigurationError, match=r"out\.jsonl was changed since byte \d+ by another program: put"):
            open_journal(out)
        assert out.read_bytes() == changed


def test_full_disk_ends_with_one_sentence_and_goes_on(out: Path) -> None:
    """The same call goes on when there is room, and has all that was told to be written."""
    work = [*WORK, ("b", answered_call("9", "x" * 20_000)), ("e", answered_call("9", "y" * 40_000)), ("e", "answered")]
    for size in range(500, 130_000, 7_000):
        put_back(out, {})
        told: list[int] = []
        with file_size_limit(size), pytest.raises(ConfigurationError) as refused:
            asyncio.run(write(open_journal(out), *work, told=told.append))
        assert re.fullmatch(f"cannot write to {out}(.journal)?: .*; {GO_ON}", str(refused.value))
        again = open_journal(out)
        done = [work[place] for place in told]
        assert {key_of(id) for id, what in done if isinstance(what, str)} <= set(again.finished)
        assert texts(again._calls_of(key_of("b")))[: len(called(done, "b"))] == called(done, "b")
        asyncio.run(write(again, *[(id, "answered") for id in "abcde" if key_of(id) not in again.finished]))
        assert sorted(ids_in(out)) == ["a", "b", "c", "d", "e"]


class file_size_limit:
    """No file of this process may grow beyond some bytes. Python ignores SIGXFSZ, so the write fails with EFBIG."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._size, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


async def test_broken_journal_is_told_once_and_ends_all_waits(out: Path) -> None:
    """A call waits until it is cancelled: an error would become the result of its item."""
    failures: list[ConfigurationError] = []
    journal = open_journal(out)
    journal.begin(failures.append)
    keeping = asyncio.ensure_future(journal.keep(key_of("a"), answered_call("1")))
    with pytest.raises(ConfigurationError, match="has failed: ZeroDivisionError"):
        await journal.finish(key_of("a"), b"", "answered", None, Usage(), lambda: b"%d" % (1 // 0))
    with pytest.raises(ConfigurationError, match="has failed"):
        await journal.finish(key_of("b"), b"", "answered", None, Usage(), lambda: line_of("b"))
    assert len(failures) == 1
    keeping.cancel()
    await journal.aclose()
    assert ids_in(out) == []
