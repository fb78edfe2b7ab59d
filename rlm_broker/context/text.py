"""Decoding of bytes to text, in pieces: by a byte order mark, by a named encoding, or as UTF-8.

Undecodable bytes are replaced and counted. If they are too many, the bytes are no text, and are refused.
"""

import codecs
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Final, Literal, get_args

from msgspec import Struct

from rlm_broker.context.found_files import FileUnfit
from rlm_broker.errors import ConfigurationError

MAX_REPLACED_SHARE: Final = 0.3
"""Largest share of replaced bytes of a text.

Read as UTF-8, about half of binary data cannot be decoded. Of text in Latin-1 it is a tenth at most, and of text in
another alphabet nearly all.
"""
JUDGED_BYTES: Final = 1 << 20
"""Bytes after which that share is checked with each piece, so that a binary file is not decoded to its end."""

Errors = Literal["replace", "strict"]
"""Treatment of undecodable bytes. `replace`: each becomes U+FFFD and is counted. `strict`: the text is
refused."""

_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16: it begins with that mark
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_NO_ENCODINGS_OF_FILES: Final = frozenset({"idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape"})
"""Python's codecs of text that are not encodings of files."""
_COUNTED: Final = "rlm_broker.counted"
"""Name of the error handler for encodings other than UTF-8. It is called for each error, which is slow: errors of UTF-8
are counted afterwards, see `_replaced_in`."""
_REPLACEMENT: Final = "\ufffd"
_replaced = threading.local()


