"""Uploaded files of many owners: each in sealed memory, with an id, an owner and an end.

Theory of operation
-------------------
A file comes in pieces (`Files.receiving`), which go straight into a memfd: no copy of the whole is ever in the memory
of this process, and none on a disk. It is sealed when it is whole (`Upload.keep`), and gets its id then.

Its text, as a context, is stored when it is first asked for (`UploadedFile.stored`), and kept: each run gets the same
memory by descriptors of its own. So a run goes on when its file is deleted or expires meanwhile. A small archive may
have a large text, so kept texts count to their owner as files do. Where there is no room, those that no run uses are
dropped, the least recently used first: they can be stored again.
"""

import asyncio
import contextlib
import os
import secrets
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from rlm_broker import ConfigurationError, OpenFile, StoredContext, ValueTooLarge, store_as_it_is
from rlm_broker.context.memfd import Memfd
from rlm_broker.serve.hosting.owner import Owner, UnknownHandle

ID_BYTES: Final = 16
"""Random bytes of an unguessable id."""


@dataclass(eq=False)
class UploadedFile:
    """One file of an owner. `Upload.keep` makes it.

    Attributes:
        owner: Owner of the file.
        name: Name given by its owner. It is shown, and never a path of this machine.
        size_bytes: Its bytes.
        purpose: Word of its owner's about its use.
        expires_s: Seconds until it is deleted, or None.
        id: Unguessable text, for example "file-5f...".
        created_at: Unix time in seconds.
    """

    _files: "Files"
    _fd: int
    owner: Owner
    name: str
    size_bytes: int
    purpose: str
    expires_s: float | None
    id: str = field(default_factory=lambda: f"file-{secrets.token_hex(ID_BYTES)}")
    created_at: float = field(default_factory=time.time)
    _storing: "asyncio.Future[StoredContext] | None" = None
    _handed_out: weakref.WeakSet[StoredContext] = field(default_factory=weakref.WeakSet)
    _waiting: int = 0

    @property
    def expires_at(self) -> float | None:
        """Unix time in seconds of its deletion, or None."""
        return None if self.expires_s is None else self.created_at + self.expires_s

    @property
    def is_used(self) -> bool:
        """Whether a caller waits for a context of its text, or has not closed it yet."""
        return self._waiting > 0 or any(context.is_open for context in self._handed_out)

    def opened(self) -> int:
        """Return a new descriptor of the bytes, for the caller to close. Read it by offsets: all descriptors share one.

        Raises:
            UnknownHandle: The file was deleted.
        """
        if self._fd < 0:
            raise _unknown(self.id)
        return os.dup(self._fd)

    async def stored(self) -> StoredContext:
        """Return the text of the file as a context, with descriptors of its own for the caller to close.

        A document is its text, as `store` has it; an archive or a database is a dict. All callers share one copy.

        Raises:
            ContextRefused: There is no text in the file, or no memory for it.
            UnknownHandle: The file was deleted.
            ValueTooLarge: The owner has no room for the text.
        """
        if self._storing is None:
            self._storing = asyncio.ensure_future(self._store(self.opened()))
        storing = self._storing
        self._waiting += 1
        try:
            context = (await asyncio.shield(storing)).another()
        except Exception:
            if self._storing is storing:  # the next caller tries again: there may be memory by then
                self._storing = None
            raise
        finally:
            self._waiting -= 1
        self._handed_out.add(context)
        if self._storing is storing:
            self._files._use_text(self)
        return context

    def forget_text(self) -> None:
        """Drop the text. It can be stored again. Contexts handed out go on."""
        self._storing = None

    def close(self) -> None:
        """Drop the bytes. Contexts handed out go on."""
        fd, self._fd = self._fd, -1
        self.forget_text()
        if fd >= 0:
            os.close(fd)

    async def _store(self, fd: int) -> StoredContext:
        stored = await asyncio.to_thread(_stored, fd, self.name)
        try:
            self._files._add_text(self, stored.size_bytes)
        except ValueTooLarge:
            stored.close()
            raise
        return stored


