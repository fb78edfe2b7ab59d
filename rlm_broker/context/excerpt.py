"""Excerpts of a stored context, for prompts. JSON that came out of a REPL is not decoded here."""

import json
import os
from typing import Final, NamedTuple

from rlm_broker.context.stored import StoredContext
from rlm_broker.errors import ContextRefused
from sandbox_worker.loading.context import index
from sandbox_worker.loading.form import ContextForm

BEGINNING_CHARS: Final = 20_000
"""Characters of a context's beginning, unless the caller wants fewer."""
_CODECS: Final = {0: "latin-1", 1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}
"""Codecs by the width of a text's characters, in bytes; 0 is ASCII."""


class Beginning(NamedTuple):
    """The first characters of a context, and whether they are all that it has."""

    text: str
    is_whole: bool


def whole_text(context: StoredContext, max_bytes: int) -> str:
    """Return a context as a prompt has it: a text as it is, any other value as JSON.

    Raises:
        ContextRefused: It takes more than `max_bytes` as it is stored, or is a table or an array.
    """
    if context.size_bytes > max_bytes:
        raise ContextRefused(f"a context of {context.size_bytes:,} bytes is too long for a prompt: give a smaller part")
    (fd, piece), *more = context.pieces()
    if piece.form.kind == "value":
        raise ContextRefused(f"a {context.info.type_name} cannot be part of a prompt: give text or plain values")
    if piece.form.kind == "json" and piece.name is None and not more:
        return os.pread(fd, piece.form.length, 0).decode("utf-8", "replace")
    value = context.value()
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def beginning(context: StoredContext, chars: int = BEGINNING_CHARS) -> Beginning:
    """Return the first characters of a context: of a text, of the first of several texts, or of JSON."""
    (fd, piece), *more = context.pieces()
    form, is_alone = piece.form, piece.name is None and not more
    if form.kind == "value":  # tables and arrays: a model cannot read their bytes
        return Beginning("", False)
    if form.kind == "json":
        data = os.pread(fd, min(4 * chars, form.length), 0)
        text = data.decode("utf-8", "replace")
        return Beginning(text[:chars], is_alone and len(data) == form.length and len(text) <= chars)
    width, length = _first(fd, form)
    text = os.pread(fd, (width or 1) * min(chars, length), 0).decode(_CODECS[width], "replace")
    return Beginning(text, is_alone and form.kind == "text" and length <= chars)


def _first(fd: int, form: ContextForm) -> tuple[int, int]:
    """Return the width and the length of the first text."""
    if form.kind == "text":
        return form.width, form.length
    lengths, kinds, _, _ = index(fd, form)
    return kinds[0], lengths[0]
