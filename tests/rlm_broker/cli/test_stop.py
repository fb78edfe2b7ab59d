import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from rlm_broker.cli.stop import target_of
from rlm_broker.errors import ConfigurationError
from rlm_broker.watch.messages import ProcessStatus, ReplStatus, RunStatus
from tests.support.command import sentence
from tests.support.controlled import SPINS, command, library, run, seen
from tests.support.fake_openai import Answer, FakeOpenAI, completion
from tests.support.waiting import until_now

GUESSES = f"I guess 3.\n{SPINS}"


pytestmark = pytest.mark.usefixtures("own_sockets")


def a_process(pid: int, *runs: str, repls: tuple[str, ...] = ()) -> ProcessStatus:
    made = tuple(
        RunStatus(id=each, pid=pid, question="why?", model="m", state="", turn=1, doing="", doing_since=1, started=1)
        for each in runs
    )
    live = tuple(ReplStatus(id=each, pid=pid, run=None, state="idle", since=1, memory_bytes=1) for each in repls)
    return ProcessStatus(pid=pid, command="ask", started=1.0, runs=made, repls=live)


FOUND = [a_process(12, "12ab", "34cd", repls=("repl-12-1", "repl-12-10")), a_process(56, "34ce")]


MEANT = {
    "12": ("process", "12"),
    "12a": ("run", "12ab"),
    "34ce": ("run", "34ce"),
    "repl-12-1": ("repl", "repl-12-1"),
    "repl-12-10": ("repl", "repl-12-10"),
}


def test_beginning_of_an_id_is_enough() -> None:
    found = {given: target_of(given, FOUND) for given in MEANT}
    assert {given: (target.kind, target.id) for given, target in found.items()} == MEANT


def test_unknown_id_is_refused() -> None:
    """The beginning of a process id is not enough."""
    for given in ("", "5", "x", "repl-1-"):
        with pytest.raises(ConfigurationError, match="there is no run, REPL or process"):
            target_of(given, FOUND)


def test_ambiguous_beginning_lists_what_it_may_mean() -> None:
    with pytest.raises(ConfigurationError, match=r"beginning of 2 ids.*34cd.*34ce"):
        target_of("34", FOUND)


def test_stopped_ask_prints_its_best_answer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    with FakeOpenAI(completion(GUESSES), models=["m"]) as server:
        ask = command("ask", "How long?", tmp_path / "a.txt", "-m", "m", "--base-url", server.base_url, "-q")
        with ask as asks:
            found = asyncio.run(seen(asks.pid, lambda found: found.runs and found.runs[0].doing == "runs block 1"))
            dry = run("runs", "stop", str(asks.pid), "--dry-run")
            assert (dry.returncode, dry.stdout) == (0, f"would stop the process ask {asks.pid}\n")
            id = found.runs[0].id
            done = run("runs", "stop", id[:6])
            assert (done.returncode, done.stdout) == (0, f"run {id}: stopped\n")
            out, err = asks.communicate()
    assert (asks.returncode, out) == (3, "I guess 3.\n")
    assert err == "rlm-broker ask: the run was stopped: that is the best answer so far\n"


def test_ask_without_an_answer_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    with FakeOpenAI(Answer(never=True), models=["m"]) as server:
        ask = command("ask", "How long?", tmp_path / "a.txt", "-m", "m", "--base-url", server.base_url, "--json")
        with ask as asks:
            asyncio.run(seen(asks.pid, lambda found: found.runs and found.runs[0].doing == "calls m"))
            assert run("runs", "stop", str(asks.pid)).returncode == 0
            out, _ = asks.communicate()
        assert server.disconnected.wait(10)
    assert asks.returncode == 3
    assert json.loads(out)["error"]["kind"] == "stopped"


def test_now_cancels_a_run() -> None:
    with library("How long?", GUESSES) as answers:
        found = asyncio.run(seen(answers.pid, lambda found: found.runs and found.runs[0].doing == "runs block 1"))
        done = run("runs", "stop", found.runs[0].id, "--now", "--json")
        (outcome,) = json.loads(done.stdout)["outcomes"]
        assert (done.returncode, outcome["state"], outcome["has_ended"]) == (0, "cancelled", True)
        assert "RunCancelled" in answers.communicate()[1]


def test_block_of_a_repl_is_interrupted(tmp_path: Path) -> None:
    program = tmp_path / "spins.py"
    program.write_text("print('begun', flush=True)\nimport time; time.sleep(1000)\n")
    with command("exec", program) as runs:
        assert runs.stdout is not None
        assert runs.stdout.readline() == "begun\n"
        found = asyncio.run(seen(runs.pid, lambda found: found.repls))
        id = found.repls[0].id
        done = run("runs", "stop", id)  # `exec` tidies up in one more block, while the outcome is on its way
        assert (done.returncode, done.stdout) == (0, f"REPL {id}: idle\n")
        assert "interrupted: it was interrupted by its caller" in runs.communicate()[1]
    assert runs.returncode == 3


def test_hung_process_cannot_be_stopped() -> None:
    with library("How long?", SPINS) as answers:
        asyncio.run(seen(answers.pid, lambda found: found.runs))
        os.kill(answers.pid, signal.SIGSTOP)
        until_now(lambda: psutil.Process(answers.pid).status() == psutil.STATUS_STOPPED)
        done = run("runs", "stop", str(answers.pid))
        assert done.returncode == 1
        assert sentence(done) == (
            f"rlm-broker runs stop: the process {answers.pid} does not answer: end it with `kill {answers.pid}`, or with "
            f"`kill -9 {answers.pid}` if it is suspended"
        )
