"""Shapes of questions: counts, rankings and searches."""

import pytest

from rlm_broker.clients.offline.question import MAX_CHARS
from rlm_broker.clients.offline.shapes import Count, Find, Ranking, shape


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        ("How many lines contain 'ERROR'?", Count(("ERROR",), "lines")),
        ('how often does "x" occur?', Count(("x",), "occurrences")),
        ("How many times is 'line' in the lines?", Count(("line",), "occurrences")),
        ("Count the entries with `a` and `b`", Count(("a", "b"), "lines", "all")),
        ("How many ERROR lines are there?", Count(("ERROR",), "lines")),
        ("How many lines are there?", Count((), "lines")),
        ("How many lines does the file have?", Count((), "lines")),
        ("How many spare keys does Ingrid hold?", Find()),
        ("How many people work at the NASA office?", Find()),
        ("How many lines of the metro cross the river?", Find()),
        ("Who said 'no'?", Find()),
        ("What did most people say?", Find()),
    ],
)
def test_count_is_recognised_by_the_questions_form(question: str, wanted: Count | Find) -> None:
    """The form of a question tells what is to be counted."""
    assert shape(question) == wanted


@pytest.mark.parametrize(
    ("question", "top"),
    [
        ("What is the most common error?", 1),
        ("What are the 5 most frequent IP addresses?", 5),
        ("top 10 users", 10),
        ("the three most common warnings", 3),
        ("Which address occurs most often?", 1),
        ("What are the top 0 errors?", 1),
    ],
)
def test_ranking_is_recognised_by_the_questions_form(question: str, top: int) -> None:
    """The form of a question tells what is to be ranked."""
    found = shape(question)
    assert isinstance(found, Ranking)
    assert found.top == top


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        ("How many lines do not contain 'x'?", Count(("x",), "lines", "none")),
        ("How many lines contain 'x' or 'y'?", Count(("x", "y"), "lines", "any")),
        ("How many rows are there?", Count((), "rows")),
        ("How often does the word harbour occur?", Count(("harbour",), "words")),
        ("How many lines start with 'x'?", Find()),
        ("How many distinct lines contain 'x'?", Find()),
        ("How many lines contain 'x' before line 10?", Find()),
        ("How many lines contain 'x' but not 'y'?", Find()),
        ("What is the most common error in pay?", Find()),
        ("What are the top 3 users by salary?", Find()),
        ("What is the least common error?", Find()),
    ],
)
def test_unknown_word_prevents_count_and_ranking(question: str, wanted: Count | Find) -> None:
    """A question with a word that no rule knows is neither a count nor a ranking."""
    assert shape(question) == wanted


def test_the_end_of_a_long_prompt_is_read() -> None:
    assert shape("a " * MAX_CHARS + "how many lines contain 'x'?") == Count(("x",), "lines")
