"""The quickstart: facts hidden in a log, asked of the offline model."""

import re
from pathlib import Path

import pytest

from rlm_broker.cli.commands import COMMANDS
from scripts.make_log import FACTS, SENTENCES, main, write
from tests.support.offline import find, played
from tests.support.places import PROJECT
from tests.support.tables import table


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("log") / "server.log"
    write(path, 2_000_000, seed=7)
    return path.read_text()


@table("question, expected", FACTS)
def test_every_hidden_fact_is_found(log: str, question: str, expected: str) -> None:
    assert expected in find(log, question).splitlines()[0]


def test_question_of_the_script_shows_a_run_with_a_mistake_put_right(log: str) -> None:
    """Three turns that a newcomer sees first, of which the last one corrects the second."""
    question = re.search(r'^question="(.+)"$', (PROJECT / "scripts/quickstart").read_text(), re.MULTILINE)
    assert question
    answer, replies = played(log, question[1])
    assert len(replies) == 3
    assert "my mistake" in replies[2]
    assert answer.startswith(f"{SENTENCES[0]}\nFound at line ")


def test_script_uses_and_names_present_commands() -> None:
    named = re.findall(r'rlm-broker"? ([a-z]+) ', (PROJECT / "scripts/quickstart").read_text())
    assert {"ask", "runs", "doctor"} <= {*named} <= {*COMMANDS, "into", "and"}


def test_count_of_a_level_is_exact(log: str) -> None:
    errors = sum(" ERROR " in line for line in log.splitlines())
    assert find(log, "How many errors are there?").startswith(f"{errors:,} lines have ERROR.\n")


@table("size", [10_000, 2_000_000])
def test_log_is_deterministic_and_holds_each_fact_once(tmp_path: Path, size: int) -> None:
    """A log has its size, each fact once, and the same bytes for the same seed."""
    one, again, other = (tmp_path / name for name in ("one", "again", "other"))
    count = write(one, size, seed=1)
    write(again, size, seed=1)
    write(other, size, seed=2)
    text = one.read_text()
    assert again.read_text() == text != other.read_text()
    assert size <= len(text) < size + 1_000
    assert text.count("\n") == count
    assert all(text.count(f"\n{sentence}\n") == 1 for sentence in SENTENCES)


def test_command_names_its_file_and_a_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says what it wrote and gives a question to ask."""
    path = tmp_path / "small.log"
    assert main([str(path), "--megabytes", "0.1", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert f"{path.stat().st_size:,} bytes, {len(path.read_text().splitlines()):,} lines" in said
    assert f'rlm-broker ask "{FACTS[0][0]}" {path}' in said


@table(
    "arguments, reason",
    [
        (["x", "--megabytes", "0"], "must be between 0.01"),
        (["x", "--megabytes", "nan"], "must be between 0.01"),
        (["/nowhere/x.log"], "cannot write /nowhere/x.log"),
    ],
)
def test_failed_write_is_told_in_a_sentence(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err
