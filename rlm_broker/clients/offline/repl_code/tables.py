"""The context as tables: CSV, Markdown, JSON and logs, as columns and rows that are read one by one."""

import csv
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rlm_broker.clients.offline.repl_code.logs import log_table

SAMPLE_CHARS = 1 << 16
"""Characters of a text from which its delimiter and header are guessed."""
MOST_PARSED_CHARS = 20_000_000
"""Maximum characters of JSON or Markdown that is read as tables; as objects it takes several times its size."""
MOST_CHARS = 200_000_000
"""Maximum characters of a text that is read as a table; a longer one is only searched."""
MOST_TABLES = 20
DEEPEST = 4
ROW_NOUNS = ("row", "record", "entry")
USUAL_COLUMNS_TEXT = """
id name title key type kind status state role city country region team department category email user product
customer owner level service date time color colour size group language
"""
USUAL_COLUMNS = frozenset(USUAL_COLUMNS_TEXT.split())
TYPED = re.compile(r"[^\w]{0,2}\d[\d.,:T /-]*\D{0,3}|true|false|yes|no", re.IGNORECASE)
RULE = re.compile(
    r"(?m)^[ \t]{0,9}(?:\|[ \t]{0,9})?:?-{2,}:?[ \t]{0,99}(?:\|[ \t]{0,9}:?-{2,}:?[ \t]{0,99})+(?:\|[ \t]{0,9})?$"
)


class Table(NamedTuple):
    """Columns and rows. A cell is a text, a list of texts, or None.

    Attributes:
        kind: Name of the format, for people.
        rows: Function that yields all rows from the first. For a log it takes the levels that are of interest.
        nouns: Words for a row, in the singular.
        doubts: Reasons not to be sure of a result. The list is complete once all rows were read.
        loose: Columns that were guessed.
    """

    kind: str
    columns: list[str]
    rows: Callable[..., Iterator[list[Any]]]
    nouns: set[str]
    doubts: list[str]
    loose: set[int]


def tables(context: object) -> list[Table]:
    """Return the tables of the context; empty if it is prose, code or several files."""
    if isinstance(context, dict) and len(context) == 1 and all(isinstance(value, str) for value in context.values()):
        context = next(iter(context.values()))
    if isinstance(context, (list, tuple)) and context and all(isinstance(item, str) for item in context):
        context = "\n".join(context)
    if not isinstance(context, str):
        return json_tables(context)
    if len(context) > MOST_CHARS:
        return []
    start = context[:100].lstrip("\ufeff \t\r\n")
    if start[:1] in ("[", "{") and len(context) <= MOST_PARSED_CHARS and (found := json_text_tables(context)):
        return found
    log = log_table(context)
    if log is not None:
        columns, rows, doubts, loose = log
        return [Table("log", columns, rows, {*ROW_NOUNS, "line", "message", "event"}, doubts, loose)]
    return (markdown_tables(context) if len(context) <= MOST_PARSED_CHARS else []) or csv_tables(context)


def lines_of(text: str) -> Iterator[str]:
    """Yield each line with its end. The text is not copied."""
    start = 0
    while (stop := text.find("\n", start)) >= 0:
        yield text[start : stop + 1]
        start = stop + 1
    if start < len(text):
        yield text[start:]


def csv_tables(text: str) -> list[Table]:
    """Return the text as one table, if its beginning has a header and lines with equal numbers of fields."""
    best, chosen = csv_sample(text[: text.rfind("\n", 0, SAMPLE_CHARS) + 1] if len(text) > SAMPLE_CHARS else text)
    header = [cell.strip().lstrip("\ufeff") for cell in best[0]]
    is_header = all(
        cell and len(cell) <= 40 and len(cell.split()) <= 4 and not TYPED.fullmatch(cell) for cell in header
    )
    if len(best) < 2 or not is_header or len({cell.lower() for cell in header}) < len(header):
        return []
    doubts = [] if sure_header(header, best[1:]) else ["the first line may be no header"]
    width = len(header)

    def rows(_levels: tuple[str, ...] = ()) -> Iterator[list[Any]]:
        ragged, first = 0, True
        for row in csv.reader(lines_of(text), delimiter=chosen):
            if first or not row:
                first = first and not row
            elif len(row) == width:
                yield row
            else:
                ragged += 1
        if ragged:
            doubt(doubts, f"{ragged} lines have another number of fields and were left out")

    return [Table("CSV table", header, rows, set(ROW_NOUNS), doubts, set())]


