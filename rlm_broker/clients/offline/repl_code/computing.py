"""Answers computed from a table: counts, sums, extremes, rankings, and the cells that conditions choose."""

import collections
import heapq
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from rlm_broker.clients.offline.repl_code.binding import Bound, bind, numeral
from rlm_broker.clients.offline.repl_code.conditions import Condition, as_number, holds_for, said
from rlm_broker.clients.offline.repl_code.logs import HIGHER, OTHER
from rlm_broker.clients.offline.repl_code.tables import Table, doubt, tables
from rlm_broker.clients.offline.repl_code.tasks import Task, read_task

MOST_DIFFERENT = 200_000
MOST_NUMBERS = 3_000_000
MOST_LISTED = 30
NAMES = ("name", "title", "full name", "username", "user", "product", "item", "id", "key")


def compute(context: object, question: str, note: str) -> str | None:
    """Return the answer, if exactly one table and the rules take every word of the question; else None."""
    answers = []
    for table in tables(context):
        bound = bind(question, table, context if isinstance(context, str) else None)
        task = read_task(bound, table) if bound else None
        if bound and task and (answer := carry_out(task, table, bound)):
            answers.append((answer, task.doubts, table, task))
    if len(answers) != 1:
        return None
    answer, doubts, table, task = answers[0]
    doubts = list(dict.fromkeys([*doubts, *table_doubts(task, table)]))
    where = " and ".join(said(condition, table) for condition in task.conditions)
    how = f"Computed ({task.kind}{f' of {table.columns[task.column]}' if task.column is not None else ''}) over "
    how += f"{'the rows where ' + where if where else 'all rows'} of the {table.kind}."
    confidence = f"LOW CONFIDENCE ({'; '.join(doubts)})" if doubts else "exact"
    return f"{answer}\n{' '.join(how.split())}\nConfidence: {confidence}\n{note}"


def table_doubts(task: Task, table: Table) -> list[str]:
    """Return the doubts of the table's rows that matter for this task."""
    levels = [each for each in task.conditions if is_level(each, table)]
    harmless = {OTHER} if levels else set()
    if not any("error" in each.texts for each in levels):
        harmless.add(HIGHER)
    return [reason for reason in table.doubts if reason not in harmless]


def is_level(condition: Condition, table: Table) -> bool:
    return table.kind == "log" and table.columns[condition.column] == "level" and condition.kind == "="


def chosen(task: Task, table: Table) -> Iterator[list[Any]]:
    """Yield the rows that fulfil the conditions."""
    levels = next((each.texts for each in task.conditions if is_level(each, table)), ())
    for row in table.rows(tuple("WARN" if level == "warning" else level.upper() for level in levels)):
        if all([holds_for(row, condition, task.doubts) for condition in task.conditions]):
            yield row


def carry_out(task: Task, table: Table, bound: Bound) -> str | None:
    """Return the answer in one line, or a line for each rank; None if the task does not fit the table."""
    if task.kind == "count columns":
        return f"{len(table.columns)} columns"
    if task.kind == "count":
        whole = not task.conditions and table.kind != "log"
        number = bound.height if whole else sum(1 for _ in chosen(task, table))
        doubt_names(task, table, bound)
        if not task.conditions and not re.search(r"\bR\b", bound.words) and not task.doubts:
            return None
        return f"{number} {'row' if number == 1 else 'rows'}"
    if task.kind in ("most", "each"):
        doubt_names(task, table, bound)
    done: dict[str, Callable[[Task, Table], str | None]] = {
        "sum": numbers, "mean": numbers, "median": numbers, "extreme": numbers, "extreme rows": extreme_rows,
        "most": most, "each": most, "count different": different, "different": different, "count column": column_count,
        "cells": cells,
        "one cell": cells, "rows": cells,
    }  # fmt: skip
    return done[task.kind](task, table)


def doubt_names(task: Task, table: Table, bound: Bound) -> None:
    """Doubt a count of people or things, if several rows share a name."""
    if table.kind == "log" or "R" in bound.words.split():
        return
    key, seen = key_column(table), set[str]()
    for row in chosen(task, table):
        name = str(row[key]).lower()
        if name in seen or len(seen) > MOST_DIFFERENT:
            doubt(task.doubts, f"several rows have one {table.columns[key]}")
            return
        seen.add(name)


def column_numbers(task: Task, table: Table) -> list[tuple[Decimal, list[Any]]] | None:
    """Return (number, row) of each chosen row; None if the column is not of numbers written in one style."""
    assert task.column is not None
    found: list[tuple[Decimal, list[Any]]] = []
    units, styles = set(), set()
    for row in chosen(task, table):
        cell = row[task.column]
        read = numeral(cell) if isinstance(cell, str) else None
        if read is None:
            if cell is None or (
                isinstance(cell, str) and cell.strip().lower() in ("", "-", "n/a", "na", "null", "none")
            ):
                doubt(task.doubts, "rows without a number were left out")
                continue
            return None
        if len(found) == MOST_NUMBERS:
            return None
        found.append((read[0], row if task.kind == "extreme rows" else [cell.strip()]))
        units.add(read[1])
        styles.add(read[2])
    if not found or len(units) > 1 or ("comma" in styles and styles & {"thousands", "point"}):
        return None
    if "thousands" in styles and "plain" not in styles and "." not in "".join(table.columns) and len(found) < 2:
        doubt(task.doubts, "a comma may stand before decimals")
    return found


def numbers(task: Task, table: Table) -> str | None:
    """Return the sum, mean, median, largest or smallest number of a column."""
    found = column_numbers(task, table)
    if found is None:
        return None
    values = sorted(number for number, _ in found)
    if task.kind == "sum":
        return as_number(sum(values, Decimal(0)))
    if task.kind == "extreme":
        least = values[0] if task.end == "min" else values[-1]
        return str(next(written for number, written in found if number == least)[0])
    middle = len(values) // 2
    if task.kind == "median":
        return rounded(values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2)
    return rounded(sum(values, Decimal(0)) / len(values))


