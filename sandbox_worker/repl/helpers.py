"""Functions for large texts that code finds: variables like its own, which it may overwrite for good.

What they do is in `texts`, which is imported by the first call: most REPLs never need it.
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
    """Where `pattern` matches in `text`: the first `limit` matches, and how many there are in all.

    Args:
        pattern: A regular expression (`(?i)` ignores case), or one that is compiled.
        text: A text, or a dict or list of texts.
        around: Characters before and after each match that are shown with it.
        plain: Whether `pattern` is the very text to look for.

    Returns:
        A list, whose `total` counts all matches. Each has `part` (key or index of the text in a dict or list, else
        None), `line` (from 1), `start` and `end` (`text[start:end]` is what matched), `text` and `around`.
    """
    from sandbox_worker.repl import texts

    return texts.search(pattern, text, around, limit, plain=plain)


def chunks(text: Texts, size: int, overlap: int = 0) -> "Chunks":
    """`text` in chunks of at most `size` characters, each of them made when it is looked at.

    A chunk ends after the last line break in its last quarter, else after the last space there, else at `size`. With
    no overlap, all chunks joined are the text.

    Args:
        text: A text, or a dict or list of texts, each of which is cut by itself.
        overlap: Characters at the end of a chunk with which the next one begins again; half of `size` at most.

    Returns:
        A sequence, with `len`, indexes, slices and loops. Each chunk is a `str` that has `part` (key or index of its
        text in a dict or list, else None), `start` and `end` (`text[start:end]` is the chunk).
    """
    from sandbox_worker.repl import texts

    return texts.Chunks(text, size, overlap)


def lines(text: Texts, first: int = 1, last: int | None = None) -> Any:
    r"""Lines `first` to `last` of `text`, counted from 1, both included; None is to the end. A line ends with `\n`.

    Returns:
        The lines as they stand in the text, as one `str`; of a dict or list of texts a dict or list of these.
    """
    from sandbox_worker.repl import texts

    return texts.lines(text, first, last)


HELPERS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {names.SEARCH: search, names.CHUNKS: chunks, names.LINES: lines}
)
"""Name → function."""
