"""Items from what users give: mappings, and lines of JSON."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlm_broker.asked import require_question
from rlm_broker.batch.items import BatchItem
from rlm_broker.context.store import Encoded, Paths
from rlm_broker.errors import ConfigurationError
from rlm_broker.journal.lines import DIGEST_BYTES
from rlm_broker.validation import suggestion
from rlm_broker.values.text import clip, printable
from sandbox_worker.wire.text_json import decode_escaped, encode_escaped

KEYS = ("id", "question", "context", "path", "metadata")
MOST_ID_CHARS = 256
"""Maximum characters of an item's id."""
MOST_LINE_BYTES = 1 << 30
"""Maximum bytes of a line of items. A longer context is given by its path."""


def item_of(given: object, where: str) -> BatchItem:
    """Return the item that a user gave: itself, or made of a mapping.

    Args:
        given: A `BatchItem`, or a mapping with the keys `KEYS`.
        where: Place of the item for errors, such as "item 3".

    Raises:
        ConfigurationError: A key is missing, unknown or of the wrong type.
    """
    if isinstance(given, BatchItem):
        _require_id(given.id, where)
        _require_question(given.question, where)
        _require_metadata(given.metadata, where)
        return given
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where} must be a BatchItem or a dict, not {type(given).__name__}")
    for key in given:
        if key not in KEYS:
            raise ConfigurationError(f"{where} has an unknown key {_short(key)}{suggestion(str(key), KEYS)}")
    if "id" not in given:
        raise ConfigurationError(f"{where} has no id: give each item one of its own")
    number = given["id"]
    id = str(number) if isinstance(number, int) and not isinstance(number, bool) else number
    _require_id(id, where)
    where = f"{where} (id {_short(id)})"
    if ("context" in given) == ("path" in given):
        both = "both a context and a path: give one of them" if "path" in given else "neither a context nor a path"
        raise ConfigurationError(f"{where} has {both}")
    if "path" in given and not (isinstance(given["path"], str | os.PathLike) and os.fspath(given["path"])):
        raise ConfigurationError(f"the path of {where} must be the path of a file or a folder, as text")
    context = given["context"] if "context" in given else Path(given["path"])
    _require_question(given.get("question"), where)
    metadata = given.get("metadata")
    _require_metadata({} if metadata is None else metadata, where)
    return BatchItem(id, context, given.get("question"), metadata or {})


def items_of_lines(lines: Iterable[bytes], name: str) -> Iterator[BatchItem]:
    """Yield the items of a file of JSON lines. Empty lines are passed over.

    Args:
        lines: Lines of the file, as bytes.
        name: Name of the file for errors.

    Raises:
        ConfigurationError: A line is no JSON object, or as for `item_of`.
    """
    for number, line in enumerate(lines, 1):
        where = f"line {number:,} of {name}"
        if not line.strip():
            continue
        if len(line) > MOST_LINE_BYTES:
            raise ConfigurationError(f"{where} has more than {MOST_LINE_BYTES:,} bytes: give the context by its path")
        bare = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        try:
            given = decode_escaped(bare, dict[str, Any])
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{where} is not a JSON object: {printable(str(error))}") from None
        yield item_of(given, where)


def digest_of(item: BatchItem) -> bytes:
    """Return the digest of an item's question and context. Of a path it has the name, and the size of the file.

    Objects of other classes than JSON has count by their class alone.
    """
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    hashed.update(encode_escaped(item.question))
    for part in _parts(item.context):
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.digest()


def _parts(context: object) -> Iterator[bytes]:
    match context:
        case str():
            yield b"text"
            yield context.encode("utf-8", "surrogatepass")
        case Encoded():
            yield f"encoded {context.encoding} {context.errors}".encode()
            yield from _parts(context.source)
        case Paths():
            for path in context:
                yield from _parts(path)
        case os.PathLike():
            yield b"path"
            yield os.fsencode(context)
            yield str(_size(Path(context))).encode()
        case _:
            yield b"value"
            try:
                yield encode_escaped(context)
            except (TypeError, ValueError, RecursionError):
                yield f"{type(context).__module__}.{type(context).__qualname__}".encode()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError):
        return None


def _require_id(id: object, where: str) -> None:
    if not isinstance(id, str):
        raise ConfigurationError(f"the id of {where} must be text or a whole number, not {type(id).__name__}")
    if not id.strip():
        raise ConfigurationError(f"the id of {where} is empty: give each item one of its own")
    if len(id) > MOST_ID_CHARS:
        raise ConfigurationError(f"the id of {where} has more than {MOST_ID_CHARS} characters: give a shorter one")


def _require_question(question: object, where: str) -> None:
    try:
        require_question(question)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None


def _require_metadata(metadata: object, where: str) -> None:
    if not isinstance(metadata, Mapping):
        raise ConfigurationError(f"the metadata of {where} must be a dict, not {type(metadata).__name__}")
    try:
        encode_escaped(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"the metadata of {where} must be JSON values: {error}") from None


def _short(value: object) -> str:
    return clip(repr(value), 80)