def csv_sample(head: str) -> tuple[list[list[str]], str]:
    """Return (rows, delimiter), with the delimiter that gives each line the same and the largest number of fields."""
    best: list[list[str]] = [[]]
    chosen = ","
    for delimiter in ",;\t|":
        try:
            sample = [row for row in csv.reader(lines_of(head), delimiter=delimiter) if row]
        except csv.Error:
            continue
        if len(sample) >= 2 and len({len(row) for row in sample}) == 1 and len(sample[0]) > max(1, len(best[0])):
            best, chosen = sample, delimiter
    return best, chosen


def sure_header(header: list[str], sample: list[list[str]]) -> bool:
    """Whether the first row differs from the others: a column has numbers, or a name is usual for columns."""
    usual = any(word in USUAL_COLUMNS for cell in header for word in re.findall(r"[a-z]+", cell.lower()))
    typed = any(
        all(TYPED.fullmatch(row[i].strip()) for row in sample if row[i].strip())
        and any(row[i].strip() for row in sample)
        for i in range(len(header))
    )
    return usual or typed


def doubt(doubts: list[str], reason: str) -> None:
    """Add a reason, once."""
    if reason not in doubts:
        doubts.append(reason)


def markdown_tables(text: str) -> list[Table]:
    """Return the tables with a header and a rule of dashes below it."""
    found: list[Table] = []
    inside = end = 0
    for rule in RULE.finditer(text):
        if len(found) == MOST_TABLES:
            return []
        start = text.rfind("\n", 0, max(0, rule.start() - 1)) + 1
        if start < end:
            continue  # this rule is a row of the table before
        header = markdown_cells(text[start : rule.start()])
        if len(header) < 2 or len(header) != len(markdown_cells(rule.group())):
            continue
        end = rule.end()
        while end < len(text) and "|" in text[end + 1 : (text.find("\n", end + 1) + 1 or len(text) + 1)]:
            end = text.find("\n", end + 1)
            end = len(text) if end < 0 else end
        heading = re.findall(r"(?m)^#+ (.+)$", text[max(0, start - 500) : start])
        nouns = {singular(word) for word in re.findall(r"\w+", heading[-1].lower())} if heading else set()
        doubts: list[str] = []
        found.append(
            Table(
                "Markdown table",
                header,
                markdown_rows(text, rule.end(), end, len(header), doubts),
                {*ROW_NOUNS, *nouns},
                doubts,
                set(),
            )
        )
        inside += end - start
    outside = len(text) - inside - sum(len(line) for line in re.findall(r"(?m)^#.*$|^\s+$", text)) if found else 0
    if outside > 20:
        for table in found:
            doubt(table.doubts, "there is text outside of the table")
    return found


def markdown_rows(text: str, start: int, end: int, width: int, doubts: list[str]) -> Callable[..., Iterator[list[Any]]]:
    """Return the function that reads the lines between two offsets as rows."""

    def rows(_levels: tuple[str, ...] = ()) -> Iterator[list[Any]]:
        for line in lines_of(text[start:end]):
            cells = markdown_cells(line) if line.strip() else []
            if len(cells) == width:
                yield cells
            elif cells:
                doubt(doubts, "some rows have another number of cells and were left out")

    return rows


