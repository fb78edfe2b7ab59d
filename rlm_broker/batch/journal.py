"""The journal of a batch: one SQLite file beside the results, from which the same batch goes on after any kill.

Theory of operation. `items` has the finished items, `calls` the calls paid for all others, `spent` the usage by model,
and `header` the settings, the seed and the time. One thread writes: all work that has come meanwhile is
one transaction, of one statement for each table. Each statement makes the thread wait for the interpreter's lock, which
the event loop holds.

- A call is committed before its run gets the answer. So a further process finds each answer that a killed one has paid.
- A result is committed together with its line, and its calls are dropped. Then the line is appended to the file of
  results, and the caller gets the result. A failed item may be asked again, so its calls stay if the item is not at
  fault (`KEEPS_CALLS`).
- `lines` keeps each line until the file of results is synced; `synced` is the length of the file at that moment. At the
  start, these lines replace all that follows that length. Lines of failed items are removed in the same way: the
  transaction that takes the items back puts all lines behind the first of them into `lines`.

The file is in WAL mode: a kill loses nothing that was committed. A transaction with a result is synced
(`synchronous = FULL`); one of calls alone is not (`NORMAL`), so a power cut may cost the calls of the last moments.
Other processes may read the file meanwhile (`status`). The lock of the file of results keeps a second writer out.
"""

import asyncio
import contextlib
import hashlib
import itertools
import os
import sqlite3
import stat
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rlm_broker.batch.results_file import PRIVATE, ResultsFile
from rlm_broker.batch.settings import changed_settings
from rlm_broker.concurrency.threads import DaemonThreads
from rlm_broker.errors import ConfigurationError
from rlm_broker.results import Call
from rlm_broker.usage import Tally, Usage
from sandbox_worker.wire.text_json import decode_escaped, encode_escaped

FORMAT = 2
"""Version of the format. Journals of other versions are refused."""
APPLICATION_ID = 0x524C4D4A
"""Mark of a journal in the SQLite file: "RLMJ" in ASCII."""
FAILED = "failed"
"""Status of the items that `retry_failed` runs again."""
KEEPS_CALLS = frozenset({"provider", "cluster", "sandbox"})
"""Kinds of failures whose calls stay, so that the item is not paid twice when it is asked again."""
DIGEST_BYTES = 16
"""Bytes of a digest: among a billion items, two share one with a probability of 1 in 10^21."""
UNSYNCED_BYTES = 1 << 20
"""Bytes of results kept in the table before the file of results is synced."""
GO_ON = "the same call goes on from here once that is put right"
USAGE = "total_calls, total_input_tokens, total_output_tokens, total_cost, stored_calls, cached_input_tokens"
"""Columns of a usage, named as its fields."""
_FIELDS = USAGE.split(", ")
_MARKS = ", ?" * len(_FIELDS)
MOST_ROWS = 64
"""Rows of one statement."""
_TABLES = f"""
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA journal_mode = WAL;
BEGIN;
CREATE TABLE header (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE items (item BLOB PRIMARY KEY, made_of BLOB NOT NULL, status TEXT NOT NULL, why TEXT) WITHOUT ROWID;
CREATE TABLE lines (n INTEGER PRIMARY KEY, line BLOB NOT NULL);
CREATE TABLE calls (n INTEGER PRIMARY KEY, item BLOB NOT NULL, key BLOB NOT NULL, depth INTEGER NOT NULL, model TEXT NOT
    NULL, {USAGE}, answer BLOB NOT NULL);
CREATE INDEX calls_item ON calls (item);
CREATE TABLE spent (kind TEXT, model TEXT, {USAGE}, PRIMARY KEY (kind, model)) WITHOUT ROWID;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
COMMIT;
"""
_CALLS = f"INSERT INTO calls (item, key, depth, model, {USAGE}, answer) VALUES {{}}"
_ITEMS = "INSERT INTO items VALUES {}"
_ADDED = ", ".join(f"{name} = {name} + excluded.{name}" for name in _FIELDS)
_SPENT = f"INSERT INTO spent VALUES (?, ?{_MARKS}) ON CONFLICT DO UPDATE SET {_ADDED}"


class AnsweredCall(msgspec.Struct, frozen=True):
    """One answered call: the digest of its request, its depth in the tree, and its answer."""

    key: bytes
    depth: int
    call: Call


