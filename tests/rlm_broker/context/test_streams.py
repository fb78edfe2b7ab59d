"""Contexts from streams: text or bytes, read to their end in pieces."""

import io
import tracemalloc
from typing import Any

import pytest

from rlm_broker.context.store import STREAM_BYTES, store
from rlm_broker.errors import ContextRefused
from tests.support.contexts import loaded

TEXT = "a line of text\n" * 100_000


class Endless:
    """Gives so many pieces, each of `STREAM_BYTES`."""

    def __init__(self, pieces: int) -> None:
        self.left = pieces

    def read(self, size: int) -> bytes:
        self.left -= 1
        return b"x" * size if self.left >= 0 else b""


@pytest.mark.parametrize("text", ["short", TEXT, TEXT + "\u00e9\u4e2d\U0001f600", "\ufeffmarked"])
def test_stream_of_bytes_or_text_is_its_text(text: str) -> None:
    wanted = text.removeprefix("\ufeff")
    with store(io.BytesIO(text.encode())) as stored:
        assert loaded(stored) == wanted
        assert stored.info.total_chars == len(wanted)
    with store(io.StringIO(text)) as stored:
        assert loaded(stored) == text


def test_stream_is_never_held_as_a_whole() -> None:
    tracemalloc.start()
    try:
        with store(Endless(200)) as stored:
            assert stored.info.total_chars == 200 * STREAM_BYTES
        assert tracemalloc.get_traced_memory()[1] < 8 * STREAM_BYTES
    finally:
        tracemalloc.stop()


def test_stream_stays_the_callers_to_close() -> None:
    stream = io.BytesIO(b"text")
    store(stream).close()
    assert not stream.closed


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([b"a", "b"], "must give only bytes or only text, not str"),
        (["a", b"b"], "must give only bytes or only text, not bytes"),
        ([5], "must give only bytes or only text, not int"),
        ([b"half", None], "gave None: it has no data just now, so give one that blocks"),
        ([b"\xff"], "the stream is not UTF-8 text: 1 of its 1 bytes cannot be decoded"),
        ([b"a", b"\x00"], "the stream is binary"),
        ([b"a", ConnectionError("gone")], "the stream cannot be read: ConnectionError: gone"),
    ],
)
def test_stream_of_something_else_is_refused(pieces: list[Any], why: str) -> None:
    class Stream:
        def read(self, _: int) -> Any:
            if not pieces:
                return b""
            piece = pieces.pop(0)
            if isinstance(piece, Exception):
                raise piece
            return piece

    with pytest.raises(ContextRefused, match=why):
        store(Stream())
