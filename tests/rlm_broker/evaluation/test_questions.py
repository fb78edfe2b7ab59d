import json
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.errors import ConfigurationError
from rlm_broker.evaluation.questions import context_of, generated, own
from rlm_broker.evaluation.scoring import Key, score
from rlm_broker.evaluation.tasks import CHARS_PER_TOKEN, TASKS, chars_of

LINE = {"question": "Who?", "context": "x", "answer": "y"}
ROW = {"question": "How many?", "context_window_text": "2 lines", "answer": "[7]", "answer_type": "ANSWER_TYPE.NUMERIC"}


def _file(folder: Path, *lines: Any) -> Path:
    file = folder / "questions.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def test_generated_questions_are_made_again_from_their_source() -> None:
    """More samples and lengths add questions, and leave the others as they are. A log can keep a source."""
    assert [chars_of(each) for each in ("8k", "1.5M", "64000")] == [32_000, 6_000_000, 256_000]
    for task, (_, every) in TASKS.items():
        few, many = generated(task, ["2k"], 2, 7), generated(task, ["2k", "4k"], len(every), 7)
        assert few == many[:2]
        assert len({question.id for question in many}) == 2 * len(every)
        assert [question.kind for question in many[: len(every)]] == list(every)
        for question in many:
            source = json.loads(json.dumps(question.source))
            context = context_of(source)
            assert context == context_of(source)
            assert len(str(context)) == pytest.approx(CHARS_PER_TOKEN * int(question.length[0]) * 1000, rel=0.05)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lengths": ["huge"]}, "length 'huge' cannot be read"),
        ({"lengths": ["1"]}, "length '1' is not from 1,000"),
        ({"samples": 0}, "at least one sample"),
        ({"asked": ["tow"]}, "needles cannot ask for 'tow': it has one, two, missing"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], why: str) -> None:
    given: dict[str, Any] = {"task": "needles", "lengths": ["2k"], "samples": 1, "seed": 0}
    with pytest.raises(ConfigurationError) as refused:
        generated(**given | options)
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"answer": "Ada"}, Key("exact", "Ada")),
        ({"answer": 42}, Key("number", 42)),
        ({"answer": 4.5, "scoring": "near"}, Key("near", 4.5)),
        ({"answer": ["a", 2]}, Key("set", ("a", "2"))),
        ({"answer": None}, Key("absent", None)),
        ({"answer": "yes", "choices": ["yes", "no"]}, Key("choice", "yes", choices=("yes", "no"))),
        ({"answer": "2024-03", "scoring": "date"}, Key("date", "2024-03")),
    ],
)
def test_answer_says_how_it_is_scored(tmp_path: Path, more: dict[str, Any], key: Key) -> None:
    (question,) = own(_file(tmp_path, {"question": "Who?", "context": "x", **more}))
    assert question.key == key


def test_contexts_of_own_questions_are_read_when_they_are_asked(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    first = json.dumps({**LINE, "id": "ä", "context": "Ada is.", "task": "people"})
    second = {"question": "What?", "path": str(tmp_path / "notes.txt"), "answer": 3}
    file = _file(tmp_path, "\ufeff" + first, "", second, {**LINE, "id": 17, "context": ["a", "b"]})
    questions = own(file)
    assert [(each.id, each.kind, each.length) for each in questions] == [
        ("ä", "people", "own"),
        ("3", "own", "own"),
        ("17", "own", "own"),
    ]
    assert [context_of(each.source) for each in questions] == ["Ada is.", tmp_path / "notes.txt", ["a", "b"]]
    file.unlink()
    with pytest.raises(ConfigurationError, match="cannot read"):
        context_of(questions[0].source)


def test_copy_of_oolong_is_read_and_scored(tmp_path: Path) -> None:
    """Rows as `datasets` writes them, with columns that are not read."""
    rows = [
        ("NUMERIC", "[7]", "Answer: 7", 1),
        ("NUMERIC", "[7]", "Answer: 8", 0.75),
        ("LABEL", "['ham']", "Label: ham", 1),
        ("USER", "[44106]", "User: 44106", 1),
        ("COMPARISON", "['less common than']", "Answer: spam is less common than ham", 1),
        ("COMPARISON", "['less common than']", "Answer: spam is more common than ham", 0),
        ("DATE", "[datetime.date(2023, 5, 3)]", "Date: 05/03/2023", 1),
        ("MONTH_YEAR", "['October 2022']", "Answer: October 2022", 1),
    ]
    lines = (
        {**ROW, "answer": gold, "answer_type": f"ANSWER_TYPE.{kind}", "context_len": 1024, "task_group": "user", "x": 1}
        for kind, gold, _, _ in rows
    )
    questions = own(_file(tmp_path, *lines))
    assert {(each.kind, each.length, context_of(each.source)) for each in questions} == {("user", "1024", "2 lines")}
    scores = [score(said, question.key) for question, (_, _, said, _) in zip(questions, rows, strict=True)]
    assert scores == [points for *_, points in rows]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["[]"], "line 1"),
        (["{"], "line 1"),
        ([{"question": "Who?", "context": "x"}], "answer"),
        ([{**LINE, "colour": 1}], "colour"),
        ([{"question": "Who?", "answer": "y"}], "give the context once"),
        ([{**LINE, "path": "y"}], "give the context once"),
        ([{**LINE, "scoring": "fuzzy"}], "line 1 .*fuzzy"),
        ([{**LINE, "scoring": "near"}], "'y' cannot be scored as near"),
        ([{**LINE, "scoring": "date"}], "'y' cannot be scored as date"),
        ([{**LINE, "answer": 1, "scoring": "exact"}], "'1' cannot be scored as exact"),
        ([{**LINE, "scoring": "choice"}], "cannot be scored as choice"),
        ([{**LINE, "choices": ["z"]}], "cannot be scored as choice"),
        ([{**LINE, "answer": True}], "answer"),
        ([{**ROW, "answer": "seven", "context_len": 1}], "line 1 is no question"),
        ([{**LINE, "id": "a"}, {**LINE, "id": "a"}], "line 2: the id 'a' was in an earlier line"),
        ([""], "has no questions"),
    ],
)
def test_file_that_has_no_questions_is_refused(tmp_path: Path, lines: list[Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        own(_file(tmp_path, *lines))
    with pytest.raises(ConfigurationError, match="cannot read"):
        own(tmp_path / "none.jsonl")
