"""Replies of models on disk, so that an equal request is not paid twice."""

import asyncio
import contextlib
import hashlib
import json
import os
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

from rlm_broker.broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.usage import Usage

MAX_BYTES = 1 << 30
"""Default maximum bytes of replies in a cache file; beyond it, the least recently used are removed."""
BUSY_TIMEOUT_S = 0.2
"""Seconds of waiting for another process's write; beyond it the operation is skipped."""
AFTER_FAILURE_S = 10.0
"""Seconds without writes after a failed one: if each call waited for the cache, it would be slower than none."""
APPLICATION_ID = 0x524C4D42
"""Mark of a cache file in its sqlite header: "RLMB" in ASCII."""
USED_AGAIN_S = 60.0
"""Seconds between two updates of a reply's time of use. Without them every read would be a write."""
_TABLE = (
    "CREATE TABLE IF NOT EXISTS replies (key BLOB PRIMARY KEY, used REAL NOT NULL CHECK (typeof(used) = 'real'), "
    "text TEXT NOT NULL CHECK (typeof(text) = 'text')) WITHOUT ROWID"
)
_INDEX = "CREATE INDEX IF NOT EXISTS replies_used ON replies (used)"


class Cache:
    """Completions by client, messages and parameters, in one sqlite file for any number of processes.

    The file has the replies, and the SHA-256 of the prompts. The least recently used replies are removed first.

    Example:
        ```python
        with contextlib.closing(Cache("replies.sqlite", max_bytes=1 << 30)) as cache:
            RLM("openai/gpt-5-mini", models=Models(cache=cache)).completion("a", "Which letter is it?")
        ```

    Args:
        path: The file; it is made if it does not exist, for this user alone.
        max_bytes: Approximate maximum bytes of replies.

    Raises:
        ConfigurationError: The file cannot be made, is something else, or is writable by other users: they could forge
            replies.
    """

    def __init__(self, path: str | Path, max_bytes: int = MAX_BYTES) -> None:
        require_kind("path", path, str, Path)
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._writes_at = 0.0
        try:
            is_new = _require_own(self.path)
            # 10 s for `_prepare` alone, while another process makes the table; calls wait for `BUSY_TIMEOUT_S`.
            self._database = sqlite3.connect(self.path, timeout=10.0, isolation_level=None, check_same_thread=False)
            self._prepare(is_new)
        except (OSError, ValueError, sqlite3.Error) as error:  # ValueError: a zero byte in the name
            raise ConfigurationError(f"cannot use {str(self.path)!r} as a cache: {error}") from None

    def key(self, client: BaseClient, request: LMRequest) -> bytes | None:
        """Return the key of a request's reply; None if the client has no fingerprint."""
        fingerprint = client.fingerprint
        if fingerprint is None:
            return None
        messages = [[message.role, message.content] for message in request.messages]
        told: list[Any] = [fingerprint, messages, request.max_completion_tokens, request.sample]
        if request.temperature is not None:  # without one the key stays as in older releases, which had none
            told.append(request.temperature)
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).digest()

    async def get(self, key: bytes) -> LMReply | None:
        """Return the stored reply, at no cost; None if there is none."""
        return await asyncio.to_thread(self._get, key)

    async def put(self, key: bytes, reply: LMReply) -> None:
        """Keep a reply, unless it has no text, names a problem, or another model gave it."""
        if reply.text and reply.problem is None and reply.model is None:
            await asyncio.to_thread(self._put, key, reply)

    def close(self) -> None:
        """Close the file. Harmless when repeated."""
        with self._lock:
            self._database.close()

    def _prepare(self, is_new: bool) -> None:
        for statement in (
            "PRAGMA trusted_schema = OFF",
            "BEGIN IMMEDIATE",  # another process may prepare the same new file at this moment
            *([f"PRAGMA application_id = {APPLICATION_ID}"] if is_new else []),
        ):
            self._database.execute(statement)
        (found,) = self._database.execute("PRAGMA application_id").fetchone()
        if found != APPLICATION_ID:
            self._database.execute("ROLLBACK")
            raise sqlite3.DatabaseError("it is a database of another program")
        for statement in (_TABLE, _INDEX, "COMMIT", "PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL"):
            self._database.execute(statement)
        self._database.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")

    def _get(self, key: bytes) -> LMReply | None:
        now = time.time()
        with self._lock, contextlib.suppress(sqlite3.Error):  # a broken cache costs calls, and fails none
            found = self._database.execute("SELECT text, used FROM replies WHERE key = ?", (key,)).fetchone()
            if found is None:
                return None
            text, used = found
            if now - used > USED_AGAIN_S and now >= self._writes_at:
                self._write("UPDATE replies SET used = ? WHERE key = ?", (now, key))
            return LMReply(text, Usage(1, 0, 0, 0.0, stored_calls=1))
        return None

    def _put(self, key: bytes, reply: LMReply) -> None:
        row = (key, time.time(), reply.text)
        with self._lock, contextlib.suppress(sqlite3.Error, UnicodeEncodeError):  # sqlite stores no lone surrogates
            if row[1] < self._writes_at or not self._write("INSERT OR REPLACE INTO replies VALUES (?, ?, ?)", row):
                return
            # A tenth of the replies at a time, so that a full cache does not have to count and remove at each write.
            while self._bytes() > self._max_bytes and self._count() > 1:
                self._database.execute(
                    "DELETE FROM replies WHERE key IN (SELECT key FROM replies ORDER BY used LIMIT max(1, ?))",
                    (self._count() // 10,),
                )

    def _write(self, statement: str, values: tuple[Any, ...]) -> bool:
        """Write, and return whether that was possible. After a failure no write is tried for `AFTER_FAILURE_S`."""
        try:
            self._database.execute(statement, values)
        except sqlite3.Error:
            self._writes_at = time.time() + AFTER_FAILURE_S
            return False
        return True

    def _bytes(self) -> int:
        pages, free, page_bytes = (
            self._database.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * page_bytes)

    def _count(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM replies").fetchone()[0])


def _require_own(path: Path) -> bool:
    """Make the file if it does not exist; return whether it is empty.

    Raises:
        OSError: It is a link, belongs to another user, or is writable by others.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError("it belongs to another user, or other users may write to it")
        return found.st_size == 0
    finally:
        os.close(fd)
