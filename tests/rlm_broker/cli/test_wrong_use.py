"""Mistakes of newcomers: each one ends in one sentence and the right exit code, and no file is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked_client, forked_python
from tests.support.command import COMMAND, ENVIRONMENT, WAIT_S, run, sentence


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("The beekeeper is called Ada.\n")
    return tmp_path / "text.txt"


def shell(script: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    fork = f"{sys.executable} -IS {forked_client.__file__} {forked_python.address()} -m rlm_broker"
    command = " ".join(COMMAND) if "&-" in script else fork  # a fork has all standard streams
    return subprocess.run(
        ["bash", "-c", script.replace("rlm-broker", command)],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "exit_code", "said"),
    [
        ("rlm-broker ask 'Who is the beekeeper?' text.txt -q >&-", 0, ""),
        ("rlm-broker ask 'Who?' - -q <&-", 2, "stdin is empty"),
        ("rlm-broker ask 'Who is the beekeeper?' text.txt -q >/dev/full", 1, "no space is left"),
        ("rlm-broker doctor --json >/dev/full", 1, "no space is left"),
        ("rlm-broker exec hello.py >/dev/full", 1, "rlm-broker: the output cannot be written: no space is left"),
        ("rlm-broker ask 'Who?' https://host.invalid/x", 2, "'https://host.invalid/x' is an address"),
        ("rlm-broker exec loop.py | head -1; exit ${PIPESTATUS[0]}", 1, ""),
        ("rlm-broker ask 'Who?' text.txt --model ''", 2, "the model's name is empty"),
        (
            "rlm-broker ask 'Who?' text.txt --max-depth 3 --limit max_depth=2",
            2,
            "--limit max_depth is given twice: give it once",
        ),
        ("rlm-broker ask 'Who?' text.txt --trace text.txt", 2, "lies in what you ask about"),
        ("rlm-broker ask 'Who?' text.txt --limit memory_bytes=99999999999999999999999", 2, "limit memory_bytes = "),
        ("rlm-broker ask 'Who?' text.txt --limit memory_bytes=1", 2, "greater than or equal to 1048576"),
        ("rlm-broker ask 'Who?' text.txt --limit max_open_files=3", 2, "limit max_open_files = 3"),
        ("rlm-broker ask 'Who?' text.txt --limit max_frame_bytes=1", 2, "limit max_frame_bytes = 1"),
        ("rlm-broker exec dies.py", 1, "os._exit"),
        ("rlm-broker exec crashes.py", 1, "SIGSEGV"),
        ("rlm-broker exec --timeout 0.5 loop.py >/dev/null", 3, "block_timeout_s = 0.5 s"),
    ],
)
def test_a_mistake_is_a_sentence_and_an_exit_code(text: Path, script: str, exit_code: int, said: str) -> None:
    (text.parent / "loop.py").write_text("while True: print('on and on')")
    (text.parent / "hello.py").write_text("print('hello')")
    (text.parent / "dies.py").write_text("import os; os._exit(7)")
    (text.parent / "crashes.py").write_text("import ctypes; ctypes.string_at(1)")
    before = text.read_bytes()
    done = shell(script, text.parent)
    assert 'File "/' not in done.stderr  # a traceback of ours
    assert "warning: on_output" not in done.stderr
    assert said in done.stderr
    assert done.returncode == exit_code, done.stderr
    assert text.read_bytes() == before


def test_a_program_is_run_to_its_end_like_by_python(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_bytes(
        b"\xef\xbb\xbfimport atexit, threading, time\n"
        b"atexit.register(print, 'bye')\n"
        b"threading.Thread(target=lambda: (time.sleep(0.3), print('result'))).start()\n"
        b"print('first')\n"
    )
    done = run("exec", tmp_path / "t.py")
    assert (done.stdout, done.returncode) == ("first\nresult\nbye\n", 0)


def test_the_end_of_a_long_output_is_shown_while_it_runs(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("for i in range(300_000): print(i)\nraise ValueError('the important message')")
    done = run("exec", tmp_path / "t.py")
    assert done.stdout.endswith("\n299999\n")
    assert done.stderr.endswith("ValueError: the important message\n")
    assert done.returncode == 1


def test_what_was_left_out_of_a_folder_is_said(text: Path) -> None:
    (text.parent / "picture.bin").write_bytes(bytes(range(256)) * 10)
    done = run("ask", "Who is the beekeeper?", text.parent)
    assert "Ada" in done.stdout
    assert "warning: left out: 1 (" in done.stderr


def test_a_limit_gives_the_partial_answer_as_json_too(text: Path) -> None:
    done = run("ask", "Who?", text, "--limit", "run_timeout_s=0.001", "--json", "-q")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["kind"] == "limit"
    assert "run_timeout_s = 0.001" in json.loads(done.stdout)["error"]["message"]


def test_a_trace_that_cannot_be_written_is_said(text: Path) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("there is no /dev/full")
    done = run("ask", "Who is the beekeeper?", text, "--trace", "/dev/full", "-q")
    assert done.returncode == 0
    assert "the trace /dev/full is not whole: No space left on device" in sentence(done)
