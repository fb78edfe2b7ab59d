"""The items of a batch, pulled from what the user gave: some at a time, and no faster than they are taken."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from rlm_broker.batch.items import BatchItem
from rlm_broker.batch.parsing import digest_of, item_of
from rlm_broker.concurrency.threads import DaemonThreads
from rlm_broker.errors import ConfigurationError
from rlm_broker.journal.lines import digest

MOST_AHEAD = 64
"""Items that are pulled in one step of the thread."""
PULLED: Final = b""
"""Digest of an item that was pulled: an id that comes again is refused, and no more of the item is needed."""
STEP_S = 0.005
"""Seconds of one step of the thread; at least one item is pulled in it."""
Items = Iterable[BatchItem | Mapping[str, Any]] | AsyncIterable[BatchItem | Mapping[str, Any]]
"""Items of a batch: `BatchItem`, or dicts with the keys `id`, `question`, `context` or `path`, and `metadata`."""


class Fed(NamedTuple):
    """An item that is to run, and the digest of its question and context."""

    item: BatchItem
    digest: bytes


class Feeding:
    """Pulls items, checks them, and leaves out those that are finished.

    A plain iterable is pulled in a thread, so that one that blocks holds no event loop.

    Args:
        items: Items, or mappings of which items are made.
        known: Maps the digest of the id of each finished item to the digest of the item. The ids of items that are
            pulled are added, so that no id comes twice.
        on_skipped: Called with the number of items that were left out, on the thread or the event loop.
    """

    def __init__(self, items: Items, known: dict[bytes, bytes], on_skipped: Callable[[int], object]) -> None:
        self._items = items
        self._known = known
        self._on_skipped = on_skipped
        self._number = 0
        self._is_at_end = False

    async def fed(self) -> AsyncGenerator[Fed, None]:
        """Yield the items that are to run.

        Raises:
            ConfigurationError: An item cannot be used, has the id of another one, or is not the one that was finished
                under its id.
        """
        if isinstance(self._items, AsyncIterable):
            async for given in self._items:
                if (fed := self._checked(given)) is not None:
                    yield fed
            return
        threads = DaemonThreads(1)
        try:
            iterator = iter(self._items)
            while not self._is_at_end:
                chunk: list[Fed] = []
                pulled = threads.submit(lambda chunk=chunk: self._pull(iterator, chunk))  # type: ignore[misc]
                error = await asyncio.wrap_future(pulled)
                for fed in chunk:
                    yield fed
                if error is not None:
                    raise error
        finally:
            threads.close(RuntimeError("the batch has ended"))

    def _pull(self, iterator: Iterator[Any], chunk: list[Fed]) -> BaseException | None:
        until = time.monotonic() + STEP_S
        try:
            while len(chunk) < MOST_AHEAD:
                if (fed := self._checked(next(iterator))) is not None:
                    chunk.append(fed)
                if time.monotonic() > until:
                    break
        except StopIteration:
            self._is_at_end = True
        except BaseException as error:  # noqa: BLE001 - raised on the event loop, after the items before it
            return error
        return None

    def _checked(self, given: object) -> Fed | None:
        self._number += 1
        item = item_of(given, f"item {self._number:,}")
        key, made_of = digest(item.id), digest_of(item)
        done = self._known.get(key)
        self._known[key] = PULLED
        if done is PULLED:
            raise ConfigurationError(f"item {self._number:,} has the id {item.id!r}, which an item before it has, too")
        if done is None:
            return Fed(item, made_of)
        if done != made_of:
            raise ConfigurationError(
                f"item {self._number:,} with the id {item.id!r} has another question or context than the one that is "
                "finished: give it another id, or name another file for the results"
            )
        self._on_skipped(1)
        return None


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
