"""Layout of a context in its memfd: the orchestrator writes it, and a worker loads it.

    text     characters │ zeros
    texts    characters │ zeros │ characters │ zeros │ ... │ lengths │ kinds │ names
    json     UTF-8 JSON
    value    UTF-8 JSON with tags

The characters of a text have CPython's form in memory: 1, 2 or 4 bytes each, as the widest character needs
(PEP 393). A zero character of the same width ends them, because C code reads ASCII as C strings. Further zeros fill up
to the next multiple of `ALIGNMENT`, where the next text begins.

Three columns follow the last text: the length of each text in characters, 8 bytes wide; the kind of each text, one byte
wide; and a list of their names, or null, as JSON. The start of a text is the sum of the spans before it.
"""

import fcntl
from typing import Annotated, Literal

import msgspec

Width = Literal[1, 2, 4]
Kind = Literal[0, 1, 2, 4]
"""Kind of a text: bytes of each character, or 0 for ASCII, with one byte each as well."""
KINDS: tuple[Kind, ...] = (0, 1, 2, 4)

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""Seals of a context's memfd. With all four, no process holding the descriptor can change the bytes or the size
(F_ADD_SEALS in fcntl(2))."""

ALIGNMENT = 8
"""Alignment of the start of each text, in bytes: as of the lengths after the last text."""
ENTRY_BYTES = 9
"""Bytes of one text's entries in the columns of lengths and kinds."""

_Length = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class ContextForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The facts about a memfd needed to load its content.

    Attributes:
        kind: `text`: one `str`; `texts`: a list of texts, or a dict of texts by name; `json`: UTF-8 JSON; `value`: a
            value in its wire form (see `wire.values`), for example a table.
        length: For `text` the number of its characters. For `texts` the bytes of all texts with their zeros. For
            `json` and `value` the bytes of the JSON.
        width: Bytes of each character of a text. It must be the narrowest width holding the widest character, as in
            CPython: otherwise `==` and `hash` are wrong. The orchestrator writes the memfd, and guarantees this.
        ascii: Whether the text is ASCII. A text of width 1 that is not ASCII has a character from U+0080 to U+00FF.
        texts: Number of texts, for `texts`.
        names_bytes: Bytes of the names of the texts as JSON, for `texts`.
    """

    kind: Literal["text", "texts", "json", "value"]
    length: _Length
    width: Width = 1
    ascii: bool = False
    texts: _Length = 0
    names_bytes: _Length = 0

    @property
    def size_bytes(self) -> int:
        """Required size of the memfd in bytes."""
        if self.kind == "text":
            return span_bytes(self.length, self.width)
        return self.length + self.texts * ENTRY_BYTES + self.names_bytes

    @property
    def mapped_bytes(self) -> int:
        """Address space of the loaded context in bytes, without objects made of JSON."""
        return self.size_bytes + self.written_bytes

    @property
    def written_bytes(self) -> int:
        """Part of `mapped_bytes` that is private writable memory: the headers of mapped texts."""
        return self.texts * HEADER_BYTES + MARGIN_BYTES


class ContextPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of one memfd of a context.

    Attributes:
        form: Layout of the content.
        name: None if the memfd holds the whole context. Otherwise the context is a dict, and this is the key under
            which the content of this memfd stands.
    """

    form: ContextForm
    name: str | None = None


MAX_PIECES = 64
"""Maximum memfds of one context; a context with more is refused. One message of a Unix socket carries at most 253
descriptors (SCM_MAX_FD in unix(7))."""
MAX_NAME_CHARS = 200
"""Maximum characters of the name of a piece; a longer one is refused."""


HEADER_BYTES = 80
"""Address space counted for the header of a mapped text: the largest `str.__basicsize__`, that of CPython 3.11.
Later releases need 64."""
MARGIN_BYTES = 1 << 14
"""Address space added for the rounding of both mappings to whole pages: 16 KiB, four pages of 4 KiB."""


def span_bytes(length: int, kind: int) -> int:
    """Return the bytes from the start of a text of `length` characters to the start of the next text."""
    return -(-(length + 1) * (kind or 1) // ALIGNMENT) * ALIGNMENT
