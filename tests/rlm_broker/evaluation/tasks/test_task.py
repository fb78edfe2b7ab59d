import hashlib
from typing import Any

import pytest

from rlm_broker.evaluation.scoring import score
from rlm_broker.evaluation.tasks.task import TASKS

DIGESTS: dict[tuple[str, int], str] = {}


def _digest(problem: Any) -> str:
    parts = (problem.context, problem.question, problem.key.scoring, repr(problem.key.expected))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@pytest.mark.parametrize("chars", [4_000, 60_000])
@pytest.mark.parametrize("name", TASKS)
def test_problems_are_the_same_everywhere(name: str, chars: int) -> None:
    """A digest that changes makes results of earlier releases incomparable: say so in the changelog."""
    assert _digest(TASKS[name].problem(0, 1, chars)) == DIGESTS[name, chars]


@pytest.mark.parametrize("name", TASKS)
def test_context_has_the_length(name: str) -> None:
    for chars in (3_000, 10_000, 100_000):
        for number in range(1, 6):
            context = TASKS[name].problem(0, number, chars).context
            assert isinstance(context, str)
            assert chars - 200 < len(context) <= chars


@pytest.mark.parametrize("name", TASKS)
def test_problems_differ_by_seed_and_number(name: str) -> None:
    made = {_digest(TASKS[name].problem(seed, number, 4_000)) for seed in range(3) for number in range(3)}
    assert len(made) == 9


@pytest.mark.parametrize("name", TASKS)
def test_expected_answer_has_the_full_score(name: str) -> None:
    """A right answer in the words that the question asks for scores 1, and one to another problem scores less."""
    problems = [TASKS[name].problem(0, number, 20_000) for number in range(1, 13)]
    for place, problem in enumerate(problems):
        expected = problem.key.expected
        answer = (
            "NOT FOUND" if expected is None else ", ".join(expected) if isinstance(expected, tuple) else str(expected)
        )
        assert score(answer, problem.key) == 1
        assert score(f"The answer is {answer}.", problem.key) == 1
        assert score("", problem.key) == 0
        assert score("K-1234567, P-1234567, R-1234567 B-1234567, many", problem.key) == 0, place
