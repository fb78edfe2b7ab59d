"""Functions for large texts that model code finds: search, chunks and lines. Only the returned parts are copied.

They are ordinary variables, as `first` is: code may overwrite them for good.
"""

import itertools
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar, overload

from sandbox_worker.repl.handles import first
from sandbox_worker.repl.objects import class_name, is_a
from sandbox_worker.wire import names

SHOWN_CHARS = 300
"""Maximum characters of a match and its surroundings in the `repr` of matches; the rest is cut."""
SHOWN_MATCHES = 20
"""Maximum matches in the `repr` of matches."""
STEP_CHARS = 1 << 16
"""Characters whose line breaks are counted in one step of the search for a line."""
T = TypeVar("T")
Texts = str | Mapping[Any, str] | Sequence[str]


class Match(NamedTuple):
    """One match, see `search`."""

    part: Any
    line: int
    start: int
    end: int
    text: str
    around: str


class _Made(Sequence[T]):
    """Sequence whose items are made when they are read. `_items` names them in errors."""

    _items: str

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Make one item, or a list of items for a slice."""
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        try:
            place = range(len(self))[index]
        except IndexError:
            raise IndexError(f"there are {len(self):,} {self._items}") from None
        return self._make(place)

    def _make(self, place: int) -> T:
        """Return the item at `place`, which is from 0 to the last one."""
        raise NotImplementedError


class Matches(_Made[Match]):
    """Sequence of all matches, see `search`. A match is made when it is read. `repr` has a line for each of the first.

    Attributes:
        total: Number of all matches, also beyond a `limit`.
    """

    _items = "matches"

    def __init__(
        self, looked_for: "str | re.Pattern[str]", parts: Sequence[tuple[Any, str]], around: int, limit: int | None
    ) -> None:
        self._around = around
        self._parts = parts
        self._found = ((number, *span) for number, (_, text) in enumerate(parts) for span in _spans(looked_for, text))
        self._spans = [array("Q"), array("Q"), array("Q")]
        self._line_at = (0, 0, 1)  # part, offset and line of the match that was read last
        self.total = sum(_count(looked_for, text) for _, text in parts)
        self._length = self.total if limit is None else min(limit, self.total)

    def __len__(self) -> int:
        return self._length

    def _make(self, place: int) -> Match:
        for span in itertools.islice(self._found, max(0, place + 1 - len(self._spans[0]))):
            for column, value in zip(self._spans, span, strict=True):
                column.append(value)
        number, start, end = (column[place] for column in self._spans)
        part, text = self._parts[number]
        seen_part, seen, line = self._line_at
        if seen_part != number or seen > start:
            seen, line = 0, 1
        line += text.count("\n", seen, start)
        self._line_at = number, start, line
        shown = text[max(0, start - self._around) : end + self._around]
        return Match(part, line, start, end, text[start:end], shown)

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Iterable[Any]) -> list[Any]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, list | Matches) and [*self] == [*other])

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        head = "no match" if not self.total else "1 match" if self.total == 1 else f"{self.total:,} matches"
        if len(self) < self.total:
            head += f", of which this has the first {len(self):,}"
        if len(self) > SHOWN_MATCHES:
            head += f"; the first {SHOWN_MATCHES} of them:"
        return "\n".join([head, *map(_shown, self[:SHOWN_MATCHES])])


class Chunk(str):
    """A chunk: a `str` with its place in the text, see `chunks`."""

    __slots__ = ("end", "part", "start")
    part: Any
    start: int
    end: int


class Chunks(_Made[Chunk]):
    """Sequence of chunks, see `chunks`. It keeps their ends alone, and makes a chunk when it is read."""

    _items = "chunks"

    def __init__(self, text: Any, size: int, overlap: int) -> None:
        _require_number("chunks", "size", size, 1)
        _require_number("chunks", "overlap", overlap, 0)
        if overlap > size // 2:
            raise ValueError(f"chunks() argument 'overlap' must be at most half of size = {size:,}, not {overlap:,}")
        self._size = size
        self._overlap = overlap
        self._parts = [(part, each, _ends(each, size, overlap)) for part, each in _parts("chunks", text)]
        self._firsts = [0, *itertools.accumulate(len(ends) for _, _, ends in self._parts)]

    def __len__(self) -> int:
        return self._firsts[-1]

    def _make(self, place: int) -> Chunk:
        number = bisect_right(self._firsts, place) - 1
        part, text, ends = self._parts[number]
        within = place - self._firsts[number]
        start = ends[within - 1] - self._overlap if within else 0
        chunk = Chunk(text[start : ends[within]])
        chunk.part, chunk.start, chunk.end = part, start, ends[within]
        return chunk

    def __repr__(self) -> str:
        overlap = f", overlap {self._overlap:,}" if self._overlap else ""
        return f"<{len(self):,} chunks of at most {self._size:,} characters{overlap}>"


def search(
    pattern: str | re.Pattern[str], text: Texts, around: int = 80, limit: int | None = None, *, plain: bool = False
) -> Matches:
    """Find `pattern` in `text`: return all matches.

    Args:
        pattern: A regular expression (`(?i)` ignores case), also a compiled one.
        text: A text, or a dict or list of texts.
        around: Characters before and after each match in its `around`.
        limit: Maximum matches to return; further ones are only counted, in `total`.
        plain: Whether `pattern` is literal text, not a regular expression.

    Returns:
        A sequence with `len`, indexes, slices and iteration. Each match has `part` (key or index of the text in a dict
        or list, else None), `line` (from 1), `start` and `end` (`text[start:end]` is the match), `text` and `around`.
    """
    _require_number("search", "around", around, 0)
    if limit is not None:
        _require_number("search", "limit", limit, 0)
    return Matches(_looked_for(pattern, plain=plain), [*_parts("search", text)], around, limit)


def chunks(text: Texts, size: int, overlap: int = 0) -> Chunks:
    """Split `text` into chunks of at most `size` characters. Each chunk is made when it is read.

    A chunk ends after the last line break in its last quarter, else after the last space there, else at `size`. Without
    overlap, all chunks joined are the text.

    Args:
        text: A text, or a dict or list of texts; each text is split by itself.
        size: Maximum characters of a chunk.
        overlap: Characters at the end of a chunk that the next one repeats; at most half of `size`.

    Returns:
        A sequence with `len`, indexes, slices and iteration. Each chunk is a `str` that has `part` (key or index of its
        text in a dict or list, else None), `start` and `end` (`text[start:end]` is the chunk).
    """
    return Chunks(text, size, overlap)


def lines(text: Texts, first: int = 1, last: int | None = None) -> Any:
    r"""Return lines `first` to `last` of `text`, counted from 1, both included. A line ends with `\n`.

    Args:
        text: A text, or a dict or list of texts.
        first: Number of the first line.
        last: Number of the last line; None for the end of the text.

    Returns:
        The lines as they are in the text, as one `str`; for a dict or list of texts a dict or list of such.
    """
    _require_number("lines", "first", first, 1)
    if last is not None:
        _require_number("lines", "last", last, 0)
    if is_a(text, str):
        return _lines(text, first, last)
    of_each = {part: _lines(each, first, last) for part, each in _parts("lines", text)}
    return of_each if is_a(text, dict) else [*of_each.values()]


def _looked_for(pattern: Any, *, plain: bool) -> "str | re.Pattern[str]":
    """Return the literal text to search for if the pattern is one, which is faster; else a regular expression."""
    if is_a(pattern, re.Pattern) and not plain and isinstance(pattern.pattern, str):
        return pattern
    if not is_a(pattern, str):
        wanted = "text" if plain else "text or a compiled regular expression"
        raise TypeError(f"search() argument 'pattern' must be {wanted}, not {class_name(pattern)}")
    if not pattern:
        raise ValueError("search() argument 'pattern' must not be empty")
    if plain or re.escape(pattern) == pattern:
        return pattern
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"search(): {pattern!r} is not a regular expression: {error}; plain=True looks for the text itself"
        ) from None


def _spans(looked_for: "str | re.Pattern[str]", text: str) -> Iterator[tuple[int, int]]:
    if not isinstance(looked_for, str):
        yield from (match.span() for match in looked_for.finditer(text))
        return
    at = text.find(looked_for)
    while at >= 0:
        yield at, at + len(looked_for)
        at = text.find(looked_for, at + len(looked_for))


def _count(looked_for: "str | re.Pattern[str]", text: str) -> int:
    return text.count(looked_for) if isinstance(looked_for, str) else sum(1 for _ in looked_for.finditer(text))


def _shown(match: Match) -> str:
    part = "" if match.part is None else f"{match.part!r}, "
    cut = "..." if len(match.around) > SHOWN_CHARS else ""
    return f"{part}line {match.line:,} [{match.start}:{match.end}] {match.around[:SHOWN_CHARS]!r}{cut}"


def _ends(text: str, size: int, overlap: int) -> "array[int]":
    """Return the ends of the chunks of a text."""
    ends = array("Q")
    start = 0
    while start + size < len(text):
        end = start + size
        last_quarter = end - size // 4
        end = text.rfind("\n", last_quarter, end) + 1 or text.rfind(" ", last_quarter, end) + 1 or end
        ends.append(end)
        start = end - overlap
    if text:
        ends.append(len(text))
    return ends


def _lines(text: str, first: int, last: int | None) -> str:
    begin = _begin_of(first, text, 0)
    if last is None or last < first:
        return text[begin:] if last is None else ""
    return text[begin : _begin_of(last - first + 2, text, begin)]


def _begin_of(line: int, text: str, at: int) -> int:
    """Return the start of a line, counted from 1 at `at`; the end of the text if it has fewer lines."""
    missing = line - 1
    while missing and at < len(text):
        there = text.count("\n", at, at + STEP_CHARS)
        if there >= missing:
            break
        at, missing = at + STEP_CHARS, missing - there
    for _ in range(missing):
        found = text.find("\n", at)
        if found < 0:
            return len(text)
        at = found + 1
    return at


def _parts(function: str, text: Any) -> Iterator[tuple[Any, str]]:
    """Yield key or index, and text, of each part of a dict or list; None and the text for a text.

    Raises:
        TypeError: `text`, or a part of it, is of another type.
    """
    if is_a(text, str):
        yield None, text
        return
    if not is_a(text, dict, list, tuple):
        raise TypeError(f"{function}() takes a text, or a list or dict of texts, not a {class_name(text)}")
    for part, each in text.items() if is_a(text, dict) else enumerate(text):
        if not is_a(each, str):
            raise TypeError(
                f"{function}() takes a list or dict of texts, and text[{part!r:.60}] is a {class_name(each)}: "
                "make a text of it first, as with json.dumps()"
            )
        yield part, each


def _require_number(function: str, argument: str, value: Any, least: int) -> None:
    if not is_a(value, int) or type(value) is bool:
        raise TypeError(f"{function}() argument {argument!r} must be int, not {class_name(value)}")
    if value < least:
        raise ValueError(f"{function}() argument {argument!r} must be at least {least}, not {value}")


HELPERS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {names.SEARCH: search, names.CHUNKS: chunks, names.LINES: lines, names.FIRST: first}
)
"""Name → function, for all functions with which a REPL starts."""
