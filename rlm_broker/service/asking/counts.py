"""Bounds on the messages, parts and files of one request: all clients wait while the event loop reads them."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

MOST_ITEMS: Final = 5_000
"""Messages or items of one request, and parts of all of them; also items of a whole conversation that is kept."""
MOST_FILES: Final = 1_000
"""Files in the messages of one request."""


def _counted(items: Any) -> Any:
    """Refuse a list with too many messages, parts or files, before each of them is looked at."""
    if not isinstance(items, list):
        return items
    parts = files = 0
    if len(items) > MOST_ITEMS:
        raise _too_many(f"{MOST_ITEMS:,} messages or items: leave out the oldest")
    for item in items:
        for content in (item.get("content"), item.get("output")) if isinstance(item, Mapping) else ():
            if isinstance(content, list):
                parts += len(content)
                if parts > MOST_ITEMS:
                    raise _too_many(f"{MOST_ITEMS:,} parts: join texts, or send a file")
                files += sum(isinstance(part, Mapping) and part.get("type") in _FILES for part in content)
    if files > MOST_FILES:
        raise _too_many(f"{MOST_FILES:,} files: send an archive of them")
    return items


def _too_many(what: str) -> PydanticCustomError:
    return PydanticCustomError("too_many", "there are more than {what}", {"what": what})


_FILES: Final = ("file", "input_file")
COUNTED: Final = BeforeValidator(_counted)
"""Marks a field whose messages are counted."""