def _replace_and_count(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    _replaced.bytes += error.end - error.start
    return _REPLACEMENT, error.end


codecs.register_error(_COUNTED, _replace_and_count)


class TextDecoding(Struct, frozen=True):
    """Encoding of bytes without a byte order mark, by its name in Python (None is UTF-8), and the treatment of errors.
    Raise ConfigurationError for an unknown one."""

    encoding: str | None = None
    errors: Errors = "replace"

    def __post_init__(self) -> None:
        if not isinstance(self.errors, str) or self.errors not in get_args(Errors):
            raise ConfigurationError(f"errors must be one of {', '.join(get_args(Errors))}, not {self.errors!r:.60}")
        if self.encoding is not None and not _is_encoding(self.encoding):
            raise ConfigurationError(
                f"there is no text encoding {self.encoding!r:.60}; some are utf-16, cp1252, gb18030"
            )

    @property
    def replaces(self) -> bool:
        """Whether bytes that cannot be decoded are replaced. Otherwise the text is refused."""
        return self.errors == "replace"

    def or_stated(self, encoding: str | None) -> "TextDecoding":
        """Return the decoding of a page that states an encoding. One that the user has named is in force."""
        return TextDecoding(encoding, self.errors) if self.encoding is None and _is_encoding(encoding) else self


def _is_encoding(name: object) -> bool:
    if not isinstance(name, str):
        return False
    try:
        found = codecs.lookup(name)
        "".encode(name)  # a LookupError for codecs that are not for text, for example base64
    except (LookupError, ValueError):
        return False
    return found.name not in _NO_ENCODINGS_OF_FILES and found.incrementaldecoder is not None


class DecodedText:
    """The text of some bytes, in pieces. A piece of bytes is ASCII, as most pieces of most texts. A byte order mark is
    not text.

    Iterating raises `FileUnfit` in three cases: the bytes are binary (they have a zero character); they cannot be
    decoded and are not to be replaced; or more than `MAX_REPLACED_SHARE` of them cannot be decoded, as is checked from
    `JUDGED_BYTES` on and at the end. That may come after any number of pieces.

    Args:
        name: Name of the bytes' source, for the error.
        grows: Counts the stored bytes of the text, if these have a bound, see `TextMemfd.add_text`.
        kind: Kind of the file that it is the text of, for example `pdf` or `picture`; empty for a text.

    Attributes:
        replaced: Bytes replaced so far.
    """

    def __init__(
        self,
        pieces: Iterable[bytes],
        name: str,
        how: TextDecoding,
        grows: Callable[[int], None] | None = None,
        kind: str = "",
    ) -> None:
        self._pieces = iter(pieces)
        self._name = name
        self._how = how
        self.grows = grows
        self.kind = kind
        self.replaced = 0

    def __iter__(self) -> Iterator[str | bytes]:
        beginning = b""
        while len(beginning) < 4 and (piece := next(self._pieces, b"")):
            beginning += piece
        marked = next((encoding for mark, encoding in _MARKS if beginning.startswith(mark)), None)
        encoding = codecs.lookup(marked or self._how.encoding or "utf-8").name
        is_utf8, begun = encoding == "utf-8", False
        counted = self._how.replaces and not is_utf8
        decoder = codecs.getincrementaldecoder(encoding)(_COUNTED if counted else self._how.errors)
        start = 0  # offset of the piece in the file
        for piece in chain([beginning] if beginning else [], self._pieces, [b""]):
            if is_utf8 and (zero := piece.find(0)) >= 0:
                raise self._binary(f"a zero byte at offset {start + zero:,}")
            behind = len(decoder.getstate()[0]) if is_utf8 or not self._how.replaces else 0
            if is_utf8 and piece and not behind and piece.isascii():
                begun = True
                yield piece
                start += len(piece)
                continue
            text = self._decoded(decoder, piece, start - behind, encoding)
            if not is_utf8 and "\0" in text:
                raise self._binary(f"a zero character, read as {encoding}")
            yield text if begun else text.removeprefix("\ufeff")
            begun = begun or bool(text)
            start += len(piece)
            if self.replaced > MAX_REPLACED_SHARE * start and (not piece or start >= JUDGED_BYTES):
                of = f"{'the first' if piece else 'its'} {start:,} bytes"
                sentence = (
                    f"{self._name} is not {_shown(encoding)} text: {self.replaced:,} of {of} cannot be decoded; name "
                    "its encoding (cp1252, utf-16, ...) if it is text"
                )
                raise FileUnfit(f"not {_shown(encoding)}", sentence)

    def _decoded(self, decoder: codecs.IncrementalDecoder, piece: bytes, start: int, encoding: str) -> str:
        """Decode a piece; an empty one is the end. `start` is the offset of the first byte decoded now, maybe of a
        character cut by the last piece."""
        _replaced.bytes = 0
        cut = decoder.getstate()[0] if encoding == "utf-8" else b""
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            byte, offset = error.object[error.start], start + error.start
            what = f"{self._name} is not {_shown(encoding)} text: byte {byte:#04x} at offset {offset:,}"
            raise FileUnfit(f"not {_shown(encoding)}", f"{what}; convert it (iconv -t UTF-8)") from None
        except UnicodeError as error:
            raise FileUnfit(
                f"not {_shown(encoding)}", f"{self._name} is not {_shown(encoding)} text: {error}"
            ) from None
        self.replaced += _replaced.bytes
        if encoding == "utf-8" and _REPLACEMENT in text:
            self.replaced += _replaced_in(text, cut + piece, len(decoder.getstate()[0]))
        return text

    def _binary(self, why: str) -> FileUnfit:
        sentence = f"{self._name} is binary ({why}), not text: convert it to UTF-8 text, or name its encoding"
        return FileUnfit("binary", sentence)


def _replaced_in(text: str, data: bytes, left: int) -> int:
    """Return how many bytes of UTF-8 were replaced when `data`, but for its last `left` bytes, became `text`. The
    text's own U+FFFD are subtracted first. Of the rest, all bytes that the text does not encode to were replaced."""
    own = data.count(_REPLACEMENT.encode())  # U+FFFD encoded by the bytes themselves: not replaced
    kept = len(text.encode()) - len(_REPLACEMENT.encode()) * (text.count(_REPLACEMENT) - own)
    return len(data) - left - kept


def _shown(encoding: str) -> str:
    return encoding.upper()
