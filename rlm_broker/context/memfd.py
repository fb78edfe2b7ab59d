"""Memfds for contexts, written piece by piece, and sealed.

Theory of operation. Any number of workers get the same context. They run code that is not trusted, and one of them must
not change what another reads. So the orchestrator writes the context once into a memfd (memfd_create(2)), sets all four
seals (`F_ADD_SEALS` in fcntl(2)), and passes the descriptor on. `sandbox_worker.loading.form` says how the bytes lie
there.

- Seals. With them no holder of the descriptor can change the bytes or their number, the orchestrator included. A worker
  checks them before it maps: if a mapped file shrinks, reading past its end is a SIGBUS, and the end of the process.
- Memory. The pages exist once on the machine, and all workers map them. Texts are written in pieces of about a
  megabyte, so the orchestrator never has a second copy of the whole.
- Width. CPython keeps the characters of a text at 1, 2 or 4 bytes each, by the widest (PEP 393), and a worker maps them
  as they lie. The widest character is known only at the end. So a text begins as ASCII; when a wider character comes,
  what is written is widened in place (`_widen`), at most twice.

Other ways were rejected. A temporary file can be changed, may reach a disk, and stays after a kill.
`multiprocessing.shared_memory` has no seals, and a name by which other processes of the user can open it. A message to
each worker is a copy for each. Two passes over the source, to know the width first, fail with a stream, and with a file
that changes in between. Four bytes for every character take four times the memory, and CPython compares and hashes
texts correctly only at the narrowest width.
"""

import errno
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from fcntl import F_ADD_SEALS, fcntl
from typing import Final, Self, cast

from sandbox_worker.loading.form import SEALS, ContextForm, Kind, Width, span_bytes
from sandbox_worker.wire.text_json import encode_raw

_PIECE_BYTES: Final = 1 << 20
"""Bytes of small pieces gathered before they are written."""
_LARGE_BYTES: Final = 1 << 12
"""Smallest piece written at once and not gathered: a system call costs less than copying it."""
_PIECE_CHARS: Final = 1 << 20
"""Characters of a text encoded, or widened, at a time."""
_SEAL_TRIES: Final = 20
"""Attempts to seal. Where the kernel itself holds a page for longer, as when it moves it, it waits 0.15 s, and then
refuses with EBUSY (memfd_wait_for_pins in mm/memfd.c)."""
_MFD_NOEXEC_SEAL: Final = 0x0008  # include/uapi/linux/memfd.h, since Linux 6.3; `os` does not name it


def new_memfd(name: str) -> int:
    """Return the descriptor of a memfd that can be sealed. The caller closes it."""
    try:
        # With vm.memfd_noexec=2 the kernel refuses memfds without this flag (userspace-api/mfd_noexec.rst).
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
    except OSError:  # EINVAL before Linux 6.3, without such a flag; any other error occurs again below
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


class Memfd:
    """A memfd written from start to end. Leaving the `with` closes it, unless it was sealed.

    Attributes:
        size_bytes: Bytes written so far, with those still gathered.
    """

    def __init__(self, name: str = "context") -> None:
        self._fd = new_memfd(name)
        self._pending = bytearray()
        self.size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def write(self, data: bytes | bytearray) -> None:
        """Append `data`. Small pieces are gathered."""
        self.size_bytes += len(data)
        if len(data) >= _LARGE_BYTES:
            self._flush()
            self._write(data)
            return
        self._pending += data
        if len(self._pending) >= _PIECE_BYTES:
            self._flush()

    def fileno(self) -> int:
        """Return the descriptor, with all that was written so far behind it. It stays the memfd's to close."""
        self._flush()
        return self._fd

    def cut(self, size_bytes: int) -> None:
        """Remove all but the first `size_bytes` bytes."""
        self._flush()
        os.ftruncate(self._fd, size_bytes)
        self.size_bytes = os.lseek(self._fd, size_bytes, os.SEEK_SET)

    def seal(self) -> int:
        """Seal the memfd, and return its descriptor, which the caller closes from here on."""
        self._flush()
        for left in reversed(range(_SEAL_TRIES)):
            try:
                fcntl(self._fd, F_ADD_SEALS, SEALS)
                break
            except OSError as error:
                if error.errno != errno.EBUSY or not left:
                    raise
        fd, self._fd = self._fd, -1
        return fd

    def _flush(self) -> None:
        if self._pending:
            # A new one, and not `clear`: a profiler or debugger in another thread may still hold a view of the old one,
            # by way of `gc.get_objects`. A bytearray with views cannot be resized: BufferError.
            pending, self._pending = self._pending, bytearray()
            self._write(pending)

    def _write(self, data: bytes | bytearray) -> None:
        with memoryview(data) as left:
            written = 0
            while written < len(left):
                written += os.write(self._fd, left[written:])


