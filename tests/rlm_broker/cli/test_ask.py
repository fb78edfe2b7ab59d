import contextlib
import json
import os
import pty
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.command import COMMAND, ENVIRONMENT, WAIT_S, run, sentence, started
from tests.support.fake_openai import Answer, FakeOpenAI, completion
from tests.support.forked_python import Python

FACT = "The custodian of the vault is Ada Quill."
QUESTION = "Who is the custodian of the vault?"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "server.log"
    file.write_text("INFO all is well\n" * 200 + FACT + "\n" + "INFO fine\n" * 200)
    return file


def test_the_answer_is_on_stdout_and_progress_on_stderr_as_plain_lines(log: Path) -> None:
    done = run("ask", QUESTION, log)
    assert done.returncode == 0
    assert "Ada Quill" in done.stdout
    assert "line 201" in done.stdout
    assert "[depth 0] REPL ready" in done.stderr
    assert not {"\r", "\x1b", "$"} & {*done.stderr}
    assert "0+0" not in done.stderr
    assert "a demonstration by the stand-in offline" in done.stderr.splitlines()[0]
    assert "demonstration" not in done.stdout


def test_json_is_one_object_quiet_is_quiet_and_a_trace_has_the_run(log: Path, tmp_path: Path) -> None:
    done = run("ask", QUESTION, log, "--json", "-q", "--trace", tmp_path / "trace.jsonl")
    shown = json.loads(done.stdout)
    assert shown.keys() >= {"response", "iterations", "depth", "execution_time", "usage_summary", "isolation"}
    assert "Ada Quill" in shown["response"]
    assert shown["usage_summary"]["model_usage_summaries"]["offline"]["total_calls"] >= 1
    assert done.stderr == ""
    first, *_, last = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert (first["event"], last["event"]) == ("run_started", "run_ended")
    assert first["metadata"].keys() >= {"model", "limits", "isolation", "version", "context"}


def test_stdin_a_pipe_a_folder_and_a_glob_are_contexts(log: Path) -> None:
    for dash in (["-"], []):
        assert "Ada Quill" in run("ask", QUESTION, *dash, "-q", stdin=log.read_bytes()).stdout
    (log.parent / "other.log").write_text("nothing here\n")
    for path in (str(log.parent), f"{log.parent}/*.log"):
        answer = run("ask", QUESTION, path, "-q").stdout
        assert "Ada Quill" in answer
        assert "server.log" in answer
    command = f"{shlex.join([*COMMAND, 'ask', QUESTION])} -q <(cat {log}) <(echo nothing)"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert "Ada Quill" in done.stdout
    assert "/dev/fd/" in done.stdout


def test_short_flags_name_the_models_the_type_of_the_answer_and_the_key(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "schema.json").write_text(SCHEMA)
    monkeypatch.setitem(ENVIRONMENT, "KEY_OF_THE_TEST", "sk-of-the-test")
    code = "len(context)\nllm_query('part')\nFINAL({'price': 40})"
    with FakeOpenAI(completion(f"```repl\n{code}\n```"), models=["m", "small"]) as server:
        models = ["-m", "m", "-s", "small", "--base-url", server.base_url, "--api-key", "env:KEY_OF_THE_TEST"]
        done = run("ask", QUESTION, log, "-q", "--output-type", tmp_path / "schema.json", *models)
    assert (done.stdout, done.stderr) == ('{"price": 40}\n', "")
    assert [request["model"] for request in server.requests] == ["m", "small"]
    assert {headers["authorization"] for headers in server.headers} == {"Bearer sk-of-the-test"}


def test_answer_is_written_to_a_file_and_settings_are_set(log: Path, tmp_path: Path) -> None:
    done = run(
        "ask", QUESTION, log, "-q", "-o", tmp_path / "answer.txt", "--set", "model=offline", "--set", "recursion=auto"
    )
    assert done.stdout == (tmp_path / "answer.txt").read_text()
    assert "Ada Quill" in done.stdout
    assert done.stderr == ""


