"""The record of a REPL: the blocks that it ran, and what it was given between them, for a fresh REPL to run again.

A record has no prompts and no output: it has digests of them, the answers that code got, and the source of the blocks.
While the REPL lives, a note is an element of a list. Its digests are made when the record is asked for, or when the
texts that wait for one have `LOOSE_CHARS`.
"""

import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from rlm_broker.broker.transport.provisions import Provisions
from rlm_broker.broker.transport.session import Wanted
from rlm_broker.errors import ConfigurationError
from rlm_broker.results import Block
from rlm_broker.sandbox.arguments import SEED_BITS
from rlm_broker.values.fields import FINITE
from rlm_broker.values.host_files import open_regular, refusal_told, replacement
from sandbox_worker.wire.counts import has_more_values_than
from sandbox_worker.wire.errors import MessageInvalid
from sandbox_worker.wire.frames import PREFIX
from sandbox_worker.wire.messages import Attach, Environment, Provide, Query, Slot, Submit, decode_from_orchestrator
from sandbox_worker.wire.prompts import MessagePart
from sandbox_worker.wire.text_json import decode_escaped, encode_escaped

MAX_FILE_BYTES: Final = 512 << 20
"""Bytes of a saved record, at most; a larger file is refused. JSON may write a character as six."""
MAX_BYTES: Final = 64 << 20
"""Characters and bytes of code, answers, values and files that are kept, at most. Beyond them there is no replay."""
ENTRY_BYTES: Final = 256
"""Bytes that an entry or an answer counts, beside its texts."""
LOOSE_CHARS: Final = 1 << 20
"""Characters of prompts and output that wait for their digest, at most."""
MAX_FILE_VALUES: Final = 16 * MAX_BYTES // ENTRY_BYTES
"""JSON values in a saved record, at most; a file with more is refused before it is decoded. An entry has 12."""
MOST_BLOCKS: Final = 1 << 31
"""Number of a block, at most."""
ANY_MODEL: Final = "*"
"""Stands for a model in `asked`, where it is not known which one code has named."""
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
"""Address in the text of an object, which differs from process to process."""
_FORMAT: Final = "rlm-broker record 1"
_TEXT = attrgetter("text")


def asked(
    want: str, prompt: object, *, model: str | None = None, system: str | None = None, tool: str | None = None
) -> bytes:
    """Return the key of one prompt of a query, by which its answer is found again.

    Args:
        want: Kind of the query, see `Query.want`. "llm" and "rlm" are one kind: below `max_depth` both are calls.
        prompt: Text, content parts or messages: as in the query, or as in `CallStarted.prompt`. For a child run the
            text of `RunStarted.question`, for a tool `ToolStarted.arguments`.
        model: Model that code named; None if it named none. `ANY_MODEL` fits each query that finds no other answer.
        system: System prompt that code gave.
        tool: Name of the tool.
    """
    if not isinstance(prompt, str) and isinstance(prompt, Sequence):
        parts = [each for each in prompt if isinstance(each, MessagePart)]
        prompt = [{"role": each.role, "content": each.content} for each in parts] or prompt
    kind = "ask" if want in ("llm", "rlm") else want
    return _digest(encode_escaped([kind, model, system, tool, prompt]))


def keys_of(query: Query | Submit, model: str | None = None) -> list[bytes]:
    """Return the key of each prompt of a query, for its model or another one."""
    if isinstance(query, Submit):
        return [asked("submit", bytes(query.fields).decode(errors="replace"))]
    model = model or query.model
    return [asked(query.want, each, model=model, system=query.system, tool=query.tool) for each in query.prompts]


def outcome_of(block: Block) -> bytes:
    """Return the digest of what an ended block has shown: its status and error, and its output without addresses."""
    shown = [_ADDRESS.sub("at", text) for text in (block.error or "", block.stdout, block.stderr)]
    return _digest(encode_escaped([block.status, block.exit_code, *shown]))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class RecordedBlock(msgspec.Struct, tag="block"):
    """One block. It has ended if it has an outcome or a problem.

    Attributes:
        code: Its source.
        outcome: Digest of its outcome, see `outcome_of`.
        seconds: Seconds that it computed, waits for replies not counted.
        answers: What its queries and tools got, in this order: key of a prompt, see `asked`, and answer.
        number: Its number in its REPL, which tracebacks show; 0 stands for the next one.
        problem: Reason why it cannot be run again, as the rest of a sentence about the block; None if it can.
        value, stdin, asks_stdin, submit, echo: As in `Wanted`.
    """

    code: str
    outcome: bytes = b""
    seconds: Annotated[float, Meta(ge=0, le=FINITE)] = 0.0
    answers: list[tuple[bytes, Slot]] = []
    number: Annotated[int, Meta(ge=0, le=MOST_BLOCKS)] = 0
    problem: str | None = None
    value: bool = False
    stdin: str | None = None
    asks_stdin: bool = False
    submit: tuple[str, ...] | None = None
    echo: bool = True


