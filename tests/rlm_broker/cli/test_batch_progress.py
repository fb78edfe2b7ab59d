import io

import pytest

from rlm_broker.batch.progress import BatchProgress
from rlm_broker.cli import batch_progress
from rlm_broker.cli.batch_progress import MOST_NOTES, BatchLine, in_words
from rlm_broker.usage import Usage
from tests.support.waiting import until_now

PROGRESS = BatchProgress(
    total=2_000,
    done=40,
    failed=2,
    limited=1,
    skipped=1_000,
    running=16,
    usage=Usage(1_234, 120_000, 3_000, 1.25),
    replayed=Usage(7),
    seconds=10.0,
    rate=4.0,
    left_s=240.0,
)


def test_line_begins_with_what_changes_most() -> None:
    """Items of earlier processes are done, too. What is zero or unknown is left out."""
    assert in_words(PROGRESS) == (
        "1,040 of 2,000 done, 4 min left, 16 running, 4 runs/s, 2 failed, 1 at a limit, "
        "1,234 calls, 120,000 tokens in and 3,000 out, $1.2500, 7 calls replayed"
    )
    assert in_words(BatchProgress(done=1, running=1, rate=0.25)) == "1 done, 1 running, 0.25 runs/s, 0 calls"


def test_lines_come_by_the_clock_without_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_progress, "LINE_EACH_S", 0.01)
    stream = io.StringIO()
    line = BatchLine(stream, lambda: PROGRESS)
    until_now(lambda: stream.getvalue().count("\n") >= 2)
    line.close()
    assert set(stream.getvalue().splitlines()) == {in_words(PROGRESS)}


def test_failures_beyond_the_first_are_counted() -> None:
    stream = io.StringIO()
    line = BatchLine(stream, lambda: PROGRESS)
    for number in range(3 * MOST_NOTES):
        line.note(f"item {number} failed")
    line.close()
    told = stream.getvalue().splitlines()
    assert told[:-1] == [f"item {number} failed" for number in range(MOST_NOTES)]
    assert told[-1] == "further failures are only counted here"
