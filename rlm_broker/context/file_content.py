"""Content of files by their bytes: a text, a page, a picture, a document, a database, or an archive of these.

Documents are PDF and office files, notebooks, databases of SQLite, and Parquet files. A process of its own reads each.
Some of the libraries are large, and a document may be hostile. So that process has bounds of memory and time, none of
our environment variables, and may write to no file. It is no sandbox: it runs as the user, and can read what the user
can.
"""

import base64
import importlib.util
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from rlm_broker.concurrency.forks import FORKING
from rlm_broker.context import document_text
from rlm_broker.context.archives import (
    BEGIN_BYTES,
    ByteReader,
    Member,
    Unpacking,
    is_tar,
    is_zip,
    packing_of,
    tar_members,
    unpacked,
    zip_members,
)
from rlm_broker.context.files import SECRET, leads_to_secret
from rlm_broker.context.found_files import PIECE_BYTES, FileUnfit, FoundFile, LeftOut, bytes_of, open_regular, printable
from rlm_broker.context.html_text import PageText, charset_of, is_page
from rlm_broker.context.memfd import new_memfd
from rlm_broker.context.text import DecodedText, TextDecoding

_OURS: Final = TextDecoding()
"""Decoding of a document's text: `text_of_document` gives UTF-8, also if the user has named another encoding for
files."""
MAX_PICTURE_BYTES: Final = 1 << 28
"""Bytes of all pictures of one context; what is beyond is left out. A folder may have gigabytes of photographs."""
_PICTURES: Final = (
    ("png", re.compile(rb"\x89PNG\r\n\x1a\n")),
    ("jpeg", re.compile(rb"\xff\xd8\xff")),
    ("gif", re.compile(rb"GIF8[79]a")),
    ("webp", re.compile(rb"RIFF....WEBP", re.DOTALL)),
)
"""Kinds of pictures that models take, and their beginnings."""
_PICTURE_PIECE_BYTES: Final = 3 << 16
"""Bytes of a picture that are written at a time: a multiple of 3, since 3 bytes are 4 characters of base64."""
CHARSET_BYTES: Final = 1 << 10
"""Bytes in which a page states its encoding."""

Content = DecodedText | Iterator[Member]
"""Content of a file: a text; or the members of an archive, each to be read before the next one is asked for."""


