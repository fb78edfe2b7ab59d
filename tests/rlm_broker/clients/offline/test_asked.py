"""Generated questions over tables, JSON, logs, prose and code: right answers, and no sure wrong ones."""

import collections
from typing import Any

import pytest

from tests.rlm_broker.clients.offline.asked_of_tables import (
    Question,
    World,
    development,
    hostile,
    is_sure,
    later,
    misread,
)
from tests.rlm_broker.clients.offline.test_answers import ask

LEAST_RIGHT = {
    "csv": 1.0, "markdown": 1.0, "json": 0.95, "log": 0.85, "prose": 0.85, "code": 0.65, "languages": 0.95
}  # fmt: skip
"""Share of the questions of a kind that is answered, or declined where the context does not tell."""


@pytest.mark.parametrize(("questions", "seed"), [(development, 1), (later, 2)])
def test_questions_are_answered_by_kind(questions: Any, seed: int) -> None:
    """Questions are answered by their kind, and no answer that is called sure is wrong."""
    asked: list[Question] = questions(World(seed))
    answers = [ask(each.text, each.context) for each in asked]
    surely_wrong = [
        each.text for each, answer in zip(asked, answers, strict=True) if is_sure(answer) and not each.is_right(answer)
    ]
    assert surely_wrong == []
    total = collections.Counter(each.kind for each in asked)
    right = collections.Counter(each.kind for each, answer in zip(asked, answers, strict=True) if each.is_right(answer))
    assert {kind: right[kind] / total[kind] for kind in total if right[kind] / total[kind] < LEAST_RIGHT[kind]} == {}


@pytest.mark.parametrize(("context", "question"), hostile())
def test_ambiguous_context_makes_no_answer_sure(context: Any, question: str) -> None:
    """A context that can be read in two ways makes no answer sure."""
    assert not is_sure(ask(question, context))


@pytest.mark.parametrize("question", misread())
def test_question_with_an_unread_word_is_not_computed(question: str) -> None:
    """A question is not computed if one of its words was not understood."""
    assert not is_sure(ask(question, World(1).csv))