class Given(msgspec.Struct, tag="given", frozen=True):
    """Tools and values that the REPL was given between two blocks. `context` names an added context, which the record
    does not have."""

    tools: list[str] | None = None
    frames: dict[str, bytes] = {}
    again: dict[str, bytes] = {}
    context: str | None = None


class HostFile(msgspec.Struct, tag="file", frozen=True):
    """A file that the host wrote into the scratch folder; with None it removed the file."""

    path: str
    data: bytes | None


class Gap(msgspec.Struct, tag="gap", frozen=True):
    """Something that cannot be done again, as a clause. No block behind it is run again."""

    why: str


Entry = RecordedBlock | Given | HostFile | Gap


class _Saved(msgspec.Struct):
    format: Literal["rlm-broker record 1"]
    seed: Annotated[int, Meta(ge=0, lt=1 << SEED_BITS)] | None
    entries: list[Entry]
    problem: str | None = None


class Replayed(NamedTuple):
    """Outcome of a replay: the number of blocks that came back, and the reason why not all did, as a clause; else None.

    Example:
        ```python
        with sandbox.repl(record=ReplRecord()) as repl:
            print(repl.replayed.blocks, repl.replayed.problem)  # 0 None
        ```
    """

    blocks: int = 0
    problem: str | None = None


