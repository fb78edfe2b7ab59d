"""Counts and rankings of the offline model: exact, over all of the context."""

import collections
import random
from typing import Any

import pytest

from tests.rlm_broker.clients.offline.test_answers import ask


def log(lines: int = 30_000) -> list[str]:
    rng = random.Random(11)
    users = [f"user=u{rng.randrange(40)}" for _ in range(lines)]
    bodies = [
        "INFO ok",
        "INFO ok again ok",
        "ERROR disk full",
        "ERROR timeout",
        "ERROR timeout",
        "WARN ERROR_RATE is high",
    ]
    return [
        f"{i:06} {rng.choice(bodies)} from 10.0.{rng.randrange(9)}.{rng.randrange(9)} {user}"
        for i, user in enumerate(users)
    ]


LOG = log()


@pytest.mark.parametrize("needle", ["timeout", "ERROR", "ok", "10.0.3.4", "u7", " INFO ok again", "absent"])
def test_counts_over_30_000_lines_are_exact(needle: str) -> None:
    text = "\n".join(LOG)
    lines, occurrences = sum(needle in line for line in LOG), text.count(needle)
    answer = ask(f'How many lines contain "{needle}"?', text)
    assert answer.splitlines()[0] == f"{lines} lines of {needle!r} ({occurrences} occurrences)"
    answer = ask(f"How many times does '{needle}' occur?", text)
    assert answer.splitlines()[0] == f"{occurrences} occurrences of {needle!r} ({lines} lines)"


def test_two_quoted_texts_are_counted_each() -> None:
    answer = ask("How many lines contain 'disk full' and how many 'timeout'?", "\n".join(LOG))
    for needle in ("disk full", "timeout"):
        assert f"{sum(needle in line for line in LOG)} lines of {needle!r}" in answer


@pytest.mark.parametrize(("text", "lines"), [("", 0), ("a", 1), ("a\n", 1), ("a\nb", 2), ("\n\n", 2)])
def test_lines_are_counted_as_wc_does(text: str, lines: int) -> None:
    """Lines of a text are counted as `wc` does, and a last line without an end counts too."""
    assert ask("How many lines are there?", text).startswith(f"{lines} line\n" if lines == 1 else f"{lines} lines\n")


def test_count_of_zero_names_a_difference_of_case() -> None:
    """A count of zero says if only the case differs."""
    answer = ask("How many lines contain 'Timeout'?", "\n".join(LOG))
    assert answer.startswith("0 lines of 'Timeout' (0 occurrences)\n")
    assert "only in other upper and lower case" in answer


@pytest.mark.parametrize(
    ("question", "key"),
    [
        ("Which address occurs most often?", lambda line: line.split(" from ")[1].split()[0]),
        ("What is the most common user?", lambda line: line.rsplit("=", 1)[1]),
        ("What is the most frequent level?", lambda line: line.split()[1]),
    ],
)
def test_most_common_value_of_30_000_lines_is_exact(question: str, key: Any) -> None:
    counted = collections.Counter(map(key, LOG))
    number = max(counted.values())
    first = ask(question, "\n".join(LOG)).splitlines()[0]
    assert first in {f"{number}  {value}" for value in counted if counted[value] == number}


def test_the_most_common_errors_are_ranked_with_exact_numbers() -> None:
    lines = ["ERROR disk full"] * 4_000 + ["ERROR timeout"] * 9_000 + ["INFO fine"] * 17_000 + ["ERROR quota"] * 37
    random.Random(3).shuffle(lines)
    answer = ask("What are the top 3 errors?", "\n".join(lines))
    assert answer.splitlines()[:3] == ["9000  timeout", "4000  disk full", "37  quota"]
    answer = ask("What is the most common error?", "\n".join(lines))
    assert answer.splitlines()[:3] == ["9000  timeout", "Then:", "4000  disk full"]


def test_most_common_value_is_sought_in_its_place() -> None:
    """The most common value is counted only where it has the meaning that was asked for."""
    text = "201 files seen\nGET /a status=200\nGET /b status=201\nGET /b status=201\n"
    answer = ask("What is the most common status?", text)
    assert answer.startswith("2  201\n")
    offset = text.index("=201") + 1
    assert f"The first stands at line 3, character {offset}." in answer


def test_error_line_without_message_keeps_the_next() -> None:
    """An error line without a message does not swallow the next line."""
    text = "a ERROR\nERROR disk full \nb ERROR\nERROR disk full\r\n"
    answer = ask("most common error?", text)
    assert answer.startswith("2  disk full\nThe first stands at line 2, character 14.")
    assert ask("What is the most common line?", "x \r\ny\nx").startswith("2  x\n")


def test_numbers_as_values_stay_apart() -> None:
    """Values that are numbers stay apart, however few they are."""
    text = "\n".join(f"client=10.0.0.{i}" for i in (1, 2, 3, 4, 2))
    assert ask("Which client is most common?", text).startswith("2  10.0.0.2\n")


def test_errors_differing_in_numbers_are_equal() -> None:
    """Errors that differ in their numbers alone count as equal."""
    lines = [f"ERROR no space on node {i}" for i in range(50)] + [f"ERROR lost peer {i}:{i}" for i in range(30)]
    assert ask("most common error?", "\n".join(lines)).startswith("50  no space on node #\n")


def test_quoted_text_with_escapes_is_counted_exactly() -> None:
    """A quoted text with quotes and backslashes is counted exactly."""
    text = 'a = "C:\\temp\\{x}"\n' * 7 + "C:/temp\n"
    assert ask("How many lines contain `C:\\temp\\{x}`?", text).startswith("7 lines")
