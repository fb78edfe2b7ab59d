"""The task of a bound question: the first rule that takes all of its words, if there is one."""

import re
from typing import NamedTuple

from rlm_broker.clients.offline.repl_code.binding import Bound
from rlm_broker.clients.offline.repl_code.conditions import Condition, conditions
from rlm_broker.clients.offline.repl_code.tables import Table, doubt

WRAPPING = re.compile(
    r"^(?:(?:please|can|could|would|you|also|i want to know|i would like to know|do you know|compute|calculate|find|"
    r"determine|tell me|give me|show me) )+"
)
PLACE_WORDS = re.compile(
    r" (?:in|of|on|from|within|across|over) (?:all of )?(?:the|this|our) (?:whole |entire |given )?"
    r"(?:table|file|csv|data|dataset|logs?|list|json|sheet|document|context|text)(?= |$)"
)
FILL = (
    r"(?: (?:&|@|is|are|was|were|do|does|did|have|has|had|there|that|which|who|the|an?|in|of|for|from|with|by|at|on|"
    r"and|be|been|being|'s|all|occur|appear|listed|recorded|given|currently|live|lives|living|located|based|get|got|log|logs|"
    r"logged|write|wrote|report|reported|emit|emitted))*"
)
NO_ROWS = (
    "times|days?|hours?|minutes?|seconds?|weeks?|months?|years?|words?|characters?|letters?|tables?|files?|pages?|percent|"
    "money|euros?|dollars?|different|distinct|unique|columns?|fields?|more|fewer|less|most|of|the|lines?|kinds?|types?|"
    "is|are|was|were|do|does|did|have|has|had|there|that|which|who|an?|in|for|from|with|by|at|on|and|not|no|max|min"
)
NOUN = rf"(?P<noun>(?!(?:{NO_ROWS}) )(?!(?:{NO_ROWS})$)[a-z][a-z-]{{2,}})(?! @)"
ROWS = rf"(?:(?:all |the )*(?:R|{NOUN}))"
MANY = r"(?:how many|count|(?:what is )?(?:the )?(?:total )?(?:number|count)-of)"
WHAT = r"(?:what is|what was|what are|which is|how much is|how high is|list)"
WHICH = r"(?:which|what|list|in which|on which|at which|for which|from which|to which)"
COLUMN = r"C(?P<column>\d+)"
TOTAL = r"(?:total|sum|combined|overall)(?: sum| amount)?"
HAS = r"(?:is|are|was|were|has|have|had|with|do|does|did|having)"
HEADS: tuple[tuple[str, str], ...] = (
    (rf"{MANY}(?: @)*(?: {ROWS})?{FILL}(?: in total)?", "count"),
    (rf"{MANY} (?:different |distinct |unique ){COLUMN}{FILL}", "count different"),
    (rf"{MANY} {COLUMN}{FILL}(?: in total)?", "count column"),
    (r"(?:how many|(?:what is the )?number-of) columns(?: are there)?", "count columns"),
    (rf"(?:{WHAT} )?(?:the )?{TOTAL}(?: of)?(?: all)?(?: the)? {COLUMN}{FILL}", "sum"),
    (rf"sum(?: up)?(?: of)?(?: all)?(?: the)? {COLUMN}{FILL}", "sum"),
    (rf"how (?:much|many) {COLUMN}{FILL} (?:in total|altogether|combined|overall)", "sum"),
    (rf"(?:{WHAT} )?(?:the )?(?:average|mean)(?: of)?(?: all)?(?: the)? {COLUMN}{FILL}", "mean"),
    (rf"(?:{WHAT} )?(?:the )?median(?: of)?(?: the)? {COLUMN}{FILL}", "median"),
    (rf"(?:{WHAT} )?(?:the )?(?P<end>max|min)(?: of)?(?: the)? {COLUMN}{FILL}", "extreme"),
    (rf"who{FILL}(?: the)? (?P<end>max|min|most|fewest|least) {COLUMN}{FILL}", "extreme rows"),
    (
        rf"{WHICH}(?: {ROWS}| C(?P<shown>\d+)| @){FILL} {HAS}(?: the)? "
        rf"(?P<end>max|min|most|fewest|least) {COLUMN}{FILL}",
        "extreme rows",
    ),
    (
        rf"what is the C(?P<shown>\d+) of the {ROWS} {HAS} the (?P<end>max|min|most|fewest|least) {COLUMN}{FILL}",
        "extreme rows",
    ),
    (rf"(?:what|which|who) is the (?P<end>max|min|most) {COLUMN} (?:{ROWS}|C(?P<shown>\d+)|@){FILL}", "extreme rows"),
    (
        rf"(?:what|which|who|list)(?: are| is)?(?: the)?(?: top)? N(?P<top>\d+)(?: R)? "
        rf"(?:with the )?(?P<end>max|min) {COLUMN}{FILL}",
        "extreme rows",
    ),
    (rf"(?:{WHAT} )?(?:the )?(?:N(?P<top>\d+) )?most (?:common|frequent) {COLUMN}{FILL}", "most"),
    (rf"{WHICH} {COLUMN}{FILL} (?:the )?most (?:common|often|frequent|frequently)", "most"),
    (rf"{WHICH} {COLUMN} {HAS} the (?P<end>most|fewest) (?:{ROWS}|@){FILL}", "most"),
    (rf"{MANY}(?: @)*(?: {ROWS})?{FILL} (?:per|for each|in each|by) {COLUMN}", "each"),
    (rf"who {COLUMN} (?:the )?(?P<end>max|min|most|least){FILL}", "extreme rows"),
    (rf"list {COLUMN}", "different"),
    (rf"when{FILL} {COLUMN}", "cells"),
    (rf"(?:(?:what|which|who) (?:is|are|was|were) )?(?:the )?{COLUMN}{FILL}", "cells"),
    (rf"(?:what|which|who) (?:is |are |was |were )?(?:&|@) 's {COLUMN}", "cells"),
    (rf"how (?:much|high)?{FILL} {COLUMN}", "one cell"),
    (rf"how {COLUMN}{FILL}", "one cell"),
    (rf"{WHICH} {COLUMN}{FILL}", "cells"),
    (rf"list {COLUMN}{FILL}", "cells"),
    (rf"(?:{WHICH}|what are) (?:all )?(?:the )?(?:different|distinct|unique) {COLUMN}{FILL}", "different"),
    (rf"{WHICH} (?:@ )?{ROWS}{FILL}", "rows"),
    (rf"{WHICH} @{FILL}", "rows"),
    (rf"who{FILL}", "rows"),
)
GENERAL_NOUNS = frozenset(("row", "record", "entry", "item", "object", "line", "message", "event"))
QUANTITIES_TEXT = """
stock quantity qty count units inventory number sold amount total copies pieces
"""
QUANTITIES = frozenset(QUANTITIES_TEXT.split())
LIVING = frozenset(("live", "lives", "living", "located", "based"))


