"""Long tasks of children, shown by their beginning and end."""

import pytest

from sandbox_worker.wire.tasks import LONG_TASK_CHARS, SHOWN_CHARS, beginning_and_end


def test_a_short_task_is_told_whole() -> None:
    task = "x" * (2 * SHOWN_CHARS)
    assert beginning_and_end(task) == task


@pytest.mark.parametrize("chars", [LONG_TASK_CHARS + 1, 10_000_000])
def test_a_long_task_is_told_by_its_ends_and_by_how_much_is_between(chars: int) -> None:
    task = "a" * SHOWN_CHARS + "b" * (chars - 2 * SHOWN_CHARS) + "c" * SHOWN_CHARS
    told = beginning_and_end(task)
    assert told.startswith("a" * SHOWN_CHARS + "\n")
    assert told.endswith("\n" + "c" * SHOWN_CHARS)
    assert "b" not in told.removesuffix("c" * SHOWN_CHARS).replace("`context`", "")[SHOWN_CHARS:]
    assert f"[{chars - 2 * SHOWN_CHARS:,} characters, see `context`]" in told
    assert len(told) < 2 * SHOWN_CHARS + 100


def test_what_is_told_can_be_sent_whatever_the_task_has() -> None:
    told = beginning_and_end("\ud800" + "x" * LONG_TASK_CHARS + "\udfff")
    assert told.encode().startswith(b"?x")
    assert told.endswith("x?")