class _PaidCall(msgspec.Struct, frozen=True):
    """A call to be written down, and its item."""

    item: bytes
    answered: AnsweredCall


class _EndedItem(msgspec.Struct, frozen=True):
    """The result of an item to be written down, with the arguments of `Journal.finish`."""

    item: bytes
    made_of: bytes
    status: str
    why: str | None
    replayed: Usage
    line: Callable[[], bytes]


_Written = asyncio.Future[None] | None
"""Resolved once a work is on the disk; None if no one waits."""


class _Named(msgspec.Struct, gc=False):
    """The part of a line of results by which its item is known."""

    id: str
    sample: int = 0


class Journal:
    """The journal of one file of results. Make it, `start` it, `begin` on the event loop, and `aclose` it.

    Args:
        out: File of results; this process locks it.

    Attributes:
        seed: Seed of the runs, as the header has it; None before the first `start`, or if there is none.
        finished: Maps the digest of each finished item's id to the digest of the item.
        failed: Number of failed items among them.
        spent: Usage by model of all processes before this one.
        seconds: Seconds they have worked.
        changed: Settings, by name, with another value now than in the beginning.

    Raises:
        ConfigurationError: The files belong to another process, user or program, or cannot be used.
    """

    def __init__(self, out: Path) -> None:
        self.finished: dict[bytes, bytes] = {}
        self.failed = 0
        self.changed: dict[str, Any] = {}
        self._out, self._path = out, journal_of(out)
        self._with_calls: set[bytes] = set()
        self._unsynced = 0
        self._thread = DaemonThreads(1)
        self._works = deque[tuple[_PaidCall | _EndedItem | float, _Written]]()
        self._is_called = False
        self._is_full: bool | None = None
        self._failure: ConfigurationError | None = None
        self._database: sqlite3.Connection | None = None
        self._results = ResultsFile(out)
        try:
            with self._told():
                require_own(self._path)
                self._is_new = not self._path.exists() or not self._path.stat().st_size
                self._database = self._connected()
                with self._undamaged():
                    self.seed: int | None = self._header("seed", None)
        except BaseException:
            self.close()
            raise

    # -- in a thread, before it begins ---------------------------------------------------------------------------------

    def start(
        self, settings: Mapping[str, Any], seed: int | None, *, retry_failed: bool = False, takes_others: bool = False
    ) -> None:
        """Compare the settings, repair the file of results, and read what is finished.

        Args:
            settings: Settings on which the results depend, as JSON values.
            seed: Seed of the runs, or None.
            retry_failed: Whether failed items run again. Their results are removed.
            takes_others: Whether other limits and prompts are taken for the items left.

        Raises:
            ConfigurationError: Settings differ, or the files cannot be used.
        """
        with self._told(), self._undamaged():
            if self._header("settings", None) is None:
                with self._transaction():
                    self._put("seed", seed)
                    self._put("settings", settings)
            else:
                self._compare(settings, seed, takes_others=takes_others)
            self._repair()
            if retry_failed:
                self._take_back()
            self._read()

    def close(self) -> None:
        """Close the files. Harmless when repeated."""
        if self._database is not None:
            with contextlib.suppress(ConfigurationError, sqlite3.Error, OSError):  # a full disk was reported already
                self._flush()
                self._settle()
                self._execute("PRAGMA incremental_vacuum")
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._database = None
        self._results.close()
        self._thread.close(RuntimeError("the journal is closed"))

    # -- on the event loop ---------------------------------------------------------------------------------------------

    def begin(self, on_failure: Callable[[ConfigurationError], object]) -> None:
        """Take calls and results of this event loop. `on_failure` is called on it if something cannot be written."""
        self._loop, self._on_failure = asyncio.get_running_loop(), on_failure

    async def earlier(self, item: bytes) -> list[AnsweredCall]:
        """Return the calls that earlier processes have paid for an item, in the order in which they ended.

        Raises:
            ConfigurationError: They cannot be read.
        """
        if item not in self._with_calls:
            return []
        self._with_calls.discard(item)
        return await asyncio.wrap_future(self._thread.submit(lambda: self._calls_of(item)))

    async def keep(self, item: bytes, call: AnsweredCall) -> None:
        """Write down a call paid for an item. Once this returns, a kill does not lose it.

        If the disk is full, this waits until it is cancelled. An error would become the result of the item.
        """
        try:
            await self._written(_PaidCall(item, call))
        except ConfigurationError:  # the caller of `begin` gets it
            await asyncio.Event().wait()

    async def finish(
        self, item: bytes, made_of: bytes, status: str, why: str | None, replayed: Usage, line: Callable[[], bytes]
    ) -> None:
        """Write the result of an item. Once this returns, it is on the disk.

        Args:
            item: Digest of its id, see `key_of`.
            made_of: Digest of its question and context.
            status, why: End of the item, and the limit or the kind of error that caused it.
            replayed: Usage of the calls answered from the journal.
            line: Makes its line; called in the thread of the journal.

        Raises:
            ConfigurationError: The disk is full, or broken.
        """
        await self._written(_EndedItem(item, made_of, status, why, replayed, line))

    def tell_seconds(self, seconds: float) -> None:
        """Write down how long all processes together have worked, and do not wait for it."""
        self._add(seconds, None)

    async def aclose(self) -> None:
        """Write all pending work, then close the files."""
        await asyncio.wrap_future(self._thread.submit(self.close))

    async def _written(self, work: _PaidCall | _EndedItem) -> None:
        written: asyncio.Future[None] = self._loop.create_future()
        self._add(work, written)
        await written

    def _add(self, work: _PaidCall | _EndedItem | float, written: _Written) -> None:
        """Queue a work, and call the thread, unless it is called and has not begun."""
        if self._database is None:
            raise RuntimeError("the journal is closed")
        self._works.append((work, written))
        if not self._is_called:
            self._is_called = True
            self._thread.submit(self._flush)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Do all pending work. Work that comes meanwhile has its turn with the next call."""
        self._is_called = False  # first: what comes from here on calls again
        works = [self._works.popleft() for _ in range(len(self._works))]
        if self._failure is None and works:
            try:
                with self._told():
                    self._write([work for work, _ in works])
            except BaseException as error:  # noqa: BLE001 - told to all
                told = ConfigurationError(f"the journal of {self._out} has failed: {error!r}")
                self._failure = error if isinstance(error, ConfigurationError) else told
                self._call_loop(self._on_failure, self._failure)
        if waiting := [written for _, written in works if written is not None]:
            self._call_loop(_resolve, waiting, self._failure)

    def _call_loop(self, call: Callable[..., object], *given: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(call, *given)

    def _write(self, works: "list[_PaidCall | _EndedItem | float]") -> None:
        calls = [work for work in works if isinstance(work, _PaidCall)]
        ended = [work for work in works if isinstance(work, _EndedItem)]
        lines = [each.line() for each in ended]
        spent = defaultdict[tuple[str, str], Tally](Tally)
        for paid in calls:
            spent["paid", paid.answered.call.root_model].add(paid.answered.call.usage)
        for each in ended:
            spent["replayed", ""].add(each.replayed)
        dropped = [each for each in ended if each.status != FAILED or each.why not in KEEPS_CALLS]
        with self._transaction(is_synced=bool(ended)):
            self._execute_for(_CALLS, [_row_of(paid) for paid in calls])
            self._execute_for(_ITEMS, [(each.item, each.made_of, each.status, each.why) for each in ended])
            self._execute_for("INSERT INTO lines (line) VALUES {}", [(line,) for line in lines])
            self._execute_for("DELETE FROM calls WHERE item IN (VALUES {})", [(each.item,) for each in dropped])
            for (kind, model), tally in spent.items():
                self._spend(kind, model, tally.usage)
            for seconds in works:
                if isinstance(seconds, float):
                    self._put("seconds", seconds)
        self._results.append(lines)
        self._unsynced += sum(map(len, lines))
        if self._unsynced >= UNSYNCED_BYTES:
            self._settle()

    def _calls_of(self, item: bytes) -> list[AnsweredCall]:
        calls = []
        with self._told(), self._undamaged():
            rows = self._execute(f"SELECT key, depth, model, answer, {USAGE} FROM calls WHERE item = ?", item)
            for key, depth, model, answer, *used in rows:
                text, problem, requested, extra = decode_escaped(answer, tuple[str, str | None, str | None, Any])
                calls.append(AnsweredCall(key, depth, Call(model, text, Usage(*used), 0.0, requested, problem, extra)))
        return calls

    # -- the parts of `start` ------------------------------------------------------------------------------------------

    def _compare(self, settings: Mapping[str, Any], seed: int | None, *, takes_others: bool) -> None:
        first, taken = self._header("settings", {}), self._header("taken", {})
        seeds = () if self.seed is None or seed is None else (self.seed, seed)
        try:
            self.changed = changed_settings(first, taken, settings, seeds, takes_others=takes_others)
        except ConfigurationError as refused:
            raise ConfigurationError(f"the journal {self._path} has results of other settings: {refused}") from None
        new = {name: value for name, value in self.changed.items() if value not in taken.get(name, [])}
        if new:
            with self._transaction():
                self._put("taken", taken | {name: [*taken.get(name, []), value] for name, value in new.items()})

    def _repair(self) -> None:
        """Put the end of the file of results in place; an earlier process may have left it torn."""
        lines = "SELECT line FROM lines ORDER BY n"
        synced, is_replaced = self._header("synced", 0), self._header("replaced", False)
        known = b"" if is_replaced else b"".join(line for (line,) in self._execute(lines))
        tail = b"" if is_replaced else self._results.tail(synced, len(known) + 1)
        if self._results.size < synced or not (known.startswith(tail) or b"\0" in tail):  # a power cut leaves zeros
            raise ConfigurationError(
                f"{self._out} was changed since byte {synced:,} by another program: put it back as it was, or name "
                "another file for the results"
            )
        if is_replaced or tail != known:
            self._results.cut(synced)
            self._results.append(line for (line,) in self._execute(lines))
        self._settle()

    def _take_back(self) -> None:
        """Remove the failed items and their lines."""
        failed = {item for (item,) in self._execute("SELECT item FROM items WHERE status = ?", FAILED)}
        if not failed:
            return
        offset, first = 0, None
        with self._transaction(is_synced=True):
            for line in self._results.lines():
                if key_of_line(line) in failed:
                    first = offset if first is None else first
                elif first is not None:
                    self._execute("INSERT INTO lines (line) VALUES (?)", line)
                offset += len(line)
            self._execute("DELETE FROM items WHERE status = ?", FAILED)
            self._put("synced", offset if first is None else first)
            self._put("replaced", True)
        self._repair()

    def _read(self) -> None:
        self.seconds = float(self._header("seconds", 0.0))
        for item, made_of, status in self._execute("SELECT item, made_of, status FROM items"):
            self.finished[item] = made_of
            self.failed += status == FAILED
        calls = self._execute("SELECT DISTINCT item FROM calls")
        self._with_calls = {item for (item,) in calls if item not in self.finished}
        rows = self._execute(f"SELECT model, {USAGE} FROM spent WHERE kind = 'paid'")
        self.spent = {model: Usage(*used) for model, *used in rows}

    # -- SQLite --------------------------------------------------------------------------------------------------------

    def _connected(self) -> sqlite3.Connection:
        """Open the file. If it is missing or empty, make it and its tables, unless there are results."""
        if self._is_new:
            self._require_no_results()
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, PRIVATE))
        database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        try:
            if database.execute("SELECT * FROM sqlite_master").fetchone():
                require_format(database, self._path)
                database.execute("PRAGMA journal_mode = WAL")
            else:  # with results, its tables are in its -wal file alone: that is missing, and may be put back
                self._require_no_results()
                database.executescript(_TABLES)
        except BaseException:
            database.close()
            raise
        return database

    def _require_no_results(self) -> None:
        if self._results.size:
            raise ConfigurationError(f"{self._out} exists, and has no journal {self._path}: name another file")

    @contextlib.contextmanager
    def _transaction(self, *, is_synced: bool = False) -> Iterator[None]:
        if self._is_full != is_synced:
            self._execute(f"PRAGMA synchronous = {'FULL' if is_synced else 'NORMAL'}")
            self._is_full = is_synced
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._execute("ROLLBACK")
            raise

    def _execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        assert self._database is not None
        return self._database.execute(statement, values)

    def _execute_for(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Execute a statement for all rows, which stand where it has `{}`: `MOST_ROWS` of them at a time."""
        for first in range(0, len(rows), MOST_ROWS):
            some = rows[first : first + MOST_ROWS]
            row = f"({', '.join('?' * len(some[0]))})"
            self._execute(statement.format(", ".join([row] * len(some))), *itertools.chain.from_iterable(some))

    def _header(self, name: str, default: Any) -> Any:
        found = self._execute("SELECT value FROM header WHERE name = ?", name).fetchone()
        return default if found is None else decode_escaped(found[0], Any)

    def _put(self, name: str, value: Any) -> None:
        self._execute("INSERT OR REPLACE INTO header VALUES (?, ?)", name, encode_escaped(value))

    def _spend(self, kind: str, model: str, usage: Usage) -> None:
        if usage.total_calls:
            self._execute(_SPENT, kind, _text(model), *(getattr(usage, name) for name in _FIELDS))

    def _settle(self) -> None:
        """Sync the file of results, and forget its lines."""
        if self._header("synced", 0) == self._results.size and not self._header("replaced", False):
            return
        self._results.sync()
        with self._transaction(is_synced=True):
            self._execute("DELETE FROM lines")
            self._put("synced", self._results.size)
            self._put("replaced", False)
        self._unsynced = 0

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Raise ConfigurationError in place of an error of the disk."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            require_whole(error, self._path)
            is_full = getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
            why = "No space left on device" if is_full else getattr(error, "strerror", None) or error
            name = self._path if isinstance(error, sqlite3.Error) and not is_full else self._out
            raise ConfigurationError(f"cannot write to {name}: {why}; {GO_ON}") from None

    @contextlib.contextmanager
    def _undamaged(self) -> Iterator[None]:
        """Raise ConfigurationError in place of the error that a damaged value causes."""
        try:
            yield
        except (TypeError, ValueError, OverflowError) as error:
            raise _damaged(self._path, error) from None


