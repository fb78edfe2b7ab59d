"""The journal of a batch: which items are finished, and the calls that were paid for those that are not.

Theory of operation. An item is finished when its result is a whole line of the file of results. Beside that file is a
folder with a header and segments:

- A paid call is written to a segment before its run gets the answer, so a killed process has paid for no answer that a
  further process does not find. It is synced soon after: a power cut may cost the calls of the last moments.
- A result is written and synced before the caller gets it. Only then its calls may be dropped.
- The order of both makes each state on the disk a valid one. Torn last lines are skipped, or cut off.

Three threads do the work, each for all lines that have come meanwhile, so that no sync delays a call.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rlm_broker.errors import ConfigurationError
from rlm_broker.journal import disk
from rlm_broker.journal.grouped import Grouped
from rlm_broker.journal.header import FORMAT, Header, require_same, write_header
from rlm_broker.journal.lines import Again, CallLine, Finished, digest, line_of
from rlm_broker.journal.out_file import OutFile
from rlm_broker.journal.paid import PaidCall
from rlm_broker.journal.segments import Segments
from rlm_broker.journal.spent import Spent, SpentFile

FAILED = "failed"
"""Status of the items that `retry_failed` runs again."""
SUFFIX = ".journal"
"""End of the name of a journal's folder: that of the file of results, and this."""


class Result(NamedTuple):
    """A result that is to be written: the digest of its item's id, and what makes its line."""

    item: bytes
    line: Callable[[], bytes]


