import pytest

from rlm_broker.evaluation.scoring import NEAR, Key, Scoring, concluding, elements_in, number_in, score
from rlm_broker.evaluation.tasks.joins import PAIR


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("42", 42),
        ("There are 42.", 42),
        ("**Answer:** 1,204 messages", 1204),
        ("Of 1,200 lines, the answer is 17", 17),
        ("1'000'000", 1_000_000),
        ("\u22123.5", -3.5),
        ("3, 4", 4),
        ("286 lines (286 hits)\nof 2,000", 286),
        ("12 on Monday and 8 on Tuesday: 20", 20),
        ("**17**", 17),
        ("-5", -5),
        ("code K-4821777", None),
        ("no number", None),
    ],
)
def test_number_in_words_is_found(answer: str, number: float | None) -> None:
    """Digits within a code are no number."""
    assert number_in(answer) == number


@pytest.mark.parametrize(
    ("scoring", "expected", "answer", "points"),
    [
        ("exact", "Ada Quill", "  ada   QUILL. ", 1),
        ("exact", "Ada Quill", "Answer: Ada Quill", 1),
        ("exact", "Ada Quill", "It is Ada Quill", 0),
        ("contains", "Ada Quill", "It is **Ada Quill**.", 1),
        ("contains", "Ada", "It is Adalbert.", 0),
        ("number", 1204, "1,204", 1),
        ("number", 1204, "1,205", 0),
        ("number", 0.5, "0.50", 1),
        ("near", 10, "10", 1),
        ("near", 10, "12", NEAR**2),
        ("near", 10, "8", NEAR**2),
        ("near", 10, "many", 0),
        ("set", ("a", "b"), "B, a", 1),
        ("set", ("a", "b"), "a", 2 / 3),
        ("set", ("a", "b"), "a, c", 1 / 2),
        ("set", ("a", "b"), "c and d", 0),
        ("set", ("a", "b"), '["a", "b"]', 1),
        ("set", ("a", "b"), "- a\n- b\n", 1),
        ("absent", None, "NOT FOUND", 1),
        ("absent", None, "The text does not mention it.", 1),
        ("absent", None, "The text doesn't say.", 1),
        ("absent", None, "It is unknown.", 1),
        ("absent", None, "It is Ada Quill.", 0),
    ],
)
def test_answer_has_its_score(scoring: Scoring, expected: object, answer: str, points: float) -> None:
    assert score(answer, Key(scoring, expected)) == pytest.approx(points)  # type: ignore[arg-type]


@pytest.mark.parametrize("scoring", ["exact", "contains", "number", "near", "choice", "set", "absent"])
@pytest.mark.parametrize("answer", [None, "", " \n"])
def test_no_answer_scores_nothing(scoring: Scoring, answer: str | None) -> None:
    expected = {"number": 0, "near": 0, "set": (), "absent": None}.get(scoring, "")
    assert score(answer, Key(scoring, expected)) == 0  # type: ignore[arg-type]


def test_choice_is_the_only_one_that_is_named() -> None:
    key = Key("choice", "order", choices=("order", "thanks", "question"))
    assert score("order", key) == 1
    assert score("The most frequent kind is **order**.", key) == 1
    assert score("It is thanks.", key) == 0
    assert score("order or thanks", key) == 0
    assert score("I compared order with thanks.\nAnswer: order", key) == 1
    assert score("thanks has 12 and order has 14.\norder", key) == 1
    assert score("disorder", key) == 0


def test_absent_is_no_answer_with_a_guess() -> None:
    key = Key("absent", None, pattern=r"\b[A-Z]-\d{7}\b")
    assert score("NOT FOUND", key) == 1
    assert score("Not found, but it may be K-1234567.", key) == 0


def test_elements_are_found_by_their_pattern() -> None:
    """Words around the elements count for no element; groups of a pattern make one element."""
    assert elements_in("The parcels P-1234567 and p-7654321.", r"\bP-\d{7}\b") == {"p-1234567", "p-7654321"}
    assert elements_in("(1, 2), (3, 4)", r"(\d), (\d)") == {"1 2", "3 4"}


def test_conclusion_is_what_follows_the_last_mark() -> None:
    assert concluding("The answer is not 3. Answer: 4").strip() == "4"
    assert concluding("42 is the answer.") == "42 is the answer."


def test_long_answers_are_scored_in_linear_time() -> None:
    """A long answer that nearly matches is scored at once: no pattern backtracks without bound."""
    pieces = ("2,", "answer is ", "not ", "R-1234567 ", "R-1234567 B-123456 ", "[")
    keys = (Key("number", 1), Key("set", ("a",)), Key("absent", None), Key("exact", "a"), Key("set", ("a",), PAIR))
    for text in [*(piece * 40_000 for piece in pieces), "[" * 40_000 + "]" * 40_000]:
        assert [score(text, key) for key in keys] == [0] * len(keys)
