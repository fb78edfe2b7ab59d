"""Writing a context into a memfd, piece by piece, and sealing it, so that nobody can change it any more.

How it lies there is told in `sandbox_worker.loading.form`.
"""

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from fcntl import F_ADD_SEALS, fcntl
from typing import Final, Self, cast

from sandbox_worker.loading.form import SEALS, ContextForm, Kind, Width, span_bytes
from sandbox_worker.wire.text_json import encode_raw

_PIECE_BYTES: Final = 1 << 20
_LARGE_BYTES: Final = 1 << 12
_PIECE_CHARS: Final = 1 << 20
_MFD_NOEXEC_SEAL: Final = 0x0008  # include/uapi/linux/memfd.h, since Linux 6.3; `os` does not name it


def new_memfd(name: str) -> int:
    """Return the descriptor of a memfd that can be sealed, for the caller to close."""
    try:
        # Where the administrator has set vm.memfd_noexec=2 there is no other kind.
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
    except OSError:  # EINVAL before Linux 6.3; any other reason comes again
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


class Memfd:
    """A memfd that is written from start to end. Leaving the `with` closes it, unless it was sealed.

    Attributes:
        size_bytes: Written so far.
    """

    def __init__(self) -> None:
        self._fd = new_memfd("context")
        self._pending = bytearray()
        self.size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def write(self, data: bytes | bytearray) -> None:
        """Append `data`; small ones are gathered."""
        self.size_bytes += len(data)
        if len(data) >= _LARGE_BYTES:
            self._flush()
            self._write(data)
            return
        self._pending += data
        if len(self._pending) >= _PIECE_BYTES:
            self._flush()

    def cut(self, size_bytes: int) -> None:
        """Take back what was written after the first `size_bytes`."""
        self._flush()
        os.ftruncate(self._fd, size_bytes)
        self.size_bytes = os.lseek(self._fd, size_bytes, os.SEEK_SET)

    def seal(self) -> int:
        """Make it final, and return its descriptor, which is the caller's from here on."""
        self._flush()
        fcntl(self._fd, F_ADD_SEALS, SEALS)
        fd, self._fd = self._fd, -1
        return fd

    def _flush(self) -> None:
        if self._pending:
            # Not cleared in place: a profiler or debugger in another thread may still hold a view of it, as
            # `gc.get_objects` does, and a bytearray with views cannot be resized.
            pending, self._pending = self._pending, bytearray()
            self._write(pending)

    def _write(self, data: bytes | bytearray) -> None:
        with memoryview(data) as left:
            written = 0
            while written < len(left):
                written += os.write(self._fd, left[written:])


class TextMemfd(Memfd):
    """Takes texts, one after the other, each in pieces and at the narrowest width that holds it so far."""

    def __init__(self) -> None:
        super().__init__()
        self._lengths = array("Q")
        self._kinds = bytearray()
        self._begin()

    def add_text(self, pieces: Iterable[str | bytes], grows: Callable[[int], None] | None = None) -> int:
        """Append one text; return its characters. What `pieces` raises takes back what came of it before.

        Args:
            pieces: Those that are bytes are ASCII. Lone surrogates are characters like others.
            grows: Called with the bytes that the memfd will grow by, before it does. It may raise.
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
        self.write(bytes(self._start + span_bytes(length, self._kind) - self.size_bytes))
        self._lengths.append(length)
        self._kinds.append(self._kind)
        self._begin()
        return length

    @property
    def form(self) -> ContextForm:
        """Of the one text that was added."""
        (length,), (kind,) = self._lengths, self._kinds
        return ContextForm("text", length, cast("Width", kind or 1), not kind)

    def add_names(self, names: list[str] | None) -> ContextForm:
        """Make the texts that were added a dict by `names`, or a list; return its form."""
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
            kind, data = self._kind, piece  # as it is
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
        # From our own copy: the file that it came from may have changed. From the end, so that nothing is overwritten
        # before it is read.
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
    """The characters of `piece` in the narrowest width that holds them, and which one that is."""
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
    """Takes the parts of one JSON value."""

    @property
    def form(self) -> ContextForm:
        """Of what has been added so far."""
        return ContextForm("json", self.size_bytes)

    def add_key(self, key: str, first: bool) -> None:
        """Append a key of an object; its value comes next."""
        self.write((b"" if first else b",") + encode_raw(key) + b":")

    def add(self, value: object) -> int:
        """Append a value; return its length: characters of a text, else bytes."""
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
    """`text` in pieces of a size to encode at once. Its own characters, whatever its class says of them."""
    length = str.__len__(text)
    return (str.__getitem__(text, slice(start, start + _PIECE_CHARS)) for start in range(0, length, _PIECE_CHARS))
