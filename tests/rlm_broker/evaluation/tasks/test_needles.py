import re

from rlm_broker.evaluation.tasks.draw import Draw
from rlm_broker.evaluation.tasks.needles import CODE, OTHERS, SEVERAL, absent, needle, needles


def _town(question: str) -> str:
    found = re.search(r" (?:at|of) ([A-Z][\w ]+)\?", question)
    assert found
    return found[1]


def test_needle_is_said_once_among_others() -> None:
    for seed in range(20):
        problem = needle(Draw(seed), 5_000)
        text, town = str(problem.context), _town(problem.question)
        said = re.findall(rf"weather station at {town} is ({CODE})", text)
        assert said == [problem.key.expected]
        assert len(re.findall("The access code of", text)) == OTHERS + 1


def test_absent_is_not_said() -> None:
    """The town is in the text, with another fact, so that its name alone tells no answer."""
    for seed in range(20):
        problem = absent(Draw(seed), 5_000)
        text, town = str(problem.context), _town(problem.question)
        assert f"weather station at {town} was painted" in text
        assert f"The access code of the weather station at {town}" not in text
        assert len(re.findall("The access code of", text)) == OTHERS


def test_absent_asks_as_needle_does() -> None:
    """The question alone does not tell whether its answer is there."""
    assert needle(Draw(1), 5_000).question == absent(Draw(1), 5_000).question


def test_needles_are_all_of_one_town() -> None:
    for seed in range(20):
        problem = needles(Draw(seed), 5_000)
        text, town = str(problem.context), _town(problem.question)
        said = re.findall(rf"Parcel ({CODE}) is kept at the depot of {town}\.", text)
        assert set(said) == set(problem.key.expected)  # type: ignore[arg-type]
        assert len(said) == SEVERAL


def test_needles_lie_anywhere() -> None:
    """Over many seeds the fact lies in the first, the middle and the last third."""
    thirds = set()
    for seed in range(30):
        problem = needle(Draw(seed), 5_000)
        text = str(problem.context)
        thirds.add(3 * text.index(f"is {problem.key.expected}") // len(text))
    assert thirds == {0, 1, 2}
