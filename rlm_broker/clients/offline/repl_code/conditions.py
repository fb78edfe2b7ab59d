"""The conditions of a bound question on rows. Rules take them out of its words, one rule after the other."""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

from rlm_broker.clients.offline.repl_code.binding import Bound, numeral
from rlm_broker.clients.offline.repl_code.tables import Table, doubt

PREPOSITION = r"(?:(?:with|whose|in|from|of|for|at|on|by) )?"
ARTICLE = r"(?:(?:the|an?) )?"
BE = r"(?:(?:is|are|was|were|be|been|has|have|had|having|do|does|did) )?"
NOT = r"(?:is |are |was |were |do |does |did |has |have |had )?not (?:be |have |in |from |of |at |on |an? |the )*"
EXCEPT = (
    r"(?:other than|except(?: for)?|excluding|besides|without|apart from|aside from|but not|outside(?: of)?|non) "
    r"(?:those |in |from |of |the |an? )*"
)
COMPARED = {
    r"(?:more|greater|larger|higher|bigger|longer) than|over|above|exceeds?|exceeding|>": ">",
    r"(?:less|fewer|lower|smaller|shorter) than|under|below|<": "<",
    r"at least|no less than|>=": ">=",
    r"at most|no more than|<=": "<=",
    r"exactly|equal to|=": "=",
}
ANY_COMPARED = "|".join(f"(?:{words})" for words in COMPARED)
UNIT = r"(?: (?:years?(?: old)?|euros?|eur|dollars?|usd|kg|percent))?"
UNCLEAR = (
    r"\b(?:not|except|excluding|without|besides|than|but)\b(?: [a-z]+)*"
    r" [VCR]\d*(?: [VCR]\d+)* (?:in|from|of|with|at|on|by|for|who|that) "
)
DATE_NAMES = frozenset(("date", "day", "time", "timestamp", "when"))
DATE_CELL = re.compile(r"\d{4}-\d\d-\d\d(?:[T ].*)?")
TRUE_WORDS, FALSE_WORDS = frozenset(("true", "yes", "y")), frozenset(("false", "no", "n"))


class Condition(NamedTuple):
    """A comparison of one column with one or more texts or numbers.

    Attributes:
        kind: "=" and "!=" of texts; ">", "<", ">=", "<=" and "==" of numbers; "before", "after", "since" and "in" of
            dates.
    """

    column: int
    kind: str
    texts: tuple[str, ...]


def conditions(bound: Bound, table: Table) -> tuple[str, list[Condition]] | None:
    """Return the remaining words, with `@` and `&` in place of conditions, and the conditions.

    `@` stands for a single value, `&` for a clause. None if two conditions contradict each other.
    """
    found: list[Condition] = []
    words = bound.words
    for pattern, rule in rules(bound, table):
        words = re.sub(rf"(?<!\S){pattern}(?!\S)", lambda match, rule=rule: rule(match, found), words)  # type: ignore[misc]
    if re.search(UNCLEAR, bound.words):
        doubt(bound.doubts, "what follows what is left out may be a part of that")
    equal = [each.column for each in found if each.kind == "="]
    if len(equal) != len(set(equal)):
        return None  # one column must have two values: "and" may mean both or either
    if re.search(r"(?:@|&) or (?:@|&)|\bnot\b|(?:@|&) (?:nor|or)\b", words):
        return None
    return re.sub(r"([@&]) (?:and |, )?(?=[@&])", r"\1 ", words), found


