"""`rlm-broker chat`: questions that go on from each other, its commands, and Ctrl+C."""

import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.cli.chat import MOST_EARLIER, AskedBefore
from tests.support.command import ENVIRONMENT, WAIT_S, run, sentence, started
from tests.support.fake_openai import Answer, FakeOpenAI, completion
from tests.support.tables import table
from tests.support.terminals import on_a_terminal


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "server.log"
    file.write_text("INFO fine\n" * 50 + "ERROR the vault of Ada Quill is open\n")
    return file


def test_questions_go_on_from_each_other_and_commands_are_answered(log: Path) -> None:
    lines = [
        "How many errors are there?",
        "",
        "/files",
        "/cost",
        "/undo",
        "/undo",
        "/nope",
        "/files too",
        "Whose vault is open?",
        "/quit",
    ]
    done = run("chat", log, "-q", "-m", "offline", stdin="\n".join([*lines, "Who?"]).encode())
    said, told = done.stdout.splitlines(), done.stderr.splitlines()
    assert done.returncode == 0
    assert said[0] == "1 line has ERROR."
    assert said[3:5] == ["server.log: 537 characters", "3 calls"]
    assert said[5] == "ERROR the vault of Ada Quill is open"
    assert len(said) == 7
    assert told[:2] == ["forgotten: How many errors are there?", "there is no question to forget"]
    assert told[2].startswith("there is no /nope; there are: /help, ")
    assert told[3] == "/files takes nothing behind it"
    assert sentence(run("chat", "-q")).endswith("name the files or folders to talk about: stdin has the questions")


def test_exit_code_says_that_a_question_of_a_pipe_had_no_answer(log: Path) -> None:
    replies = iter([Answer(status=400), completion("```repl\nlen(context)\nFINAL('yes')\n```"), Answer(status=400)])
    with FakeOpenAI(lambda _: next(replies), models=["m"]) as server:
        model = "-m", "m", "--base-url", server.base_url
        done = run("chat", log, "-q", *model, stdin=b"first\nsecond\n")
        typed = on_a_terminal("chat", str(log), "-q", *model, keys=b"third\n\x04", after=b"> ")
    assert (done.returncode, done.stdout) == (1, "yes\n")
    assert "rlm-broker chat: " in sentence(done)
    assert b"rlm-broker chat: " in typed


def test_chat_says_what_it_is_about_and_that_a_stand_in_answers(log: Path) -> None:
    done = run("chat", log, stdin=b"")
    stand_in, about = done.stderr.splitlines()
    assert stand_in.startswith("rlm-broker chat: no model is named, so this is a demonstration by the stand-in offline")
    assert about == f"about {log}, 537 characters; /help says more"


def test_question_that_is_no_utf8_is_answered(log: Path) -> None:
    done = run("chat", log, "-q", "-m", "offline", stdin=b"Whose vault? \xff\n")
    assert done.stdout.splitlines()[0] == "ERROR the vault of Ada Quill is open"
    assert not done.stderr


@table("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_within_an_answer_ends_the_conversation(log: Path, number: signal.Signals) -> None:
    is_asked = threading.Event()

    def reply(request: dict[str, Any]) -> Answer:
        if request["messages"][-1]["content"] == "ready":
            is_asked.set()
        return completion("an idea\n```repl\nllm_query('ready')\nimport time; time.sleep(1000)\n```")

    with FakeOpenAI(reply) as server:
        options = ["-q", "-m", "m", "--base-url", server.base_url, "--limit", "block_timeout_s=600"]
        with started("chat", log, *options, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as chat:
            assert chat.stdin
            assert chat.stdout
            assert chat.stderr
            chat.stdin.write("What?\n")
            chat.stdin.flush()
            assert is_asked.wait(WAIT_S)
            chat.send_signal(number)
            assert chat.wait(WAIT_S) == 128 + number  # its stdin is still open
            assert (chat.stdout.read(), chat.stderr.read()) == ("an idea\n", "rlm-broker chat: stopped\n")


def test_ctrl_c_ends_an_answer_and_keeps_the_variables(log: Path) -> None:
    is_kept = threading.Event()

    def reply(request: dict[str, Any]) -> Answer:
        if request["messages"][-1]["content"] == "ready":
            is_kept.set()
            return completion("go on")
        if "Who?" in str(request["messages"]):
            return completion("```repl\nFINAL(kept)\n```")
        return completion(
            "an idea\n```repl\nkept = 'as it was'\nllm_query('ready')\nimport time; time.sleep(1000)\n```"
        )

    with FakeOpenAI(reply) as server:
        options = ["-q", "-m", "m", "--base-url", server.base_url, "--limit", "block_timeout_s=600"]
        with started("chat", log, *options, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as chat:
            assert chat.stdin
            assert chat.stdout
            chat.stdin.write("What?\n")
            chat.stdin.flush()
            assert is_kept.wait(WAIT_S)
            chat.send_signal(signal.SIGINT)
            assert chat.stdout.readline() == "an idea\n"
            chat.stdin.write("Who?\n")
            chat.stdin.close()
            assert chat.stdout.readline() == "as it was\n"
            assert chat.wait() == 0


def test_ask_goes_on_from_the_last_question_at_a_terminal(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "XDG_STATE_HOME", str(tmp_path / "state"))
    assert "there is no last question" in sentence(run("ask", "And why?", "-c", "-q"))
    run("ask", "How many errors?", str(log), "-q", "-m", "offline")
    assert not (tmp_path / "state").exists()  # a program's question is not kept
    on_a_terminal("ask", "How many errors?", str(log), "-q", "-m", "offline")
    (kept,) = (tmp_path / "state" / "rlm-broker").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    with FakeOpenAI(completion("```repl\nFINAL(len(context))\n```")) as server:
        done = run("ask", "And why?", "-c", "-q", "-m", "m", "--base-url", server.base_url)
    assert done.stdout == "537\n"
    asked = str(server.requests[0]["messages"][1]["content"])
    assert "And why?" in asked
    assert "Asked: How many errors?\nAnswered: 1 line has ERROR." in asked


def test_question_brings_the_exchanges_before_it_within_bounds() -> None:
    assert AskedBefore((), []).with_question("And why?") == "And why?"
    said = [(f"question {number}", "x" * 10_000) for number in range(20)]
    whole = AskedBefore((), said).with_question("And why?")
    assert whole.startswith("And why?\n\nThis question goes on from these:\n\nAsked: question 14\nAnswered: xxx")
    assert whole.count("Asked: ") == MOST_EARLIER
    assert len(whole) < 20_000
