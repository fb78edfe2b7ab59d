"""Journals for tests: opened without an engine, and a disk that ends the process, or fails, at a certain operation."""

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.journal import disk
from rlm_broker.journal.header import read_header
from rlm_broker.journal.journal import Journal, folder_of, opened
from rlm_broker.journal.lines import line_of
from rlm_broker.journal.out_file import OutFile
from rlm_broker.journal.paid import PaidCall
from rlm_broker.results import Call
from rlm_broker.usage import Usage

OPERATIONS = ("open_to_append", "append", "cut", "sync", "sync_folder", "put_in_place", "remove")
"""Functions of `journal.disk` that change files."""


class Crash(BaseException):
    """Stands for the death of the process: no code of the journal catches it for good."""


class DyingDisk:
    """A disk whose operation of a certain number is the last one: before it, or in the middle of what it writes.

    Args:
        last: Number of that operation, from 1; 0 counts operations alone.
        tears: Whether a write is half done before the end.
        end: Ends the process.
    """

    def __init__(self, last: int, *, tears: bool = False, end: Callable[[], Any]) -> None:
        self.operations = 0
        self._last = last
        self._tears = tears
        self._end = end

    def patch(self, put: Callable[[str, Any], Any]) -> "DyingDisk":
        """Take the place of the operations. `put` gets the name of each and its replacement."""
        for name in OPERATIONS:
            put(name, self._counted(name, getattr(disk, name)))
        return self

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            self.operations += 1
            if self._last and self.operations >= self._last:
                if name == "append" and self._tears and self.operations == self._last:
                    os.write(given[0], given[1][: len(given[1]) // 2])
                self._end()
            return real(*given)

        return counted


def kill_this_process() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def crash() -> None:
    """End what is going on in this process as a kill would, for files that are looked at in the same process."""
    raise Crash


def dying(monkeypatch: pytest.MonkeyPatch, last: int, *, tears: bool = False) -> DyingDisk:
    """Let each operation of this process's disk from a certain number on raise `Crash`."""
    made = DyingDisk(last, tears=tears, end=crash)
    return made.patch(lambda name, function: monkeypatch.setattr(disk, name, function))


def open_journal(
    out: Path, settings: dict[str, object] | None = None, seed: int | None = 1, *, retry_failed: bool = False
) -> Journal:
    """Open the journal of a file of results, as a batch does. Its files are closed if it is refused."""
    file = OutFile(out)
    try:
        header = read_header(folder_of(out))
        return opened(file, header, seed, settings or {"model": "m"}, retry_failed=retry_failed)
    except BaseException:
        file.close()
        raise


def paid_call(key: str, text: str = "answer", tokens: int = 1) -> PaidCall:
    """Return a call that was paid."""
    return PaidCall(key.encode().ljust(16, b"."), 0, Call("m", text, Usage(1, tokens, 1, 0.5), 0.0))


def result(id: str, status: str = "answered", **more: Any) -> bytes:
    """Return a line of results."""
    used = {"m": {"total_calls": 1, "total_input_tokens": 10, "total_output_tokens": 1, "total_cost": 1.0}}
    return line_of({"id": id, "status": status, "usage": used, "digest": id.encode().hex(), **more})


def texts(calls: list[PaidCall]) -> list[str]:
    """Return the answers of calls."""
    return [paid.call.response for paid in calls]


async def write(journal: Journal, *work: tuple[str, Any]) -> None:
    """Write calls and results, one after the other, and close the journal.

    Args:
        work: Pairs of an item's id and one of its calls, or its status.
    """
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(error: BaseException) -> None:
        if not failed.done():
            failed.set_exception(error)

    journal.begin(fail)

    async def written() -> None:
        for id, what in work:
            if isinstance(what, PaidCall):
                await journal.keep(id, what)
            else:
                await journal.finish(id, partial(result, id, what))

    writing = asyncio.ensure_future(written())
    try:
        await asyncio.wait({writing, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        await writing
    finally:
        writing.cancel()
        await asyncio.wait({writing})
        await journal.aclose()