def rules(bound: Bound, table: Table) -> list[tuple[str, Callable[[re.Match[str], list[Condition]], str]]]:
    """Return patterns over the words, in the order of their use, and the function for the matches of each."""
    several = r"V(\d+)((?: (?:or|and|nor) (?:an? |the |in |from )?V\d+)*)"
    return [
        (rf"{PREPOSITION}{ARTICLE}C(\d+) {BE}(?:a |of |an )?({ANY_COMPARED}) N(\d+){UNIT}", compare(bound, 1, 2, 3)),
        (rf"{PREPOSITION}{BE}({ANY_COMPARED}) N(\d+){UNIT} {ARTICLE}(?:in |of )?C(\d+)", compare(bound, 3, 1, 2)),
        (rf"{PREPOSITION}{ARTICLE}C(\d+) {BE}(?:of )?[ND](\d+){UNIT}", compare(bound, 1, 0, 2)),
        (r"(R|C\d+) N(\d+)", numbered(bound, table)),
        (rf"(?:{PREPOSITION}{ARTICLE}C(\d+) )?{BE}(before|after|since|in|on|during) D(\d+)", dated(bound, table)),
        (r"(out of|in) C(\d+)", stocked(table)),
        (
            rf"(?:{PREPOSITION}{ARTICLE}C(\d+) )?(?:{BE}neither (?:an? |in |from )*|{NOT}){several}(?: C(\d+))?",
            unequal(bound, "and"),
        ),
        (rf"(?:{PREPOSITION}{ARTICLE}C(\d+) )?{EXCEPT}{several}(?: C(\d+))?", unequal(bound, "")),
        (r"()C(\d+)(?= (?:R|V\d))", true(table)),
        (rf"({BE}{PREPOSITION}{ARTICLE})C(\d+) ({BE}{PREPOSITION}{ARTICLE}){several}(?: C(\d+))?", equal(bound)),
        (rf"({BE}{PREPOSITION}{ARTICLE})()(){several}(?: C(\d+))?", equal(bound)),
        (r"(is|are|was|were|is not|are not|not) C(\d+)", true(table)),
        (r"()C(\d+)(?= R)", true(table)),
    ]


def compare(bound: Bound, column: int, words: int, number: int) -> Callable[[re.Match[str], list[Condition]], str]:
    """Return the rule for a number. The arguments after `bound` are groups of the pattern."""

    def rule(match: re.Match[str], found: list[Condition]) -> str:
        said = match[words] if words else "="
        kind = next(kind for pattern, kind in COMPARED.items() if re.fullmatch(pattern, said))
        found.append(Condition(int(match[column]), "==" if kind == "=" else kind, (bound.numbers[int(match[number])],)))
        return "&"

    return rule


def numbered(bound: Bound, table: Table) -> Callable[[re.Match[str], list[Condition]], str]:
    """Return the rule for "order 17": the row whose `id` is that number."""

    def rule(match: re.Match[str], found: list[Condition]) -> str:
        lower = [column.lower() for column in table.columns]
        if match[1] != "R" or "id" not in lower:
            return match[0]
        found.append(Condition(lower.index("id"), "=", (bound.numbers[int(match[2])],)))
        return "&"

    return rule


def dated(bound: Bound, table: Table) -> Callable[[re.Match[str], list[Condition]], str]:
    """Return the rule for a day or a year, of the column named before it or the only column with dates."""

    def rule(match: re.Match[str], found: list[Condition]) -> str:
        columns = [int(match[1])] if match[1] else dates_of(table)
        if len(columns) != 1:
            return match[0]
        if not match[1] and table.kind != "log" and not DATE_NAMES & set(table.columns[columns[0]].lower().split("_")):
            doubt(bound.doubts, f"the date is taken for one of {table.columns[columns[0]]!r}")
        kind = "in" if match[2] in ("in", "on", "during") else match[2]
        found.append(Condition(columns[0], kind, (bound.numbers[int(match[3])],)))
        return "&"

    return rule


def dates_of(table: Table) -> list[int]:
    """Return the columns whose first cells are days."""
    first = [row for row, _ in zip(table.rows(), range(20), strict=False)]
    return [
        i
        for i in range(len(table.columns))
        if first and all(isinstance(row[i], str) and DATE_CELL.fullmatch(row[i].strip()) for row in first)
    ]


def stocked(table: Table) -> Callable[[re.Match[str], list[Condition]], str]:
    """Return the rule for "in stock" and "out of stock"."""

    def rule(match: re.Match[str], found: list[Condition]) -> str:
        if not {"stock", "inventory"} & set(re.findall(r"[a-z]+", table.columns[int(match[2])].lower())):
            return match[0]
        found.append(Condition(int(match[2]), "==" if match[1] == "out of" else ">", ("0",)))
        return "&"

    return rule


def several_values(
    bound: Bound, first: str, more: str | None, column: int | None
) -> tuple[int, tuple[str, ...]] | None:
    """Return (column, values), if exactly one column has all the values; with a `column`, only that one may."""
    numbers = [int(first), *(int(number) for number in re.findall(r"V(\d+)", more or ""))]
    shared = set.intersection(*(set(bound.values[number][1]) for number in numbers))
    shared &= shared if column is None else {column}
    return (shared.pop(), tuple(bound.values[number][0] for number in numbers)) if len(shared) == 1 else None


