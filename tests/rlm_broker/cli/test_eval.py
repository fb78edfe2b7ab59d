import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.support.command import WAIT_S, run, sentence, started
from tests.support.fake_openai import Answer, FakeOpenAI, completion, failure
from tests.support.waiting import until_now

SMALL = ("--tasks", "needle", "--lengths", "3000", "--length-unit", "chars", "--samples", "2")
"""Options of an evaluation that takes a second."""


def _asked(request: dict[str, Any]) -> Answer:
    """Answer a question of `_data`: its number is in the prompt."""
    text = json.dumps(request["messages"])
    number = re.findall(r"question (\d+):", text)[0]
    return completion(f"```repl\nFINAL({number})\n```" if "```repl" in text else number, 100, 10)


def _data(folder: Path, count: int) -> Path:
    file = folder / "data.jsonl"
    lines = (
        {"id": f"q{number}", "question": f"question {number}: which?", "context": "text", "answer": number}
        for number in range(count)
    )
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def _settings(folder: Path, server: FakeOpenAI) -> tuple[str, ...]:
    """Options for the model of a server."""
    return ("--model", "test-model", "--base-url", server.base_url, "--out", str(folder))


def test_offline_evaluation_runs_end_to_end(tmp_path: Path) -> None:
    """The table is on stdout; the estimate, the note on the model and the progress are on stderr."""
    picture = tmp_path / "scores.svg"
    done = run("eval", *SMALL, "--arms", "plain,rlm1", "--picture", picture)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["task", "length", "arm", "score", "95", "%", "items", "cost", "tokens", "seconds"]
    assert [line.split()[:5] for line in lines[1:3]] == [
        ["needle", "3000", "plain", "1.00", "0.34-1.00"],
        ["needle", "3000", "rlm1", "1.00", "0.34-1.00"],
    ]
    assert "rlm1 against plain, the same 2 items: +0.00 (p = 1), within noise" in done.stdout
    assert "eval: 4 runs: 2 arms x 2 questions, with contexts of about 1,250 tokens together" in done.stderr
    assert "the model offline answers by rules" in done.stderr
    assert "eval: rlm1: 2 of 2 items" in done.stderr
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


def test_dry_run_asks_no_model() -> None:
    with FakeOpenAI(completion("x")) as server:
        done = run("eval", "--model", "m", "--base-url", server.base_url, "--dry-run", "--samples", "3")
        assert server.requests == []
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "108 runs: 3 arms x 36 questions, with contexts of about 1,296,000 tokens together, which the arm plain "
        "sends whole\n"
    )


def test_own_questions_are_scored(tmp_path: Path) -> None:
    with FakeOpenAI(_asked) as server:
        options = (*_settings(tmp_path / "out", server), "--arms", "plain,rlm1", "--json", "-q")
        done = run("eval", "--data", _data(tmp_path, 3), *options)
    assert (done.returncode, done.stderr) == (0, "")
    shown = json.loads(done.stdout)
    assert [(cell["arm"], cell["task"], cell["score"]["mean"]) for cell in shown["cells"]] == [
        ("plain", "data", 1),
        ("rlm1", "data", 1),
    ]
    assert shown["about"]["model"] == "test-model"
    assert json.loads((tmp_path / "out/report.json").read_text()) == shown
    assert (tmp_path / "out/scores.svg").exists()


def test_killed_evaluation_goes_on(tmp_path: Path) -> None:
    """Killed at its fourth call of six, the same command asks what has no result yet, and nothing twice."""
    options = ("eval", "--data", str(_data(tmp_path, 3)), "--arms", "plain,rlm1", "--max-concurrent", "1", "-q")
    with FakeOpenAI(_asked, _asked, _asked, Answer(never=True)) as server:
        with started(*options, *_settings(tmp_path / "out", server), stdout=subprocess.DEVNULL) as process:
            until_now(lambda: len(server.requests) == 4)
            process.send_signal(signal.SIGKILL)
            assert process.wait(WAIT_S) == -signal.SIGKILL
        server._answers = [_asked]
        done = run(*options, *_settings(tmp_path / "out", server), "--json")
        assert done.returncode == 0, done.stderr
        assert len(server.requests) == 4 + 3
    shown = json.loads(done.stdout)
    assert [(cell["arm"], cell["items"], cell["score"]["mean"]) for cell in shown["cells"]] == [
        ("plain", 3, 1),
        ("rlm1", 3, 1),
    ]


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    with FakeOpenAI(Answer(never=True)) as server:
        options = ("eval", "--data", str(_data(tmp_path, 1)), *_settings(tmp_path / "out", server), "-q")
        with started(*options) as process:
            until_now(lambda: server.requests)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=WAIT_S)
    assert (process.returncode, told) == (130, "rlm-broker eval: stopped: the same command goes on\n")


def test_limit_of_all_arms_ends_with_a_partial_table(tmp_path: Path) -> None:
    with FakeOpenAI(_asked) as server:
        options = ("eval", "--data", str(_data(tmp_path, 4)), *_settings(tmp_path / "out", server), "-q")
        done = run(*options, "--arms", "plain,rlm1", "--batch-tokens", "500", "--limit", "max_completion_tokens=10")
        assert done.returncode == 3
        assert "unfinished: " in done.stdout
        assert "max_tokens" in sentence(done)
        assert "a higher limit goes on" in sentence(done)


def test_failure_of_each_item_is_a_failure(tmp_path: Path) -> None:
    with FakeOpenAI(failure(401, "the key is wrong")) as server:
        done = run("eval", "--data", _data(tmp_path, 2), *_settings(tmp_path, server), "--arms", "plain", "-q")
    assert done.returncode == 1
    assert "2 failed" in done.stdout
    assert "all 2 items of plain failed" in sentence(done)
    assert "the key is wrong" in sentence(done)
