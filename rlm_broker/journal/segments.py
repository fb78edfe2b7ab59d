"""The paid calls of unfinished items on disk: numbered files of lines, each of which is removed with its last item.

Theory of operation. A process appends to segments of its own, and begins the next one at 64 MB. So a torn last line can
only be at the end of a segment that no process continues, and is skipped when that is read. An index in memory has the
place of each call that an earlier process has paid. `PaidCalls` holds those of this process.

A segment is removed once all items with a call in it are finished, and their results are on the disk. An item that
takes long would so keep the calls of all others. Therefore lines that are still needed are moved to the newest segment
if they are less than half of an old one. The disk then holds at most twice what unfinished items need, and some
segments. Each line has a number, by which the order of the calls is known after that, and a line that a kill has left
in two segments.
"""

import os
import re
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rlm_broker.journal import disk
from rlm_broker.journal.lines import CallAnswer, CallHead, Used, digest
from rlm_broker.journal.paid import PaidCall
from sandbox_worker.wire.text_json import decode_escaped

SEGMENT_BYTES = 64 << 20
"""Bytes after which a segment ends, and the next one begins."""
MOST_OLD = 4
"""Segments that are kept before lines are moved out of one."""
_NAME = re.compile(r"calls-(\d{6,12})\.jsonl")
_Place = tuple[int, int, int]
"""Number of a segment, and offset and length of a line in it, in bytes."""


