"""A question in the terms of a table: columns `C0`, values `V0`, numbers `N0`, dates `D0`, rows `R`.

Other words stay as they are. A question with a word that no rule takes is not computed, because it may change the
meaning.
"""

import re
from decimal import Decimal
from typing import Any, NamedTuple

from rlm_broker.clients.offline.repl_code.logs import LOG_SAMPLE
from rlm_broker.clients.offline.repl_code.tables import Table, doubt, singular

TOTAL_ROW = re.compile(r"(?:grand |sub)?(?:total|sum|average|mean|gesamt|summe|all|overall)s?\b")
MOST_SEEN = 100_000
MOST_QUESTION_CHARS = 600
LONGEST_PHRASE = 6
TOKEN = re.compile(
    r"\"[^\"]*\"|\u201c[^\u201d]*\u201d|`[^`]*`|(?<!\w)'[^']*'(?!\w)|'s\b|\d{4}-\d\d-\d\d(?![\d-])"
    r"|[\u20ac$\u00a3]?-?\d+(?:[.,]\d+)*(?!\w)%?|[^\W_][\w.@/:-]*[^\W_]|[^\W_]|[<>]=?|="
)
GRAMMAR_TEXT = """
a about above after all altogether among an and any apart are as aside ask at average be been before being below
beside besides between biggest both bottom but by came cheaper cheapest combined common compute could count
counts currently did different distinct do does down each earliest either equal every exactly exceed exceeding
exceeds except excluding exist expensive fewer fewest find first follow for former frequent frequently from give
given gives greater greatest had has have having higher highest how i if in include included includes including
inside into is it its just largest last latest least less list longer longest lower lowest many max maximum mean
median me min minimum minus more most much neither next no non none nor not number of off often oldest on once
one only or other others our out outside over overall own part per please plus rank s same second show shortest
since smaller smallest so some sort still sum tell than that the their them then there these they third this
those three through times to together top total two under unique until up us used using was we were what when
where which while who whom whose why with within without would year you youngest youngest newest
"""
GRAMMAR = frozenset(GRAMMAR_TEXT.split())
"""Words with a meaning of their own in questions. They are never taken for a cell or a column."""
SAME_COLUMN = (
    ("price", "cost", "costs", "prices"),
    ("salary", "earn", "earns", "wage", "wages", "salaries"),
    ("weight", "weigh", "weighs"),
    ("age", "old"),
    ("height", "tall"),
    ("population", "inhabitants"),
    ("stock", "inventory"),
    ("quantity", "qty"),
    ("email", "e-mail", "mail"),
    ("phone", "telephone"),
)
ADJECTIVES = {
    "older": ("age", "more"), "oldest": ("age", "max"), "younger": ("age", "less"), "youngest": ("age", "min"),
    "cheaper": ("price", "less"), "cheapest": ("price", "min"), "heavier": ("weight", "more"),
    "heaviest": ("weight", "max"), "lighter": ("weight", "less"), "lightest": ("weight", "min"),
    "taller": ("height", "more"), "tallest": ("height", "max"),
}  # fmt: skip
FREE_WORDS_TEXT = """
people person live living located based appear occur listed recorded currently old time please get got log
logged write wrote report reported emit emitted
"""
FREE_WORDS = frozenset(FREE_WORDS_TEXT.split())
"""Words that rules skip, and that need not occur in a cell."""
HIGHEST = {"highest", "largest", "biggest", "greatest", "maximum", "max", "longest"}
LOWEST = {"lowest", "smallest", "minimum", "min", "shortest"}
UNIT_WORDS_TEXT = """
eur usd gbp kg g cm m km s ms id no number amount count years days pct percent in
"""
UNIT_WORDS = frozenset(UNIT_WORDS_TEXT.split())
NUMBER = re.compile(r"([\u20ac$\u00a3]?)\s?(-?\d+(?:[.,]\d+)*)\s?(%|\u20ac|\u00a3|\$|[A-Za-z]{1,5})?")
NUMBER_WORDS = {"two": 2, "three": 3, "four": 4, "five": 5, "ten": 10}


class Bound(NamedTuple):
    """A question in the terms of a table.

    Attributes:
        words: Question, with `C0`, `V0`, `N0`, `D0` and `R` in place of phrases.
        values: For each V, its text in lower case and the columns that have it as a cell.
        numbers: For each N and D, its text.
        doubts: Reasons not to be sure of the reading.
        height: Number of rows.
    """

    words: str
    values: list[tuple[str, list[int]]]
    numbers: list[str]
    doubts: list[str]
    height: int


