"""Trace files: the events of runs as one JSON object a line, numbered and flushed as they happen, and read again."""

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, get_args, get_type_hints

import msgspec
from msgspec import NODEFAULT, convert, defstruct, structs

from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.events.event import BlockEnded, CallText, Event
from rlm_broker.events.log import text_chars
from rlm_broker.results import Block
from rlm_broker.values.host_files import refusal_told
from rlm_broker.values.text import printable, shorten
from sandbox_worker.wire.mime import MimeType
from sandbox_worker.wire.text_json import encode_escaped

INLINE_CHARS = 1 << 16
"""Maximum characters of an event written on the event loop; a longer one is written by a thread.

Encoding takes tens of milliseconds per megabyte. Events that come while the thread is behind are written by it, too, so
that their order stays.
"""
MOST_WAITING_CHARS = 1 << 25
"""Maximum characters waiting for the thread; beyond it, texts are cut to `CUT_CHARS` and marked."""
CUT_CHARS = 10_000
"""Characters kept of a text when the thread cannot keep up."""


class TraceWriter:
    """Writes events to the new file `path`. If the process is killed, all lines before the last are whole.

    Pieces of replies (`CallText`) are not written. A secret could be split between two of them, and `CallEnded` has the
    whole reply.

    Example:
        ```python
        with TraceWriter("run.jsonl") as trace, RLM("offline", on_event=trace) as rlm:
            rlm.completion(Path("logs/"), "Which service failed first?")
        ```

    Args:
        path: Path of the file.
        extras: Whether token ids and log probabilities (`CallEnded.extra`) are written. They are many times as long as
            the text, and have it in pieces, in which no secret is recognised.

    Attributes:
        lost: Reason why lines are missing, or None.

    Raises:
        ConfigurationError: The file is not empty, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, extras: bool = False) -> None:
        require_kind("path", path, str, os.PathLike)
        require_kind("extras", extras, bool)
        self._extras = extras
        path = Path(path)
        with refusal_told(f"cannot write the trace {printable(str(path))}"):
            if path.is_file() and path.stat().st_size:  # events of two traces in one file would mix
                raise ConfigurationError(f"{path} exists: remove it, or write the trace to another file")
            self._file = path.open("ab", buffering=0)
        self._number = 0
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[tuple[dict[str, Any], int] | None] = SimpleQueue()
        self._waiting_chars = 0
        self._thread: threading.Thread | None = None
        self.lost: str | None = None

    def __call__(self, event: Event) -> None:
        """Write one event. It is in the file when this returns, unless it or an event before it is long."""
        if isinstance(event, CallText):
            return
        line = plain(event, extras=self._extras)
        chars = text_chars(line)
        with self._lock:
            self._number += 1
            line = {**line, "n": event.n or self._number, "time": event.time or round(time.time(), 6)}
            if chars <= INLINE_CHARS and not self._waiting_chars:
                self._write(line)
            else:
                self._write_later(line, chars)

    def close(self) -> None:
        """Write all waiting events, and close the file. A second call has no effect.

        Example:
            ```python
            trace = TraceWriter("second.jsonl")
            RLM("offline", on_event=trace).completion("a", "Which letter is it?")
            trace.close()
            ```
        """
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None
        self._file.close()

    def _write_later(self, line: dict[str, Any], chars: int) -> None:
        if self._waiting_chars + chars > MOST_WAITING_CHARS:
            line = cut(line)
            chars = text_chars(line)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_what_waits, name="rlm-broker-trace", daemon=True)
            self._thread.start()
        self._waiting_chars += chars + 1
        self._waiting.put((line, chars + 1))

    def _write_what_waits(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            line, chars = waiting
            self._write(line)
            with self._lock:
                self._waiting_chars -= chars

    def _write(self, line: dict[str, Any]) -> None:
        try:
            left = memoryview(encoded(line) + b"\n")
            while left:  # a nearly full disk takes a part, and fails at the rest
                left = left[self._file.write(left) :]
        except (OSError, ValueError) as error:  # a trace must not end its run; `lost` says why
            self.lost = self.lost or getattr(error, "strerror", None) or str(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@cache
def name_of(kind: type[Event]) -> str:
    """Return what a trace calls a kind of event: `block_ended` for `BlockEnded`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def plain(event: Event, *, extras: bool = False) -> dict[str, Any]:
    """Return the plain values of an event's line in a trace."""
    line = {"n": 0, "time": 0, "event": name_of(type(event)), **msgspec.to_builtins(event)}
    if not extras:
        line.pop("extra", None)
    return line


