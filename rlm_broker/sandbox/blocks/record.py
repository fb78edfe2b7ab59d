"""The record of a REPL: the blocks that it ran, and what it was given between them, for a fresh REPL to run again.

A record has no prompts and no output: it has digests of them, the answers that code got, and the source of the blocks.
Digests are made when they are needed, or when the texts that wait for one have `LOOSE_CHARS`.
"""

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from rlm_broker.broker.transport.provisions import Provisions
from rlm_broker.broker.transport.session import Wanted
from rlm_broker.errors import ConfigurationError
from rlm_broker.results import Block
from sandbox_worker.wire.messages import Query, Slot, Submit
from sandbox_worker.wire.prompts import MessagePart
from sandbox_worker.wire.text_json import decode_escaped, encode_escaped

MAX_BYTES: Final = 64 << 20
"""Characters and bytes of code, answers, values and files in a record, at most. Beyond them there is no replay."""
MAX_FILE_BYTES: Final = 8 * MAX_BYTES
"""Bytes of a saved record, at most; a larger file is refused. JSON may write a character as six."""
ENTRY_BYTES: Final = 256
"""Bytes that an entry or an answer counts, beside its texts."""
LOOSE_CHARS: Final = 1 << 20
"""Characters of prompts and output that wait for their digest, at most."""
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


def outcome_of(block: Block) -> bytes:
    """Return the digest of what an ended block has shown: its status and error, and its output without addresses."""
    shown = [_ADDRESS.sub("at", text) for text in (block.error or "", block.stdout, block.stderr)]
    return _digest(encode_escaped([block.status, block.exit_code, *shown]))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class RecordedBlock(msgspec.Struct, tag="block"):
    """One block that has ended.

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
    seconds: float = 0.0
    answers: list[tuple[bytes, Slot]] = []
    number: int = 0
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
    seed: int | None
    entries: list[Entry]


class Replayed(NamedTuple):
    """What a replay brought back: the number of blocks, and the reason why not all, as a clause; else None."""

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
        is_kept: Whether further entries are kept.

    Attributes:
        problem: Reason why nothing is kept, as a clause; None if it is.
    """

    def __init__(self, entries: Iterable[Entry] = (), seed: int | None = None, *, is_kept: bool = True) -> None:
        self.entries = [*entries]
        self.seed = seed
        self.problem = None if is_kept else "max_replay_s is 0"
        self._room = MAX_BYTES if is_kept else -1
        self._loose: list[tuple[RecordedBlock, Query | Submit | None, Any]] = []
        self._loose_chars = 0

    def __repr__(self) -> str:
        return f"ReplRecord({len(self.blocks)} blocks)"

    @property
    def blocks(self) -> list[RecordedBlock]:
        """The blocks that have ended."""
        self._make_digests()
        return [each for each in self.entries if isinstance(each, RecordedBlock) and (each.outcome or each.problem)]

    def until(self, blocks: int) -> "ReplRecord":
        """Return the record of the first blocks alone, with what the REPL was given up to the next one.

        Args:
            blocks: Number of blocks.
        """
        ended = [id(each) for each in self.blocks]
        first = list[Entry]()
        for entry in self.entries:
            if isinstance(entry, RecordedBlock):
                if id(entry) not in ended:  # it runs
                    continue
                if id(entry) in ended[blocks:]:
                    break
            first.append(entry)
        return ReplRecord(first, self.seed)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to a file that its owner alone may read, and replace one of that name.

        Raises:
            ConfigurationError: The file cannot be written.
        """
        entries = self.until(len(self.entries)).entries
        data = encode_escaped(_Saved(_FORMAT, self.seed, entries))
        target = Path(path)
        part = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            part.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise ConfigurationError(f"{target} cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ReplRecord":
        """Return the record in a file of `save`.

        Raises:
            ConfigurationError: The file cannot be read, or has no record of this version.
        """
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if len(data) > MAX_FILE_BYTES:
            raise ConfigurationError(f"{path} has more than {MAX_FILE_BYTES:,} bytes, and so is no record of a REPL")
        try:
            saved = decode_escaped(data, _Saved)
        except (ValueError, RecursionError, TypeError) as error:
            raise ConfigurationError(f"{path} is no record of a REPL that this version reads: {error}") from None
        return cls(saved.entries, saved.seed)

    # -- what the REPL does ------------------------------------------------------------------------------------------

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
        if block is None or block.status == "interrupted":
            recorded.problem = "was interrupted"
            return
        self._loose.append((recorded, None, block))
        self._loose_chars += len(block.stdout) + len(block.stderr)
        self._room -= len(recorded.code) + len(recorded.stdin or "") + ENTRY_BYTES
        if self._loose_chars > LOOSE_CHARS or self._room < 0 or block.displays:  # a picture is not kept alive
            self._tidy()

    def forget(self, recorded: RecordedBlock) -> None:
        """Drop a block that was killed or never ran."""
        self.entries = [each for each in self.entries if each is not recorded]

    def cut(self, blocks: int) -> None:
        """Drop all blocks but the first ones. What the REPL was given stays."""
        kept = {id(each) for each in self.blocks[:blocks]}
        self.entries = [each for each in self.entries if not isinstance(each, RecordedBlock) or id(each) in kept]

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
        self._add(sum(map(len, frames.values())), Given(tools, frames, again, context))

    def file(self, path: str, data: bytes | None) -> None:
        """Note a file that the host has written, or removed."""
        self._add(len(data or b""), HostFile(path, data))

    def gap(self, why: str) -> None:
        """Note something that cannot be done again, as a clause."""
        if not self.entries or not isinstance(self.entries[-1], Gap):
            self._add(0, Gap(why))

    def _add(self, size: int, entry: Entry) -> None:
        self._room -= size + ENTRY_BYTES
        if self._room >= 0:
            self.entries.append(entry)
        else:
            self._tidy()

    def _tidy(self) -> None:
        """Make the digests that are missing. Beyond the bound, drop all entries for good."""
        self._make_digests()
        if self._room < 0 and self.entries:
            self.entries = []
            self.problem = f"the record of its blocks has more than {MAX_BYTES >> 20} MiB"

    def _make_digests(self) -> None:
        loose, self._loose, self._loose_chars = self._loose, [], 0
        for block, query, told in loose:
            if query is None:
                block.outcome = outcome_of(told)
            else:
                block.answers += zip(keys_of(query), told, strict=False)


def keys_of(query: Query | Submit, model: str | None = None) -> list[bytes]:
    """Return the key of each prompt of a query, for its model or another one."""
    if isinstance(query, Submit):
        return [asked("submit", bytes(query.fields).decode(errors="replace"))]
    model = model or query.model
    return [asked(query.want, each, model=model, system=query.system, tool=query.tool) for each in query.prompts]
