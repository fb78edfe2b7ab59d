"""Functions for large texts that model code finds. They are ordinary variables, which code may overwrite for good.

`texts` implements them. The first call imports it, since most REPLs never need it.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from sandbox_worker.wire import names

if TYPE_CHECKING:
    import re

    from sandbox_worker.repl.texts import Chunks, Matches

Texts = str | Mapping[Any, str] | Sequence[str]


def search(
    pattern: "str | re.Pattern[str]", text: Texts, around: int = 80, limit: int = 20, *, plain: bool = False
) -> "Matches":
    """Find `pattern` in `text`: return the first `limit` matches, and the number of all matches.

    Args:
        pattern: A regular expression (`(?i)` ignores case), also a compiled one.
        text: A text, or a dict or list of texts.
        around: Characters before and after each match in its `around`.
        limit: Maximum matches in the list; further ones are only counted.
        plain: Whether `pattern` is literal text, not a regular expression.

    Returns:
        A list, whose `total` counts all matches. Each match has `part` (key or index of the text in a dict or list,
        else None), `line` (from 1), `start` and `end` (`text[start:end]` is the match), `text` and `around`.
    """
    from sandbox_worker.repl import texts

    return texts.search(pattern, text, around, limit, plain=plain)


def chunks(text: Texts, size: int, overlap: int = 0) -> "Chunks":
    """Split `text` into chunks of at most `size` characters. Each chunk is made when it is read.

    A chunk ends after the last line break in its last quarter, else after the last space there, else at `size`. Without
    overlap, all chunks joined are the text.

    Args:
        text: A text, or a dict or list of texts, each of which is split by itself.
        size: Maximum characters of a chunk.
        overlap: Characters at the end of a chunk that the next one repeats; at most half of `size`.

    Returns:
        A sequence with `len`, indexes, slices and iteration. Each chunk is a `str` that has `part` (key or index of its
        text in a dict or list, else None), `start` and `end` (`text[start:end]` is the chunk).
    """
    from sandbox_worker.repl import texts

    return texts.Chunks(text, size, overlap)


def lines(text: Texts, first: int = 1, last: int | None = None) -> Any:
    r"""Return lines `first` to `last` of `text`, counted from 1, both included. A line ends with `\n`.

    Args:
        text: A text, or a dict or list of texts.
        first: Number of the first line.
        last: Number of the last line; None for the end of the text.

    Returns:
        The lines as they are in the text, as one `str`; for a dict or list of texts a dict or list of such.
    """
    from sandbox_worker.repl import texts

    return texts.lines(text, first, last)


HELPERS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {names.SEARCH: search, names.CHUNKS: chunks, names.LINES: lines}
)
"""Name → function, for all functions of this module."""
