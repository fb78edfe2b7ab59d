"""A log as a table: time, level, service, fields such as `user=anna`, and the message."""

import re
from collections.abc import Callable, Iterator
from typing import Any

LEVELS = "TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL|SEVERE"
LOG_LINE = re.compile(rf"(.{{0,80}}?)(?<![\w-])(?:level=)?[\[(<]?({LEVELS})(?![\w-])[\])>:|]*[ \t]*(.*)")
LEVEL_WORD = re.compile(rf"\b(?:{LEVELS})\b")
LOG_TIME = re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?")
SERVICE = re.compile(
    r"\[([A-Za-z][\w./-]*)\][: ]*|\(([A-Za-z][\w./-]*)\)[: ]*|([A-Za-z][\w./-]*): +|([A-Za-z][\w./-]*) - "
)
FIRST_WORD = re.compile(r"([a-z][\w./-]*)(?= )")
FIELD = re.compile(r"(?<![\w.-])([A-Za-z_][\w.-]{0,40})=(\"[^\"]*\"|[^\s,;\"]+)")
STRAY = "lines of another form name a level and were left out"
OTHER = "lines without a level were left out"
HIGHER = "lines of a higher level than ERROR were left out"
LEAST_LOG_LINES = 0.6
"""Share of sampled lines with a level from which on a text is a log."""
LOG_SAMPLE = 2_000
"""Lines of a text that are sampled."""


def log_table(text: str) -> tuple[list[str], Callable[..., Iterator[list[Any]]], list[str], set[int]] | None:
    """Return (columns, rows, doubts, guessed columns) of a log; None for a text where too few lines have a level."""
    lines = [line for line in text[: LOG_SAMPLE * 200].splitlines() if line.strip()][:LOG_SAMPLE]
    matches = [match for line in lines if (match := LOG_LINE.match(line))]
    if len(matches) < 3 or len(matches) < LEAST_LOG_LINES * len(lines):
        return None
    has_digit = 2 * sum(has_number(match) for match in matches) > len(matches)
    matches = [match for match in matches if has_number(match) == has_digit]
    side, is_loose = service_side(matches)
    fields = list(dict.fromkeys(key for match in matches for key, _ in FIELD.findall(match.string)))[:30]
    fields = [key for key in fields if key not in ("level", "time", "message", "service")]
    names = ["time", "level", *(["service"] if side else []), *fields, ""]
    doubts: list[str] = []

    def rows(levels: tuple[str, ...] = ()) -> Iterator[list[Any]]:
        stray, other, higher = 0, 0, 0
        for line in lines_naming(text, levels):
            match = LOG_LINE.match(line)
            if match is None or has_number(match) != has_digit:
                stray += LEVEL_WORD.search(line) is not None
                other += not line.isspace() and line != ""
                continue
            higher += match[2] in ("FATAL", "CRITICAL", "SEVERE")
            values = {key: value.strip('"') for key, value in FIELD.findall(line)} if fields or side == "field" else {}
            time = LOG_TIME.search(match[1])
            service = [service_of(match, side, is_loose) or values.get("service")] if side else []
            yield [
                time[0] if time else None,
                level_name(match[2]),
                *service,
                *(values.get(key) for key in fields),
                match[3],
            ]
        reasons = {STRAY: stray, OTHER: other, HIGHER: higher}
        doubts.extend(reason for reason, number in reasons.items() if number and reason not in doubts)

    return names, rows, doubts, {2} if is_loose else set()


def lines_naming(text: str, levels: tuple[str, ...]) -> Iterator[str]:
    """Yield each line; with levels, each line that names one of them or a level above ERROR.

    A search finds these, without a look at the other lines.
    """
    start = 0
    if levels:
        for hit in re.finditer("|".join((*levels, "FATAL", "CRITICAL", "SEVERE")), text):
            if hit.start() >= start:
                stop = text.find("\n", hit.end())
                stop = len(text) if stop < 0 else stop
                begin = text.rfind("\n", start, hit.start()) + 1 or start
                yield text[begin : min(stop, begin + 10_000)].rstrip("\r")
                start = stop + 1
        return
    while start < len(text):
        stop = text.find("\n", start)
        stop = len(text) if stop < 0 else stop
        yield text[start : min(stop, start + 10_000)].rstrip("\r")
        start = stop + 1


def has_number(match: re.Match[str]) -> bool:
    """Whether a line begins with a time or a number. In one log all lines do, or none does."""
    return any(char.isdigit() for char in match[1])


def level_name(level: str) -> str:
    return "WARNING" if level == "WARN" else level


def service_side(matches: list[re.Match[str]]) -> tuple[str, bool]:
    """Return the place of the service in lines, and whether that is a guess.

    The place is "after" the level, "before" it, in a "field", or "" for none.
    """
    enough = 0.9 * len(matches)
    if sum(FIELD.search(match.string) is not None and "service=" in match.string for match in matches) >= enough:
        return "field", False
    for side in ("after", "before"):
        if sum(service_of(match, side, False) is not None for match in matches) >= enough:
            return side, False
    first = [service_of(match, "after", True) for match in matches]
    is_few = len(set(first)) <= min(30, len(first) // 2)
    return ("after", True) if is_few and sum(word is not None for word in first) >= enough else ("", False)


def service_of(match: re.Match[str], side: str, is_loose: bool) -> str | None:
    """Return the service that a line names, in lower case, or None."""
    if side == "before":
        rest = re.sub(r"^[\[(]?[\d:.,TZ+/ -]+[\])]?", "", match[1]).strip(" []()-:|")
        return rest.lower() if re.fullmatch(r"[A-Za-z][\w./-]*", rest) else None
    if side != "after":
        return None
    found = (FIRST_WORD if is_loose else SERVICE).match(match[3])
    return next(name for name in found.groups() if name).lower() if found else None
