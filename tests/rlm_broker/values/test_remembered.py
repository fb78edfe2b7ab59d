"""Answers that were given before."""

from rlm_broker.values.remembered import Remembered


def test_equal_questions_get_their_answers_once_each_and_in_order() -> None:
    remembered = Remembered[str, int]()
    for key, value in (("a", 1), ("b", 2), ("a", 3)):
        remembered.add(key, value)
    assert [remembered.take(key) for key in ("a", "a", "a", "b", "c")] == [1, 3, None, 2, None]
    remembered.add("a", 4)
    assert remembered.take("a") == 4