def markdown_cells(line: str) -> list[str]:
    """Return the cells of a line, without marks of emphasis."""
    inner = re.sub(r"^\||(?<!\\)\|$", "", line.strip())
    return [cell.strip().strip("*`_").replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", inner)]


def json_text_tables(text: str) -> list[Table]:
    """Return the tables of a JSON text, or of a text with one JSON object a line."""
    doubts: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            doubt(doubts, "an object has one key twice")
        return made

    try:
        try:
            value = json.loads(text, object_pairs_hook=once)
        except ValueError:
            value = [json.loads(line, object_pairs_hook=once) for line in lines_of(text) if line.strip()]
    except (ValueError, RecursionError):
        return []
    return [table._replace(doubts=doubts) for table in json_tables(value)]


def json_tables(value: object) -> list[Table]:
    """Return each list of objects as a table, named by the key that holds it."""
    found: list[Table] = []
    todo: list[tuple[str, object, int]] = [("", value, 0)]
    while todo and len(found) < MOST_TABLES:
        name, inner, depth = todo.pop()
        objects = list(inner) if isinstance(inner, (list, tuple)) else []
        if isinstance(inner, dict):
            values = list(inner.values())
            if len(values) >= 2 and all(isinstance(each, dict) for each in values) and shared_keys(values):
                label = "name" if not any("name" in each for each in values) else "key"
                objects = [{label: str(key), **each} for key, each in inner.items()]
            elif depth < DEEPEST:
                todo += [(str(key), each, depth + 1) for key, each in inner.items()]
        if objects and all(isinstance(each, dict) for each in objects) and not is_chat(objects):
            found.append(object_table(name, objects))
        elif objects and name and all(isinstance(each, (str, int, float)) for each in objects):
            cells = [[scalar(each)] for each in objects]
            found.append(
                Table(
                    "JSON list",
                    [singular(name.lower())],
                    lambda _levels=(), cells=cells: iter(cells),
                    {"item"},
                    [],
                    set(),
                )
            )
    return found


def shared_keys(values: list[Any]) -> set[str]:
    return set.intersection(*(set(each) for each in values[:100]))


def is_chat(objects: list[Any]) -> bool:
    return all({"role", "content"} <= set(each) for each in objects)


def object_table(name: str, objects: list[Any]) -> Table:
    """Return objects as rows. Fields of nested objects become columns `outer.inner`."""
    columns: dict[str, int] = {}
    for each in objects:
        for key in flat(each):
            columns.setdefault(key, len(columns))

    def rows(_levels: tuple[str, ...] = ()) -> Iterator[list[Any]]:
        for each in objects:
            cells = flat(each)
            yield [cells.get(key) for key in columns]

    nouns = {*ROW_NOUNS, *([singular(name.lower())] if name else ["object", "item"])}
    return Table(f"JSON objects{f' in {name!r}' if name else ''}", list(columns), rows, nouns, [], set())


def flat(value: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return path -> cell. Lists of objects are left out, because no rule asks about them."""
    cells: dict[str, Any] = {}
    for key, inner in value.items():
        path = f"{prefix}{key}"
        if isinstance(inner, dict) and path.count(".") < DEEPEST:
            cells |= flat(inner, f"{path}.")
        elif isinstance(inner, (list, tuple)) and not any(isinstance(each, (dict, list, tuple)) for each in inner):
            cells[path] = [scalar(each) or "" for each in inner]
        elif not isinstance(inner, (dict, list, tuple)):
            cells[path] = scalar(inner)
    return cells


def scalar(value: object) -> str | None:
    """Return a cell's text, as JSON writes it."""
    return (
        value
        if isinstance(value, str) or value is None
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def singular(word: str) -> str:
    """Return an English noun in the singular, judged by its ending."""
    if re.search(r"(?:[^aeiou])ies$", word) and len(word) > 4:
        return f"{word[:-3]}y"
    if re.search(r"(?:x|ch|sh|ss)es$", word):
        return word[:-2]
    return word[:-1] if re.search(r"[^su']s$", word) and len(word) > 3 else {"people": "person"}.get(word, word)
