"""Tasks and contexts of child runs. Of a long task, the prompt holds only the beginning and the end."""

from typing import Annotated

import msgspec

MAX_CONTEXT_NAME_CHARS = 64
"""Maximum characters of the name of a context of a child: of its file, or of its variable. A query with a longer name
is invalid."""
MAX_INLINE_BYTES = 1 << 14
"""Maximum bytes of a child's context, as JSON, inside the query. A larger context goes into a file."""
LONG_TASK_CHARS = 4_000
"""Maximum characters of a task that stands in the child's prompt as a whole. Of a longer task the prompt holds the
beginning and the end; the whole task is the child's context."""
SHOWN_CHARS = 1_000
"""Characters of the beginning of a long task in the prompt, and as many of its end."""


def beginning_and_end(text: str) -> str:
    """Return the first and last `SHOWN_CHARS` characters of a text, with the number of omitted ones between them."""
    left_out = len(text) - 2 * SHOWN_CHARS
    if left_out <= 0:
        return text
    whole = f"{text[:SHOWN_CHARS]}\n... [{left_out:,} characters, see `context`] ...\n{text[-SHOWN_CHARS:]}"
    return whole.encode("utf-8", "replace").decode()  # a lone surrogate cannot be sent


class ChildContext(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The context of one child run, in one of three places.

    Attributes:
        value: Text of the context's JSON, of at most `MAX_INLINE_BYTES`; or None.
        file: Name of a file in the scratch folder that holds the context as UTF-8; or None.
        own: Name of one of the REPL's own contexts, which the child shares; or None.
        is_json: Whether the file holds JSON. Otherwise it holds plain text.
        is_task: Whether the context is the child's long task; the prompt is then its beginning and end.
    """

    value: str | None = None
    file: Annotated[str, msgspec.Meta(max_length=MAX_CONTEXT_NAME_CHARS)] | None = None
    own: Annotated[str, msgspec.Meta(max_length=MAX_CONTEXT_NAME_CHARS)] | None = None
    is_json: bool = False
    is_task: bool = False
