"""The items of a batch as the user gives them: mappings or lines of JSON, read some at a time.

No item is pulled before there is a place for it, so a source of any length takes no memory.
"""

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlm_broker.batch.items import BatchItem
from rlm_broker.batch.journal import DIGEST_BYTES, key_of
from rlm_broker.concurrency.threads import DaemonThreads
from rlm_broker.context.store import Encoded, Paths
from rlm_broker.errors import ConfigurationError, ContextRefused
from rlm_broker.run.request import require_question
from rlm_broker.values.text import printable
from rlm_broker.values.validation import suggestion
from sandbox_worker.wire.text_json import decode_escaped, encode_escaped

KEYS = ("id", "question", "context", "path", "metadata")
MOST_ID_CHARS = 256
"""Maximum characters of an item's id."""
MOST_LINE_BYTES = 1 << 30
"""Maximum bytes of a line of items. A longer context is given by its path."""


def item_of(given: object, where: str) -> BatchItem:
    """Return the item that a user gave: the item itself, or one made of a mapping.

    Args:
        given: A `BatchItem`, or a mapping with the keys `KEYS`.
        where: Place of the item for errors, for example "item 3".

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
            raise ConfigurationError(f"{where} has an unknown key {key!r:.80}{suggestion(str(key), KEYS)}")
    if "id" not in given:
        raise ConfigurationError(f"{where} has no id: give each item one of its own")
    number = given["id"]
    id = str(number) if isinstance(number, int) and not isinstance(number, bool) else number
    _require_id(id, where)
    where = f"{where} (id {id!r:.80})"
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


def digest_of(item: BatchItem, root: Path | None = None) -> bytes:
    """Return the digest of an item's question and context.

    A path counts by its name, and by the name, size and time of each file it stands for. Objects of other classes
    than JSON has count by their class alone.

    Args:
        item: The item.
        root: Folder to which names of paths below it are relative, so that an input may be moved with its files.
    """
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    hashed.update(encode_escaped(item.question))
    for part in _parts(item.context, root):
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.digest()


def _parts(context: object, root: Path | None) -> Iterator[bytes]:
    match context:
        case str():
            yield b"text"
            yield context.encode("utf-8", "surrogatepass")
        case Encoded():
            yield f"encoded {context.encoding} {context.errors}".encode()
            yield from _parts(context.source, root)
        case Paths():
            yield from _parts_of_files(context, root)
        case os.PathLike():
            yield from _parts_of_files(Paths([context]), root)
        case _:
            yield b"value"
            try:
                yield encode_escaped(context)
            except (TypeError, ValueError, RecursionError):
                yield f"{type(context).__module__}.{type(context).__qualname__}".encode()


def _parts_of_files(paths: Paths, root: Path | None) -> Iterator[bytes]:
    yield b"paths"
    for path in paths:
        yield os.fsencode(path.relative_to(root) if root is not None and path.is_relative_to(root) else path)
    try:
        for name, path in paths.files().items():
            found = path.stat()
            yield os.fsencode(name)
            yield f"{found.st_size} {int(found.st_mtime)}".encode()
    except (ContextRefused, OSError, ValueError):
        yield b"missing"


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


MOST_AHEAD = 64
"""Items of a list pulled in one step of the thread."""
PULLED: Final = b""
"""Stands for the digest of a pulled item: no more is needed to refuse its id when that comes again."""
STEP_S = 0.005
"""Seconds of one step of the thread; at least one item is pulled in it."""
Items = Iterable[BatchItem | Mapping[str, Any]] | AsyncIterable[BatchItem | Mapping[str, Any]]
"""Items of a batch: `BatchItem`, or dicts with the keys `id`, `question`, `context` or `path`, and `metadata`."""


class Fed(NamedTuple):
    """An item to run.

    Attributes:
        digest: Digest of its question and context.
        sample: Number of its sample, from 0.
        key: Digest of its id and the sample.
    """

    item: BatchItem
    digest: bytes
    sample: int
    key: bytes


class Feeding:
    """Pulls items, checks them, and leaves out finished ones.

    A plain iterable is pulled in a thread, so that one that blocks holds no event loop.

    Args:
        items: Items, or mappings to make items of.
        known: Maps the key of each finished item or sample to the digest of the item. The keys of pulled items are
            added, so that no id comes twice.
        on_skipped: Called with the number of items left out, on the thread or the event loop.
        samples: Times that each item is asked.
        root: Folder to which paths are relative in digests.
    """

    def __init__(
        self,
        items: Items,
        known: dict[bytes, bytes],
        on_skipped: Callable[[int], object],
        samples: int = 1,
        root: Path | None = None,
    ) -> None:
        self._items = items
        self._known = known
        self._on_skipped = on_skipped
        self._samples = samples
        self._root = root
        self._number = 0
        self._is_at_end = False

    async def fed(self) -> AsyncGenerator[Fed, None]:
        """Yield the items to run.

        Raises:
            ConfigurationError: An item cannot be used, has the id of another one, or is not the finished one
                under its id.
        """
        if isinstance(self._items, AsyncIterable):
            async for given in self._items:
                for fed in self._checked(given):
                    yield fed
            return
        threads = DaemonThreads(1)
        # The next item of a stream may be late, and the one before it shall not wait.
        most = 1 if total_of(self._items) is None else MOST_AHEAD
        try:
            iterator = iter(self._items)
            while not self._is_at_end:
                chunk: list[Fed] = []
                pulled = threads.submit(lambda chunk=chunk: self._pull(iterator, chunk, most))  # type: ignore[misc]
                error = await asyncio.wrap_future(pulled)
                for fed in chunk:
                    yield fed
                if error is not None:
                    raise error
        finally:
            threads.close(RuntimeError("the batch has ended"))

    def _pull(self, iterator: Iterator[Any], chunk: list[Fed], most: int) -> BaseException | None:
        until = time.monotonic() + STEP_S
        try:
            while len(chunk) < most:
                chunk += self._checked(next(iterator))
                if time.monotonic() > until:
                    break
        except StopIteration:
            self._is_at_end = True
        except BaseException as error:  # noqa: BLE001 - raised on the event loop, after the items before it
            return error
        return None

    def _checked(self, given: object) -> list[Fed]:
        self._number += 1
        item = item_of(given, f"item {self._number:,}")
        made_of = digest_of(item, self._root)
        left = []
        for sample in range(self._samples):
            key = key_of(item.id, sample)
            done = self._known.get(key)
            self._known[key] = PULLED
            if done is None:
                left.append(Fed(item, made_of, sample, key))
            elif done is PULLED:
                raise ConfigurationError(
                    f"item {self._number:,} has the id {item.id!r}, which an item before it has, too"
                )
            elif done != made_of:
                raise ConfigurationError(
                    f"item {self._number:,} with the id {item.id!r} has another question or context than the one that "
                    "is finished: give it another id, or name another file for the results"
                )
        if len(left) < self._samples:
            self._on_skipped(self._samples - len(left))
        return left


def require_items(items: object) -> None:
    """Refuse a value that is no iterable of items.

    Raises:
        ConfigurationError: It cannot be iterated over, or is a single text or dict.
    """
    if not isinstance(items, AsyncIterable | Iterable) or isinstance(items, str | bytes | Mapping):
        raise ConfigurationError(f"items must be an iterable of items, not {type(items).__name__}")


def total_of(items: Items) -> int | None:
    """Return the number of items; None if that is not known before they are pulled."""
    try:
        return len(items)  # type: ignore[arg-type]
    except TypeError:
        return None
