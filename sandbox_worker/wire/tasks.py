"""What a child is handed: its context, and its task, of which a long one is told by its beginning and its end."""

from typing import Annotated

import msgspec

MAX_CONTEXT_NAME_CHARS = 64
"""Of a file that holds the context of a child, and of the variable that does."""
MAX_INLINE_BYTES = 1 << 14
"""Bytes of a child's context as JSON that is part of the query. A larger one goes into a file."""
LONG_TASK_CHARS = 4_000
"""A longer prompt of a child is told by its beginning and end; all of it is the child's context."""
SHOWN_CHARS = 1_000
"""Of the beginning, and of the end."""


def beginning_and_end(text: str) -> str:
    """Return the first and last `SHOWN_CHARS` characters of a text, and between them how many are left out."""
    left_out = len(text) - 2 * SHOWN_CHARS
    if left_out <= 0:
        return text
    whole = f"{text[:SHOWN_CHARS]}\n... [{left_out:,} characters, see `context`] ...\n{text[-SHOWN_CHARS:]}"
    return whole.encode("utf-8", "replace").decode()  # a lone surrogate cannot be sent


class ChildContext(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The context of one child run, in one of three places.

    Attributes:
        value: Here, as the text of its JSON, of at most `MAX_INLINE_BYTES`.
        file: Name of a file in the scratch folder, which has it as UTF-8: text, or JSON where `is_json`.
        own: Name of a context of the REPL's own.
        is_task: The child's task stands in it; the prompt is its beginning and end.
    """

    value: str | None = None
    file: Annotated[str, msgspec.Meta(max_length=MAX_CONTEXT_NAME_CHARS)] | None = None
    own: Annotated[str, msgspec.Meta(max_length=MAX_CONTEXT_NAME_CHARS)] | None = None
    is_json: bool = False
    is_task: bool = False
