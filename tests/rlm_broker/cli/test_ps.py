import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlm_broker.cli.ps import NONE_RUNS, table
from rlm_broker.watch.messages import ProcessStatus, ReplStatus, RunStatus
from tests.support.command import started
from tests.support.controlled import SPINS, environment, library, run, seen

HOSTILE = "\x1b[31mred\x07 \u202e\nsecond line [bold]markup[/]"
ESCAPED = "\\x1b[31mred\\x07 \\u202e second line [bold]markup[/]"


pytestmark = pytest.mark.usefixtures("own_sockets")


def a_run(**more: object) -> RunStatus:
    fields = {"id": "0123456789abcdef", "pid": 7, "question": "How long?", "model": "m", "state": "running", "turn": 2}
    fields |= {"doing": "calls m (2 of 8)", "doing_since": time.time() - 65, "started": 1.0, "tokens": 12345}
    return RunStatus(**{**fields, "cost_usd": 0.5, **more})  # type: ignore[arg-type]


def a_repl(run: str | None) -> ReplStatus:
    return ReplStatus(id="repl-7-1", pid=7, run=run, state="busy", since=time.time(), memory_bytes=5_000_000)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_table_has_a_row_for_each_run_and_repl() -> None:
    of_run, alone = a_repl("0123456789abcdef"), a_repl(None)
    process = ProcessStatus(pid=7, command="serve", started=1.0, runs=(a_run(),), repls=(of_run, alone))
    heading, run_line, repl_line = table([process], 200)
    assert cells(heading)[:3] == ["PROCESS", "RUN", "QUESTION"]
    shown = cells(run_line)
    assert shown[:5] == ["serve 7", "0123456789abcdef", "How long?", "2", "calls m (2 of 8)"]
    assert shown[6:] == ["1", "5 MB", "12,345", "0.5000"]
    assert cells(repl_line)[:3] == ["serve 7", "repl-7-1", "busy"]


def test_long_question_unknown_price_and_hung_process_have_their_cells() -> None:
    asked = ProcessStatus(pid=7, command="ask", started=1.0, runs=(a_run(question="why " * 100, cost_usd=None),))
    hung = ProcessStatus(pid=7, command="serve", started=1.0, is_hung=True)
    lines = table([asked, hung], 130)
    assert max(map(len, lines)) <= 130
    assert cells(lines[1])[-1] == "?"
    assert cells(lines[2]) == ["serve 7", "does not answer: hung or suspended"]


def test_no_process_is_one_sentence() -> None:
    done = run("runs")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{NONE_RUNS}\n", "")
    assert json.loads(run("runs", "--json").stdout) == {"processes": []}


def test_text_of_a_run_steers_no_terminal() -> None:
    """Neither control characters nor the markup of rich have an effect, also where rich draws."""
    with library(HOSTILE, SPINS) as answers:
        asyncio.run(seen(answers.pid, lambda found: found.runs and found.runs[0].turn))
        plain = run("runs").stdout
        ours, theirs = pty.openpty()
        variables = environment(TERM="xterm", COLUMNS="300")
        with started("runs", "--watch", stdout=theirs, stderr=theirs, env=variables) as watching:
            os.close(theirs)
            drawn = b""
            while drawn.count(b"markup") < 2:
                drawn += os.read(ours, 1 << 16)
            watching.send_signal(signal.SIGINT)
            assert watching.wait() == 130
        os.close(ours)
    assert ESCAPED in plain
    assert ESCAPED.encode() in drawn
    for stream in (plain.encode(), drawn):
        assert b"\x1b[31m" not in stream
        assert b"\x07" not in stream
        assert "\u202e".encode() not in stream


def test_json_has_what_a_process_tells() -> None:
    with library("How long?", SPINS) as answers:
        asyncio.run(seen(answers.pid, lambda found: found.repls and found.repls[0].run))
        (process,) = json.loads(run("runs", "--json").stdout)["processes"]
    assert (process["pid"], process["command"], process["is_hung"]) == (answers.pid, "python", False)
    assert process["runs"][0]["question"] == "How long?"
    assert process["repls"][0]["run"] == process["runs"][0]["id"]


def test_watch_in_a_pipe_prints_tables() -> None:
    with started("runs", "--watch", env=environment()) as watching:
        assert watching.stdout is not None
        assert [watching.stdout.readline() for _ in range(2)] == [f"{NONE_RUNS}\n"] * 2
        watching.send_signal(signal.SIGINT)
        assert watching.wait() == 130


def test_folder_that_cannot_be_trusted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "rlm-broker").symlink_to(tmp_path)
    done = run("runs")
    assert done.returncode == 2
    assert "cannot be trusted" in done.stderr


def test_ps_imports_nothing_heavy() -> None:
    heavy = ("pydantic", "litellm", "rich", "psutil", "aiohttp", "rlm_broker.rlm", "rlm_broker.watch.server")
    code = (
        "import sys; sys.argv[1:] = ['ps']\nfrom rlm_broker.cli.main import main\nmain()\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.splitlines()[-1] == "[]"