class Files:
    """Uploaded files of all owners. Lives on one event loop. All files are gone when its `with` is left.

    Args:
        file_bytes: Bytes of one file.
        owner_bytes: Bytes of all files of one owner, with uploads under way, and of their texts.
        owner_files: Files of one owner, with uploads under way.
    """

    def __init__(self, file_bytes: int = 4 << 30, owner_bytes: int = 16 << 30, owner_files: int = 1_000) -> None:
        self._file_bytes = file_bytes
        self._owner_bytes = owner_bytes
        self._owner_files = owner_files
        self._files: OrderedDict[str, UploadedFile] = OrderedDict()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._numbers: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        """Name of an owner → number and bytes of its files, with uploads under way, and of their texts."""
        self._texts: OrderedDict[UploadedFile, int] = OrderedDict()
        """Files whose text is kept → its bytes, the least recently used first."""

    def __len__(self) -> int:
        return len(self._files)

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        for file in list(self._files.values()):
            self._drop(file)

    @contextlib.contextmanager
    def receiving(self, owner: Owner) -> Iterator["Upload"]:
        """Receive a file within the block. Nothing of it is left if the block ends before it was kept.

        Raises:
            ConfigurationError: The owner has too many files.
        """
        if self._numbers[owner.name] >= self._owner_files:
            raise ConfigurationError(f"this key has {self._owner_files:,} files: delete some first")
        self._numbers[owner.name] += 1
        with Memfd("upload") as memfd:
            upload = Upload(self, owner, memfd)
            try:
                yield upload
            finally:
                if upload.kept is None:
                    self._numbers[owner.name] -= 1
                    self._bytes[owner.name] -= memfd.size_bytes

    def get(self, owner: Owner, id: str) -> UploadedFile:
        """Find a file by its id.

        Raises:
            UnknownHandle: The owner has no such file, or it was deleted or has expired.
        """
        file = self._files.get(id)
        if file is None or file.owner != owner:
            raise _unknown(id)
        return file

    def of(self, owner: Owner) -> list[UploadedFile]:
        """Return all files of an owner, the oldest first."""
        return [file for file in self._files.values() if file.owner == owner]

    def delete(self, owner: Owner, id: str) -> None:
        """Delete a file.

        Raises:
            UnknownHandle: As for `get`.
        """
        self._drop(self.get(owner, id))

    def _hold(self, file: UploadedFile) -> None:
        self._files[file.id] = file
        if file.expires_s is not None:
            self._timers[file.id] = asyncio.get_running_loop().call_later(file.expires_s, self._drop, file)

    def _drop(self, file: UploadedFile) -> None:
        del self._files[file.id]
        if (timer := self._timers.pop(file.id, None)) is not None:
            timer.cancel()
        self._drop_text(file)
        self._numbers[file.owner.name] -= 1
        self._bytes[file.owner.name] -= file.size_bytes
        file.close()

    def _add_text(self, file: UploadedFile, text_bytes: int) -> None:
        """Keep the stored text of a file."""
        if self._files.get(file.id) is file:  # else it was deleted meanwhile, and its text goes with its callers
            self._make_room(file.owner, text_bytes)
            self._texts[file] = text_bytes
            self._bytes[file.owner.name] += text_bytes

    def _use_text(self, file: UploadedFile) -> None:
        if file in self._texts:
            self._texts.move_to_end(file)

    def _drop_text(self, file: UploadedFile) -> None:
        self._bytes[file.owner.name] -= self._texts.pop(file, 0)
        file.forget_text()

    def _make_room(self, owner: Owner, more: int) -> None:
        """Drop unused texts of the owner, until `more` bytes fit.

        Raises:
            ValueTooLarge: They do not fit without them either.
        """
        while self._bytes[owner.name] + more > self._owner_bytes:
            unused = (file for file in self._texts if file.owner == owner and not file.is_used)
            if (file := next(unused, None)) is None:
                had = f"the files of this key, with the texts that runs use, have more than {self._owner_bytes:,} bytes"
                raise ValueTooLarge(f"{had}: delete some first")
            self._drop_text(file)

    def _grow(self, owner: Owner, file_bytes: int, more: int) -> None:
        if file_bytes + more > self._file_bytes:
            raise ValueTooLarge(f"the file has more than {self._file_bytes:,} bytes")
        self._make_room(owner, more)
        self._bytes[owner.name] += more

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, with uploads under way, and of their texts."""
        return self._bytes.total()


class Upload:
    """A file that arrives in pieces. `Files.receiving` makes it.

    Attributes:
        kept: The file, when it is whole.
    """

    def __init__(self, files: Files, owner: Owner, memfd: Memfd) -> None:
        self._files = files
        self._owner = owner
        self._memfd = memfd
        self.kept: UploadedFile | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes received so far."""
        return self._memfd.size_bytes

    def fileno(self) -> int:
        """Return the descriptor of what has come so far. It stays open while the file is received."""
        return self._memfd.fileno()

    def write(self, piece: bytes) -> None:
        """Append a piece.

        Raises:
            ValueTooLarge: The file, or all files of the owner, would have too many bytes.
        """
        self._files._grow(self._owner, self.size_bytes, len(piece))
        self._memfd.write(piece)

    def keep(self, name: str, purpose: str = "user_data", expires_s: float | None = None) -> UploadedFile:
        """Seal the whole file, and return it with its id.

        Args:
            name, purpose: As for `UploadedFile`.
            expires_s: Seconds until it is deleted; None keeps it until its owner deletes it, or the process ends.
        """
        size_bytes = self.size_bytes
        self.kept = UploadedFile(self._files, self._memfd.seal(), self._owner, name, size_bytes, purpose, expires_s)
        self._files._hold(self.kept)
        return self.kept


def _stored(fd: int, name: str) -> StoredContext:
    try:
        return store_as_it_is(OpenFile(fd, name))
    finally:
        os.close(fd)


def _unknown(id: str) -> UnknownHandle:
    return UnknownHandle(f"there is no file {id[:100]!r}: it was deleted, has expired, or never existed")
