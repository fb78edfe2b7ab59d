"""PDF and office documents as text, by libraries of the extra `documents`, in a process of its own for each.

The libraries are large, and a document may be hostile. So the process that runs them has bounds of memory and time,
none of our environment variables, and may write to no file. It is no sandbox: it runs as the user, and can read what
the user can.
"""

import importlib.util
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rlm_broker.concurrency.forks import FORKING
from rlm_broker.context import document_text
from rlm_broker.context.archives import ByteReader
from rlm_broker.context.found_files import PIECE_BYTES, FileUnfit
from rlm_broker.context.memfd import new_memfd

MAX_DOCUMENT_BYTES: Final = 1 << 28
"""Largest document, in bytes; a larger one is refused."""
MAX_TEXT_BYTES: Final = 1 << 28
"""Longest text of one document, in bytes of UTF-8. A small document may repeat one text in each of a million cells."""
TIMEOUT_S: Final = 120.0
"""Seconds that the text of one document may take. Beyond it the process is killed, and the document is refused."""
EXTRA: Final = "PDF or office file, which needs rlm-broker[documents]"
"""Reason for documents that are left out since the libraries are not installed."""
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
_LIBRARIES: Final = {"pdf": "pypdf", "docx": "docx", "xlsx": "openpyxl", "pptx": "pptx"}


def document_kind(beginning: bytes, name: str) -> str | None:
    """Return `pdf`, `docx`, `xlsx` or `pptx`; None for any other file."""
    if beginning.startswith(b"%PDF-"):
        return "pdf"
    ending = name.rpartition(".")[2].lower()
    return ending if ending in _LIBRARIES and beginning.startswith(b"PK\x03\x04") else None


def text_of_document(reader: ByteReader, kind: str, given: str) -> Iterator[bytes]:
    """Yield the text of a document as UTF-8, in pieces.

    Raises:
        FileUnfit: A library is missing; the document cannot be read, has no text, or takes too much time or memory; or
            its text is longer than `MAX_TEXT_BYTES`. This may come after any number of pieces.
    """
    if importlib.util.find_spec(_LIBRARIES[kind]) is None:
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
            process.kill()  # harmless for one that has ended
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
