"""Materials of a request: texts and uploaded files, which become one context."""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rlm_broker import OpenFile, StoredContext, store_as_it_is
from rlm_broker.context.memfd import Memfd
from rlm_broker.serve.hosting.files import UploadedFile

NAME_CHARS: Final = 200
"""Characters of the name of a text within a context, before its number; a longer name is cut."""
SMALL_CHARS: Final = 1 << 16
"""Characters of a text up to which it is stored on the event loop: a thread would take five times as long."""
MOST_SHARED: Final = 64
"""Texts of a dict that a worker maps each from memory of its own. Texts of a dict with more are copied together."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text in a request.

    Attributes:
        name: Its key, if it is one of several materials.
        text: The text.
    """

    name: str
    text: str

    async def stored(self) -> StoredContext:
        """Return the text as a context."""
        if len(self.text) <= SMALL_CHARS:
            return store_as_it_is(self.text)
        return await asyncio.to_thread(store_as_it_is, self.text)


@dataclass(frozen=True, slots=True)
class InlineFile:
    """A file within a request.

    Attributes:
        name: Name of the file. Its ending distinguishes documents and archives from texts.
        data: Its bytes.
    """

    name: str
    data: bytes

    async def stored(self) -> StoredContext:
        """Return the text of the file as a context, as `UploadedFile.stored` does.

        Raises:
            ContextRefused: There is no text in the file, or no memory for it.
        """
        return await asyncio.to_thread(self._stored)

    def _stored(self) -> StoredContext:
        with Memfd("upload") as memfd:
            memfd.write(self.data)
            fd = memfd.seal()
        try:
            return store_as_it_is(OpenFile(fd, self.name))
        finally:
            os.close(fd)


Material = Text | UploadedFile | InlineFile
"""A text or a file that a request is about."""


async def stored_of(materials: Sequence[Material]) -> StoredContext:
    """Return materials as one context, which the caller closes.

    A lone text is the text itself, and a lone file its text. Several are a dict from name to text: each by its name,
    and with a number if two have the same; texts in an archive by "ARCHIVE/NAME". Files are shared, and not copied.

    Raises:
        ContextRefused: A file has no text, or there is no memory for it.
        UnknownHandle: A file was deleted meanwhile.
    """
    if len(materials) == 1:
        return await materials[0].stored()
    with contextlib.ExitStack() as stack:
        parts: dict[str, StoredContext | str] = {}
        names = _Names()
        for material in materials:
            name = names.unique(_shown(material.name))
            if isinstance(material, Text):
                parts[name] = material.text
            else:
                parts[name] = stack.enter_context(await material.stored())
        return await asyncio.to_thread(_together, parts)


def _together(parts: dict[str, StoredContext | str]) -> StoredContext:
    is_flat = all(isinstance(part, str) or part.info.type_name == "str" for part in parts.values())
    if is_flat and len(parts) <= MOST_SHARED:
        return store_as_it_is(parts)
    texts: dict[str, str] = {}
    names = _Names()
    for name, part in parts.items():
        value = part if isinstance(part, str) else part.value()
        if isinstance(value, str):
            texts[names.unique(name)] = value
        else:
            texts |= {names.unique(f"{name}/{inner}"): text for inner, text in value.items()}
    return store_as_it_is(texts)


class _Names(dict[str, int]):
    """Names that are given once each, with the last number of each, so that many equal ones take no longer."""

    def unique(self, name: str) -> str:
        """Return the name, with a number if it is taken already."""
        unique = name
        while unique in self:
            self[name] += 1
            unique = f"{name} ({self[name]})"
        self[unique] = 0
        return unique


def _shown(name: str) -> str:
    """Return a name that can be the key of a context: printable, and not too long."""
    printable = "".join(each if each.isprintable() else "_" for each in name)
    return printable[:NAME_CHARS] or "text"
