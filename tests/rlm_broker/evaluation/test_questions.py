import json
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.evaluation.lengths import lengths_of
from rlm_broker.evaluation.questions import OWN_LENGTH, generated, own, tasks_of
from rlm_broker.evaluation.scoring import Key
from rlm_broker.evaluation.tasks.task import TASKS


def _file(tmp_path: Path, *lines: Any) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def test_generated_questions_have_ids_of_their_own() -> None:
    """Further samples, lengths and tasks add questions, and leave the ids of the others as they are."""
    few = generated(tasks_of("needle"), lengths_of("2k", "tokens"), 2, 7)
    many = generated(tasks_of("all"), lengths_of("2k,4k", "tokens"), 3, 7)
    assert [question.id for question in few] == ["needle-2k-tokens-7-1", "needle-2k-tokens-7-2"]
    assert len({question.id for question in many}) == len(many) == len(TASKS) * 2 * 3
    by_id = {question.id: question for question in many}
    assert all(by_id[question.id].problem() == question.problem() for question in few)


def test_length_of_a_context_is_in_tokens_of_its_task() -> None:
    for question in generated(tasks_of("all"), lengths_of("4k", "tokens"), 1, 0):
        chars = len(str(question.problem().context))
        assert chars / TASKS[question.task].chars_per_token == pytest.approx(4_000, rel=0.05)
        assert question.tokens == 4_000


def test_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="there is no task 'needel'; did you mean needle"):
        tasks_of("needel")
    with pytest.raises(ConfigurationError, match="there is no task: name some of needle"):
        tasks_of("")


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"answer": "Ada"}, Key("exact", "Ada")),
        ({"answer": 42}, Key("number", 42)),
        ({"answer": 4.5, "scoring": "near"}, Key("near", 4.5)),
        ({"answer": ["a", 2]}, Key("set", ("a", "2"))),
        ({"answer": None}, Key("absent", None)),
        ({"answer": "yes", "choices": ["yes", "no"]}, Key("choice", "yes", choices=("yes", "no"))),
        ({"answer": "Ada", "scoring": "contains"}, Key("contains", "Ada")),
    ],
)
def test_answer_says_how_it_is_scored(tmp_path: Path, more: dict[str, Any], key: Key) -> None:
    (question,) = own(_file(tmp_path, {"question": "Who?", "context": "x", **more}))
    assert question.problem().key == key


def test_own_questions_are_read_when_they_are_asked(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    file = _file(
        tmp_path,
        "\ufeff" + json.dumps({"id": "ä", "question": "Who?", "context": "Ada is.", "answer": "Ada", "task": "people"}),
        "",
        {"question": "What?", "path": str(tmp_path / "notes.txt"), "answer": 3},
        {"id": 17, "question": "Which?", "context": ["a", "b"], "answer": "a"},
        {"id": 18, "question": "Where?", "path": "no name is so long " * 20, "answer": "a"},
    )
    questions = own(file)
    assert [(each.id, each.task, each.length) for each in questions] == [
        ("ä", "people", OWN_LENGTH),
        ("3", "data", OWN_LENGTH),
        ("17", "data", OWN_LENGTH),
        ("18", "data", OWN_LENGTH),
    ]
    contexts = [question.problem().context for question in questions[:3]]
    assert contexts == ["Ada is.", tmp_path / "notes.txt", ["a", "b"]]
    file.unlink()
    with pytest.raises(ConfigurationError, match="cannot read"):
        questions[0].problem()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[]", "line 1"),
        ("{", "line 1"),
        ({"question": "Who?", "context": "x"}, "answer"),
        ({"question": "Who?", "context": "x", "answer": "y", "colour": 1}, "colour"),
        ({"question": " ", "context": "x", "answer": "y"}, "the question is empty"),
        ({"question": "Who?", "answer": "y"}, "give the context once"),
        ({"question": "Who?", "context": "x", "path": "y", "answer": "y"}, "give the context once"),
        ({"question": "Who?", "context": "x", "answer": "y", "scoring": "fuzzy"}, "there is no scoring 'fuzzy'"),
        ({"question": "Who?", "context": "x", "answer": "y", "scoring": "near"}, "must be a number"),
        ({"question": "Who?", "context": "x", "answer": 1, "scoring": "exact"}, "must be a text"),
        ({"question": "Who?", "context": "x", "answer": "", "scoring": "exact"}, "must be a text"),
        ({"question": "Who?", "context": "x", "answer": "y", "scoring": "choice"}, "give choices"),
        ({"question": "Who?", "context": "x", "answer": "y", "choices": ["z"]}, "with the answer among them"),
        ({"question": "Who?", "context": "x", "answer": True}, "answer"),
        ({"id": "", "question": "Who?", "context": "x", "answer": "y"}, "the id is empty"),
    ],
)
def test_line_that_is_no_question_is_refused(tmp_path: Path, line: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why) as refused:
        own(_file(tmp_path, line))
    assert "line 1" in str(refused.value)


def test_repeated_id_is_refused(tmp_path: Path) -> None:
    line = {"id": "a", "question": "Who?", "context": "x", "answer": "y"}
    with pytest.raises(ConfigurationError, match="line 2: the id 'a' was in an earlier line"):
        own(_file(tmp_path, line, line))


def test_file_without_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no questions"):
        own(_file(tmp_path, ""))
    with pytest.raises(ConfigurationError, match="cannot read"):
        own(tmp_path / "none.jsonl")