def test_encoding_is_named_and_what_is_replaced_or_left_out_is_said(log: Path) -> None:
    text = f"na\xefve {log.read_text()}"
    log.write_bytes(text.encode("latin-1"))
    (log.parent / ".env").write_text("KEY=1")
    done = run("ask", QUESTION, log.parent, "-q")
    assert "Ada Quill" in done.stdout
    assert "warning: left out: 1 (likely a secret: name the file itself to include it): .env" in done.stderr
    assert "warning: replaced by U+FFFD: 1 (bytes that cannot be decoded)" in done.stderr
    for stdin, path in ((b"", log), (log.read_bytes(), "-")):
        assert run("ask", QUESTION, path, "-q", "--set", "encoding=latin-1", stdin=stdin).stderr == ""
        done = run("ask", QUESTION, path, "-q", "--set", "strict_text=true", stdin=stdin)
        assert (done.returncode, done.stdout) == (2, "")
        assert "is not UTF-8 text: byte 0xef at offset 2" in sentence(done)


def test_a_failure_under_json_is_an_object_and_a_limit_is_3(log: Path) -> None:
    done = run("ask", QUESTION, log, "-q", "--json", "--limit", "run_timeout_s=0.001")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["kind"], "run_timeout_s = 0.001" in error["message"]) == (3, "limit", True)
    with FakeOpenAI(completion("```repl\nprint(1)\n```"), models=["m"]) as server:
        model = ("-m", "m", "--base-url", server.base_url)
        done = run("ask", QUESTION, log, "-q", *model, "--limit", "max_iterations=1")
    assert (done.returncode, done.stdout) == (3, "")
    assert "max_iterations was reached before there was an answer: raise it by --limit" in sentence(done)


def test_what_a_failed_run_used_is_said_and_in_its_json(log: Path) -> None:
    def reply(request: dict[str, Any]) -> Answer:
        first = len(request["messages"]) == 2
        return completion("an idea\n```repl\nprint(1)\n```", 40, 2) if first else Answer(status=400)

    with FakeOpenAI(reply, models=["m"]) as server:
        said, shown = (
            run("ask", QUESTION, log, "--model", "m", "--base-url", server.base_url, *more) for more in ([], ["--json"])
        )
    assert (said.returncode, said.stdout) == (5, "an idea\n")
    assert " s, 1 turn, 1 call, 40 tokens in and 2 out, cost unknown\n" in said.stderr
    error = json.loads(shown.stdout)["error"]
    assert (error["kind"], error["partial_answer"], error["iterations"]) == ("provider", "an idea", 1)
    assert error["usage_summary"]["model_usage_summaries"]["m"]["total_input_tokens"] == 40
    assert error["usage_by_depth"]["0"]["total_output_tokens"] == 2
    assert error["execution_time"] > 0


def test_best_of_prints_the_most_frequent_answer_and_how_frequent_it_is(log: Path, tmp_path: Path) -> None:
    answers = iter(["Ada", "ada", "Bob"] * 2)
    with FakeOpenAI(lambda _: completion(f"```repl\nlen(context)\nFINAL('{next(answers)}')\n```")) as server:
        ask = ("ask", QUESTION, log, "-m", "m", "--base-url", server.base_url, "--best-of", "3")
        done, shown = run(*ask, "--trace", tmp_path / "trace.jsonl"), run(*ask, "--json", "-q")
    assert (done.returncode, done.stdout.casefold()) == (0, "ada\n")
    assert "2 of 3 runs gave this answer, 3 calls" in done.stderr
    for number in (1, 2, 3):
        assert f"[depth 0] {number}/3 run 1 with m" in done.stderr
        assert f"[depth 0] {number}/3 turn 1\n" in done.stderr
    assert (tmp_path / "trace.jsonl").read_text().count('"run_started"') == 3
    assert json.loads(shown.stdout)["best_of"] == {"runs": 3, "votes": 2}