def _row_of(paid: _PaidCall) -> tuple[Any, ...]:
    """Return a call as a row of its table."""
    call = paid.answered.call
    used = [getattr(call.usage, name) for name in _FIELDS]
    answer = encode_escaped((call.response, call.problem, call.requested_model, call.extra))
    return paid.item, paid.answered.key, paid.answered.depth, _text(call.root_model), *used, answer


def _resolve(waiting: list[asyncio.Future[None]], failure: ConfigurationError | None) -> None:
    """Tell all that wait that their work is done, or why it cannot be."""
    for written in waiting:
        if written.done():  # cancelled: the work itself is done
            continue
        if failure is None:
            written.set_result(None)
        else:
            written.set_exception(failure)


def journal_of(out: Path) -> Path:
    """Return the journal of a file of results."""
    return out.with_name(f"{out.name}.journal")


def key_of(id: str, sample: int = 0) -> bytes:
    """Return the digest of the id of an item or of one of its samples."""
    named = f"{id}\0{sample}" if sample or "\0" in id else id  # else the id "a\0001" would be sample 1 of "a"
    if not named.isascii():  # two lone surrogates are one character in the line that has the id as JSON
        named = named.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def key_of_line(line: bytes) -> bytes | None:
    """Return the digest of the item in a line of results; None if the line is no result."""
    with contextlib.suppress(ValueError, RecursionError):
        found = decode_escaped(line, _Named)
        return key_of(found.id, found.sample)
    return None