class TextMemfd(Memfd):
    """A memfd of texts, one after the other. Each comes in pieces, and is kept at the narrowest width holding it so
    far."""

    def __init__(self) -> None:
        super().__init__()
        self._lengths = array("Q")
        self._kinds = bytearray()
        self._begin()

    def add_text(self, pieces: Iterable[str | bytes], grows: Callable[[int], None] | None = None) -> int:
        """Append one text; return its number of characters. An error of `pieces` leaves the memfd as it was before, and
        goes on.

        Args:
            pieces: Pieces of the text. Bytes must be ASCII. Lone surrogates are characters like others.
            grows: Called with the number of bytes before the memfd grows by them. It may raise an error.
        """
        try:
            for piece in pieces:
                self._add(piece, grows)
        except BaseException:
            if self.size_bytes > self._start:
                self.cut(self._start)
            self._begin()
            raise
        length = self._length
        self.write(bytes(self._start + span_bytes(length, self._kind) - self.size_bytes))  # zeros up to the next text
        self._lengths.append(length)
        self._kinds.append(self._kind)
        self._begin()
        return length

    @property
    def form(self) -> ContextForm:
        """Form of the memfd, if it has one text."""
        (length,), (kind,) = self._lengths, self._kinds
        return ContextForm("text", length, cast("Width", kind or 1), not kind)

    def add_names(self, names: list[str] | None) -> ContextForm:
        """Make the texts a dict by `names`, or a list if that is None; return the form of the memfd."""
        data = encode_raw(names)
        for part in (self._lengths.tobytes(), self._kinds, data):
            self.write(part)
        return ContextForm("texts", self._start, texts=len(self._lengths), names_bytes=len(data))

    def _begin(self) -> None:
        self._start = self.size_bytes
        self._length = 0
        self._kind: Kind = 0

    def _add(self, piece: str | bytes, grows: Callable[[int], None] | None) -> None:
        if not piece:
            return
        if isinstance(piece, bytes) and self._kind <= 1:
            kind, data = self._kind, piece  # ASCII has the same bytes in ASCII and Latin-1, so no text is made of it
        else:
            kind, data = _encoded(piece.decode("ascii") if isinstance(piece, bytes) else piece, self._kind)
        wider = (kind or 1) - (self._kind or 1)
        if grows:
            grows(self._length * wider + len(data))
        if wider:
            self._widen(kind)
        self._kind = kind
        self.write(data)
        self._length += len(piece)

    def _widen(self, kind: Kind) -> None:
        # The memfd is read, and not the source, which may have changed or be a stream. The last piece is widened first:
        # each is written behind its old place, over bytes that were read already.
        """Widen the text written so far to `kind` bytes for each character, in place."""
        self._flush()
        old, new = self._kind or 1, kind
        for first in reversed(range(0, self._length, _PIECE_CHARS)):
            narrow = os.pread(self._fd, _PIECE_CHARS * old, self._start + first * old)
            wide = bytearray(len(narrow) // old * new)
            for byte in range(old):  # little-endian: the new upper bytes are zeros
                wide[byte::new] = narrow[byte::old]
            os.lseek(self._fd, self._start + first * new, os.SEEK_SET)
            self._write(wide)
        self.size_bytes = os.lseek(self._fd, self._start + self._length * new, os.SEEK_SET)


def _encoded(piece: str, at_least: Kind) -> tuple[Kind, bytes]:
    """Return the narrowest width holding the characters of `piece`, `at_least` or more, and the characters in it."""
    if not at_least and piece.isascii():
        return 0, piece.encode("ascii")
    if at_least <= 1:
        try:
            return 1, piece.encode("latin-1")
        except UnicodeEncodeError:
            pass
    if at_least <= 2 and len(data := piece.encode("utf-16-le", "surrogatepass")) == 2 * len(piece):
        return 2, data
    return 4, piece.encode("utf-32-le", "surrogatepass")


class JsonMemfd(Memfd):
    """A memfd of one JSON value, which comes in parts."""

    @property
    def form(self) -> ContextForm:
        """Form of what has been added so far."""
        return ContextForm("json", self.size_bytes)

    def add_key(self, key: str, first: bool) -> None:
        """Append a key of an object. Its value must come next."""
        self.write((b"" if first else b",") + encode_raw(key) + b":")

    def add(self, value: object) -> int:
        """Append a value; return its length: characters of a text, bytes of any other."""
        if isinstance(value, str):
            self.write(b'"')
            for piece in pieces_of(value):
                self.write(encode_raw(piece)[1:-1])
            self.write(b'"')
            return len(value)
        data = encode_raw(value)
        self.write(data)
        return len(data)


def pieces_of(text: str) -> Iterator[str]:
    """Return `text` in pieces of a size to encode at once, by the methods of `str`: a subclass may say anything of
    itself."""
    length = str.__len__(text)
    return (str.__getitem__(text, slice(start, start + _PIECE_CHARS)) for start in range(0, length, _PIECE_CHARS))