class Task(NamedTuple):
    """Operation on the rows that fulfil the conditions."""

    kind: str
    column: int | None
    shown: int | None
    end: str
    top: int
    conditions: list[Condition]
    doubts: list[str]


def read_task(bound: Bound, table: Table) -> Task | None:
    """Return the task whose rule takes every word of the question; None if there is none."""
    words = WRAPPING.sub("", PLACE_WORDS.sub("", bound.words))
    words = re.sub(r"\b(number|count) of\b", r"\1-of", words)
    words = re.sub(r"^(?:list|show|name)(?: all| me| every)*(?: the)? ", "list ", words)
    taken = conditions(bound._replace(words=words), table)
    if taken is None:
        return None
    words, found = taken
    for pattern, kind in HEADS:
        match = re.fullmatch(pattern, words)
        noun = match.groupdict().get("noun") if match else None
        is_guess = noun is not None and noun not in row_words(table)
        if match is None or (is_guess and (table.kind == "log" or table.nouns - GENERAL_NOUNS)):
            continue  # the table's rows are called otherwise
        parts = match.groupdict()
        column, shown, top = (int(parts[key]) if parts.get(key) else None for key in ("column", "shown", "top"))
        number = int(bound.numbers[top]) if top is not None and bound.numbers[top].isdigit() else 1
        doubts = [*bound.doubts, *([f"{noun!r} is taken for the rows"] if is_guess else [])]
        if kind == "count" and not noun and "R" not in words.split() and has_quantity(table):
            doubt(doubts, "a column of quantities may be what is to be added up")
        used = [column, *(condition.column for condition in found)]
        return Task(
            kind, column, shown, parts.get("end") or "max", number, found, doubts + guessed(bound, words, used, table)
        )
    return None


def guessed(bound: Bound, words: str, used: list[int | None], table: Table) -> list[str]:
    """Return reasons to doubt that the question means the columns that the task uses."""
    doubts = [f"what is taken for {table.columns[each]!r} is a guess" for each in used if each in table.loose and each]
    if LIVING & set(words.split()) and not places(table, used):
        doubts.append("no column is named for a place")
    if {"from", "to", "by"} & set(bound.words.split()) and has_roles(table):
        doubts.append("the columns stand for two sides")
    return doubts


def has_quantity(table: Table) -> bool:
    """Whether a column says for how many things a row stands."""
    words = {word for column in table.columns for word in re.findall(r"[a-z]+", column.lower())}
    return bool(QUANTITIES & words)


def places(table: Table, columns: list[int | None]) -> bool:
    """Whether one of the columns is named for a place."""
    names = " ".join(table.columns[column].lower() for column in columns if column is not None)
    return bool({"city", "country", "town", "place", "location", "region"} & set(re.findall(r"[a-z]+", names)))


def row_words(table: Table) -> set[str]:
    """Return words for the rows besides `Table.nouns`: for people, if rows have a name and, for example, an age."""
    columns = {column.lower() for column in table.columns}
    is_people = "name" in columns and columns & {"age", "salary", "email", "birthday", "role"}
    return {"people", "person", "persons"} if is_people else set()


def has_roles(table: Table) -> bool:
    """Whether columns name two sides, such as sender and recipient, which "from" and "to" tell apart."""
    sides = {
        "from",
        "to",
        "origin",
        "destination",
        "source",
        "target",
        "sender",
        "recipient",
        "receiver",
        "buyer",
        "seller",
    }
    return bool(sides & {word for column in table.columns for word in re.findall(r"[a-z]+", column.lower())})
