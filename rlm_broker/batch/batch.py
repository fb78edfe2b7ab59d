"""The handle of a batch and its work: items in, runs at the same time, results out.

Theory of operation. One task pulls items, and begins a task for each as soon as one of `max_concurrent` places is free.
An item keeps its place until its result has room in the queue for the caller. So a caller that stops taking results
stops the feeding, and memory stays flat.

A batch ends in one of these ways. All pass through `_end`, and the caller first gets the results so far:

- All items are finished.
- A limit of the batch, a failure that every further call would meet, a full disk, `stop` or Ctrl+C: no further
  call is sent, calls under way have `DRAIN_S` to end, and then all runs are cancelled. Items that need no further call
  are finished meanwhile. The others stay unfinished, and their answers are in the journal.
- `cancel`, a second `stop`, or leaving the context manager: all runs are cancelled at once.
- An item cannot be used, or the iterable of the items raises: the runs under way go on to their end.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rlm_broker.batch.budget import Spending
from rlm_broker.batch.feed import Fed, Feeding, Items, require_items, total_of
from rlm_broker.batch.item_calls import ItemCalls, Turns
from rlm_broker.batch.items import BatchResult, result_line, result_of
from rlm_broker.batch.journal import Journal
from rlm_broker.batch.progress import BatchProgress, Counting
from rlm_broker.batch.score import Score, Scoring
from rlm_broker.batch.settings import settings_of
from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.concurrency.resource import AsyncResource
from rlm_broker.concurrency.threads import in_thread
from rlm_broker.errors import ConfigurationError, LimitReached, RunCancelled, require_kind
from rlm_broker.limits import BatchLimits
from rlm_broker.results import Completion
from rlm_broker.run.engine import Engine
from rlm_broker.run.request import RunRequest
from rlm_broker.usage import Usage

TELLS_SECONDS_S = 5.0
"""Seconds between two notes of the time worked."""
DRAIN_S = 20.0
"""Seconds for calls under way when a batch ends: their answers are paid, and are kept in the journal."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The request for a batch.

    Attributes:
        items: Items, in any form that `RLM.batch` takes.
        max_concurrent: Runs at the same time.
        limits: Limits of the whole batch.
        fail_fast: Whether the first failed item ends it.
        score: Function that judges each result, or None.
        trajectories: Whether lines of results have the conversations.
        out: File of results; None keeps none.
        retry_failed: Whether failed items run again.
        settings_changed: Whether other limits than those in the journal are taken for the items left.
        samples: Times that each item is asked.
        root: Folder to which paths are relative in digests; None takes paths as they are.

    Raises:
        ConfigurationError: A value cannot be used.
    """

    items: Items
    max_concurrent: int = 16
    limits: BatchLimits = field(default_factory=BatchLimits)
    fail_fast: bool = False
    score: Score | None = None
    trajectories: bool = False
    out: str | os.PathLike[str] | None = None
    retry_failed: bool = False
    settings_changed: bool = False
    samples: int = 1
    root: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        require_items(self.items)
        for name in ("max_concurrent", "samples"):
            require_kind(name, value := getattr(self, name), int)
            if value < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {value}")
        require_kind("limits of a batch", self.limits, BatchLimits)
        for name in ("fail_fast", "trajectories", "retry_failed", "settings_changed"):
            require_kind(name, getattr(self, name), bool)
        for name in ("out", "root"):
            require_kind(name, getattr(self, name), str, os.PathLike, type(None))
        for name in ("retry_failed", "settings_changed"):
            if getattr(self, name) and self.out is None:
                raise ConfigurationError(f"{name} needs the file of results: give out")


class Batch(AsyncResource):
    """Many questions being answered. `RLM.batch` makes it.

    Iterate over it, with `for` or `async for`: each `BatchResult` comes as its item is done. It begins when the first
    result is asked for, or when it is entered as a context manager. Leaving the context ends all runs.

    Example:
        ```python
        with RLM("offline") as rlm, rlm.batch(items, out="results.jsonl") as batch:
            for result in batch:
                print(result.id, result.answer, batch.progress.left_s)
        ```

    Args:
        batch: The request.
        engine: Starts the runs. It is opened while the batch runs, if it is not open.
        request: Request for the run of each item, but for its question and its context.
    """

    def __init__(
        self,
        batch: BatchRequest,
        engine: Engine,
        request: RunRequest,
    ) -> None:
        self._event_loop = engine.run_loop
        self._batch = batch
        self._engine = engine
        self._request = request
        self._scoring = Scoring(batch.score)
        self._keeping = AsyncExitStack()
        self._journal: Journal | None = None
        total = total_of(batch.items)
        self._counting = Counting(None if total is None else total * batch.samples)
        self._spending: Spending | None = None
        self._error: BaseException | None = None
        self._main: asyncio.Task[None] | None = None
        self._drains = False
        self._has_begun = self._is_iterated = False

    # -- what callers do with it -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[BatchResult]:
        with contextlib.ExitStack() as own:
            if not self.is_open:
                own.enter_context(self)
            loop = self.bind_loop()
            self._require_once()
            while True:
                try:
                    result = loop.run(self._next())
                except KeyboardInterrupt:
                    self.stop()
                    continue
                if result is None:
                    return
                yield result

    async def __aiter__(self) -> AsyncIterator[BatchResult]:
        async with contextlib.AsyncExitStack() as own:
            if not self.is_open:
                await own.enter_async_context(self)
            loop = self.bind_loop()
            self._require_once()
            while (result := await loop.arun(self._next())) is not None:
                yield result

    @property
    def progress(self) -> BatchProgress:
        """Progress at this moment. It may be read from any thread."""
        return self._counting.progress(Usage() if self._spending is None else self._spending.usage)

    def stop(self) -> None:
        """Send no further call, let those under way end for 20 s, and keep their answers in the journal.

        Unfinished items stay so, and iterating raises `RunCancelled`. A second call ends all runs at once.

        Example:
            ```python
            for result in (batch := rlm.batch(items)):
                if result.failure:
                    batch.stop()
            ```
        """
        if self._event_loop is not None:
            self._event_loop.call_soon(lambda: self._end(RunCancelled()))

    def cancel(self) -> None:
        """End all runs at once. Their items stay unfinished, and iterating raises `RunCancelled`.

        Example:
            ```python
            for result in (batch := rlm.batch(items)):
                if result.failure:
                    batch.cancel()
            ```
        """
        if self._event_loop is not None:
            self._event_loop.call_soon(lambda: self._end(RunCancelled(), at_once=True))

    # -- its beginning and its end -----------------------------------------------------------------------------------

    async def _open(self) -> None:
        if self._has_begun:
            raise ConfigurationError("a batch runs once: make another one, which goes on from the same file")
        self._has_begun = True
        self._results: asyncio.Queue[BatchResult | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(self._batch.max_concurrent)
        self._places = asyncio.Semaphore(self._batch.max_concurrent)
        self._running: set[asyncio.Task[None]] = set()
        self._journal = await self._keeping.enter_async_context(self._opened())
        self._begin_counting()
        self._main = asyncio.get_running_loop().create_task(self._work())

    async def _close(self) -> None:
        if self._main is not None:
            self._end(RunCancelled(), at_once=True)
            await asyncio.wait({self._main})
        self._scoring.close()
        await self._keeping.aclose()

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[Journal | None]:
        """Open the engine and the journal, until the context manager exits.

        Raises:
            ConfigurationError: The file of results or its journal cannot be used, or the price of a model is not known.
        """
        engine, batch = self._engine, self._batch
        async with AsyncExitStack() as own:
            journal = None
            if batch.out is not None:  # a link stays one, and its file has the journal beside it
                out = Path(batch.out)
                out = Path(os.path.realpath(out)) if os.path.islink(out) else out  # noqa: PTH114 - `Path` raises
                journal = await in_thread(lambda _: Journal(out), discard=Journal.close)
                own.push_async_callback(journal.aclose)
            if not engine.is_open:
                own.enter_context(engine.seeded(None if journal is None else journal.seed))
            await own.enter_async_context(engine.borrowed())
            if batch.limits.max_budget_usd is not None:
                await engine.require_priced("max_budget_usd")
            if journal is not None:
                start = partial(journal.start, settings_of(engine, self._request), engine.seed)
                flags = {"retry_failed": batch.retry_failed, "takes_others": batch.settings_changed}
                await in_thread(lambda _: start(**flags))
            yield journal

    def _begin_counting(self) -> None:
        journal, limits = self._journal, self._batch.limits
        self._earlier_s = 0.0
        self._counting = Counting(self._counting.total)
        if journal is not None:
            journal.begin(self._end)
            self._earlier_s = journal.seconds
            self._counting.failed_before = journal.failed
        self._spending = Spending(limits, {} if journal is None else journal.spent, self._end)

    def _end(self, error: BaseException, *, at_once: bool = False) -> None:
        """End the batch with an error, after the calls under way. The first error counts; a second one ends
        the wait for the calls."""
        if self._main is None or self._main.done():
            return
        assert self._spending is not None
        if self._error is not None or at_once:
            self._spending.hurry()
        if self._error is not None:
            return
        self._error = error
        self._spending.stop()
        self._drains = not at_once
        self._main.cancel()

    async def _next(self) -> BatchResult | None:
        result = await self._results.get()
        if result is not None:
            self._room.release()
            return result
        self._results.put_nowait(None)
        if self._error is not None:
            raise self._error
        return None

    def _require_once(self) -> None:
        if self._is_iterated:
            raise ConfigurationError("a batch is iterated over once: keep the results that it gave")
        self._is_iterated = True

    # -- its work ----------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        notes = asyncio.get_running_loop().create_task(self._note_time())
        try:
            await self._feed()
            while self._running:
                await asyncio.wait(self._running)
        except asyncio.CancelledError:
            self._error = self._error or RunCancelled()
            notes.cancel()
            if self._drains and self._spending is not None:
                await self._spending.drained(DRAIN_S)
        finally:
            notes.cancel()
            for task in self._running:
                task.cancel()
            while self._running:
                await asyncio.wait(self._running)
            self._counting.end()
            if self._journal is not None:
                self._journal.tell_seconds(self._earlier_s + self._counting.seconds)
            self._results.put_nowait(None)

    async def _feed(self) -> None:
        finished = {} if self._journal is None else self._journal.finished
        root = None if self._batch.root is None else Path(self._batch.root)
        feeding = Feeding(self._batch.items, finished, self._count_skipped, self._batch.samples, root)
        failure: BaseException | None = None
        try:
            async with contextlib.aclosing(feeding.fed()) as items:
                await self._places.acquire()
                async for fed in items:
                    self._require_means()
                    task = asyncio.get_running_loop().create_task(self._one(fed))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
                    await self._places.acquire()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised to the caller after the results under way
            failure = error
        while self._running:
            await asyncio.wait(self._running)
        self._error = self._error or failure

    def _require_means(self) -> None:
        """Refuse to begin an item if a limit is reached already. A finished batch needs no means.

        Raises:
            LimitReached: Earlier processes have spent all.
        """
        assert self._spending is not None
        self._spending.require_means()
        timeout_s, worked_s = self._batch.limits.timeout_s, self._earlier_s + self._counting.seconds
        if timeout_s is not None and worked_s >= timeout_s:
            raise LimitReached("timeout_s", worked_s, timeout_s)

    async def _one(self, fed: Fed) -> None:
        """Answer one item, and hand its result to the caller. It has a place, and keeps it until there is room."""
        self._counting.running += 1
        try:
            result, error, turns = await self._answered(fed)
            result = await self._scoring.scored(fed.item, result)
            await to_its_end(lambda: self._finish(fed, result, turns))
            if self._batch.fail_fast and result.status == "failed" and error is not None:
                self._end(error, at_once=True)
            await self._room.acquire()
        except Exception as error:  # noqa: BLE001 - raised to the caller
            self._end(error)
        finally:
            self._counting.running -= 1
            self._places.release()

    async def _finish(self, fed: Fed, result: BatchResult, turns: dict[str, Turns] | None) -> None:
        """Write a result down, and give it out. An item cancelled from outside stays unfinished."""
        journal = self._journal
        if journal is not None and not isinstance(result.failure, RunCancelled):
            more: dict[str, Any] = {"sample": fed.sample} if self._batch.samples > 1 else {}
            if journal.changed:
                more["settings_changed"] = journal.changed
            line = partial(result_line, result, fed.digest, turns, more)
            why = result.error_kind if result.status == "failed" else result.limit
            await journal.finish(fed.key, fed.digest, result.status, why, result.replayed, line)
        self._counting.add(result)
        self._results.put_nowait(result)

    async def _answered(self, fed: Fed) -> tuple[BatchResult, Exception | None, dict[str, Turns] | None]:
        journal, spending, item = self._journal, self._spending, fed.item
        assert spending is not None
        earlier = [] if journal is None else await journal.earlier(fed.key)
        turns: dict[str, Turns] | None = {} if self._batch.trajectories else None
        keep = None if journal is None else partial(journal.keep, fed.key)
        calls = ItemCalls(earlier, keep, fed.sample, turns, spending)
        request = replace(self._request, context=item.context, question=item.question, completing=calls.before)
        outcome: Completion | Exception
        try:
            outcome = await self._engine.start(request)
        except Exception as error:  # noqa: BLE001 - becomes the item's result
            if isinstance(error, RunCancelled) and not self._engine.is_open:  # the engine is being closed
                self._end(error, at_once=True)
                raise asyncio.CancelledError from None
            outcome = error
        result = result_of(item, fed.sample, outcome, calls)
        self._counting.replayed += result.replayed
        return result, outcome if isinstance(outcome, Exception) else None, turns

    def _count_skipped(self, number: int) -> None:
        self._counting.skipped += number

    async def _note_time(self) -> None:
        """Write down the time worked, and end the batch when it is used up, unless no item runs."""
        limit_s = self._batch.limits.timeout_s
        while True:
            worked_s = self._earlier_s + self._counting.seconds
            if limit_s is not None and worked_s >= limit_s and not self._running:
                limit_s = None  # `_require_means` refuses the next item
            if limit_s is not None and worked_s >= limit_s:
                self._end(LimitReached("timeout_s", worked_s, limit_s))
                return
            if self._journal is not None:
                self._journal.tell_seconds(worked_s)
            await asyncio.sleep(TELLS_SECONDS_S if limit_s is None else min(TELLS_SECONDS_S, limit_s - worked_s))