def require_own(path: Path) -> None:
    """Refuse a journal that another user may have written, or one of an earlier format.

    Raises:
        ConfigurationError: It is a folder or a link, or another user owns it or can write to it.
    """
    if path.is_dir() and not path.is_symlink():
        raise ConfigurationError(
            f"{path} is a journal of an earlier release: go on with that release, or name another file for the results"
        )
    for each in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))):
        with contextlib.suppress(FileNotFoundError):
            found = each.lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise ConfigurationError(
                    f"{each} is not a file that this user alone can write to: put its owner and mode right "
                    "(`chmod go-w`), or name another file for the results"
                )


def require_format(database: sqlite3.Connection, path: Path) -> None:
    """Refuse a database of another program or version.

    Raises:
        ConfigurationError: It is one.
    """
    (mark,), (version,) = (database.execute(f"PRAGMA {each}").fetchone() for each in ("application_id", "user_version"))
    if mark != APPLICATION_ID:
        raise ConfigurationError(f"{path} is a database of another program: name another file for the results")
    if version != FORMAT:
        raise ConfigurationError(f"{path} has another version of the format: go on with the release that wrote it")


def require_whole(error: Exception, path: Path) -> None:
    """Refuse a damaged journal.

    Raises:
        ConfigurationError: SQLite reports that the file is damaged.
    """
    if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"the journal {path} is damaged ({error}): put back a copy of it, or name another file for the results"
    )


def _text(name: str) -> str:
    """Return the name of a model as SQLite can keep it: without lone surrogates."""
    return name.encode("utf-8", "replace").decode()
