"""State of a batch, read from its files while any process may work on it. Nothing is locked or changed."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rlm_broker.errors import ConfigurationError
from rlm_broker.journal import disk
from rlm_broker.journal.header import read_header
from rlm_broker.journal.journal import folder_of
from rlm_broker.journal.lines import CallHead, Used
from rlm_broker.journal.spent import NAME as SPENT
from rlm_broker.journal.spent import SpentLine, line_digest
from rlm_broker.usage import Tally, Usage, UsageSummary
from sandbox_worker.wire.text_json import decode_escaped

T = TypeVar("T")

LOCKS = Path("/proc/locks")


class _Error(msgspec.Struct, gc=False):
    kind: str = "failed"


class _Result(msgspec.Struct, gc=False):
    """The part of a line of results that is counted."""

    id: str
    status: str
    limit: str | None = None
    error: _Error | None = None
    usage: dict[str, Used] = {}
    replayed: Used | None = None


@dataclass
class BatchStatus:
    """State of a batch.

    Attributes:
        out: File of results.
        process: Id of the process that works on it now; None if there is none, or it cannot be seen.
        done: Items that have a result.
        answered: Items with an answer that no limit cut short.
        failed: Number of failed items, by the `kind` of their error.
        limited: Number of items that a limit ended, by the limit.
        unfinished: Items that have no result, and calls that were paid for them.
        unfinished_usage: Usage of those calls.
        usage: Usage of all items by model, with the unfinished ones.
        replayed: The part of it that runs took from the journal.
        seconds: Seconds that all processes have worked, as far as they have written that down.
    """

    out: Path
    process: int | None = None
    done: int = 0
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    limited: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0
    unfinished_usage: Usage = field(default_factory=Usage)
    usage: UsageSummary = field(default_factory=UsageSummary)
    replayed: Usage = field(default_factory=Usage)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the status as JSON values."""
        return {
            "out": str(self.out),
            "process": self.process,
            "done": self.done,
            "answered": self.answered,
            "failed": dict(self.failed),
            "limited": dict(self.limited),
            "unfinished": {"items": self.unfinished, "usage": self.unfinished_usage.to_dict()},
            "usage": self.usage.to_dict(),
            "replayed": self.replayed.to_dict(),
            "seconds": self.seconds,
        }


def read_status(out: Path) -> BatchStatus:
    """Read how far a batch is.

    The journal is read before the results: an item that ends meanwhile then counts as finished.

    Args:
        out: File of results, with its journal beside it.

    Raises:
        ConfigurationError: There is no such file, it cannot be read, or has no journal.
    """
    status = BatchStatus(out)
    if out.is_symlink():  # as a batch does: the journal is beside the file itself
        out = out.resolve()
    folder = folder_of(out)
    tallies: dict[str, Tally] = {}
    replayed, unfinished = Tally(), Tally()
    try:
        identity = out.stat()
        if read_header(folder) is None:
            why = "it is not the file of a batch" if identity.st_size else "its batch has not begun yet, or never did"
            raise ConfigurationError(f"{out} has no journal {folder}: {why}")
        paid = _paid(folder)
        removed = _spent(folder, status, tallies)
        for line, result in _values(out, _Result):
            paid.pop(result.id, None)
            _count(status, result)
            if not removed or line_digest(line) not in removed:  # a kill came before the line was removed
                _add(tallies, result.usage)
            if result.replayed is not None:
                replayed.add(result.replayed.usage())
    except OSError as error:
        raise ConfigurationError(f"cannot read {error.filename or out}: {error.strerror or error}") from None
    for calls in paid.values():
        _add(tallies, calls)
        for used in calls.values():
            unfinished.add(used.usage())
    status.unfinished, status.unfinished_usage = len(paid), unfinished.usage
    status.usage = UsageSummary({model: tally.usage for model, tally in sorted(tallies.items())})
    status.replayed = replayed.usage
    status.process = locked_by(identity)
    return status


def locked_by(identity: os.stat_result) -> int | None:
    """Return the id of the process that has locked a file with this identity; None if there is none to be seen.

    The kernel's list is read, since an attempt to lock the file could make another process fail.
    """
    try:
        lines = LOCKS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:  # such as "1: FLOCK  ADVISORY  WRITE 4173 fd:01:1234 0 EOF"
        parts = line.split()
        if len(parts) != 8 or parts[1] != "FLOCK" or not parts[4].isdecimal():
            continue
        pid, inode = int(parts[4]), parts[5].rpartition(":")[2]
        if inode == str(identity.st_ino) and _has_open(pid, identity):
            return pid
    return None


def _has_open(pid: int, identity: os.stat_result) -> bool:
    """Whether a process has the file open: the list of locks tells devices apart otherwise than `stat` does."""
    try:
        found = [each.stat() for each in os.scandir(f"/proc/{pid}/fd") if each.is_file()]
    except OSError:
        return False
    return any(os.path.samestat(each, identity) for each in found)


def _spent(folder: Path, status: BatchStatus, tallies: dict[str, Tally]) -> set[str]:
    """Count the means that the journal alone tells, and return the digests of the results among them."""
    removed: set[str] = set()
    for _, told in _values(folder / SPENT, SpentLine):
        status.seconds = max(status.seconds, told.seconds or 0)
        if told.removed is not None and told.removed not in removed:
            removed.add(told.removed)
            _add(tallies, told.usage)
    return removed


def _paid(folder: Path) -> dict[str, dict[str, Used]]:
    """Return usage by item and model of all calls in the journal. A line that is in two segments counts once."""
    calls: dict[str, dict[int, tuple[str, Used]]] = {}
    voided: dict[str, int] = {}
    for path in sorted(folder.glob("calls-*.jsonl")):
        try:
            for _, head in _values(path, CallHead):
                if head.again:
                    voided[head.item] = max(head.n, voided.get(head.item, 0))
                else:
                    calls.setdefault(head.item, {})[head.n] = head.model, head.used
        except FileNotFoundError:  # its items are all finished
            continue
    paid: dict[str, dict[str, Used]] = {}
    for item, by_number in calls.items():
        for n, (model, used) in by_number.items():
            if n > voided.get(item, 0):
                of_item = paid.setdefault(item, {})
                of_item[model] = Used.of(of_item.get(model, Used()).usage() + used.usage())
    return paid


def _values(path: Path, wanted: type[T]) -> Iterator[tuple[bytes, T]]:
    """Yield the whole lines of a file and their values; a torn one is skipped."""
    with disk.open_to_read(path) as file:
        for line in file:
            try:
                value = decode_escaped(line, wanted)
            except (ValueError, RecursionError):
                continue
            yield line, value


def _add(tallies: dict[str, Tally], usage: dict[str, Used]) -> None:
    for model, used in usage.items():
        tallies.setdefault(model, Tally()).add(used.usage())


def _count(status: BatchStatus, result: _Result) -> None:
    status.done += 1
    if result.status == "failed":
        status.failed[result.error.kind if result.error is not None else "failed"] += 1
    elif result.status == "limited":
        status.limited[result.limit or "stopped"] += 1
    else:
        status.answered += 1
