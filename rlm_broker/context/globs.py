"""Globs over the parts of a path: those of a command line, and those of lines of a .gitignore.

A stranger's .gitignore may have any number of wildcards in a line, so no pattern may go back and forth. A table over
the parts finds what `**` stands for. Within a part, the first place behind a `*` at which the text up to the next `*`
fits is as good as each later one, so an atomic group keeps to it, as in the expressions of `fnmatch`. Comparing a part
with a name takes at most the product of their lengths.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import translate
from itertools import pairwise
from typing import Final

Glob = Sequence["re.Pattern[str] | None"]
"""One expression for each part. None stands for `**`, any number of parts, and never follows itself."""

_IN_SET: Final = r"(?: \\. | \[:[^\]]{0,9}:\] | (?!\[:[^\]]{0,9}:\])[^\\\]] )"
_GIT_TOKEN: Final = re.compile(
    rf"""(?sx)
      \\?(?P<slash>/)
    | (?P<stars>\*+)
    | (?P<any>\?)
    | \[(?P<negated>[!^]?)(?P<set>(?:\] | {_IN_SET}){_IN_SET}*)\]
    | \\(?P<escaped>.)
    | (?P<plain>[^\\\[*?/]+)
    """
)
_GIT_SET: Final = re.compile(r"(?s)\[:(?P<name>[^\]]{0,9}):\]|\\?(?P<first>.)(?:-\\?(?P<last>.))?")
_CLASSES: Final = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": " \\t",
    "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": "!-/:-@\\[-`{-~",
    "space": " \\t-\\r",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


def shell_glob(parts: Iterable[str]) -> Glob:
    """Return a glob in which `*`, `?` and `[...]` stay within one part, and a part `**` is any number of parts."""
    return _without_repeats([None if part == "**" else re.compile(translate(part)) for part in parts])


def git_glob(pattern: str) -> Glob | None:
    """Return the glob of a line of a .gitignore, or None for a line that git matches with no path.

    Args:
        pattern: The line without `!` in front and `/` at the end. See "PATTERN FORMAT" of gitignore(5). Unlike git
            2.39, `?` is one character and not one byte, and `ab**/c` does not match `ab/x/c`, as that page says.
    """
    parts: list[re.Pattern[str] | None] = [] if "/" in pattern else [None]
    try:
        for stars_alone, pieces in _git_parts(pattern.removeprefix("/")):
            parts.append(None if stars_alone and "/" in pattern else _expression(pieces))
    except ValueError:
        return None
    # `a/**` is about all that is below `a`, and not about `a` itself.
    return _without_repeats(parts if parts[-1] is not None else [*parts, _expression(["", ""])])


def matches(parts: Sequence[str], glob: Glob) -> bool:
    """Whether `glob` matches the path of `parts`, in at most `len(parts) * len(glob)` comparisons.

    `ends` has the numbers of parts that the glob, as far as it was read, can match.
    """
    if len(glob) > 2 * len(parts) + 1 or (glob[-1] is not None and not glob[-1].fullmatch(parts[-1])):
        return False
    ends = {0}
    for wanted in glob:
        if wanted is None:
            ends = set(range(min(ends), len(parts) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(parts) and wanted.fullmatch(parts[end])}
        if not ends:
            return False
    return len(parts) in ends


def may_hold(folder: Sequence[str], glob: Glob) -> bool:
    """Whether an entry below `folder` can match. Without this check `*.txt` would walk the whole tree."""
    for part, wanted in zip(folder, glob, strict=False):
        if wanted is None:
            return True
        if not wanted.fullmatch(part):
            return False
    return len(folder) < len(glob)


def _without_repeats(parts: Sequence["re.Pattern[str] | None"]) -> Glob:
    return [*parts[:1], *(part for before, part in pairwise(parts) if part is not None or before is not None)]


def _expression(pieces: Sequence[str]) -> "re.Pattern[str]":
    """Return the expression of a part.

    Args:
        pieces: Expressions of fixed length. A `*` is between each two of them.
    """
    first, *middle = pieces
    if not middle:
        return re.compile(first, re.DOTALL)
    last = middle.pop()
    return re.compile(f"{first}{''.join(f'(?>.*?{piece})' for piece in middle)}.*{last}", re.DOTALL)


def _git_parts(pattern: str) -> Iterator[tuple[bool, list[str]]]:
    """Yield for each part whether it is of two or more `*` alone, and its pieces as for `_expression`.

    Raises:
        ValueError: A bracket or a backslash is without its end, or a class has no name that there is.
    """
    pieces, stars_alone, at = [""], False, 0
    while at < len(pattern):
        if (token := _GIT_TOKEN.match(pattern, at)) is None:
            raise ValueError(pattern)
        if token["slash"]:
            yield stars_alone, pieces
            pieces = [""]
        elif token["stars"]:
            pieces.append("")
        elif token["any"]:
            pieces[-1] += "."
        elif token["set"]:
            pieces[-1] += _git_set(token["set"], bool(token["negated"]))
        else:
            pieces[-1] += re.escape(token["escaped"] or token["plain"])
        stars_alone = len(token["stars"] or "") > 1 and pieces == ["", ""]
        at = token.end()
    yield stars_alone, pieces


def _git_set(text: str, is_negated: bool) -> str:
    ranges = ""
    for found in _GIT_SET.finditer(text):
        name, first, last = found["name"], found["first"], found["last"]
        if name is not None:
            if name not in _CLASSES:
                raise ValueError(f"[:{name}:]")
            ranges += _CLASSES[name]
        else:  # git takes a range that ends before it begins for its first character
            ranges += re.escape(first) + (f"-{re.escape(last)}" if last is not None and last >= first else "")
    return f"[{'^' if is_negated else ''}{ranges}]"
