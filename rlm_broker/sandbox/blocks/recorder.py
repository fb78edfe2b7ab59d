"""The recorder of a REPL: it notes the blocks that run, the answers that they get, and what the host gives the REPL.

A note is an element of a list. Digests are made when the record is asked for, or when the texts that wait for one have
`LOOSE_CHARS`.
"""

from collections import deque
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from rlm_broker.broker.transport.provisions import Provisions
from rlm_broker.broker.transport.session import Wanted
from rlm_broker.results import Block
from rlm_broker.sandbox.blocks.record import (
    Entry,
    Gap,
    Given,
    HostFile,
    RecordedBlock,
    ReplRecord,
    keys_of,
    outcome_of,
)
from sandbox_worker.wire.messages import Query, Slot, Submit

MAX_BYTES: Final = 64 << 20
"""Characters and bytes of code, answers, values and files that are kept, at most. Beyond them there is no replay."""
ENTRY_BYTES: Final = 256
"""Bytes that an entry or an answer counts, beside its texts."""
LOOSE_CHARS: Final = 1 << 20
"""Characters of prompts and output that wait for their digest, at most."""
_TEXT = attrgetter("text")


class ReplRecorder:
    """Makes the record of one REPL.

    Args:
        is_on: Whether anything is kept.

    Attributes:
        entries: The entries so far, with the block that runs.
        seed: Seed of the REPL's random numbers; None before it is known.
        problem: Reason why nothing is kept, as a clause; None if it is.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.entries: list[Entry] = []
        self.seed: int | None = None
        self.problem = None if is_on else "max_replay_s is 0"
        self._room = MAX_BYTES if is_on else -1
        self._loose = deque[tuple[RecordedBlock, Query | Submit | None, Any]]()
        self._loose_chars = 0

    def record(self) -> ReplRecord:
        """Return the record of all blocks that have ended."""
        self._make_digests()
        ended = (each for each in self.entries if not isinstance(each, RecordedBlock) or each.outcome or each.problem)
        return ReplRecord(ended, self.seed, self.problem)

    def copy(self) -> "ReplRecorder":
        """Return the recorder of a fork, which goes on from here. No block runs."""
        self._make_digests()
        made = ReplRecorder(is_on=True)
        made.entries = [
            replace(each, answers=[*each.answers]) if isinstance(each, RecordedBlock) else each for each in self.entries
        ]
        made.seed, made.problem, made._room = self.seed, self.problem, self._room
        return made

    def begun(self, code: str, wanted: Wanted, number: int) -> RecordedBlock:
        """Note a block that begins. It counts when it has `ended`. One that reads variables does not count."""
        asks, submit = callable(wanted.stdin), wanted.submit
        stdin = wanted.stdin if isinstance(wanted.stdin, str) else None
        block = RecordedBlock(code, b"", 0.0, [], number, None, wanted.value, stdin, asks, submit, wanted.echo)
        if self._room >= 0 and wanted.names is None:
            self.entries.append(block)
        return block

    def ended(self, recorded: RecordedBlock, block: Block | None, seconds: float) -> None:
        """Note how a block has ended; None stands for the end of its caller, which waits for no outcome."""
        recorded.seconds = seconds
        self._room -= len(recorded.code) + len(recorded.stdin or "") + ENTRY_BYTES
        if block is None or block.status == "interrupted":
            recorded.problem = "was interrupted"
        else:
            self._loose.append((recorded, None, block))
            self._loose_chars += len(block.stdout) + len(block.stderr)
        has_pictures = block is not None and block.displays  # which are not kept alive
        if self._loose_chars > LOOSE_CHARS or self._room < 0 or has_pictures:
            self._tidy()

    def forget(self, recorded: RecordedBlock) -> None:
        """Drop a block that never ran."""
        self.entries = [each for each in self.entries if each is not recorded]

    def cut(self, blocks: int) -> None:
        """Drop all blocks but the first ones that have ended. What the REPL was given stays."""
        first: list[Entry] = []
        for entry in self.record().entries:
            blocks -= isinstance(entry, RecordedBlock)
            if blocks >= 0 or not isinstance(entry, RecordedBlock):
                first.append(entry)
        self.entries = first

    def answered(self, query: Query | Submit, slots: list[Slot], size: int) -> None:
        """Note the answer to a query of the present block, or of an earlier one that goes on in the background.

        Args:
            size: Characters of the query, roughly.
        """
        number = int(query.id.partition(":")[0])
        for block in reversed(self.entries):
            if isinstance(block, RecordedBlock) and block.number <= number:
                if block.number == number:
                    self._loose.append((block, query, slots))
                    self._loose_chars += size
                    self._room -= sum(map(len, map(_TEXT, slots))) + ENTRY_BYTES * len(slots)
                break
        if self._loose_chars > LOOSE_CHARS or self._room < 0:
            self._tidy()

    def given(self, more: Provisions, context: str | None = None) -> None:
        """Note tools and values that the REPL is given from its next block on, or the added context of this name."""
        tools, frames, again = more.parts()
        self._add(sum(map(len, frames.values())), lambda: Given(tools, frames, again, context))

    def file(self, path: str, data: bytes | bytearray | memoryview | Path | None) -> None:
        """Note a file that the host has written, or removed. A copy of a file of the host cannot be made again: it may
        be another one by then."""
        if isinstance(data, Path):
            self.gap("a file of the host was copied into its scratch folder")
        else:
            self._add(
                0 if data is None else memoryview(data).nbytes,
                lambda: HostFile(path, None if data is None else bytes(data)),
            )

    def gap(self, why: str) -> None:
        """Note something that cannot be done again, as a clause."""
        if not self.entries or not isinstance(self.entries[-1], Gap):
            self._add(0, lambda: Gap(why))

    def _add(self, size: int, entry: Callable[[], Entry]) -> None:
        self._room -= size + ENTRY_BYTES
        if self._room >= 0:
            self.entries.append(entry())
        else:
            self._tidy()

    def _tidy(self) -> None:
        """Make the digests that are missing. Beyond the bound, drop all entries for good."""
        self._make_digests()
        if self._room < 0 and self.problem is None:
            self.entries = []
            self.problem = f"the record of its blocks has more than {MAX_BYTES >> 20} MiB"

    def _make_digests(self) -> None:
        self._loose_chars = 0
        while self._loose:
            block, query, told = self._loose.popleft()
            if query is None:
                block.outcome = outcome_of(told)
            else:
                block.answers += zip(keys_of(query), told, strict=False)
