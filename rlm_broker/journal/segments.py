"""The paid calls of unfinished items on disk: numbered files of lines, each of which is removed with its last item.

Theory of operation. A process appends to a segment of its own, and begins the next one at 64 MB. So a torn last line
can be only at the end of a segment that no process continues, and is skipped when that is read. An index in memory has
the place of each call that an earlier process has paid; the calls of this process need none, because `PaidCalls` holds
them. A segment is removed once all items with a call in it are finished, and their results are on the disk.
"""

import os
import re
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rlm_broker.journal import disk
from rlm_broker.journal.lines import CallAnswer, CallHead, digest
from rlm_broker.journal.paid import PaidCall
from sandbox_worker.wire.text_json import decode_escaped

SEGMENT_BYTES = 64 << 20
"""Bytes after which a segment ends, and the next one begins."""
_NAME = re.compile(r"calls-(\d{6,12})\.jsonl")


class Segments:
    """The segments in a folder. Methods may be called from any thread.

    Args:
        folder: Folder of the journal.
        most_bytes: Bytes after which the next segment begins.
    """

    def __init__(self, folder: Path, most_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._holders: dict[int, set[bytes]] = {}
        """Maps the number of a segment to the unfinished items with a call in it."""
        self._places = defaultdict[bytes, "array[int]"](lambda: array("Q"))
        """Maps an item to segment, offset and length of each of its calls, one after the other."""
        self._number = max(self._numbers(), default=0)
        self._descriptor = -1
        self._end = 0

    def scan(self, is_finished: Callable[[bytes], bool], found: Callable[[CallHead], None]) -> None:
        """Read the segments of earlier processes, and remove those whose items are all finished.

        Args:
            is_finished: Whether the item with this digest of its id is finished.
            found: Called with each call of an unfinished item.
        """
        heads: dict[bytes, list[CallHead]] = {}
        for number in self._numbers():
            holders = self._holders[number] = set()
            for offset, line in _lines(self.path(number)):
                try:
                    head = decode_escaped(line, CallHead)
                except (ValueError, RecursionError):  # torn by a kill or a power cut: the call is only paid again
                    continue
                item = digest(head.item)
                if is_finished(item):
                    continue
                holders.add(item)
                if head.again:
                    self._places.pop(item, None)
                    heads.pop(item, None)
                else:
                    self._places[item].extend((number, offset, len(line)))
                    heads.setdefault(item, []).append(head)
        for calls in heads.values():
            for head in calls:
                found(head)
        self.finish(())

    def has(self, item: bytes) -> bool:
        """Whether an earlier process has paid calls for an item."""
        return item in self._places

    def earlier(self, item: bytes) -> list[PaidCall]:
        """Return the calls that earlier processes have paid for an item, in the order in which they ended."""
        with self._lock:
            places = self._places.pop(item, None)
        if places is None:
            return []
        calls: list[PaidCall] = []
        for at in range(0, len(places), 3):
            number, offset, length = places[at : at + 3]
            with open(self.path(number), "rb") as file:
                file.seek(offset)
                calls.append(decode_escaped(file.read(length), CallAnswer).paid())
        return calls

    def append(self, lines: Sequence[tuple[bytes, bytes]]) -> None:
        """Write lines, each with the digest of its item's id before it.

        Raises:
            OSError: The disk is full, or broken.
        """
        with self._lock:
            if self._descriptor < 0 or self._end >= self._most_bytes:
                self._begin_next()
            self._holders[self._number].update(item for item, _ in lines)
            self._end = disk.append(self._descriptor, b"".join(line for _, line in lines), self._end)

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
                holders.difference_update(items)
                if not holders and (number != self._number or self._descriptor < 0):
                    disk.remove(self.path(number))
                    del self._holders[number]

    def close(self) -> None:
        """Close the segment that is written, and remove it if no unfinished item needs it."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
        self.finish(())

    def path(self, number: int) -> Path:
        """Return the path of a segment."""
        return self._folder / f"calls-{number:06}.jsonl"

    def _numbers(self) -> list[int]:
        return sorted(int(name[1]) for each in self._folder.iterdir() if (name := _NAME.fullmatch(each.name)))

    def _begin_next(self) -> None:
        if self._descriptor >= 0:
            disk.sync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
        number = self._number + 1
        self._descriptor = disk.open_to_append(self.path(number))
        self._number, self._end = number, 0
        self._holders[number] = set()
        disk.sync_folder(self._folder)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the offset of each whole line of a file, and the line."""
    offset = 0
    with open(path, "rb", buffering=1 << 20) as file:
        for line in file:
            if line.endswith(b"\n"):
                yield offset, line
            offset += len(line)