def rounded(value: Decimal) -> str:
    short = value.quantize(Decimal("0.0001"))
    return as_number(short) if short == value else f"{as_number(short)} (rounded)"


def key_column(table: Table) -> int:
    """Return the column that names a row: one with a usual name, else the first."""
    lower = [re.sub(r"[_ ]+", " ", column.lower()) for column in table.columns]
    return next((lower.index(name) for name in NAMES if name in lower), 0)


def shown_cell(row: list[Any], column: int) -> str:
    cell = row[column]
    return ", ".join(cell) if isinstance(cell, list) else " ".join((cell or "(nothing)").split())[:300]


def extreme_rows(task: Task, table: Table) -> str | None:
    """Return the rows with the largest or smallest numbers of a column; ties of the last place are included."""
    found = column_numbers(task, table)
    if not found:
        return None
    key = key_column(table) if task.shown is None else task.shown
    pick = heapq.nsmallest if task.end in ("min", "fewest", "least") else heapq.nlargest
    limit = pick(max(1, task.top), (number for number, _ in found))[-1]
    within = [
        (number, row) for number, row in found if (number <= limit if pick is heapq.nsmallest else number >= limit)
    ]
    within.sort(key=lambda pair: pair[0], reverse=pick is heapq.nlargest)
    if len(within) > MOST_LISTED:
        return None
    names = collections.Counter(shown_cell(row, key) for row in chosen(task, table))
    if len(names) < sum(names.values()):
        doubt(
            task.doubts,
            "several rows have one name: this is the largest or smallest of single rows",
        )
    return ", ".join(f"{shown_cell(row, key)} ({as_number(number)})" for number, row in within)


def most(task: Task, table: Table) -> str | None:
    """Return how many chosen rows have each value of a column, the most frequent or the rarest first."""
    counted = values_of(task, table)
    if not counted:
        return None
    if task.kind == "each":
        return ", ".join(f"{value}: {number}" for value, number in counted.most_common(MOST_LISTED)) + (
            f" and {len(counted) - MOST_LISTED} more" if len(counted) > MOST_LISTED else ""
        )
    ranks = counted.most_common()
    if task.end == "fewest":
        doubt(task.doubts, "a value without any such row is not seen")
        ranks.reverse()
    last = ranks[min(max(1, task.top), len(ranks)) - 1][1]
    shown = [rank for rank in ranks if (rank[1] <= last if task.end == "fewest" else rank[1] >= last)]
    return "\n".join(f"{number}  {value}" for value, number in shown[:MOST_LISTED])


def values_of(task: Task, table: Table) -> collections.Counter[str] | None:
    """Return the values of a column in the chosen rows; None if they are too many to hold."""
    assert task.column is not None
    counted: collections.Counter[str] = collections.Counter()
    for row in chosen(task, table):
        cell = row[task.column]
        if not cell or (isinstance(cell, str) and not cell.strip()):
            doubt(task.doubts, "rows without a value were left out")
            continue
        counted.update(" ".join(each.split()) for each in (cell if isinstance(cell, list) else [cell]))
        if len(counted) > MOST_DIFFERENT:
            return None
    if len({value.lower() for value in counted}) < len(counted):
        doubt(task.doubts, "some values differ in upper and lower case alone")
    return counted


def different(task: Task, table: Table) -> str | None:
    """Return the different values of a column, or their number."""
    counted = values_of(task, table)
    if counted is None:
        return None
    return str(len(counted)) if task.kind == "count different" else listed(list(counted))


def column_count(task: Task, table: Table) -> str | None:
    """Return a count of what a column is named for: its different values, or the number in it."""
    assert task.column is not None
    found = column_numbers(task, table)
    counted = values_of(task, table)
    rows = sum(1 for _ in chosen(task, table))
    if counted is None:
        return None
    if found and len(found) == rows == 1:
        return as_number(found[0][0])
    if found:
        doubt(task.doubts, "the numbers of that column were added")
        return as_number(sum((number for number, _ in found), Decimal(0)))
    if task.conditions and task.column != key_column(table):
        doubt(task.doubts, "the conditions may be of the rows, and not of what is counted")
    if len(counted) == rows == sum(counted.values()):
        return f"{rows}"
    doubt(task.doubts, f"{len(counted)} different values; {rows} rows")
    return f"{len(counted)} different, in {rows} rows"


def listed(values: list[str]) -> str:
    more = len(values) - MOST_LISTED
    return ", ".join(values[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def cells(task: Task, table: Table) -> str | None:
    """Return the cells of a column, or the names of the rows, that the conditions choose."""
    column = key_column(table) if task.column is None else task.column
    asked = {condition.column for condition in task.conditions if condition.kind == "="}
    if not task.conditions or column in asked:
        return None
    rows, found = 0, dict[str, None]()
    for row in chosen(task, table):
        rows += 1
        found[shown_cell(row, column)] = None
        if len(found) > MOST_DIFFERENT:
            return None
    if rows > 1 and (task.kind == "one cell" or any(numeral(text) for text in found)):
        doubt(task.doubts, "several rows answer: these are their values, one by one")
    if len(found) < rows and any(condition.kind == "!=" for condition in task.conditions):
        doubt(task.doubts, "a name that is shown here may also be in a row that is left out")
    if "(nothing)" in found:
        doubt(task.doubts, "a cell is empty")
    if not rows:
        return "none: no row fulfils all of the conditions"
    return f"{listed(list(found))}{f' ({rows} rows)' if rows > 1 else ''}"
