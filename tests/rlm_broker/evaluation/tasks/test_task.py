import hashlib
from typing import Any

import pytest

from rlm_broker.evaluation.scoring import score
from rlm_broker.evaluation.tasks.task import TASKS

DIGESTS: dict[tuple[str, int], str] = {
    ("needle", 4000): "1aaeb3812adc6ff4",
    ("needle", 60000): "57d04dbe36d5f661",
    ("needles", 4000): "3e8940384e02a6a8",
    ("needles", 60000): "f8f73ff175ac0b66",
    ("absent", 4000): "7cb4c550471dca0a",
    ("absent", 60000): "6708974143630d9b",
    ("count", 4000): "d8dddbda301139f4",
    ("count", 60000): "a9d71a179d7be185",
    ("classify", 4000): "3d754bc3961be6aa",
    ("classify", 60000): "4027c0be92e81089",
    ("pairs", 4000): "ff9f878e5f220ea5",
    ("pairs", 60000): "faafe3d6d054d7fd",
}


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
