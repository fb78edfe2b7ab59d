"""How a context lies in its memfd: what the orchestrator writes, and what a worker goes by.

    text     characters │ zeros
    texts    characters │ zeros │ characters │ zeros │ ... │ lengths │ kinds │ names
    json     UTF-8 JSON
    value    UTF-8 JSON with tags

The characters of a text lie there as CPython keeps them: 1, 2 or 4 bytes each, by the widest. A zero of their width
ends them, as CPython wants it; more go up to the next multiple of `ALIGNMENT`, where the next text begins.
Behind all of them are the length of each, in characters and 8 bytes wide; the kind of each, one byte wide; and a list
of their names, or null, as JSON. Where a text begins follows from those before it.
"""

import fcntl
from typing import Annotated, Literal

import msgspec

Width = Literal[1, 2, 4]
Kind = Literal[0, 1, 2, 4]
"""Of a text: the bytes of each character, or 0 where it is ASCII, of which each takes one as well."""
KINDS: tuple[Kind, ...] = (0, 1, 2, 4)

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""With all four neither the bytes nor their number can change any more, for anybody who holds the descriptor."""

ALIGNMENT = 8
ENTRY_BYTES = 9
"""Of a text, behind the texts."""

_Length = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class ContextForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What has to be known of a descriptor to load it.

    Attributes:
        kind: `text`: one `str`; `texts`: a list of them, or a dict of them by name; `json`: UTF-8 JSON; `value`: a
            value as it crosses (see `wire.values`), such as a table.
        length: Characters of a text; bytes of all texts together, with their zeros; bytes of JSON.
        width: Bytes of each character of a text. It must be the narrowest that holds the widest character, as in
            CPython: otherwise neither `==` nor `hash` is right. Whoever writes the descriptor answers for that.
        ascii: Whether the text is ASCII; a text of width 1 that is not has characters from U+0080 to U+00FF.
        texts, names_bytes: How many there are, and what their names take.
    """

    kind: Literal["text", "texts", "json", "value"]
    length: _Length
    width: Width = 1
    ascii: bool = False
    texts: _Length = 0
    names_bytes: _Length = 0

    @property
    def size_bytes(self) -> int:
        """Bytes that the descriptor has to hold."""
        if self.kind == "text":
            return span_bytes(self.length, self.width)
        return self.length + self.texts * ENTRY_BYTES + self.names_bytes

    @property
    def mapped_bytes(self) -> int:
        """Address space that it takes when it is loaded, but for objects that are made of JSON."""
        return self.size_bytes + self.texts * HEADER_BYTES + MARGIN_BYTES


class ContextPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one descriptor of a context holds.

    Attributes:
        form: How it lies there.
        name: None where it is the whole context; else the context is a dict, and this is the key of the value.
    """

    form: ContextForm
    name: str | None = None


MAX_PIECES = 64
"""Descriptors of one context, at most: a message of a Unix socket takes 253."""
MAX_NAME_CHARS = 200
"""Of the name of a piece."""


HEADER_BYTES = 64
"""Address space of the header of a mapped text, at most."""
MARGIN_BYTES = 1 << 14
"""What the kernel adds to both at most, since it maps whole pages."""


def span_bytes(length: int, kind: int) -> int:
    """From the start of a text of `length` characters to the start of the next one."""
    return -(-(length + 1) * (kind or 1) // ALIGNMENT) * ALIGNMENT