class ReplRecord:
    """The blocks that a REPL ran, in their order, with all that a fresh REPL needs to run them again.

    Example:
        ```python
        with sandbox.repl("some text") as repl:
            repl.execute("n = len(context)")
            repl.record.save("session.json")
        with sandbox.repl("some text", record=ReplRecord.load("session.json")) as again:
            print(again.get("n"), again.replayed)  # 9 Replayed(blocks=1, problem=None)
        ```

    Made by `SandboxedRepl.record`. It has no context: the REPL that replays it is given the same one.

    Args:
        entries: Its entries, in their order.
        seed: Seed of the REPL's random numbers; None if it is not known.

    Attributes:
        problem: Reason why nothing was kept, as a clause; None if all was.
    """

    def __init__(self, entries: Iterable[Entry] = (), seed: int | None = None, problem: str | None = None) -> None:
        self.entries = [*entries]
        self.seed = seed
        self.problem = problem

    def __repr__(self) -> str:
        return f"ReplRecord({self.blocks} blocks)"

    @property
    def blocks(self) -> int:
        """Number of its blocks."""
        return len(_places(self.entries))

    @property
    def chars(self) -> int:
        """Characters and bytes of its texts, values and files."""
        return sum(map(_chars_of, self.entries))

    def until(self, blocks: int) -> "ReplRecord":
        """Return the record of the first blocks alone, with what the REPL was given up to the next one.

        Args:
            blocks: Number of blocks.

        Raises:
            ConfigurationError: `blocks` is no number of blocks.
        """
        if type(blocks) is not int or blocks < 0:
            raise ConfigurationError(f"blocks = {blocks!r}: give a number of blocks, from 0 on")
        further = _places(self.entries)[blocks:]
        return ReplRecord(self.entries[: further[0] if further else None], self.seed, self.problem)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to a file that its owner alone may read, and replace one of that name.

        Raises:
            ConfigurationError: The file cannot be written.
        """
        data = encode_escaped(_Saved(_FORMAT, self.seed, self.entries, self.problem))
        with refusal_told(f"{path} cannot be written"), replacement(Path(path)) as file:
            file.write(data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ReplRecord":
        """Return the record in a file of `save`.

        Raises:
            ConfigurationError: The file cannot be read, or has no record of this version.
        """
        with open(open_regular(path), "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES or has_more_values_than(MAX_FILE_VALUES, data):
            most = f"{MAX_FILE_BYTES:,} bytes or {MAX_FILE_VALUES:,} values"
            raise ConfigurationError(f"{path} has more than {most}, and so is no record of a REPL")
        try:
            saved = decode_escaped(data, _Saved)
            for entry in saved.entries:
                if isinstance(entry, Given):
                    _require_frames(entry)
        except (ValueError, RecursionError, TypeError, MessageInvalid) as error:
            raise ConfigurationError(f"{path} is no record of a REPL that this version reads: {error}") from None
        return cls(saved.entries, saved.seed, saved.problem)


def _require_frames(given: Given) -> None:
    """Raise ValueError or MessageInvalid for a frame without a value. A REPL would wait for the rest of a short one."""
    for name, frame in (*given.frames.items(), *given.again.items()):
        payload = frame[PREFIX.size :]
        message = decode_from_orchestrator(payload)
        is_value = isinstance(message, Provide | Attach) and message.name == name
        if not is_value or frame[: PREFIX.size] != PREFIX.pack(len(payload)):
            raise ValueError(f"the value {name[:80]!r} is malformed")


def _places(entries: Sequence[Entry]) -> list[int]:
    """Return the places of the blocks among entries."""
    return [place for place, each in enumerate(entries) if isinstance(each, RecordedBlock)]


def _chars_of(entry: Entry) -> int:
    match entry:
        case RecordedBlock():
            return len(entry.code) + sum(len(slot.text) for _, slot in entry.answers)
        case Given():
            return sum(map(len, entry.frames.values())) + sum(map(len, entry.again.values()))
        case HostFile():
            return len(entry.data or b"")
    return 0


class ReplRecorder:
    """Makes the record of one REPL.

    Args:
        opening: Tools, values and environment of the REPL when it opens.
        seed: Seed of its random numbers; None before it is known.
        is_on: Whether anything is kept.

    Attributes:
        entries: The entries so far, with the block that runs.
        problem: Reason why nothing is kept, as a clause; None if it is.
    """

    def __init__(self, opening: Provisions, seed: int | None, *, is_on: bool) -> None:
        self.entries: list[Entry] = []
        self.seed = seed
        self.problem = None if is_on else "max_replay_s is 0"
        self._opening = opening
        self._room = MAX_BYTES if is_on else -1
        self._loose = deque[tuple[RecordedBlock, Query | Submit | None, Any]]()
        self._loose_chars = 0

    def record(self) -> ReplRecord:
        """Return the record of all blocks that have ended."""
        self._tidy()
        ended = (each for each in self.entries if not isinstance(each, RecordedBlock) or each.outcome or each.problem)
        return ReplRecord(ended, self.seed, self.problem)

    def copy(self) -> "ReplRecorder":
        """Return the recorder of a fork, which goes on from here. No block runs."""
        self._tidy()
        made = ReplRecorder(self._opening, self.seed, is_on=True)
        made.begin_with(self.entries)
        made.problem, made._room = self.problem, self._room
        return made

    def begin_with(self, entries: Iterable[Entry]) -> None:
        """Take the entries of another record, as copies: a child in the background may add an answer to a block."""
        self.entries = [
            replace(each, answers=[*each.answers]) if isinstance(each, RecordedBlock) else each for each in entries
        ]

    def opening(self, max_frame_bytes: int) -> Provisions:
        """Return what a fresh REPL is given for a replay: as when the first one opened, with the seed of the record."""
        made = self._opening.copy()
        made.add(Provisions.of({}, max_frame_bytes, environment=Environment({}, self.seed)))
        return made

    def begun(self, code: str, wanted: Wanted, number: int) -> RecordedBlock:
        """Note a block that begins. It counts when it has `ended`. One that reads variables is not kept."""
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

    def place(self, blocks: int) -> int:
        """Return the place in `entries` right behind the first blocks."""
        return max(_places(self.entries)[:blocks], default=-1) + 1

    def cut(self, blocks: int) -> None:
        """Drop all blocks but the first ones that have ended. What the REPL was given stays."""
        self.entries, place = self.record().entries, self.place(blocks)
        self.entries[place:] = [each for each in self.entries[place:] if not isinstance(each, RecordedBlock)]

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
        self._loose_chars = 0
        while self._loose:
            block, query, told = self._loose.popleft()
            if query is None:
                block.outcome = outcome_of(told)
            else:
                block.answers += zip(keys_of(query), told, strict=False)
        if self._room < 0 and self.problem is None:
            self.entries = []
            self.problem = f"the record of its blocks has more than {MAX_BYTES >> 20} MiB"