class Journal:
    """A journal that is open, on one event loop. `opened` makes it.

    Attributes:
        finished: Maps the digest of the id of each finished item to the digest of the item.
        counts: Number of finished items by status.
        spent: Usage by model and depth, and seconds, of all processes before this one.
    """

    def __init__(self, out: OutFile, folder: Path) -> None:
        self.finished: dict[bytes, bytes] = {}
        self.counts: dict[str, int] = {}
        self._out = out
        self._spent_file = SpentFile(folder)
        self.spent: Spent = self._spent_file.spent
        self._segments = Segments(folder)
        self._calls: Grouped[tuple[str, PaidCall]]
        self._results: Grouped[Result]
        self._syncs: Grouped[float | None]
        self._has_begun = False

    async def earlier(self, item: str) -> list[PaidCall]:
        """Return the calls that earlier processes have paid for an unfinished item.

        Raises:
            ConfigurationError: They cannot be read.
        """
        key = digest(item)
        if not self._segments.has(key):
            return []
        try:
            return await asyncio.to_thread(self._segments.earlier, key)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cannot read the journal of {self._out.path}: {error}") from None

    async def keep(self, item: str, paid: PaidCall) -> None:
        """Write down a call that was paid for an item. Once this returns, a kill does not lose it.

        If the disk is full, this waits until it is cancelled. An error would become the result of the item.
        """
        try:
            await self._calls.done((item, paid))
        except Exception:  # noqa: BLE001 - the one who has called `begin` is told
            await asyncio.Event().wait()

    async def finish(self, item: str, line: Callable[[], bytes]) -> None:
        """Write the result of an item, whose line is made in a thread. Once this returns, it is on the disk.

        Raises:
            OSError: The disk is full, or broken.
        """
        await self._results.done(Result(digest(item), line))

    def tell_seconds(self, seconds: float) -> None:
        """Write down how long all processes together have worked."""
        self._syncs.put(seconds)

    def begin(self, on_failure: Callable[[ConfigurationError], object]) -> None:
        """Start the threads. `on_failure` is called on this event loop if a line cannot be written."""

        def failed(error: BaseException) -> None:
            wrong = disk.unwritable(self._out.path, error) if isinstance(error, OSError) else None
            on_failure(wrong or ConfigurationError(f"the journal of {self._out.path} has failed: {error!r}"))

        self._calls = Grouped(self._write_calls, failed, "rlm-broker-calls")
        self._results = Grouped(self._write_results, failed, "rlm-broker-results")
        self._syncs = Grouped(self._sync, failed, "rlm-broker-sync")
        self._has_begun = True

    async def aclose(self) -> None:
        """Write all that was handed over, then close the files."""
        for thread in (self._calls, self._results, self._syncs) if self._has_begun else ():
            await thread.aclose()
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Close the files."""
        self._segments.close()
        self._spent_file.close()
        self._out.close()

    # -- in threads --------------------------------------------------------------------------------------------------

    def read(self, *, retry_failed: bool = False) -> None:
        """Read which items are finished, and which calls were paid for others.

        Args:
            retry_failed: Whether items that have failed run again, from their beginning. Their results are removed, and
                what they have used stays counted.

        Raises:
            OSError: The disk is full, or broken.
        """
        removed: dict[bytes, str] = {}

        def add(finished: Finished, line: bytes) -> None:
            item = digest(finished.id)
            if retry_failed and finished.status == FAILED:
                self._spent_file.add_removed(line, finished.usage)
                removed[item] = finished.id
                return
            self.finished[item] = bytes.fromhex(finished.digest)
            self.counts[finished.status] = self.counts.get(finished.status, 0) + 1
            if not self._spent_file.has_removed(line):
                for model, used in finished.usage.items():
                    self.spent.add(model, used.usage())

        self._out.read(add)
        self._segments.scan(
            lambda item: item in self.finished or item in removed,
            lambda model, used: self.spent.add(model, used.usage()),
        )
        if removed:  # in this order, each state that a kill leaves is a valid one
            self._spent_file.sync()
            again = [(item, line_of(Again(id, self._next_number()))) for item, id in removed.items()]
            self._segments.append(again)
            self._segments.sync()
            self._out.keep_only(lambda finished: finished.status != FAILED)

    def _next_number(self) -> int:
        self._segments.last_number += 1
        return self._segments.last_number

    def _write_calls(self, calls: Sequence[tuple[str, PaidCall]]) -> None:
        lines = [(item, CallLine.of(item, self._next_number(), paid)) for item, paid in calls]
        self._segments.append([(digest(item), line.encoded()) for item, line in lines])
        self._syncs.put(None)

    def _write_results(self, results: Sequence[Result]) -> None:
        self._out.append(b"".join(result.line() for result in results))
        self._segments.finish([result.item for result in results])

    def _sync(self, told: Sequence[float | None]) -> None:
        self._segments.sync()
        if seconds := [each for each in told if each is not None]:
            self._spent_file.add_seconds(max(seconds))


def folder_of(out: Path) -> Path:
    """Return the folder of the journal of a file of results."""
    return out.with_name(out.name + SUFFIX)


def opened(
    file: OutFile, header: Header | None, seed: int | None, settings: dict[str, object], *, retry_failed: bool = False
) -> Journal:
    """Open the journal of a file of results, or make one. Call it in a thread: it reads the file.

    Args:
        file: File of results, which the journal closes.
        header: Header of the journal, as `read_header` has read it; None makes a journal.
        seed: Seed of the runs, or None.
        settings: Settings on which the results depend.
        retry_failed: Whether items that have failed run again.

    Raises:
        ConfigurationError: The file has no journal, or one of other settings or of another user, or cannot be used.
    """
    folder = folder_of(file.path)
    try:
        if header is None:
            _begin(folder, file, Header(FORMAT, seed, settings))
        else:
            disk.require_own(folder)
            has_seeds = header.seed is not None and seed is not None
            before, now = ({"seed": header.seed}, {"seed": seed}) if has_seeds else ({}, {})
            require_same(folder, {**header.settings, **before}, {**settings, **now})
        journal = Journal(file, folder)
        try:
            journal.read(retry_failed=retry_failed)
        except BaseException:
            journal.close()
            raise
    except OSError as error:
        raise disk.unwritable(file.path, error) from None
    return journal


def _begin(folder: Path, file: OutFile, header: Header) -> None:
    if not file.is_empty:
        raise ConfigurationError(f"{file.path} exists, and has no journal {folder}: name another file for the results")
    folder.mkdir(0o700, exist_ok=True)
    disk.require_own(folder)
    write_header(folder, header)
    disk.sync_folder(folder.parent)
