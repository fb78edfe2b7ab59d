"""The progress of a batch."""

from rlm_broker.batch.items import BatchResult
from rlm_broker.batch.progress import Counting
from rlm_broker.usage import Usage
from tests.support.clock import Clock


def test_progress_tells_rate_and_time_left(clock: Clock) -> None:
    counting = Counting(10)
    counting.skipped = 2
    assert counting.progress(Usage()).left_s is None
    clock.forward(4)
    for status in ("answered", "failed", "limited", "answered"):
        counting.add(BatchResult("a", status))
    seen = counting.progress(Usage(5))
    assert (seen.done, seen.failed, seen.limited, seen.skipped, seen.usage.total_calls) == (4, 1, 1, 2, 5)
    assert (seen.seconds, seen.rate, seen.left_s) == (4, 1, 4)
    counting.end()
    clock.forward(100)
    assert counting.progress(Usage()).seconds == 4


def test_time_left_is_known_at_the_end_only_with_a_total(clock: Clock) -> None:
    clock.forward(1)
    assert Counting(0).progress(Usage()).left_s == 0
    counting = Counting(None)
    counting.add(BatchResult("a", "answered"))
    clock.forward(1)
    assert counting.progress(Usage()).left_s is None
