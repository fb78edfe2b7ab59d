"""Long tasks of children, shown by their beginning and end."""

import pytest

from sandbox_worker.wire.tasks import LONG_TASK_CHARS, SHOWN_CHARS, beginning_and_end


def test_short_task_is_told_whole() -> None:
    task = "x" * (2 * SHOWN_CHARS)
    assert beginning_and_end(task) == task


@pytest.mark.parametrize("chars", [LONG_TASK_CHARS + 1, 10_000_000])
def test_long_task_shows_its_ends(chars: int) -> None:
    """A long task is told by its ends and by the amount between them."""
    task = "a" * SHOWN_CHARS + "b" * (chars - 2 * SHOWN_CHARS) + "c" * SHOWN_CHARS
    told = beginning_and_end(task)
    assert told.startswith("a" * SHOWN_CHARS + "\n")
    assert told.endswith("\n" + "c" * SHOWN_CHARS)
    assert "b" not in told.removesuffix("c" * SHOWN_CHARS).replace("`context`", "")[SHOWN_CHARS:]
    assert f"[{chars - 2 * SHOWN_CHARS:,} characters, see `context`]" in told
    assert len(told) < 2 * SHOWN_CHARS + 100


def test_shown_task_can_always_be_sent() -> None:
    """The shown form of any task can be sent."""
    told = beginning_and_end("\ud800" + "x" * LONG_TASK_CHARS + "\udfff")
    assert told.encode().startswith(b"?x")
    assert told.endswith("x?")
