"""Files of a REPL, as the orchestrator writes, reads, saves and lists them, beside a running block."""

import contextlib
import os
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path, PurePath
from typing import Any, Final

from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.concurrency.threads import in_thread
from rlm_broker.errors import ConfigurationError, FileRefused, SandboxFailed
from rlm_broker.results import FileEntry
from rlm_broker.sandbox.workers.worker import Worker
from rlm_broker.values.host_files import open_regular, refusal_told, replacement
from sandbox_worker.wire.control import ROOT, OpenToRead, OpenToWrite
from sandbox_worker.wire.errors import file_kind

PIECE_BYTES: Final = 1 << 18
"""Bytes copied at once. A copy can be stopped between two pieces."""
MAX_READ_BYTES: Final = 64 << 20
"""Bytes that `read` returns at most, unless its caller says otherwise. A larger file is refused; `save` streams it."""
MAX_ENTRIES: Final = 10_000
"""Largest number of entries in a list. Init refuses a folder with more."""
MAX_PATH_BYTES: Final = 4096
"""Bytes of a path in a REPL. A longer one is refused, as the kernel would (PATH_MAX)."""

Data = bytes | bytearray | memoryview | Path
Entries = list[FileEntry]


class ReplFiles:
    """The files in a REPL's scratch folder, which is the current folder of its code: `repl.files`.

    Example:
        ```python
        repl.files.write("data.csv", b"a,b\\n1,2\\n")
        repl.execute("text = open('data.csv').read().upper(); print(text, file=open('out.csv', 'w'))")
        repl.files.read("out.csv")  # b'A,B\\n1,2\\n\\n'
        ```

    The methods are named as in E2B's `sandbox.files` (`write`, `read`, `list`, `remove`): code needs few changes.
    `save` and `open` keep large files out of memory. Async code has awaited twins: `awrite`,
    `aread`, `asave`, `aopen`, `alist`, `aremove`.

    A path is relative to the scratch folder, or absolute, as code would write it. In the scratch folder, which has the
    names `/w` and `/tmp` at `strict`, no link is followed. Elsewhere the files that code may read can be read and
    listed. Only regular files are opened, and none of /proc.

    Files can be used while a block runs: init opens each of them, and a thread copies it. A block that reads a file
    while it is written sees the part written so far.

    Files stay when a REPL is killed, unless its worker had to be replaced, as after a full scratch folder.

    All methods raise `FileRefused` if the path has a "..", and as they say; `ConfigurationError` if another argument
    cannot be used; `ReplClosed` and `SandboxFailed` as `SandboxedRepl.execute` does.

    Args:
        event_loop: Loop of the REPL.
        worker: Returns the worker with the files.
        max_bytes: Bytes of the scratch folder (`scratch_bytes`).
        on_change: Called with the path and the data of each file written, and with None for a removed one.
    """

    def __init__(
        self,
        event_loop: EventLoopRef,
        worker: Callable[[], Awaitable[Worker]],
        max_bytes: int,
        on_change: Callable[[str, Data | None], object],
    ) -> None:
        self._event_loop = event_loop
        self._worker = worker
        self._max_bytes = max_bytes
        self._on_change = on_change

    def write(self, path: str | PurePath, data: Data) -> None:
        """Write a file, and replace one of that name. Missing folders of its path are made.

        Example:
            ```python
            repl.files.write("data.csv", b"a,b")
            repl.files.write("report.txt", Path("report.txt"))
            ```

        Args:
            path: File in the REPL.
            data: Bytes of the file; or a `Path` of a file of the host, copied in pieces.

        Raises:
            FileRefused: There is no room (`scratch_bytes`, `max_scratch_files`), or a folder or link of that name.
        """
        self._event_loop.run(self._written(path, data))

    async def awrite(self, path: str | PurePath, data: Data) -> None:
        """Write a file as `write` does, awaited."""
        await self._event_loop.arun(self._written(path, data))

    def read(self, path: str | PurePath, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return the bytes of a file.

        Example:
            ```python
            repl.execute("open('out.txt', 'w').write('done')")
            repl.files.read("out.txt")  # b'done'
            ```

        Args:
            path: File in the REPL.
            max_bytes: Bytes of the file at most; a larger one is refused.

        Raises:
            FileRefused: There is no such file, or it has more than `max_bytes`.
        """
        return self._event_loop.run(self._read(path, max_bytes))

    async def aread(self, path: str | PurePath, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return the bytes of a file as `read` does, awaited."""
        return await self._event_loop.arun(self._read(path, max_bytes))

    def save(self, path: str | PurePath, to: str | Path) -> None:
        """Copy a file to the host, in pieces. `to` appears when it is complete, and replaces a file of that name.

        Example:
            ```python
            repl.execute("open('out.txt', 'w').write('done')")
            repl.files.save("out.txt", Path("result.txt"))
            ```

        Args:
            path: File in the REPL.
            to: File of the host.

        Raises:
            FileRefused: There is no such file, or it has more than `scratch_bytes`.
        """
        self._event_loop.run(self._save(path, to))

    async def asave(self, path: str | PurePath, to: str | Path) -> None:
        """Copy a file to the host as `save` does, awaited."""
        await self._event_loop.arun(self._save(path, to))

    def list(self, path: str | PurePath = ".") -> Entries:
        """Return the entries of a folder, ordered by name. Entries of its folders are not among them.

        Example:
            ```python
            repl.files.write("data.csv", b"a,b")
            print([(entry.name, entry.size_bytes) for entry in repl.files.list()])  # [('data.csv', 3)]
            ```

        Args:
            path: Folder in the REPL.

        Returns:
            Up to 10,000 entries, each with name, kind and size in bytes.

        Raises:
            FileRefused: There is no such folder, or it has more entries.
        """
        return self._event_loop.run(self._list(path))

    async def alist(self, path: str | PurePath = ".") -> Entries:
        """Return the entries of a folder as `list` does, awaited."""
        return await self._event_loop.arun(self._list(path))

    def open(self, path: str | PurePath) -> FileIO:
        """Open a file to read it in pieces. The caller closes it. Code may change it meanwhile.

        Example:
            ```python
            repl.files.write("data.csv", b"a,b")
            with repl.files.open("data.csv") as file:
                print(file.read(1))  # b'a'
            ```

        Raises:
            FileRefused: There is no such file.
        """
        return self._event_loop.run(self._opened_to_read(path))

    async def aopen(self, path: str | PurePath) -> FileIO:
        """Open a file as `open` does, awaited."""
        return await self._event_loop.arun(self._opened_to_read(path))

    def remove(self, path: str | PurePath) -> None:
        """Remove a file. Of a link, the link itself is removed, and never its target.

        Example:
            ```python
            repl.files.write("data.csv", b"a,b")
            repl.files.remove("data.csv")
            ```

        Raises:
            FileRefused: There is no such file, or it is a folder.
        """
        self._event_loop.run(self._removed(path))

    async def aremove(self, path: str | PurePath) -> None:
        """Remove a file as `remove` does, awaited."""
        await self._event_loop.arun(self._removed(path))

    async def put(self, path: str, data: bytes | None) -> None:
        """Write a file, or remove it if there are no bytes, without a note of it."""
        await (self._remove(path) if data is None else self._write(path, data))

    # -- on the loop -------------------------------------------------------------------------------------------------

    async def _written(self, path: object, data: Data) -> None:
        await self._write(path, data)
        self._on_change(str(path), data)

    async def _removed(self, path: object) -> None:
        await self._remove(path)
        self._on_change(str(path), None)

    async def _write(self, path: object, data: object) -> None:
        names = names_of(path)
        if isinstance(data, Path):
            source: memoryview | int = open_regular(data)
        elif isinstance(data, bytes | bytearray | memoryview):
            source = memoryview(data.tobytes() if isinstance(data, memoryview) else data)
        else:
            raise ConfigurationError(
                f"data must be bytes or a Path of the host, not {type(data).__name__}: for text give `data.encode()`"
            )
        with contextlib.ExitStack() as opened:
            opened.callback(source.release if isinstance(source, memoryview) else partial(os.close, source))
            size_bytes = len(source) if isinstance(source, memoryview) else os.fstat(source).st_size
            worker = await self._worker()
            fd = await self._opened(OpenToWrite(names, size_bytes), path, worker)
            opened.callback(os.close, fd)
            with _naming(path), contextlib.ExitStack() as kept:
                kept.callback(os.close, own := os.dup(fd))  # the thread closes the other one
                await in_thread(lambda stop: _fill(fd, source, size_bytes, stop), at_end=opened.pop_all().close)
                await worker.init.store(own)

    async def _read(self, path: object, max_bytes: object) -> bytes:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
            raise ConfigurationError(f"max_bytes = {max_bytes!r}: give a number of bytes")
        whole = bytearray()
        fd = await self._opened(OpenToRead(names_of(path)), path)
        with _naming(path):
            beyond = f"more than max_bytes = {max_bytes:,}: raise it, or use `save`"
            await in_thread(lambda stop: _copy(fd, whole.extend, max_bytes, beyond, stop), at_end=partial(os.close, fd))
        return bytes(whole)

    async def _save(self, path: object, to: object) -> None:
        if not isinstance(to, str | Path) or not str(to):
            raise ConfigurationError(f"to must be a path of the host, not {to!r}")
        target, names = Path(to), names_of(path)
        fd = await self._opened(OpenToRead(names), path)
        with _naming(path):
            beyond = f"more than scratch_bytes = {self._max_bytes:,}"
            await in_thread(
                lambda stop: _save_as(target, fd, self._max_bytes, beyond, stop), at_end=partial(os.close, fd)
            )

    async def _list(self, path: object) -> Entries:
        names = names_of(path, may_be_empty=True)
        worker = await self._worker()
        found: Entries = []
        after = b""
        while True:
            with _naming(path):
                listed = await worker.list_folder(names, after)
            found += [FileEntry(os.fsdecode(each.name), each.kind, each.size_bytes) for each in listed.entries]
            last = listed.entries[-1].name if listed.entries else after
            if len(found) > MAX_ENTRIES or (listed.entries and last <= after):  # only a forged list does that
                raise SandboxFailed(f"the list of {str(path)!r} that came out of the sandbox does not end")
            if listed.is_all or not listed.entries:
                return found
            after = last

    async def _opened_to_read(self, path: object) -> FileIO:
        return FileIO(await self._opened(OpenToRead(names_of(path)), path))

    async def _remove(self, path: object) -> None:
        names = names_of(path)
        worker = await self._worker()
        with _naming(path):
            await worker.remove_file(names)

    async def _opened(self, request: OpenToRead | OpenToWrite, path: object, worker: Worker | None = None) -> int:
        """Return a descriptor of a regular file, which the caller closes."""
        worker = worker or await self._worker()
        with _naming(path):
            fd = await worker.open_file(request)
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # init checks, too, but a descriptor out of a worker is untrusted
            os.close(fd)
            raise FileRefused(f"{str(path)!r} is not a regular file")
        return fd


def names_of(path: object, may_be_empty: bool = False) -> list[bytes]:
    """Return the names in a path from the scratch folder; those of an absolute path begin with `ROOT`. Raise
    FileRefused for a path with ".." or one that names no file."""
    if not isinstance(path, str | PurePath):
        raise ConfigurationError(f"a path in a REPL must be text, not {type(path).__name__}")
    try:
        whole = os.fsencode(path)
    except UnicodeEncodeError:
        raise _path_refused(f"the path {str(path)!r} has lone surrogates, which no file name has") from None
    names = [name for name in whole.split(b"/") if name not in (b"", b".")]
    if b"\0" in whole or len(whole) > MAX_PATH_BYTES:
        raise _path_refused(f"the path {str(path)[:80]!r} has a NUL character or over {MAX_PATH_BYTES:,} bytes")
    if b".." in names:
        raise _path_refused(f"the path {str(path)!r} must be without '..': absolute, or from the REPL's scratch folder")
    if not names and not may_be_empty:
        raise _path_refused(f"the path {str(path)!r} names no file")
    return [ROOT, *names] if whole.startswith(b"/") else names


def _path_refused(why: str) -> FileRefused:
    refused = FileRefused(why)
    refused.is_path = True
    return refused


def _fill(fd: int, source: "memoryview | int", size_bytes: int, stop: threading.Event) -> None:
    """Write `size_bytes` of the source, or fewer if it has become shorter."""
    done = 0
    while done < size_bytes and not stop.is_set():
        length = min(PIECE_BYTES, size_bytes - done)
        piece = os.pread(source, length, done) if isinstance(source, int) else source[done : done + length]
        if not piece:
            return
        done += os.write(fd, piece)


def _copy(fd: int, take: Callable[[bytes], Any], max_bytes: int, beyond: str, stop: threading.Event) -> None:
    """Pass the content of a file to `take`, piece by piece. The file may grow meanwhile. Raise FileRefused beyond
    `max_bytes`, with the rest of a sentence about the file."""
    size_bytes = os.fstat(fd).st_size
    if size_bytes > max_bytes:
        raise FileRefused(f"has {size_bytes:,} bytes, {beyond}", "too_large")
    done = 0
    while piece := os.read(fd, PIECE_BYTES):
        if stop.is_set():  # and so no caller gets this error
            raise InterruptedError
        done += len(piece)
        if done > max_bytes:
            raise FileRefused(f"has grown to {beyond}", "too_large")
        take(piece)


def _save_as(target: Path, fd: int, max_bytes: int, beyond: str, stop: threading.Event) -> None:
    """Copy to a file of the host."""
    if target.is_dir():
        raise ConfigurationError(f"{target} is a folder: name the file")
    with refusal_told(f"{target} cannot be written"), replacement(target, 0o666) as file:
        _copy(fd, file.write, max_bytes, beyond, stop)


@contextmanager
def _naming(path: object) -> Iterator[None]:
    """Put the path before the message of a refusal, and turn an error of the kernel into one."""
    try:
        yield
    except FileRefused as error:
        raise FileRefused(f"{str(path)!r} {error}", error.kind) from None
    except OSError as error:
        raise FileRefused(f"{str(path)!r} cannot be copied: {error.strerror}", file_kind(error)) from None
