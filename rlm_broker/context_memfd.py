"""Writing a context into a memfd, piece by piece, and sealing it, so that nobody can change it any more."""

import json
import os
from collections.abc import Iterable, Iterator
from fcntl import F_ADD_SEALS, fcntl
from typing import Final, Self

import msgspec

from sandbox_worker.loading import SEALS, ContextForm, Width

_PIECE_BYTES: Final = 1 << 20
_LARGE_BYTES: Final = 1 << 16
_PIECE_CHARS: Final = 1 << 20
_MFD_NOEXEC_SEAL: Final = 0x0008  # include/uapi/linux/memfd.h, since Linux 6.3; `os` does not name it


class Memfd:
    """A memfd that is written from start to end. Leaving the `with` closes it, unless it was sealed.

    Attributes:
        size_bytes: Written so far.
    """

    def __init__(self) -> None:
        try:
            # Where the administrator has set vm.memfd_noexec=2 there is no other kind.
            self._fd = os.memfd_create("context", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
        except OSError:  # EINVAL before Linux 6.3; any other reason comes again
            self._fd = os.memfd_create("context", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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
            self._write(self._pending)
            self._pending.clear()

    def _write(self, data: bytes | bytearray) -> None:
        with memoryview(data) as left:
            written = 0
            while written < len(left):
                written += os.write(self._fd, left[written:])


class TextMemfd(Memfd):
    """Takes the pieces of one text, at the narrowest width so far; at a wider character all before it is widened.

    Attributes:
        length: Characters so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self._width: Width = 1
        self._ascii = True

    @property
    def form(self) -> ContextForm:
        """Of what has been added so far."""
        return ContextForm("text", self.length, self._width, self._ascii)

    def add(self, piece: str | bytes) -> None:
        """Append `piece`; bytes are ASCII. Lone surrogates are characters like others."""
        if isinstance(piece, bytes):
            if self._width == 1:
                self.write(piece)
                self.length += len(piece)
                return
            piece = piece.decode("ascii")
        self._ascii = self._ascii and piece.isascii()
        width, data = _encoded(piece, self._width)
        if width > self._width:
            self._widen(width)
        self.write(data)
        self.length += len(piece)

    def _widen(self, width: Width) -> None:
        # From our own copy: the file that it came from may have changed.
        self._flush()
        with Memfd() as wider:
            for offset in range(0, self.size_bytes, _PIECE_BYTES):
                narrow = os.pread(self._fd, _PIECE_BYTES, offset)
                wide = bytearray(len(narrow) // self._width * width)
                for byte in range(self._width):  # little-endian: the new upper bytes are zeros
                    wide[byte::width] = narrow[byte :: self._width]
                wider.write(wide)
            wider._flush()
            self._fd, wider._fd = wider._fd, self._fd
            self.size_bytes, self._width = wider.size_bytes, width


def _encoded(piece: str, at_least: Width) -> tuple[Width, bytes]:
    """The characters of `piece` in the narrowest width that holds them, and which one that is."""
    if at_least == 1:
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
        self.write((b"" if first else b",") + _json(key) + b":")

    def add(self, value: object) -> int:
        """Append a value; return its length: characters of a text, else bytes."""
        if isinstance(value, str):
            return self.add_text(pieces_of(value))
        data = _json(value)
        self.write(data)
        return len(data)

    def add_text(self, pieces: Iterable[str | bytes]) -> int:
        """Append one text that comes in pieces, of which bytes are ASCII; return its characters."""
        chars = 0
        self.write(b'"')
        for piece in pieces:
            self.write(_json(piece if isinstance(piece, str) else piece.decode("ascii"))[1:-1])
            chars += len(piece)
        self.write(b'"')
        return chars


def _json(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, TypeError):  # a lone surrogate; a subclass of str, int or float
        # Surrogates stay raw: as escapes, two that stand side by side would be read as one character.
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def pieces_of(text: str) -> Iterator[str]:
    """`text` in pieces of a size to encode at once."""
    return (text[start : start + _PIECE_CHARS] for start in range(0, len(text), _PIECE_CHARS))
