import json
import os
from pathlib import Path

import pytest

from tests.support.command import run, sentence
from tests.support.skips import NEEDS_ORDINARY_USER
from tests.support.venvs import a_venv


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("print('out')\n1 + 1", 0),
        ("1 / 0", 1),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit('no')", 1),
        ("raise SystemExit(5)", 5),
    ],
)
def test_the_exit_code_says_how_it_ended(script: Path, code: str, exit_code: int) -> None:
    script.write_text(code)
    assert run("exec", script).returncode == exit_code


def test_its_output_is_ours_and_a_traceback_is_on_stderr(script: Path) -> None:
    script.write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)\n'not shown'\n1 / 0")
    done = run("exec", script)
    assert done.stdout == "out\n"
    assert done.stderr.startswith("err\n")
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("code", "grace_s", "status"),
    [
        ("while True: pass", 60, "interrupted"),
        ("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", 0.2, "killed"),
    ],
)
def test_a_limit_ends_it_with_3_and_says_which(script: Path, code: str, grace_s: float, status: str) -> None:
    script.write_text(code)
    done = run("exec", script, "--timeout", "0.3", "--limit", f"interrupt_grace_s={grace_s}")
    assert done.returncode == 3
    assert f"rlm-broker exec: {status}: " in done.stderr


MANY_THREADS = "import threading, time\nfor _ in range(99):\n    threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("held = []\nwhile True: held.append(bytes(1_000_000))", "memory_bytes = 200,000,000: MemoryError"),
        (MANY_THREADS, "max_processes = 8: RuntimeError: can't start new thread"),
    ],
)
def test_a_limit_that_is_an_exception_ends_it_with_3_and_is_named(code: str, limit: str) -> None:
    limits = ["--limit", "memory_bytes=200000000", "--limit", "max_processes=8"]
    done = run("exec", "-", *limits, stdin=code.encode())
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith(f"rlm-broker exec: it ended at the limit {limit}")
    done = run("exec", "-", "--json", *limits, stdin=code.encode())
    assert (done.returncode, json.loads(done.stdout)["limit"]) == (3, limit.split()[0])


def test_json_has_what_happened_and_what_was_enforced() -> None:
    done = run("exec", "-", "--json", stdin=b"print('out')")
    shown = json.loads(done.stdout)
    assert shown.keys() >= {"status", "stdout", "stderr", "execution_time", "isolation"}
    assert (shown["status"], shown["stdout"], shown["code"]) == ("ok", "out\n", "print('out')")
    assert shown["isolation"]["level"] in ("strict", "standard")


def test_what_the_program_shows_is_counted_and_part_of_the_json() -> None:
    code = b"class A:\n    def _repr_png_(self): return b'png'\ndisplay(A())\n"
    late = b"import atexit; atexit.register(display, A())"
    done = run("exec", "-", stdin=code + late)
    assert (done.returncode, done.stderr) == (0, "rlm-broker exec: shown beside the output: 2 (see --json)\n")
    displays = json.loads(run("exec", "-", "--json", stdin=code).stdout)["displays"]
    assert [each["image/png"] for each in displays] == ["cG5n"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py"], "cannot read nowhere.py: No such file or directory"),
        (["/"], "cannot read /: Is a directory"),
        (["-", "--isolation", "vault"], "no isolation level 'vault'; choose one of"),
        (["-", "--python", "/nowhere"], "python: there is no /nowhere: make one by `uv venv"),
        (["-", "--packages", "-r list"], "packages: '-r' is no name with versions"),
        (["-", "--python", "/nowhere", "--packages", "six"], "give either python or packages"),
        (["-", "--timeout", "0"], "limit block_timeout_s = 0.0: input should be greater than 0"),
        (["-", "--timeout", "nan"], "limit block_timeout_s = nan: "),
        (["-", "--limit", "memory_bites=1"], "there is no such limit; did you mean memory_bytes?"),
        (["-", "--limit", "memory_bytes"], "give NAME=VALUE"),
        (["-", "--limit", "memory_bytes=lots"], "limit memory_bytes = lots: "),
    ],
)
def test_bad_input_is_one_sentence_and_2(arguments: list[str], said: str) -> None:
    done = run("exec", *arguments)
    assert done.returncode == 2
    assert said in sentence(done)


def test_code_has_the_packages_of_a_venv(tmp_path: Path) -> None:
    packages = next(a_venv(tmp_path / "venv").glob("lib/*/site-packages"))
    (packages / "lenses.py").write_text("COUNT = 40\n")
    code = b"import lenses\nprint(lenses.COUNT)\nimport click"
    done = run("exec", "-", "--python", tmp_path / "venv", stdin=code)
    assert (done.returncode, done.stdout) == (1, "40\n")
    assert "No module named 'click'" in done.stderr


def test_a_file_that_is_not_text_is_named_with_the_place() -> None:
    done = run("exec", "-", stdin=b"print(1)\xff")
    assert done.returncode == 2
    assert sentence(done) == "rlm-broker exec: stdin is not UTF-8 text: byte at offset 8"


def test_a_file_that_may_not_be_read_is_named(script: Path) -> None:
    if os.getuid() == 0:
        pytest.skip(NEEDS_ORDINARY_USER)
    script.write_text("1")
    script.chmod(0)
    assert "Permission denied" in sentence(run("exec", script))


def test_without_protection_it_warns() -> None:
    done = run("exec", "-", "--isolation", "process", stdin=b"print(1)")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "warning: isolation level 'process' is no security boundary" in done.stderr