class Segments:
    """The segments in a folder. Methods may be called from any thread.

    Args:
        folder: Folder of the journal.
        most_bytes: Bytes after which the next segment begins.

    Attributes:
        last_number: Largest number of a line that was read or written.
    """

    def __init__(self, folder: Path, most_bytes: int = SEGMENT_BYTES) -> None:
        self.last_number = 0
        self._folder = folder
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._holders: dict[int, dict[bytes, int]] = {}
        """Maps the number of a segment to the unfinished items with lines in it, and the bytes of these."""
        self._places: dict[bytes, array[int]] = {}
        """Maps an item to the places of the calls that earlier processes have paid for it, one after the other."""
        self._current = max(self._numbers(), default=0)
        self._descriptor = -1
        self._end = 0

    def scan(self, is_finished: Callable[[bytes], bool], found: Callable[[str, Used], None]) -> None:
        """Read the segments of earlier processes, and remove those whose items are all finished.

        Args:
            is_finished: Whether the item with this digest of its id is finished.
            found: Called with the model and the usage of each call of an unfinished item.

        Raises:
            ConfigurationError: A segment is no regular file.
            OSError: A segment cannot be read.
        """
        calls: dict[bytes, dict[int, tuple[_Place, str, Used]]] = {}
        again: dict[bytes, int] = {}
        for number in self._numbers():
            holders: dict[bytes, int] = {}
            for offset, line, head in _heads(self._path(number)):
                self.last_number = max(self.last_number, head.n)
                item = digest(head.item)
                if is_finished(item):
                    continue
                holders[item] = holders.get(item, 0) + len(line)
                if head.again:
                    again[item] = max(again.get(item, 0), head.n)
                else:
                    calls.setdefault(item, {})[head.n] = (number, offset, len(line)), head.model, head.used
            self._holders[number] = holders  # not before: a segment that cannot be read stays
        for item, by_number in calls.items():
            places = self._places[item] = array("Q")
            for n, (place, model, used) in sorted(by_number.items()):
                if n > again.get(item, 0):
                    places.extend(place)
                    found(model, used)
        self.finish(())

    def has(self, item: bytes) -> bool:
        """Whether an earlier process has paid calls for an item."""
        return item in self._places

    def earlier(self, item: bytes) -> list[PaidCall]:
        """Return the calls that earlier processes have paid for an item, in the order in which they ended.

        Raises:
            OSError, ValueError: A segment cannot be read, or was changed.
        """
        calls: list[PaidCall] = []
        with self._lock:  # held while it reads: a line might be moved meanwhile
            for number, offset, length in _places(self._places.pop(item, array("Q"))):
                with disk.open_to_read(self._path(number)) as file:
                    file.seek(offset)
                    calls.append(decode_escaped(file.read(length), CallAnswer).paid())
        return calls

    def append(self, lines: Sequence[tuple[bytes, bytes]]) -> None:
        """Write lines, each with the digest of its item's id before it.

        Raises:
            OSError: The disk is full, or broken.
        """
        with self._lock:
            self._append(lines)
            if self._end >= self._most_bytes:
                self._begin_next()
                self._make_room()

    def sync(self) -> None:
        """Wait until the lines that were written are on the disk."""
        with self._lock:
            descriptor = -1 if self._descriptor < 0 else os.dup(self._descriptor)
        if descriptor >= 0:
            try:
                disk.sync(descriptor)
            finally:
                os.close(descriptor)

    def finish(self, items: Sequence[bytes]) -> None:
        """Forget the calls of items whose results are on the disk, and remove segments that no other item needs."""
        with self._lock:
            for number, holders in list(self._holders.items()):
                for item in items:
                    holders.pop(item, None)
                if not holders and (number != self._current or self._descriptor < 0):
                    self._remove(number)

    def close(self) -> None:
        """Close the segment that is written, and remove it if no unfinished item needs it. Harmless when repeated."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
        self.finish(())

    # -- with the lock -----------------------------------------------------------------------------------------------

    def _append(self, lines: Sequence[tuple[bytes, bytes]]) -> None:
        if self._descriptor < 0:
            self._begin_next()
        self._end = disk.append(self._descriptor, b"".join(line for _, line in lines), self._end)
        holders = self._holders[self._current]
        for item, line in lines:
            holders[item] = holders.get(item, 0) + len(line)

    def _begin_next(self) -> None:
        descriptor = disk.open_to_append(self._path(self._current + 1))
        if self._descriptor >= 0:
            disk.sync(self._descriptor)
            os.close(self._descriptor)
        self._descriptor, self._end = descriptor, 0
        self._current += 1
        self._holders[self._current] = {}
        disk.sync_folder(self._folder)

    def _make_room(self) -> None:
        """Move the lines that are needed out of the oldest segment that has fewer of them than others."""
        old = [number for number in sorted(self._holders) if number != self._current]
        if len(old) <= MOST_OLD:
            return
        for number in old:
            if 2 * sum(self._holders[number].values()) <= self._path(number).stat().st_size:
                self._move(number)
                return

    def _move(self, number: int) -> None:
        holders = self._holders[number]
        moved: dict[int, _Place] = {}
        waiting: list[tuple[bytes, bytes]] = []
        size = 0
        for offset, line, head in _heads(self._path(number)):
            if (item := digest(head.item)) in holders:
                moved[offset] = self._current, self._end + size, len(line)
                waiting.append((item, line))
                size += len(line)
            if size >= disk.READ_BYTES:
                self._append(waiting)
                waiting, size = [], 0
        if waiting:
            self._append(waiting)
        disk.sync(self._descriptor)
        for item in holders:
            if item in self._places:
                places = _places(self._places[item])
                new = [moved.get(place[1], place) if place[0] == number else place for place in places]
                self._places[item] = array("Q", [each for place in new for each in place])
        self._remove(number)

    def _remove(self, number: int) -> None:
        disk.remove(self._path(number))
        del self._holders[number]

    def _path(self, number: int) -> Path:
        return self._folder / f"calls-{number:06}.jsonl"

    def _numbers(self) -> list[int]:
        return sorted(int(name[1]) for each in self._folder.iterdir() if (name := _NAME.fullmatch(each.name)))


def _heads(path: Path) -> Iterator[tuple[int, bytes, CallHead]]:
    """Yield the offset of each line of a segment, the line and its head. Lines that are not whole are passed over.

    A kill or a power cut has torn them, so their calls are only paid again.
    """
    offset = 0
    with disk.open_to_read(path) as file:
        for line in file:
            try:
                head = decode_escaped(line, CallHead) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                head = None
            if head is not None:
                yield offset, line, head
            offset += len(line)


def _places(flat: "array[int]") -> Iterator[_Place]:
    for at in range(0, len(flat), 3):
        yield flat[at], flat[at + 1], flat[at + 2]
