"""What the answers of unfinished batches hold in memory."""

import sys
from collections import Counter
from collections.abc import Awaitable

from sandbox_worker.wire.messages import Slot

MOST_ANSWER_BYTES = 32 << 20
"""Memory of the answers that unfinished batches of one run hold, in bytes. Further ones are dropped, with an error."""


class HeldAnswers:
    """The answers of one batch.

    Args:
        by_run: Bytes that the batches of each run hold.
        run: Of the batch.
    """

    def __init__(self, by_run: Counter[str], run: str) -> None:
        self._by_run = by_run
        self._run = run
        self._bytes = 0

    async def kept(self, answering: Awaitable[Slot]) -> Slot:
        """Await an answer, and count it. One that is too much is dropped, with an error."""
        slot = await answering
        size = sys.getsizeof(slot.text)
        if self._by_run[self._run] + size > MOST_ANSWER_BYTES:
            why = f"its batches hold {MOST_ANSWER_BYTES:,} bytes of answers already: ask in smaller batches"
            return Slot(error=f"the answer of {len(slot.text):,} characters was dropped: {why}")
        self._bytes += size
        self._by_run[self._run] += size
        return slot

    def forget(self) -> None:
        """The batch has ended: its answers are the REPL's."""
        self._by_run[self._run] -= self._bytes
        if not self._by_run[self._run]:
            del self._by_run[self._run]
