"""The progress of a batch."""

import time
from dataclasses import dataclass, field

from rlm_broker.batch.items import BatchResult
from rlm_broker.usage import Usage


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Progress of a batch at one moment.

    Example:
        ```python
        for _ in (batch := rlm.batch(items)):
            print(f"{batch.progress.done} of {batch.progress.total}")  # 1 of 1
        ```

    Attributes:
        total: Items in all; None while it is unknown.
        done: Items finished by this process, in whichever way they ended.
        failed, limited: Items among them that failed, and that a limit ended.
        skipped: Items of the input finished by an earlier process, as far as the input was read.
        failed_before: Failed items in the file of results from before this process, which it does not ask again.
        running: Items under way.
        usage: Usage of all processes that have worked on the batch.
        replayed: The part of it that this process took from the journal, and did not pay again.
        seconds: Seconds worked by this process.
        rate: Items finished per second by this process.
        left_s: Estimated seconds until the end; None while it is unknown.
    """

    total: int | None = None
    done: int = 0
    failed: int = 0
    limited: int = 0
    skipped: int = 0
    failed_before: int = 0
    running: int = 0
    usage: Usage = field(default_factory=Usage)
    replayed: Usage = field(default_factory=Usage)
    seconds: float = 0.0
    rate: float = 0.0
    left_s: float | None = None


class Counting:
    """Counts of a batch under way.

    Attributes:
        total, done, failed, limited, skipped, failed_before, running: As in `BatchProgress`.
        replayed: Sum of what was taken from the journal.
    """

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.done = self.failed = self.limited = self.skipped = self.failed_before = self.running = 0
        self.replayed = Usage()
        self._began = time.monotonic()
        self._ended: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the beginning, or between the beginning and the end."""
        return (time.monotonic() if self._ended is None else self._ended) - self._began

    def add(self, result: BatchResult) -> None:
        """Count a result."""
        self.done += 1
        self.failed += result.status == "failed"
        self.limited += result.status == "limited"

    def end(self) -> None:
        """Stop the clock."""
        self._ended = self._ended or time.monotonic()

    def progress(self, usage: Usage) -> BatchProgress:
        """Return the progress at this moment."""
        seconds = self.seconds
        rate = self.done / seconds if seconds > 0 else 0.0
        left = None if self.total is None else max(0, self.total - self.done - self.skipped)
        left_s = 0.0 if left == 0 else None if left is None or not rate else left / rate
        counts = {name: count for name, count in vars(self).items() if name[0] != "_"}
        return BatchProgress(**counts, usage=usage, seconds=seconds, rate=rate, left_s=left_s)
