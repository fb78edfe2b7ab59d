"""Content of files to write."""

from types import SimpleNamespace
from typing import Any


def coerce_write_payload(*, path: Any, data: Any) -> SimpleNamespace:
    """Return a stream of bytes."""
    assert path is not None
    return SimpleNamespace(stream=data)
