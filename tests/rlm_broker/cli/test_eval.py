from pathlib import Path

import pytest

from tests.support.command import run, sentence

MODEL = ("--model", "openai/gpt-5-mini")
END = "--model openai/gpt-5-mini"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), f"rlm_broker/needles rlm_broker/messages -T arm=rlm,plain -T length=8k -T seed=0 {END}"),
        (
            ("--tasks", "needles", "--length", "8k, 1m", "--samples", "30", "--arms", "rlm:recursion=auto,plain"),
            f"rlm_broker/needles -T arm=rlm:recursion=auto,plain -T length=8k,1m -T samples=30 -T seed=0 {END}",
        ),
        (("-s", "openai/x"), f"-T seed=0 {END} --model-role sub=openai/x"),
    ],
)
def test_line_of_inspect_is_printed(options: tuple[str, ...], line: str) -> None:
    done = run("eval", *MODEL, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("inspect eval rlm_broker/")
    assert line in done.stdout


def test_own_questions_are_read_before_the_line_is_printed(tmp_path: Path) -> None:
    data = tmp_path / "my own.jsonl"
    data.write_text('{"question": "Who?", "context": "Ada.", "answer": "Ada"}\n')
    done = run("eval", *MODEL, "--data", data)
    assert done.stdout == f"inspect eval rlm_broker/own -T arm=rlm,plain -T 'data={data}' {END}\n"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), "name one by --model"),
        ((*MODEL, "--tasks", "needels"), "there is no task 'needels'; did you mean needles?"),
        ((*MODEL, "--tasks", ","), "there is no task: name some of needles, messages"),
        ((*MODEL, "--length", "1"), "length '1' is not from"),
        ((*MODEL, "--length", ""), "there is no length: give some"),
        ((*MODEL, "--arms", "none"), "there is no arm 'none'"),
        ((*MODEL, "--data", "/dev/null"), "has no questions"),
        ((*MODEL, "--data", "/dev/null", "--seed", "3"), "--seed has no effect beside --data: leave it out"),
    ],
)
def test_line_that_would_fail_is_refused(options: tuple[str, ...], why: str) -> None:
    done = run("eval", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in sentence(done)