class Reading:
    """Reads the files of one context, within the bounds for all together, and counts those that are left out."""

    def __init__(self, how: TextDecoding, skipped: LeftOut | None = None) -> None:
        self.skipped = LeftOut() if skipped is None else skipped
        self._how = how
        self._unpacking = Unpacking()
        self._picture_bytes_left = MAX_PICTURE_BYTES

    @contextmanager
    def opened(self, file: FoundFile) -> Iterator[Content]:
        """Open a file for as long as its content is read. Raise FileUnfit if it cannot be read or has no text,
        ContextRefused if too much is unpacked. Reading the content raises them, too."""
        fd, size_bytes = open_regular(file)
        try:
            yield self._content(ByteReader(bytes_of(file, fd, size_bytes)), file.name, file.given, fd)
        finally:
            os.close(fd)

    def of_stream(self, pieces: Iterable[bytes], name: str) -> DecodedText:
        """Return the text of a stream. Raise as `opened` does, and FileUnfit for an archive."""
        return self._text(ByteReader(pieces), name, name)

    def texts_of(self, file: FoundFile) -> Iterator[tuple[str, DecodedText]]:
        """Yield the names and texts in a file, each to be read before the next. Count those that are left out. Raise
        ContextRefused if too much is unpacked."""
        try:
            with self.opened(file) as content:
                if isinstance(content, DecodedText):
                    yield file.name, content
                else:
                    yield from ((f"{file.name}/{name}", text) for name, text in self.texts_in(content, file.given))
        except FileUnfit as unfit:
            self.skipped.add(unfit.reason, file.name)

    def texts_in(self, members: Iterator[Member], given: str) -> Iterator[tuple[str, DecodedText]]:
        """Yield the names and texts in an archive, as `texts_of` does. Raise FileUnfit if the archive cannot be read,
        maybe after any number of texts."""
        for member in members:
            whole = f"{given}/{member.name}"
            parts = member.name.replace("\\", "/").split("/")  # archives from Windows may have backslashes
            if member.unfit:
                self.skipped.add(member.unfit, printable(whole))
            elif ".git" in parts:
                continue
            elif leads_to_secret(parts):
                self.skipped.add(SECRET, printable(whole))
            else:
                try:
                    text = self._text(ByteReader(member.pieces), member.name, whole, member.was_packed)
                except FileUnfit as unfit:
                    self.skipped.add(unfit.reason, printable(whole))
                else:
                    yield member.name, text

    def _text(self, reader: ByteReader, name: str, given: str, was_packed: bool = False) -> DecodedText:
        content = self._content(reader, name, given, None, was_packed)
        assert isinstance(content, DecodedText)
        return content

    def _content(self, reader: ByteReader, name: str, given: str, fd: int | None, was_packed: bool = False) -> Content:
        """Return the content of the bytes, by their beginning. `fd` is the descriptor of the file they are read from,
        if it is one; `was_packed` says whether they come out of something compressed."""
        beginning = reader.peek(BEGIN_BYTES)
        grows = partial(self._unpacking.count_stored, given=given)
        if packing := packing_of(beginning):
            reader = ByteReader(self._unpacking.counted(unpacked(reader, packing, given), given))
            beginning = reader.peek(BEGIN_BYTES)
            if packing_of(beginning):
                raise FileUnfit("compressed twice", f"{given} is compressed twice: unpack it first")
        if kind := document_kind(beginning, name):
            text = self._unpacking.counted(text_of_document(reader, kind, given), given)
            if kind != "sqlite":
                return DecodedText(text, given, _OURS, grows, kind)
            if fd is None:
                raise _inside(given, "a database")
            return tar_members(ByteReader(text), given, self._unpacking, was_packed=True)
        tar = is_tar(beginning, name)
        if not tar and not is_zip(beginning):
            return self._plain(reader, beginning, name, given, grows if packing or was_packed else None)
        if fd is None or (packing and not tar):
            raise _inside(given, "an archive")
        if tar:
            return tar_members(reader, given, self._unpacking, was_packed=packing is not None)
        return zip_members(fd, given, self._unpacking)

    def _plain(
        self, reader: ByteReader, beginning: bytes, name: str, given: str, grows: Callable[[int], None] | None
    ) -> DecodedText:
        """Return the content of a text, a page or a picture."""
        if picture := next((kind for kind, begins in _PICTURES if begins.match(beginning)), None):
            return DecodedText(self._address(reader, picture, given), given, _OURS, grows, "picture")
        if is_page(beginning, name):
            how = self._how.or_stated(charset_of(reader.peek(CHARSET_BYTES)))
            return PageText(reader, given, how, grows, "html")
        return DecodedText(reader, given, self._how, grows)

    def _address(self, reader: ByteReader, kind: str, given: str) -> Iterator[bytes]:
        """Yield a picture as a `data:` address, the form in which code shows it to a model."""
        yield f"data:image/{kind};base64,".encode()
        while piece := reader.read(_PICTURE_PIECE_BYTES):
            self._picture_bytes_left -= len(piece)
            if self._picture_bytes_left < 0:
                sentence = f"{given} is beyond the {MAX_PICTURE_BYTES:,} bytes that all pictures of a context may have"
                raise FileUnfit("a picture, beyond the bytes for pictures", sentence)
            yield base64.b64encode(piece)


def _inside(given: str, what: str) -> FileUnfit:
    sentence = f"{given} is {what}, which can be read only from a file of its own: save it as a file"
    return FileUnfit(f"{what} inside something else", sentence)


# -- documents -------------------------------------------------------------------------------------------------------

MAX_DOCUMENT_BYTES: Final = 1 << 28
"""Largest document, in bytes; a larger one is refused."""
MAX_TEXT_BYTES: Final = 1 << 28
"""Longest text of one document, in bytes of UTF-8. A small document may repeat one text in each of a million cells."""
TIMEOUT_S: Final = 120.0
"""Seconds for the text of one document. Beyond it the process is killed, and the document is refused."""
EXTRA: Final = "PDF or office file, which needs rlm-broker[documents]"
"""Reason for documents left out since the libraries are not installed."""
EXTRA_PARQUET: Final = "Parquet file, which needs rlm-broker[parquet]"
"""The same for Parquet files."""
_UNREADABLE: Final = "a document that cannot be read"
_TOO_LARGE: Final = "a document that is too large"
_TOO_LONG: Final = (
    f"it took more than {document_text.CPU_S} s of CPU time or {TIMEOUT_S:g} s, or crashed the process that reads it"
)
_WHY: Final = {
    document_text.ENCRYPTED: "it opens with a password",
    document_text.UNREADABLE: f"it is damaged, or takes more than {document_text.MEMORY_BYTES:,} bytes of memory",
    document_text.WITHOUT_TEXT: "there is no text in it (pictures of text are not read)",
}
_LIBRARIES: Final = {"pdf": "pypdf", "docx": "docx", "xlsx": "openpyxl", "pptx": "pptx", "parquet": "pyarrow"}
_MARKS: Final = {b"%PDF-": "pdf", b"SQLite format 3\0": "sqlite", b"PAR1": "parquet"}
"""Kinds of documents by their beginning."""


