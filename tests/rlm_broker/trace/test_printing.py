"""Lines that a run prints while it goes on."""

import io

from rlm_broker.trace.events import CallEnded
from rlm_broker.trace.printing import print_event
from rlm_broker.usage import Usage


def test_long_batch_is_ten_lines() -> None:
    stream = io.StringIO()
    for done in range(1, 1001):
        print_event(CallEnded("1", 1, done, "m", Usage(), 0.1, "", batch=3, done=done, of=1000), stream)
    hundreds = range(100, 1001, 100)
    assert stream.getvalue().splitlines() == [f"[depth 1] batch 3: {done:,} of 1,000 calls" for done in hundreds]
