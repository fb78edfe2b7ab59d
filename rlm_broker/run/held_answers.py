"""Bound of the memory that the answers of unfinished batches take."""

import sys
from collections import Counter
from collections.abc import Awaitable

from sandbox_worker.wire.messages import Slot

MOST_ANSWER_BYTES = 32 << 20
"""Memory in bytes of the answers that unfinished batches of one run hold. Further answers are dropped, with an
error."""


class HeldAnswers:
    """The answers of one batch.

    Args:
        by_run: Bytes that the unfinished batches of each run hold, by run.
        run: Name of the batch's run.
    """

    def __init__(self, by_run: Counter[str], run: str) -> None:
        self._by_run = by_run
        self._run = run
        self._bytes = 0

    async def kept(self, answering: Awaitable[Slot]) -> Slot:
        """Await an answer and count its memory. If that exceeds `MOST_ANSWER_BYTES`, return an error in its place."""
        slot = await answering
        size = sys.getsizeof(slot.text)
        if self._by_run[self._run] + size > MOST_ANSWER_BYTES:
            why = f"its batches hold {MOST_ANSWER_BYTES:,} bytes of answers already: ask in smaller batches"
            return Slot(error=f"the answer of {len(slot.text):,} characters was dropped: {why}")
        self._bytes += size
        self._by_run[self._run] += size
        return slot

    def forget(self) -> None:
        """Stop counting the answers of this batch: it has ended, and they belong to the REPL."""
        self._by_run[self._run] -= self._bytes
        if not self._by_run[self._run]:
            del self._by_run[self._run]
