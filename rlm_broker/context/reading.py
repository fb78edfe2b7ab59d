"""Kinds of files by their bytes: a text, a compressed text, a document, or an archive of these."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

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
from rlm_broker.context.documents import document_kind, text_of_document
from rlm_broker.context.files import SECRET, leads_to_secret
from rlm_broker.context.found_files import FileUnfit, FoundFile, LeftOut, bytes_of, open_regular, printable
from rlm_broker.context.text import DecodedText, TextDecoding

_OURS: Final = TextDecoding()
"""Decoding of a document's text: `text_of_document` gives UTF-8, also if the user has named another encoding for
files."""

Content = DecodedText | Iterator[Member]
"""Content of a file: a text; or the members of an archive, each to be read before the next one is asked for."""


class Reading:
    """Reads the files of one context, within the bounds of what it may unpack.

    Attributes:
        skipped: Number of files, entries of archives or folders that were left out, by reason.
    """

    def __init__(self, how: TextDecoding, skipped: LeftOut | None = None) -> None:
        self.skipped = LeftOut() if skipped is None else skipped
        self._how = how
        self._unpacking = Unpacking()

    @contextmanager
    def opened(self, file: FoundFile) -> Iterator[Content]:
        """Open a file for as long as its content is read.

        Raises:
            FileUnfit: The file cannot be read, or has no text. Reading the content raises it, too.
            ContextRefused: Too much is unpacked. Reading the content raises it, too.
        """
        fd, size_bytes = open_regular(file)
        try:
            yield self._content(ByteReader(bytes_of(file, fd, size_bytes)), file.name, file.given, fd)
        finally:
            os.close(fd)

    def of_stream(self, pieces: Iterable[bytes], name: str) -> DecodedText:
        """Return the text of a stream.

        Raises:
            FileUnfit: The stream is an archive, or as for `opened`. Reading the text raises it, too.
            ContextRefused: Too much is unpacked. Reading the text raises it, too.
        """
        return self._text(ByteReader(pieces), name, name)

    def texts_of(self, file: FoundFile) -> Iterator[tuple[str, DecodedText]]:
        """Yield the names and texts in a file, each to be read before the next. Count those that are left out.

        Raises:
            ContextRefused: Too much is unpacked.
        """
        try:
            with self.opened(file) as content:
                if isinstance(content, DecodedText):
                    yield file.name, content
                else:
                    yield from ((f"{file.name}/{name}", text) for name, text in self.texts_in(content, file.given))
        except FileUnfit as unfit:
            self.skipped.add(unfit.reason, file.name)

    def texts_in(self, members: Iterator[Member], given: str) -> Iterator[tuple[str, DecodedText]]:
        """Yield the names and texts in an archive, each to be read before the next. Count those that are left out.

        Raises:
            FileUnfit: The archive cannot be read. This may come after any number of texts.
            ContextRefused: Too much is unpacked.
        """
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
        """Return the content of the bytes, by their beginning.

        Args:
            fd: Descriptor of the file that they are read from; None if they are not a file.
            was_packed: Whether they come out of something compressed.
        """
        beginning = reader.peek(BEGIN_BYTES)
        grows = partial(self._unpacking.count_stored, given=given)
        if packing := packing_of(beginning):
            reader = ByteReader(self._unpacking.counted(unpacked(reader, packing, given), given))
            beginning = reader.peek(BEGIN_BYTES)
            if packing_of(beginning):
                raise FileUnfit("compressed twice", f"{given} is compressed twice: unpack it first")
        if kind := document_kind(beginning, name):
            text = self._unpacking.counted(text_of_document(reader, kind, given), given)
            return DecodedText(text, given, _OURS, grows)
        tar = is_tar(beginning, name)
        if not tar and not is_zip(beginning):
            return DecodedText(reader, given, self._how, grows if packing or was_packed else None)
        if fd is None or (packing and not tar):
            sentence = f"{given} is an archive, which can be read only from a file of its own: save it as a file"
            raise FileUnfit("an archive inside something else", sentence)
        if tar:
            return tar_members(reader, given, self._unpacking, was_packed=packing is not None)
        return zip_members(fd, given, self._unpacking)