def bind(question: str, table: Table, sample: str | None = None) -> Bound | None:
    """Return the question in the table's terms; None if it is too long, or has a word that no rule can take.

    Args:
        question: Question as the user wrote it.
        table: Table to ask.
        sample: Text that the table was read from, if it was text: each value occurs in it.
    """
    if len(question) > MOST_QUESTION_CHARS:
        return None
    question = plain_words(question)
    found = list(TOKEN.finditer(question))
    tokens = [match.group().lower() for match in found]
    spans = [
        (i, i + size, question[found[i].start() : found[i + size - 1].end()])
        for size in range(LONGEST_PHRASE, 0, -1)
        for i in range(len(tokens) - size + 1)
        if may_name([match.group() for match in found[i : i + size]], i == 0, is_own(tokens, i, table))
    ]
    columns, partial = column_names(table)
    wanted: dict[str, list[tuple[int, int]]] = {}
    for begin, end, text in spans:
        for form in forms(unquoted(text)):
            wanted.setdefault(form, []).append((begin, end))
    if any(is_strange(token, table, columns, sample) for token in tokens):
        return None
    cells, height = survey(table, wanted)
    bound = Bound("", [], [], [], height)
    at: dict[int, tuple[int, str]] = {}
    taken: set[int] = set()
    for begin, end, text in spans:
        if taken.isdisjoint(range(begin, end)) and (name := named_by(text, table, columns, partial, cells, bound)):
            taken |= set(range(begin, end))
            at[begin] = (end, name)
    words, i = [], 0
    while i < len(tokens):
        end, name = at.get(i) or (i + 1, other_word(tokens[i], columns, bound))
        words.append(name)
        i = end
    return bound._replace(words=" ".join(words))


def is_strange(token: str, table: Table, columns: dict[str, list[int]], text: str | None) -> bool:
    """Whether a word occurs nowhere and no rule takes it, so that reading the rows is pointless."""
    if text is None or token in GRAMMAR or not token.isalpha() or token.endswith("s") or token in ADJECTIVES:
        return False
    if any(token in phrase for phrase in columns) or token in table.nouns or token in FREE_WORDS:
        return False
    return re.search(re.escape(token), text, re.IGNORECASE) is None


def plain_words(question: str) -> str:
    """Return the question with contractions written out."""
    question = " ".join(question.replace("\u2019", "'").split())
    question = re.sub(r"(?i)\b(what|who|which|where|when|how)'s\b", r"\1 is", question)
    question = re.sub(r"(?i)\b(can)not\b|\b(can)'t\b", "can not", question)
    return re.sub(r"(?i)n't\b", " not", question)


def is_own(tokens: list[str], i: int, table: Table) -> bool:
    """Whether "total" names a column of the table, and not an operation."""
    is_column = tokens[i] == "total" and any(column.lower() == "total" for column in table.columns)
    return is_column and tokens[i + 1 : i + 2] not in (["number"], ["amount"], ["count"], ["sum"])


def may_name(tokens: list[str], first: bool, own: bool) -> bool:
    """Whether words can be a name in the table: they are quoted, or none belongs to the question's grammar."""
    if len(tokens) == 1 and tokens[0][0] in "\"'`\u201c":
        return len(tokens[0]) > 2
    if len(tokens) == 1 and tokens[0].lower() in GRAMMAR:
        return own or (tokens[0].isupper() and not first and tokens[0] not in ("I", "OR", "AND", "NOT"))
    return not any(token.lower() in GRAMMAR or token[0] in "\"'`\u201c<>=" for token in tokens)


def unquoted(text: str) -> str:
    return text[1:-1] if text[0] in "\"'`\u201c" and text != "'s" else text


def forms(text: str) -> list[str]:
    """Return a phrase in lower case: as it is, in the singular and in the plural."""
    text = text.strip().lower()
    head, _, last = text.rpartition(" ")
    return list(dict.fromkeys([text, f"{head} {singular(last)}".strip(), f"{text}s"]))


def column_names(table: Table) -> tuple[dict[str, list[int]], set[str]]:
    """Return phrase -> columns that it may mean, and the phrases that are only a part of a column's name."""
    full: dict[str, list[int]] = {}
    part: dict[str, list[int]] = {}
    for i, column in enumerate(table.columns):
        spaced = re.sub(r"([a-z\d])([A-Z])", r"\1 \2", column.rpartition(".")[2])
        words = re.findall(r"[^\W_]+", spaced.lower()) or [""]
        rest = [word for word in words if word not in UNIT_WORDS]
        verb = [re.sub(r"ed$", ending, words[0]) for ending in ("", "e", "ed")] if words[0].endswith("ed") else []
        names = [" ".join(words), " ".join(rest), column.lower(), *(verb if len(rest) == 1 else [])]
        for phrase in {form for name in names if name for form in forms(name)}:
            if phrase not in GRAMMAR or phrase == "total":
                full.setdefault(phrase, []).append(i)
        for word in rest if len(rest) > 1 else []:
            if len(word) > 3 and word not in GRAMMAR:
                part.setdefault(word, []).append(i)
    for group in SAME_COLUMN:
        meant = {tuple(full[word]) for word in group if word in full}
        for word in group if len(meant) == 1 else ():
            full.setdefault(word, list(next(iter(meant))))
    partial = {phrase for phrase in part if phrase not in full}
    return {**part, **full}, partial


