import pytest

from rlm_broker.evaluation.scoring import NEAR, Key, Scoring, score


@pytest.mark.parametrize(
    ("scoring", "expected", "answers", "points"),
    [
        ("exact", "Ada Quill", ["  ada   QUILL. ", "Answer: Ada Quill"], 1),
        ("exact", "Ada Quill", ["It is Ada Quill"], 0),
        ("contains", "Ada Quill", ["It is **Ada Quill**."], 1),
        ("contains", "Ada", ["It is Adalbert."], 0),
        ("number", 0.5, ["0.50", "It is 0.5."], 1),
        ("number", -3.5, ["\u22123.5", "-3.5"], 1),
        ("number", 1204, ["1,204", "**Answer:** 1,204 messages", "1'204", "1204 lines (1204 hits)\nof 2,000"], 1),
        ("number", 1204, ["1,205", "code K-1204", "many"], 0),
        ("number", 2024, ["In 2024.", "The year was 2024"], 1),
        ("number", 42, ["42 of 130", "42 of the 130 messages", "42/130", "**42** (32%)", "42 out of 130."], 1),
        ("number", 42, ["Of the 130 messages, 42 are complaints", "There are 42 among 130 messages"], 1),
        (
            "number",
            42,
            ["42 complaints in 130 messages", "In all 42 of 130", "130 messages, of which 42 are complaints"],
            1,
        ),
        ("number", 42, ["The answer is not 3. Answer: 42", "12 on Monday, 30 on Tuesday: 42", "a total of 42"], 1),
        ("number", 130, ["42 of 130", "42 of all 130"], 0),
        ("number", 0, ["There are none.", "No complaints.", "zero", "0 of 130"], 1),
        ("near", 10, ["10", "10 of 40"], 1),
        ("near", 10, ["12", "8"], NEAR**2),
        ("near", 10, ["many"], 0),
        ("set", ("a", "b"), ["B, a", '["a", "b"]', "- a\n- b\n", "1. a\n2. b", "a and b"], 1),
        ("set", ("a", "b"), ["a"], 2 / 3),
        ("set", ("a", "b"), ["a, c"], 1 / 2),
        ("set", ("a", "b"), ["c and d"], 0),
        (
            "date",
            "2024-03-09",
            ["2024-03-09", "03/09/2024", "9th of March 2024", "It was on March 9, 2024.", "Mar 9"],
            1,
        ),
        ("date", "2024-03-09", ["2024-03-10", "2023-03-09", "March 2024", "May 9", "soon"], 0),
        ("date", "2024-03", ["March", "2024-03", "In March 2024.", "2024-03 (2024-05 has one less)"[:7]], 1),
        ("date", "October 2022", ["Answer: October 2022", "2022-10"], 1),
        ("date", "2024-03", ["May", "2024-04", "the market"], 0),
        ("absent", None, ["NONE", "NOT FOUND", "There isn't one.", "No one.", "Nobody.", "It is unknown."], 1),
        ("absent", None, ["The text does not tell.", "The text doesn't mention it.", "No person is described so."], 1),
        ("absent", None, ["Ada owns the shop, but there isn't one.", "There is none; Bela only owns the shop."], 1),
        ("absent", None, ["Ada", "It is Ada Quill.", "Not stated, but perhaps Ada."], 0),
        ("choice", "Ada", ["Ada", "**Ada**.", "I compared Ada with Bela.\nAnswer: Ada", "Ada. Bela is not."], 1),
        ("choice", "Ada", ["Bela has 12 and Ada has 14.\nAda", "It is Ada's, of 130"], 1),
        ("choice", "Ada", ["Bela", "Ada or Bela", "Adalbert", "NONE"], 0),
    ],
)
def test_answers_have_their_score(scoring: Scoring, expected: object, answers: list[str], points: float) -> None:
    """No form of an answer gains: short and wordy ones that say the same score the same."""
    key = Key(scoring, expected, choices=("Ada", "Bela"))  # type: ignore[arg-type]
    assert {answer: score(answer, key) for answer in answers} == pytest.approx(dict.fromkeys(answers, points))


def test_no_answer_scores_nothing() -> None:
    keys = (
        Key("exact", ""),
        Key("number", 0),
        Key("near", 0),
        Key("set", ()),
        Key("date", "2024-03"),
        Key("absent", None),
    )
    assert {score(answer, key) for key in keys for answer in (None, "", " \n")} == {0}


def test_elements_are_found_by_their_pattern() -> None:
    """Words around the elements count for no element."""
    key = Key("set", ("U-1234567", "U-7654321"), r"\bU-\d{7}\b")
    assert score("The users U-1234567 and u-7654321 have.", key) == 1


def test_long_answers_are_scored_in_linear_time() -> None:
    """A long answer that nearly matches is scored at once: no pattern backtracks without bound."""
    pieces = ("2,", "answer is ", "not ", "2024-13 ", "of the 1 ", "perhaps ", "- ", "May 1st of ")
    keys = [Key("number", 7), Key("set", ("a",)), Key("absent", None, choices=("Ada",)), Key("date", "2020-02")]
    for text in (piece * 20_000 for piece in pieces):
        assert [score(text, key) for key in keys] == [0] * len(keys)
