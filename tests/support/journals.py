"""Journals for tests: opened without an engine, and a disk that ends the process at a certain operation."""

import asyncio
import os
import signal
import sqlite3
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlm_broker.batch import journal, results_file
from rlm_broker.batch.journal import AnsweredCall, Journal, key_of
from rlm_broker.results import Call
from rlm_broker.usage import Usage
from sandbox_worker.wire.text_json import encode_escaped


class DyingDisk:
    """A disk whose operation of a certain number ends the process: before it, or in the middle of what it writes.

    Operations are those on the file of results, and each statement of SQLite, `COMMIT` among them.

    Args:
        last: Number of that operation, from 1; 0 ends nothing.
        tears: Whether a write to the file of results is half done before the end.
        end: Ends the process.

    Attributes:
        operations: Operations so far.
    """

    def __init__(self, last: int, *, tears: bool = False, end: Callable[[], Any] | None = None) -> None:
        self.operations = 0
        self._last = last
        self._tears = tears
        self._end = end or kill_this_process

    def patch(self) -> "DyingDisk":
        """Take the place of the operations in this process, for good."""
        named = {name: self._counted(name, getattr(os, name)) for name in ("write", "ftruncate", "fdatasync")}
        vars(results_file)["os"] = _Instead(os, **named)
        vars(journal)["sqlite3"] = _Instead(sqlite3, connect=self._connected)
        return self

    def _connected(self, *given: Any, **more: Any) -> sqlite3.Connection:
        database: sqlite3.Connection = sqlite3.connect(*given, **more)
        database.set_trace_callback(lambda _: self._count())
        return database

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            if name == "write" and self._tears and self.operations + 1 == self._last:
                os.write(given[0], bytes(given[1])[: len(given[1]) // 2])
            self._count()
            return real(*given)

        return counted

    def _count(self) -> None:
        self.operations += 1
        if self.operations == self._last:
            self._end()


class _Instead:
    """A module of which some names are others."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def kill_this_process() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def was_killed(work: Callable[[], object]) -> bool:
    """Run work in a forked child, and return whether a SIGKILL has ended it. It must not fail otherwise."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - told by the status
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def open_journal(
    out: Path, settings: Mapping[str, object] | None = None, seed: int | None = 1, **flags: bool
) -> Journal:
    """Open the journal of a file of results, as a batch does. Its files are closed if it is refused."""
    opened = Journal(out)
    try:
        opened.start(settings or {"model": "m"}, seed, **flags)
    except BaseException:
        opened.close()
        raise
    return opened


def answered_call(key: str, text: str = "answer", tokens: int = 1) -> AnsweredCall:
    """Return a call that was answered."""
    call = Call("m", text, Usage(1, tokens, 1, 0.5), 0.0, extra={"token_ids": [1, 2]})
    return AnsweredCall(key.encode().ljust(16, b"."), 0, call)


def line_of(id: str, status: str = "answered") -> bytes:
    """Return a line of results."""
    return encode_escaped({"id": id, "status": status, "digest": coded(id).hex()}) + b"\n"


def coded(id: str) -> bytes:
    """Return the digest of an item that has this id: the id itself."""
    return id.encode("utf-8", "surrogatepass")


def texts(calls: list[AnsweredCall]) -> list[str]:
    """Return the answers of calls."""
    return [each.call.response for each in calls]


async def write(opened: Journal, *work: tuple[str, Any], told: Callable[[int], object] = lambda _: None) -> None:
    """Write calls and results, one after the other, and close the journal.

    Args:
        opened: The journal.
        work: Pairs of an item's id and one of its calls, or its status with the kind of its failure behind a colon.
        told: Called with the number of each pair, from 0, once it is written.
    """
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(error: BaseException) -> None:
        if not failed.done():
            failed.set_exception(error)

    opened.begin(fail)

    async def written() -> None:
        for number, (id, what) in enumerate(work):
            key = key_of(id)
            if isinstance(what, AnsweredCall):
                await opened.keep(key, what)
            else:
                status, _, why = what.partition(":")
                line = partial(line_of, id, status)
                await opened.finish(key, coded(id), status, why or None, Usage(), line)
            told(number)

    writing = asyncio.ensure_future(written())
    try:
        await asyncio.wait({writing, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        await writing
    finally:
        writing.cancel()
        await asyncio.wait({writing})
        await opened.aclose()