def test_resume_goes_on_with_the_question_model_and_limits_of_the_trace(log: Path, tmp_path: Path) -> None:
    def reply(request: dict[str, Any]) -> Answer:
        is_first = len(request["messages"]) == 2
        return completion(
            "```repl\nsize = len(context)\n```" if is_first else "```repl\nFINAL(f'{size} characters')\n```"
        )

    first, second, both = (tmp_path / f"{name}.jsonl" for name in ("first", "second", "both"))
    with FakeOpenAI(reply, models=["m"]) as server:
        url = ("--base-url", server.base_url)
        limits = ("--limit", "max_llm_calls=1", "--limit", "max_tokens=100000")
        assert run("ask", QUESTION, log, "-m", "m", *url, *limits, "--trace", first, "-q").returncode == 3
        again = run("ask", "--resume", first, log, *url)
        assert (again.returncode, "max_llm_calls = 1 was reached" in again.stderr) == (3, True)
        traced = run("ask", "--resume", first, log, *url, "--trace", tmp_path / "a b.jsonl")
        assert f"rlm-broker ask --resume {first} --resume '{tmp_path}/a b.jsonl'\n" in traced.stderr
        done = run("ask", "--resume", first, log, *url, "--limit", "max_llm_calls=5", "--trace", second)
        both.write_text(first.read_text() + second.read_text().replace('"is_resumed":true', '"is_resumed":false'))
        assert run("ask", "--resume", both, log, *url).returncode == 3  # the second run, a branch, has other limits
    assert (done.returncode, done.stdout) == (0, f"{len(log.read_text())} characters\n")
    assert "2 turns, 2 calls" in done.stderr
    started = json.loads(second.read_text().splitlines()[0])
    assert (started["question"], started["model"], started["after_turn"]) == (QUESTION, "m", 1)
    assert (started["metadata"]["limits"]["max_tokens"], started["metadata"]["limits"]["max_llm_calls"]) == (100_000, 5)
    strange = tmp_path / "strange.jsonl"
    strange.write_text(json.dumps(started | {"metadata": {"limits": ["max_tokens"]}}) + "\n")
    refused = run("ask", "--resume", strange, log, *url, "-m", "m")
    assert (refused.returncode, "does not say what its run was about" in refused.stderr) == (2, True)


def test_resume_and_best_of_are_refused_beside_what_they_cannot_have(log: Path, tmp_path: Path) -> None:
    for options, refused in (
        (("--resume", "a", "--best-of", "2"), "--resume and --best-of cannot be combined"),
        (("--resume", "a", "--record", "b"), "--resume and --record cannot be combined"),
        (("--resume", "a", "-c"), "--resume and --continue cannot be combined"),
        (("--best-of", "2", "--replay", "b"), "--best-of and --replay cannot be combined"),
        (("--resume", tmp_path / "none.jsonl"), "cannot read"),
        (("--best-of", "0"), "'--best-of': 0 is not in the range"),
    ):
        question = () if "--resume" in options else (QUESTION,)
        done = run("ask", *question, log, *options)
        assert done.returncode == 2
        assert refused in sentence(done)
    done = run("ask", "--resume", "a", QUESTION, log)
    assert "is no file: with --resume the trace has the question, so give the paths alone" in sentence(done)


TOOLS = 'PRICES = {"lens": 40}\n\ndef in_stock(item: str) -> bool:\n    """Is it there?"""\n    return item in PRICES\n'
SCHEMA = '{"type": "object", "properties": {"price": {"type": "integer"}}, "required": ["price"]}'


def test_tools_and_the_type_of_the_answer_come_from_files(log: Path, tmp_path: Path) -> None:
    def reply(request: dict[str, Any]) -> Answer:
        if "in_stock(item: str) -> bool" not in request["messages"][0]["content"]:
            return Answer(status=400)
        last = str(request["messages"][-1]["content"])
        if "price" not in last.partition("Block 1")[0]:
            return Answer(status=400)
        code = "len(context)\nFINAL({'price': PRICES['lens'] if in_stock('lens') else 0})"
        return completion(f"```repl\n{code}\n```")

    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "schema.json").write_text(SCHEMA)
    files: list[str | Path] = ["--tools", tmp_path / "tools.py", "--output-type", tmp_path / "schema.json"]
    with FakeOpenAI(reply, models=["m"]) as server:
        asked: list[str | Path] = ["ask", QUESTION, log, "-q", "--model", "m", "--base-url", server.base_url, *files]
        done, shown = run(*asked), run(*asked, "--json")
    assert (done.stdout, done.stderr, done.returncode) == ('{"price": 40}\n', "", 0)
    assert json.loads(shown.stdout)["parsed"] == {"price": 40}
    with FakeOpenAI(completion("```repl\nlen(context)\nFINAL('cheap')\n```"), models=["m"]) as server:
        options = ["-m", "m", "--base-url", server.base_url, "--limit", "max_output_retries=0"]
        failed = run("ask", QUESTION, log, "-q", *options, "--output-type", tmp_path / "schema.json")
    assert (failed.returncode, failed.stdout, "rlm-broker ask: " in sentence(failed)) == (1, "", True)