def survey(table: Table, wanted: dict[str, list[tuple[int, int]]]) -> tuple[dict[str, set[int]], int]:
    """Return for each wanted text the columns that have it as a cell, and the number of rows.

    For a log a sample of the rows is read, and texts that are not in it are not bound.
    """
    found: dict[str, set[int]] = {}
    seen: set[int] = set()
    height = 0
    for row in table.rows():
        height += 1
        if table.kind == "log" and height > LOG_SAMPLE:
            break
        if table.kind != "log":
            look_at_row(row, seen, table, height)
        for i, cell in enumerate(row) if wanted else ():
            for each in cell if isinstance(cell, list) else (cell,):
                if each and (text := each.strip().lower()) in wanted:
                    found.setdefault(text, set()).add(i)
    return found, height


def look_at_row(row: list[Any], seen: set[int], table: Table, number: int) -> None:
    """Note rows that a count should perhaps omit: empty rows, repeated rows, and totals of other rows."""
    first = str(row[0] or "").strip().lower()
    if TOTAL_ROW.match(first):
        doubt(table.doubts, f"a row named {first[:40]!r} may be a total of others")
    if not any(row):
        doubt(table.doubts, "a row is empty")
    if number <= MOST_SEEN:
        same = hash(str(row))
        if same in seen:
            doubt(table.doubts, "some rows are the same")
        seen.add(same)


def named_by(
    text: str, table: Table, columns: dict[str, list[int]], partial: set[str], cells: dict[str, set[int]], bound: Bound
) -> str | None:
    """Return what a phrase stands for: rows, a column or a value; `X`, which no rule takes, if it may be two of
    them."""
    is_quoted = text[0] in "\"'`\u201c"
    candidates = forms(unquoted(text))
    column = next((columns[form] for form in candidates if form in columns), None) if not is_quoted else None
    value = next((form for form in candidates if form in cells), None)
    is_row = not is_quoted and any(form in table.nouns for form in candidates)
    if value is not None and re.fullmatch(r"[\d.,-]+", text):
        value = None  # a number is compared with a column that the question names
    if (column is not None) + (value is not None) + (is_row and column is None) > 1 or len(column or [0]) > 1:
        return "X"
    if column is not None:
        if any(form in partial for form in candidates):
            doubt(bound.doubts, f"{text!r} is taken for the column {table.columns[column[0]]!r}")
        return f"C{column[0]}"
    if is_row:
        return "R"
    if value is None:
        return None
    bound.values.append((value, sorted(cells[value])))
    return f"V{len(bound.values) - 1}"


def other_word(token: str, columns: dict[str, list[int]], bound: Bound) -> str:
    """Return a number, a date, an adjective of a column, or the word itself."""
    if re.fullmatch(r"\d{4}-\d\d-\d\d|(?:19|20)\d\d", token):
        bound.numbers.append(token)
        return f"D{len(bound.numbers) - 1}"
    if NUMBER.fullmatch(token):
        bound.numbers.append(token)
        return f"N{len(bound.numbers) - 1}"
    concept, direction = ADJECTIVES.get(token, ("", ""))
    if len(columns.get(concept, ())) == 1:
        return (
            f"C{columns[concept][0]} {direction}"
            if direction in ("more", "less")
            else f"{direction} C{columns[concept][0]}"
        )
    if token in ("expensive",) and len(columns.get("price", ())) == 1:
        return f"C{columns['price'][0]}"
    if token in NUMBER_WORDS:
        bound.numbers.append(str(NUMBER_WORDS[token]))
        return f"N{len(bound.numbers) - 1}"
    return "max" if token in HIGHEST else "min" if token in LOWEST else token


def numeral(text: str) -> tuple[Decimal, str, str] | None:
    """Return (number, unit, style of writing) of a cell with a number and at most a unit; else None."""
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    digits, unit = match[2], (match[1] or match[3] or "").lower()
    if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", digits):
        return Decimal(digits.replace(",", "")), unit, "thousands"
    if re.fullmatch(r"-?\d+(?:\.\d+)?", digits):
        return Decimal(digits), unit, "point" if "." in digits else "plain"
    if re.fullmatch(r"-?\d{1,3}(?:\.\d{3})+(?:,\d+)?|-?\d+,\d+", digits):
        return Decimal(digits.replace(".", "").replace(",", ".")), unit, "comma"
    return None