def document_kind(beginning: bytes, name: str) -> str | None:
    """Return the kind of a document by which `document_text` knows it; None for any other file."""
    if marked := next((kind for mark, kind in _MARKS.items() if beginning.startswith(mark)), None):
        return marked
    ending = name.rpartition(".")[2].lower()
    if ending == "ipynb":
        return ending if beginning.lstrip().startswith(b"{") else None
    return ending if ending in ("docx", "xlsx", "pptx") and beginning.startswith(b"PK\x03\x04") else None


def text_of_document(reader: ByteReader, kind: str, given: str) -> Iterator[bytes]:
    """Yield the text of a document as UTF-8, in pieces.

    Raises:
        FileUnfit: A library is missing; the document cannot be read, has no text, or takes too much time or memory; or
            its text is longer than `MAX_TEXT_BYTES`. This may come after any number of pieces.
    """
    if (library := _LIBRARIES.get(kind)) and importlib.util.find_spec(library) is None:
        if kind == "parquet":
            instead = "or give it as a table, pandas.read_parquet(...)"
            raise FileUnfit(EXTRA_PARQUET, f"{given} is a parquet file: pip install 'rlm-broker[parquet]', {instead}")
        sentence = f"{given} is a {kind} document: pip install 'rlm-broker[documents]' to have its text read"
        raise FileUnfit(EXTRA, sentence)
    program = [sys.executable, "-I", str(Path(document_text.__file__)), kind]
    environment = {"LANG": "C.UTF-8", "PATH": os.defpath}
    document = _copied(reader, given)
    try:
        with FORKING:
            process = subprocess.Popen(
                program, stdin=document, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd="/"
            )
    except OSError as error:
        raise FileUnfit(_UNREADABLE, f"{given} cannot be read: its process did not start ({error.strerror})") from None
    finally:
        os.close(document)
    with process:
        try:
            yield from _said(process, given)
            ended = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise FileUnfit(_UNREADABLE, f"{given} cannot be read as {kind}: {_TOO_LONG}") from None
        finally:
            process.kill()  # harmless after its end
    if ended:
        raise FileUnfit(_UNREADABLE, f"{given} cannot be read as {kind}: {_WHY.get(ended, _TOO_LONG)}")


def _copied(reader: ByteReader, given: str) -> int:
    """Return a memfd of the document, which the caller closes. The libraries seek in it, which they could not in a
    pipe."""
    fd, left = new_memfd("document"), MAX_DOCUMENT_BYTES
    try:
        while piece := reader.read(PIECE_BYTES):
            left -= len(piece)
            if left < 0:
                sentence = f"{given} is a document of more than {MAX_DOCUMENT_BYTES:,} bytes: hand in its text"
                raise FileUnfit(_TOO_LARGE, sentence)
            written = 0
            while written < len(piece):
                written += os.write(fd, piece[written:])
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _said(process: "subprocess.Popen[bytes]", given: str) -> Iterator[bytes]:
    assert process.stdout is not None
    fd, deadline, left = process.stdout.fileno(), time.monotonic() + TIMEOUT_S, MAX_TEXT_BYTES
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        piece = os.read(fd, PIECE_BYTES)
        if not piece:
            return
        left -= len(piece)
        if left < 0:
            sentence = f"{given} has more than {MAX_TEXT_BYTES:,} bytes of text: hand in what is needed of it"
            raise FileUnfit(_TOO_LARGE, sentence)
        yield piece
    raise FileUnfit(_UNREADABLE, f"{given} cannot be read: {_TOO_LONG}")
