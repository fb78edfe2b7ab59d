"""The journal of a batch: what is finished, what was paid, and both after any kill."""

import asyncio
import json
import os
import resource
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.journal import disk, segments
from rlm_broker.journal.journal import folder_of
from rlm_broker.journal.lines import digest
from tests.support.journals import Crash, dying, open_journal, paid_call, result, texts, write

WORK: tuple[tuple[str, Any], ...] = (
    ("a", paid_call("1", "one")),
    ("b", paid_call("2", "two")),
    ("a", paid_call("3", "three")),
    ("a", "answered"),
    ("b", paid_call("4", "four")),
    ("c", paid_call("5", "five")),
    ("c", "failed"),
)
"""Two items that end, and one that does not."""


def files_of(out: Path) -> dict[str, bytes]:
    folder = folder_of(out)
    return {str(path.relative_to(out.parent)): path.read_bytes() for path in [out, *sorted(folder.iterdir())]}


async def test_further_process_finds_results_and_paid_calls(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    await write(open_journal(out), *WORK)
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["a", "c"]
    again = open_journal(out)
    assert set(again.finished) == {digest("a"), digest("c")}
    assert again.counts == {"answered": 1, "failed": 1}
    assert texts(await again.earlier("b")) == ["two", "four"]
    assert await again.earlier("a") == []
    await again.aclose()


async def test_spent_means_are_those_of_all_processes(tmp_path: Path) -> None:
    """Results count, and calls of items that are not finished; calls of finished items are part of their results."""
    out = tmp_path / "out.jsonl"
    journal = open_journal(out)
    journal.begin(print)
    journal.tell_seconds(12.5)
    await journal.aclose()
    await write(open_journal(out), *WORK)
    again = open_journal(out)
    assert again.spent.usage["m"].usage.total_input_tokens == 10 + 10 + 1 + 1
    assert again.spent.seconds == 12.5
    await again.aclose()


async def test_calls_are_removed_with_their_last_item(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    await write(open_journal(out), *WORK)
    assert [path.name for path in folder_of(out).glob("calls-*")] == ["calls-000001.jsonl"]
    await write(open_journal(out), ("b", "answered"))
    assert list(folder_of(out).glob("calls-*")) == []


async def test_second_process_on_a_file_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    journal = open_journal(out)
    with pytest.raises(ConfigurationError, match=r"another process writes to .*out\.jsonl: wait"):
        open_journal(out)
    await journal.aclose()
    await open_journal(out).aclose()


@pytest.mark.parametrize(
    "now",
    [
        {"model": "other", "limits": {"max_depth": 1}},
        {"model": "m", "limits": {"max_depth": 2}},
        {"model": "m", "limits": {"max_depth": 1}, "routes": ["new"]},
    ],
)
async def test_other_settings_are_refused_with_the_difference(tmp_path: Path, now: dict[str, object]) -> None:
    out = tmp_path / "out.jsonl"
    await open_journal(out, {"model": "m", "limits": {"max_depth": 1}}).aclose()
    before = files_of(out)
    with pytest.raises(ConfigurationError, match=r"'m' and is 'other'|_depth was 1 and is 2|routes was None and"):
        open_journal(out, now)
    assert files_of(out) == before


async def test_other_seed_is_refused_and_no_seed_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    await open_journal(out, seed=7).aclose()
    with pytest.raises(ConfigurationError, match="seed was 7 and is 8"):
        open_journal(out, seed=8)
    await open_journal(out, seed=None).aclose()


@pytest.mark.parametrize("is_new", [True, False])
async def test_folder_that_others_can_write_to_is_refused(tmp_path: Path, is_new: bool) -> None:
    out = tmp_path / "out.jsonl"
    folder = folder_of(out)
    if is_new:
        folder.mkdir()
    else:
        await write(open_journal(out), *WORK)
    folder.chmod(0o777)
    before = files_of(out) if not is_new else {}
    with pytest.raises(ConfigurationError, match=r"\.journal is not a folder that this user alone can write to: put"):
        open_journal(out)
    assert (list(folder.iterdir()) if is_new else files_of(out)) == ([] if is_new else before)
    folder.chmod(0o755)
    await open_journal(out).aclose()


def test_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    folder_of(out).mkdir(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: folder_of(out).stat().st_uid + 1)
    with pytest.raises(ConfigurationError, match="is not a folder that this user alone can write to"):
        open_journal(out)


def test_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    out, other = tmp_path / "out.jsonl", tmp_path / "other"
    other.mkdir(0o700)
    folder_of(out).symlink_to(other)
    with pytest.raises(ConfigurationError, match="is not a folder that this user alone can write to"):
        open_journal(out)
    assert list(other.iterdir()) == []


def test_results_without_a_journal_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(result("a"))
    with pytest.raises(ConfigurationError, match=r"exists, and has no journal .*out.jsonl.journal: name another file"):
        open_journal(out)
    assert out.read_bytes() == result("a")
    assert not folder_of(out).exists()


async def test_failed_items_run_again_from_their_beginning(tmp_path: Path) -> None:
    """Their calls are void also where a segment has calls of other items; what they have used stays counted."""
    out = tmp_path / "out.jsonl"
    await write(open_journal(out), *WORK)
    for _ in range(2):  # the second finds what the first has left
        again = open_journal(out, retry_failed=True)
        assert set(again.finished) == {digest("a")}
        assert await again.earlier("c") == []
        assert again.spent.usage["m"].usage.total_input_tokens == 10 + 10 + 1 + 1
        await again.aclose()
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["a"]
    await write(open_journal(out), ("c", paid_call("5", "new")))
    last = open_journal(out)
    assert texts(await last.earlier("c")) == ["new"]
    assert texts(await last.earlier("b")) == ["two", "four"]
    await last.aclose()


@pytest.mark.parametrize("tears", [False, True])
async def test_kill_at_any_operation_leaves_a_valid_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tears: bool
) -> None:
    """Whatever was told to be written is there, and the same call goes on."""
    number, ended = 0, False
    while not ended:
        number += 1
        out = tmp_path / f"{number}" / "out.jsonl"
        out.parent.mkdir()
        told: list[tuple[str, Any]] = []
        with monkeypatch.context() as patched:
            dying(patched, number, tears=tears)
            ended = await written_until_crash(out, told)
        again = open_journal(out)
        finished = {id for id, what in told if isinstance(what, str)}
        assert {digest(id) for id in finished} <= set(again.finished) <= {digest("a"), digest("c")}
        for id in "abc":
            kept = texts(await again.earlier(id))
            if digest(id) not in again.finished:
                assert kept[: len(paid_of(id, told))] == paid_of(id, told)
                assert kept == paid_of(id, WORK)[: len(kept)]
        await write(again, *[(id, "answered") for id in "abc" if digest(id) not in again.finished])
        assert sorted(json.loads(line)["id"] for line in out.read_text().splitlines()) == ["a", "b", "c"]
        assert list(folder_of(out).glob("calls-*")) == []
        shutil.rmtree(out.parent)
    assert number > 15


async def written_until_crash(out: Path, told: list[tuple[str, Any]]) -> bool:
    """Write `WORK`, and return whether no crash came. What was written before it is in `told`."""
    try:
        journal = open_journal(out)
    except Crash:
        return False
    failures: list[BaseException] = []
    journal.begin(failures.append)
    for id, what in WORK:
        line = partial(result, id, str(what))
        work = journal.finish(id, line) if isinstance(what, str) else journal.keep(id, what)
        if not await ended_before(work, failures):
            break
        told.append((id, what))
    try:
        await journal.aclose()
    except Crash:
        failures.append(Crash())
        journal._out.close()
    return not failures


async def ended_before(work: Any, failures: list[BaseException]) -> bool:
    """Whether work has ended before the journal has failed."""
    task = asyncio.ensure_future(work)
    while not task.done() and not failures:
        await asyncio.sleep(0)
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    return not task.cancelled()


def paid_of(id: str, work: Any) -> list[str]:
    return [what.call.response for each, what in work if each == id and not isinstance(what, str)]


async def test_full_disk_ends_with_one_sentence_and_goes_on(tmp_path: Path) -> None:
    """The torn piece is cut off again, and further calls are written when there is room."""
    out = tmp_path / "out.jsonl"
    long = ("b", paid_call("9", "x" * 20_000))
    with file_size_limit(12_000), pytest.raises(ConfigurationError) as refused:
        await write(open_journal(out), *WORK, long)
    assert str(refused.value) == f"cannot write to {out}: File too large; {disk.GO_ON}"
    (segment,) = folder_of(out).glob("calls-*")
    assert segment.read_bytes().endswith(b"}\n")
    await write(open_journal(out), long)
    again = open_journal(out)
    assert [len(text) for text in texts(await again.earlier("b"))] == [3, 4, 20_000]
    await again.aclose()


class file_size_limit:
    """No file of this process may grow beyond some bytes. Python ignores SIGXFSZ, so the write fails with EFBIG."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._size, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


async def test_long_item_does_not_keep_the_calls_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(segments.Segments, "__init__", small_segments(segments.Segments.__init__))
    work: list[tuple[str, Any]] = []
    for number in range(100):
        work += [("long", paid_call(f"{number}", f"answer {number}"))] if number % 5 == 0 else []
        work += [(f"short {number}", paid_call("x", "y" * 900)), (f"short {number}", "answered")]
    await write(open_journal(out), *work)
    assert len(list(folder_of(out).glob("calls-*"))) <= segments.MOST_OLD + 2
    again = open_journal(out)
    assert texts(await again.earlier("long")) == [f"answer {number}" for number in range(0, 100, 5)]
    await again.aclose()


def small_segments(real: Any) -> Any:
    return lambda self, folder: real(self, folder, 4_000)
