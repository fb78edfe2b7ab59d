"""A run's events as a file: one JSON object a line, numbered, flushed as it happens."""

import json
import re
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from rlm_broker.errors import ConfigurationError
from rlm_broker.trace.events import Event

SECRET = re.compile(
    r"sk-[A-Za-z0-9_-]{16,}|Bearer [A-Za-z0-9._-]{16,}|(?i:api[_-]?key|password)\s*[=:]\s*[A-Za-z0-9+/._-]{8,}"
)
"""What looks like a key or a password in any text of a trace."""


class TraceWriter:
    """Writes events to `path`; a run that is killed leaves every line before its end whole.

    Attributes:
        lost: Why lines are missing, if any are.

    Raises:
        ConfigurationError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigurationError(f"cannot write the trace {path}: {error.strerror}") from None
        self._number = 0
        self.lost: str | None = None

    def __call__(self, event: Event) -> None:
        """Write one event."""
        self._number += 1
        line: dict[str, Any] = {
            "n": self._number,
            "time": round(time.time(), 6),
            "event": _name(event),
            **msgspec.to_builtins(event),
        }
        try:
            self._file.write(_encoded(line) + b"\n")
        except OSError as error:  # a run is not to end because its trace cannot be written
            self.lost = self.lost or error.strerror or str(error)

    def close(self) -> None:
        """Harmless when repeated."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _name(event: Event) -> str:
    """`BlockEnded` → `block_ended`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()


def _encoded(line: dict[str, Any]) -> bytes:
    try:
        text = msgspec.json.encode(line).decode()
    except UnicodeEncodeError:  # lone surrogates
        text = json.dumps(line)
    return SECRET.sub("[redacted]", text).encode()
