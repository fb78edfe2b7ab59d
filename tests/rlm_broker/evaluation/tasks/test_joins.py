import re

from rlm_broker.evaluation.scoring import score
from rlm_broker.evaluation.tasks.draw import Draw
from rlm_broker.evaluation.tasks.joins import PAIRS, pairs


def test_pairs_are_those_of_a_join() -> None:
    for seed in range(10):
        problem = pairs(Draw(seed), 30_000)
        text = str(problem.context)
        asked = re.match(r"Which readers from (\w+) borrowed .* branch in (\w+)\?", problem.question)
        assert asked
        lent = {book: (who, town) for who, town, book in re.findall(r"Reader (\S+) from (\w+) .* (B-\d+)\.", text)}
        returned = dict(re.findall(r"The book (B-\d+) came back to the branch in (\w+)\.", text))
        assert lent.keys() == returned.keys()
        joined = {
            f"{who} {book}" for book, (who, town) in lent.items() if (town, returned[book]) == (asked[1], asked[2])
        }
        assert set(problem.key.expected) == joined  # type: ignore[arg-type]
        assert len(joined) == PAIRS


def test_one_list_alone_tells_no_pair() -> None:
    """Many readers are from the town, and many books came back to the branch."""
    problem = pairs(Draw(0), 100_000)
    asked = re.match(r"Which readers from (\w+) borrowed .* branch in (\w+)\?", problem.question)
    assert asked
    text = str(problem.context)
    assert text.count(f"from {asked[1]} ") > 2 * PAIRS
    assert text.count(f"the branch in {asked[2]}.") > 2 * PAIRS


def test_forms_of_a_pair_are_understood() -> None:
    key = pairs(Draw(0), 5_000).key
    assert isinstance(key.expected, tuple)
    for form in (
        "({}, {})",
        "{}: {}",
        "{} -> {}",
        "- reader {} and book {}",
        '["{}",\n "{}"]',
        "| {} | {} |",
        "{}\t{}",
    ):
        assert score("\n".join(form.format(*pair.split()) for pair in key.expected), key) == 1, form
    swapped = [pair.split()[0] for pair in key.expected]
    books = [pair.split()[1] for pair in key.expected]
    assert score("\n".join(map(", ".join, zip(swapped, books[1:] + books[:1], strict=True))), key) == 0
