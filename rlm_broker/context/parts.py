"""Contexts that come out of a REPL, for its children. Their JSON is decoded by the child's sandbox, and not here."""

import codecs
import os
import threading
from collections.abc import Iterator
from itertools import chain
from typing import Final

from rlm_broker.context.memfd import JsonMemfd, TextMemfd
from rlm_broker.context.stored import ContextInfo, StoredContext
from rlm_broker.errors import ContextRefused
from sandbox_worker.loading.form import ContextPiece

PIECE_BYTES: Final = 1 << 18
"""Bytes that are read at once. Storing can be stopped between two pieces."""
_KINDS: Final = {b"{": "dict", b"[": "list", b'"': "str", b"t": "bool", b"f": "bool", b"n": "NoneType"}
"""Type of the value by the first byte of its JSON; other bytes begin a number."""


def store_part(fd: int, is_json: bool, max_bytes: int, stop: threading.Event) -> StoredContext:
    """Store the content of a file that model code has written, and may be writing still.

    Args:
        is_json: Whether it is JSON; otherwise it is text. Both are UTF-8.
        max_bytes: Most bytes that it may take when it is stored. In a text with a wide character each character takes 2
            or 4.
        stop: When it is set, the rest is left out: the caller has given the context up.

    Raises:
        ContextRefused: It takes more than `max_bytes`, or is not UTF-8.
        OSError: It cannot be read, or there is no memory for it.
    """
    return _json(_pieces(fd, max_bytes, stop)) if is_json else _text(_pieces(fd, max_bytes, stop), max_bytes)


def _pieces(fd: int, max_bytes: int, stop: threading.Event) -> Iterator[bytes]:
    done = 0
    while not stop.is_set() and (piece := os.read(fd, PIECE_BYTES)):
        done += len(piece)
        if done > max_bytes:
            raise _too_large(max_bytes)
        yield piece


def _text(pieces: Iterator[bytes], max_bytes: int) -> StoredContext:
    decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
    try:
        with TextMemfd() as memfd:

            def decoded() -> Iterator[str]:
                for piece in chain(pieces, [b""]):
                    yield decoder.decode(piece, not piece)
                    if memfd.size_bytes > max_bytes:
                        raise _too_large(max_bytes)

            chars = memfd.add_text(decoded())
            form = memfd.form
            return StoredContext([(memfd.seal(), ContextPiece(form))], ContextInfo("str", chars))
    except UnicodeDecodeError as error:
        raise ContextRefused(f"a context is not UTF-8: {error.reason}") from None


def _too_large(max_bytes: int) -> ContextRefused:
    return ContextRefused(f"a context takes more than scratch_bytes = {max_bytes:,}: give a smaller part")


def _json(pieces: Iterator[bytes]) -> StoredContext:
    kind = ""
    with JsonMemfd() as memfd:
        for piece in pieces:
            kind = kind or _KINDS.get(piece[:1], "number")
            memfd.write(piece)
        form = memfd.form
        return StoredContext([(memfd.seal(), ContextPiece(form))], ContextInfo(kind, form.length))
