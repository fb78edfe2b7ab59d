"""State of a batch or of its shards, read while any process may work on it. Nothing is locked or changed."""

import contextlib
import os
import sqlite3
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rlm_broker.batch.journal import FAILED, USAGE, journal_of, require_format, require_own, require_whole
from rlm_broker.batch.shards import shards_of
from rlm_broker.errors import ConfigurationError
from rlm_broker.usage import Usage, UsageSummary

LOCKS = Path("/proc/locks")


@dataclass
class BatchStatus:
    """State of a batch, or of all its shards together.

    Attributes:
        out: File of results.
        process: Id of a process that works on it now; None if there is none, or it cannot be seen.
        shards: Shards whose files are there, and shards in all; None if the batch has none.
        done: Items with a result.
        answered: Items with an answer that no limit cut short.
        failed: Number of failed items, by the `kind` of their error.
        limited: Number of items ended by a limit, by that limit.
        unfinished: Items without a result, and calls paid for them.
        unfinished_usage: Usage of those calls.
        usage: Usage of all items by model, with the unfinished ones.
        replayed: The part of it that runs took from the journal.
        seconds: Seconds worked by all processes, as far as they have written that down.
        cut_bytes: Bytes of results removed by another program from the end of the file.
    """

    out: Path
    process: int | None = None
    shards: tuple[int, int] | None = None
    done: int = 0
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    limited: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0
    unfinished_usage: Usage = field(default_factory=Usage)
    usage: UsageSummary = field(default_factory=UsageSummary)
    replayed: Usage = field(default_factory=Usage)
    seconds: float = 0.0
    cut_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the status as JSON values."""
        shards = {} if self.shards is None else {"shards": {"there": self.shards[0], "of": self.shards[1]}}
        return {
            "out": str(self.out),
            "process": self.process,
            **shards,
            "done": self.done,
            "answered": self.answered,
            "failed": dict(self.failed),
            "limited": dict(self.limited),
            "unfinished": {"items": self.unfinished, "usage": self.unfinished_usage.to_dict()},
            "usage": self.usage.to_dict(),
            "replayed": self.replayed.to_dict(),
            "seconds": self.seconds,
            "cut_bytes": self.cut_bytes,
        }


def read_status(out: Path, *, of_shards: bool = False) -> BatchStatus:
    """Read how far a batch is, or all its shards together.

    Args:
        out: File of results, with its journal beside it. Without a journal, its shards are looked for.
        of_shards: Whether shards are looked for in any case.

    Raises:
        ConfigurationError: There is no such file, it cannot be read, or has no journal.
    """
    status = BatchStatus(out)
    shards = shards_of(out) if of_shards or not os.path.exists(journal_of(out)) else {}  # noqa: PTH110 - `Path` raises
    for each in shards.values() or [out]:
        _add(status, each)
    if shards:
        status.shards = len(shards), next(iter(shards))[1]
    return status


def _add(status: BatchStatus, out: Path) -> None:
    try:
        if out.is_symlink():  # as a batch does: the journal is beside the file itself
            out = out.resolve()
        with _opened(out, journal_of(out)) as database:
            synced = _count(status, database)
        identity = out.stat()  # after the journal: a process appends meanwhile, and never cuts below what it has synced
        status.cut_bytes += max(0, synced - identity.st_size)
    except (OSError, sqlite3.Error, TypeError, ValueError) as error:
        require_whole(error, journal_of(out))
        name = journal_of(out) if isinstance(error, sqlite3.Error) else out
        raise ConfigurationError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from None
    status.process = status.process or locked_by(identity)


@contextlib.contextmanager
def _opened(out: Path, journal: Path) -> Iterator[sqlite3.Connection]:
    """Open a journal to read it, in one state. If no process has it open, not even a lock is taken.

    Raises:
        ConfigurationError: There is none, or it is of another format.
    """
    require_own(journal)
    if not journal.exists() or not journal.stat().st_size:
        why = "it is not the file of a batch" if out.stat().st_size else "its batch has not begun yet, or never did"
        raise ConfigurationError(f"{out} has no journal {journal}: {why}")
    mode = "ro" if journal.with_name(f"{journal.name}-wal").exists() else "ro&immutable=1"
    name = urllib.parse.quote(str(journal.absolute()))
    with contextlib.closing(sqlite3.connect(f"file:{name}?mode={mode}", uri=True, isolation_level=None)) as database:
        require_format(database, journal)
        database.execute("BEGIN")
        yield database


def _count(status: BatchStatus, database: sqlite3.Connection) -> int:
    """Add what a journal has, and return the length in bytes that the file of results has at least."""
    for how, why, number in database.execute("SELECT status, why, count(*) FROM items GROUP BY status, why"):
        status.done += number
        if how == FAILED:
            status.failed[why or FAILED] += number
        elif how == "limited":
            status.limited[why or "stopped"] += number
        else:
            status.answered += number
    left = f"SELECT item, {USAGE} FROM calls WHERE item NOT IN (SELECT item FROM items)"
    unfinished = set()
    for item, *used in database.execute(left):
        unfinished.add(item)
        status.unfinished_usage += Usage(*used)
    status.unfinished += len(unfinished)
    usage = dict(status.usage.model_usage_summaries)
    for kind, model, *used in database.execute(f"SELECT kind, model, {USAGE} FROM spent"):
        if kind == "replayed":
            status.replayed += Usage(*used)
        else:
            usage[model] = usage.get(model, Usage()) + Usage(*used)
    status.usage = UsageSummary(dict(sorted(usage.items())))
    header = dict(database.execute("SELECT name, value FROM header WHERE name IN ('seconds', 'synced')"))
    status.seconds += msgspec.json.decode(header.get("seconds", b"0"), type=float)
    return msgspec.json.decode(header.get("synced", b"0"), type=int)


def locked_by(identity: os.stat_result) -> int | None:
    """Return the id of the process that has locked the file with this identity; None if none can be seen.

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