def unequal(bound: Bound, refused: str) -> Callable[[re.Match[str], list[Condition]], str]:
    """Return the rule for values that a column must not have. `refused` is a word that joins values ambiguously."""

    def rule(match: re.Match[str], found: list[Condition]) -> str:
        before, after = match[1], match[4]
        if refused and refused in (match[3] or "").split():
            return match[0]
        chosen = several_values(bound, match[2], match[3], int(before or after) if before or after else None)
        if chosen is None:
            return match[0]
        found.append(Condition(chosen[0], "!=", chosen[1]))
        return "&"

    return rule


def equal(bound: Bound) -> Callable[[re.Match[str], list[Condition]], str]:
    """Return the rule for values that a column must have. A neighbouring column that lacks them stays in the words."""

    def rule(match: re.Match[str], found: list[Condition]) -> str:
        before, after = match[2], match[6]
        if "and" in (match[5] or "").split() or "nor" in (match[5] or "").split():
            return match[0]
        named = [int(column) for column in (before, after) if column]
        for column in [*named, None]:
            chosen = several_values(bound, match[4], match[5], column)
            if chosen is not None:
                break
        else:
            return match[0]
        found.append(Condition(chosen[0], "=", chosen[1]))
        left = f"{match[1]}C{before} " if before and int(before) != chosen[0] else ""
        right = f" C{after}" if after and int(after) != chosen[0] else ""
        is_clause = match[3] if left else match[1] or before
        return f"{left}{'&' if is_clause else '@'}{right}"

    return rule


def true(table: Table) -> Callable[[re.Match[str], list[Condition]], str]:
    """Return the rule for a column of yes and no."""

    def rule(match: re.Match[str], found: list[Condition]) -> str:
        first = [str(row[int(match[2])]).strip().lower() for row, _ in zip(table.rows(), range(200), strict=False)]
        if not first or not set(first) <= TRUE_WORDS | FALSE_WORDS:
            return match[0]
        wanted = FALSE_WORDS if "not" in match[1] else TRUE_WORDS
        found.append(Condition(int(match[2]), "=", tuple(sorted(wanted))))
        return "&" if match[1] else "@"

    return rule


def holds_for(row: list[Any], condition: Condition, doubts: list[str]) -> bool:
    """Whether a row fulfils a condition. Reasons not to be sure are added to the doubts."""
    cell = row[condition.column]
    each = [text.strip().lower() for text in (cell if isinstance(cell, list) else [cell or ""])]
    if condition.kind in ("=", "!="):
        is_one = any(text in condition.texts for text in each)
        if not is_one and any(wanted in text for text in each for wanted in condition.texts if len(wanted) > 1):
            doubt(doubts, f"other cells contain {' or '.join(condition.texts)!r} beside other words")
        if condition.kind == "!=" and not any(each):
            doubt(doubts, "a row has nothing in that column")
        return is_one == (condition.kind == "=")
    return (
        holds_date(each[0], condition, doubts) if condition.kind.isalpha() else holds_number(each[0], condition, doubts)
    )


def holds_number(text: str, condition: Condition, doubts: list[str]) -> bool:
    found, wanted = numeral(text), numeral(condition.texts[0])
    if found is None or wanted is None:
        doubt(doubts, "a row has no number in that column" if not text else f"{text[:40]!r} is no number")
        return False
    number, limit = found[0], wanted[0]
    return {
        ">": number > limit, "<": number < limit, ">=": number >= limit, "<=": number <= limit, "==": number == limit
    }[condition.kind]  # fmt: skip


def holds_date(text: str, condition: Condition, doubts: list[str]) -> bool:
    wanted = condition.texts[0]
    if re.fullmatch(r"\d{4}", text) and len(wanted) == 4:
        day = text
    elif DATE_CELL.fullmatch(text):
        day = text[: len(wanted)]
    else:
        doubt(doubts, f"{text[:40]!r} is no date" if text else "a row has no date")
        return False
    return {"before": day < wanted, "after": day > wanted, "since": day >= wanted, "in": day == wanted}[condition.kind]


def said(condition: Condition, table: Table) -> str:
    """Return a condition in words, for people."""
    joined = " or ".join(repr(text) if condition.kind in ("=", "!=") else text for text in condition.texts)
    kind = {"=": "is", "!=": "is not", "==": "is"}.get(condition.kind, condition.kind)
    return f"{table.columns[condition.column]} {kind} {joined}"


def as_number(text: Decimal) -> str:
    """Return a number without an exponent and without trailing zeros."""
    plain = f"{text:f}"
    return plain.rstrip("0").rstrip(".") if "." in plain else plain
