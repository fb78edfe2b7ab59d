"""The record of a REPL: the blocks that it ran, and what it was given between them, for a fresh REPL to run again.

A record has no prompts and no output: it has digests of them, the answers that code got, and the source of the blocks.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from rlm_broker.errors import ConfigurationError
from rlm_broker.results import Block
from rlm_broker.sandbox.arguments import SEED_BITS
from rlm_broker.values.fields import FINITE
from rlm_broker.values.host_files import refusal_told, replacement
from sandbox_worker.wire.errors import MessageInvalid
from sandbox_worker.wire.frames import PREFIX
from sandbox_worker.wire.messages import Attach, Provide, Query, Slot, Submit, decode_from_orchestrator
from sandbox_worker.wire.prompts import MessagePart
from sandbox_worker.wire.text_json import decode_escaped, encode_escaped

MAX_FILE_BYTES: Final = 512 << 20
"""Bytes of a saved record, at most; a larger file is refused. JSON may write a character as six."""
MOST_BLOCKS: Final = 1 << 31
"""Number of a block, at most."""
ANY_MODEL: Final = "*"
"""Stands for a model in `asked`, where it is not known which one code has named."""
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
"""Address in the text of an object, which differs from process to process."""
_FORMAT: Final = "rlm-broker record 1"


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
        return sum(isinstance(each, RecordedBlock) for each in self.entries)

    @property
    def chars(self) -> int:
        """Characters and bytes of its texts, values and files."""
        return sum(map(_chars_of, self.entries))

    def until(self, blocks: int) -> "ReplRecord":
        """Return the record of the first blocks alone, with what the REPL was given up to the next one.

        Args:
            blocks: Number of blocks.
        """
        first = list[Entry]()
        for entry in self.entries:
            blocks -= isinstance(entry, RecordedBlock)
            if blocks < 0:
                break
            first.append(entry)
        return ReplRecord(first, self.seed, self.problem)

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
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # else a named pipe would have the opening wait
        with refusal_told(f"{path} cannot be read"), open(os.open(path, flags), "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1) or b""
        if len(data) > MAX_FILE_BYTES:
            raise ConfigurationError(f"{path} has more than {MAX_FILE_BYTES:,} bytes, and so is no record of a REPL")
        try:
            saved = decode_escaped(data, _Saved)
            for entry in saved.entries:
                if isinstance(entry, Given):
                    _require_frames(entry)
        except (ValueError, RecursionError, TypeError, MessageInvalid) as error:
            raise ConfigurationError(f"{path} is no record of a REPL that this version reads: {error}") from None
        return cls(saved.entries, saved.seed, saved.problem)


def keys_of(query: Query | Submit, model: str | None = None) -> list[bytes]:
    """Return the key of each prompt of a query, for its model or another one."""
    if isinstance(query, Submit):
        return [asked("submit", bytes(query.fields).decode(errors="replace"))]
    model = model or query.model
    return [asked(query.want, each, model=model, system=query.system, tool=query.tool) for each in query.prompts]


def _require_frames(given: Given) -> None:
    """Raise ValueError or MessageInvalid for a frame without a value. A REPL would wait for the rest of a short one."""
    for name, frame in (*given.frames.items(), *given.again.items()):
        payload = frame[PREFIX.size :]
        message = decode_from_orchestrator(payload)
        is_value = isinstance(message, Provide | Attach) and message.name == name
        if not is_value or frame[: PREFIX.size] != PREFIX.pack(len(payload)):
            raise ValueError(f"the value {name[:80]!r} is malformed")


def _chars_of(entry: Entry) -> int:
    match entry:
        case RecordedBlock():
            return len(entry.code) + sum(len(slot.text) for _, slot in entry.answers)
        case Given():
            return sum(map(len, entry.frames.values())) + sum(map(len, entry.again.values()))
        case HostFile():
            return len(entry.data or b"")
    return 0