def test_how_models_are_told_and_asked_can_be_said(log: Path) -> None:
    code = "print(context[:9], llm_query('hello', model='m'), rlm_query('short'))\nimport subprocess\n"
    code += "try: subprocess.run(['true'])\nexcept OSError: FINAL('no programs')\nelse: FINAL('programs')"
    with FakeOpenAI(lambda _: completion(f"```repl\n{code}\n```"), models=["m", "small"]) as server:
        asked: list[str | Path] = ["ask", QUESTION, log, "-q", "--model", "m", "--sub-model", "small"]
        asked += ["--base-url", server.base_url, "--max-depth", "2"]
        assert run(*asked).returncode == 0
        plain = list(server.requests)
        said = ("prompt_profile=final", "recursion=auto", "model_policy=open", "allow_exec=false")
        assert run(*asked, *(word for each in said for word in ("--set", each))).stdout == "no programs\n"
    other = server.requests[len(plain) :]
    assert "answer['ready']" in plain[0]["messages"][0]["content"]
    assert "answer['ready']" not in other[0]["messages"][0]["content"]
    assert [request["model"] for request in plain] == ["m", "small", "small"]  # a child run, and what it asks
    assert [request["model"] for request in other] == ["m", "m", "small"]  # the model that code names; no child run


ENDLESS = r"""
from rlm_broker.cli import composition
from rlm_broker.broker.clients.function import FunctionClient
code = 'an idea\n```repl\nprint("up", flush=True)\nimport time; time.sleep(1000)\n```'
rlm = composition.RLM
composition.RLM = lambda model, sub_model, **options: rlm(FunctionClient(lambda messages: code), **options)
from rlm_broker.cli.main import main
main()
"""
"""A program that asks with a model that keeps its REPL busy, and says when the block runs."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_with_its_partial_answer_and_leaves_nothing(
    log: Path, tmp_path: Path, number: signal.Signals
) -> None:
    trace = tmp_path / "trace.jsonl"
    command = ["-c", ENDLESS, "ask", QUESTION, str(log), "--trace", str(trace)]
    with Python(command, env=ENVIRONMENT) as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)  # so that a failure leaves no process
        assert process.stderr is not None
        for line in process.stderr:
            if "turn 1" in line:
                break
        with trace.open() as events:  # the block runs when it has printed
            while "block_printed" not in events.read():
                assert process.poll() is None
        below = psutil.Process(process.pid).children(recursive=True)
        assert below
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_S)
    assert psutil.wait_procs(below, timeout=20)[1] == []
    assert process.returncode == 128 + number
    assert out.startswith("an idea")
    assert "rlm-broker ask: the run was cancelled" in err
    assert " s, 1 turn, 1 call" in err
    assert "Traceback" not in err
    last = json.loads(trace.read_text().splitlines()[-1])
    assert (last["event"], last["error"]) == ("run_ended", "cancelled")


def test_nohup_keeps_a_hangup_ignored() -> None:
    with started("exec", "-", stdin=subprocess.PIPE, ignores=[signal.SIGHUP]) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("print('up', flush=True)\nfor _ in range(10**7): pass\nprint('end')")
        process.stdin.close()
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.read() == "end\n"
    assert process.returncode == 0


def test_on_a_terminal_one_line_lives_and_the_answer_is_whole(log: Path) -> None:
    controller, terminal = pty.openpty()
    variables = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "60"}
    shown = b""

    def reply(_request: dict[str, Any]) -> Answer:
        nonlocal shown
        while b"turn 1 of 30" not in shown:  # the line is drawn from time to time
            shown += os.read(controller, 1 << 16)
        return completion("```repl\nFINAL('It is ' + context[:4])\n```")

    with FakeOpenAI(reply, models=["m"]) as server:
        named = ["--model", "m", "--base-url", server.base_url]
        with started("ask", QUESTION, log, *named, stderr=terminal, env=variables) as asks:
            os.close(terminal)
            answer, _ = asks.communicate()
    os.close(controller)
    assert (answer, asks.returncode) == ("It is INFO\n", 0)
