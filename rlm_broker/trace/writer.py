"""A run's events as a file: one JSON object a line, numbered, flushed as it happens."""

import os
import re
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import msgspec

from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.trace.event_log import text_chars
from rlm_broker.trace.events import CallText, Event
from sandbox_worker.wire.text_json import encode_escaped

INLINE_CHARS = 1 << 16
"""Characters of an event that is written where it happens. A longer one takes tens of milliseconds a megabyte, and
is written by a thread, with all that come while it is behind."""
MOST_WAITING_CHARS = 1 << 25
"""Characters that may wait for the thread. Beyond, texts are cut to `CUT_CHARS`, and say so."""
CUT_CHARS = 10_000


class TraceWriter:
    """Writes events to the new file `path`; a run that is killed leaves every line before its end whole.

    Pieces of replies are not written: a secret could be in two of them, and `CallEnded` has the whole reply.

    Attributes:
        lost: Why lines are missing, if any are.

    Raises:
        ConfigurationError: The file has something in it already, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require_kind("path", path, str, os.PathLike)
        path = Path(path)
        try:
            if path.is_file() and path.stat().st_size:  # two traces in one file would be taken for one
                raise ConfigurationError(f"{path} exists: remove it, or write the trace to another file")
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigurationError(f"cannot write the trace {path}: {error.strerror}") from None
        except ValueError as error:  # no file can have that name
            raise ConfigurationError(f"cannot write the trace {str(path)!r}: {error}") from None
        self._number = 0
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[tuple[dict[str, Any], int] | None] = SimpleQueue()
        self._waiting_chars = 0
        self._thread: threading.Thread | None = None
        self.lost: str | None = None

    def __call__(self, event: Event) -> None:
        """Write one event. It is in the file when this returns, unless it or one before it is long."""
        if isinstance(event, CallText):
            return
        line: dict[str, Any] = {"n": 0, "time": 0, "event": name_of(type(event)), **msgspec.to_builtins(event)}
        chars = text_chars(line)
        with self._lock:
            self._number += 1
            line = {**line, "n": event.n or self._number, "time": event.time or round(time.time(), 6)}
            if chars <= INLINE_CHARS and not self._waiting_chars:
                self._write(line)
            else:
                self._write_later(line, chars)

    def close(self) -> None:
        """Write what waits, and close the file. Harmless when repeated."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None
        self._file.close()

    def _write_later(self, line: dict[str, Any], chars: int) -> None:
        if self._waiting_chars + chars > MOST_WAITING_CHARS:
            line = _cut(line)
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
            left = memoryview(encode_escaped(line) + b"\n")
            while left:  # a disk that is nearly full takes a part of it, and says so with the rest
                left = left[self._file.write(left) :]
        except (OSError, ValueError) as error:  # a run is not to end because its trace cannot be written, or was closed
            self.lost = self.lost or getattr(error, "strerror", None) or str(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def name_of(kind: type[Event]) -> str:
    """Return what a trace calls a kind of event: `block_ended` for `BlockEnded`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _cut(value: Any) -> Any:
    """The same plain values with long texts cut."""
    if isinstance(value, str) and len(value) > CUT_CHARS:
        return f"{value[:CUT_CHARS]}... [{len(value) - CUT_CHARS:,} characters left out: the trace could not keep up]"
    if isinstance(value, dict):
        return {key: _cut(each) for key, each in value.items()}
    return list(map(_cut, value)) if isinstance(value, list) else value