def trace_line(event: Event) -> bytes:
    """Return an event as a line of a trace, without its newline, for a `LiveSource` of your own.

    Example:
        ```python
        async def lines(self, run, after):
            async for event in self.started[run].events(after):
                yield trace_line(event)
        ```
    """
    return encoded(plain(event))


def encoded(line: dict[str, Any]) -> bytes:
    """Return a line of a trace as bytes, without its newline. It takes tens of milliseconds per megabyte."""
    return encode_escaped(line)


def cut(value: Any) -> Any:
    """Return the same plain values, with texts longer than `CUT_CHARS` cut."""
    if isinstance(value, str):
        return shorten(value, CUT_CHARS, end=0, gap="")
    if isinstance(value, dict):
        return {key: cut(each) for key, each in value.items()}
    return list(map(cut, value)) if isinstance(value, list) else value


# -- reading -----------------------------------------------------------------------------------------------------------

MOST_LINE_BYTES = 64 << 20
"""Bytes of one line of a trace. A longer one is refused: the largest event takes some 12 MB."""
MOST_DEPTH = 1_000
"""Depth of a run in a trace. A larger one is refused: each level is drawn further to the right."""
_KINDS = {name_of(kind): kind for kind in get_args(Event)}


def events(path: Path) -> Iterator[Event]:
    """Yield the events of a trace, as they were given to `on_event`.

    Raises:
        ConfigurationError: The file cannot be read, or is not a trace of this release. This may come after any number
            of events.
    """
    for line in lines(path):
        kind = _KINDS.get(str(line["event"]))
        if kind is None:
            continue
        try:
            event = _block_ended(line) if kind is BlockEnded else convert(line, kind)
            is_possible = 0 <= event.depth <= MOST_DEPTH
        except (ValueError, RecursionError, ArithmeticError):
            is_possible = False
        if not is_possible:
            raise ConfigurationError(f"{path} is not a trace: malformed {line['event']!s:.40} event")
        yield event


def _block_ended(line: dict[str, Any]) -> BlockEnded:
    """Convert what `msgspec` cannot: a block's displays may be text or bytes. A trace has none of them."""
    told = convert(line, _block_ended_form())
    outcome = Block(**structs.asdict(told.outcome))
    return BlockEnded(
        told.run, told.depth, told.block, outcome, told.displays, tree=told.tree, n=told.n, time=told.time
    )


@cache
def _block_ended_form() -> Any:
    """Return the fields of `BlockEnded` as a trace has them: its `Block` has no displays."""
    types = get_type_hints(Block)
    kept = [each for each in fields(Block) if each.name != "displays"]
    outcome = defstruct(
        "Outcome",
        [(each.name, types[each.name], NODEFAULT if each.default is MISSING else each.default) for each in kept],
    )
    displays = tuple[dict[MimeType, int], ...]
    own: list[Any] = [("run", str), ("depth", int), ("block", int), ("outcome", outcome), ("displays", displays, ())]
    return defstruct("BlockEndedForm", [*own, ("tree", str, ""), ("n", int, 0), ("time", float, 0.0)])


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a trace as plain values. Only `event`, `run` and `depth` are sure to be there, of any type.

    A last line that was cut off is left out.

    Raises:
        ConfigurationError: The file cannot be read, or is not a trace. This may come after any number of lines.
    """
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES), b""), 1):
                if len(line) == MOST_LINE_BYTES:
                    raise ConfigurationError(
                        f"{path} is not a trace: line {number} has {MOST_LINE_BYTES:,} bytes or more"
                    )
                if number > 1 and not line.endswith(b"\n"):  # the process was killed while it wrote this line
                    break
                event = json.loads(line)  # unlike msgspec, it reads lone surrogates
                if not isinstance(event, dict) or not {"event", "run", "depth"} <= event.keys():
                    raise ConfigurationError(f"{path} is not a trace: line {number} is not an event of a run")
                yield event
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if not number:  # the path contains a NUL
            raise ConfigurationError(f"cannot read {str(path)!r}: {error}") from None
        raise ConfigurationError(f"{path} is not a trace: line {number} is not JSON") from None
