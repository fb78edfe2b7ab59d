import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import WAIT_S, run, sentence, started
from tests.support.skips import NEEDS_ORDINARY_USER
from tests.support.tables import table
from tests.support.terminals import lines_shown, on_a_terminal
from tests.support.venvs import a_venv


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


ENDS = {
    "print('out')\n1 + 1": 0,
    "1 / 0": 1,
    "import sys; sys.exit()": 0,
    "import sys; sys.exit('no')": 1,
    "raise SystemExit(5)": 5,
}


@table("code, exit_code", ENDS.items())
def test_the_exit_code_says_how_it_ended(script: Path, code: str, exit_code: int) -> None:
    script.write_text(code)
    assert run("exec", script).returncode == exit_code, code


def test_its_output_is_ours_and_a_traceback_is_on_stderr(script: Path) -> None:
    script.write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)\n'not shown'\n1 / 0")
    done = run("exec", script)
    assert done.stdout == "out\n"
    assert done.stderr.startswith("err\n")
    assert f'  File "{script}", line 5, in <module>\n    1 / 0\n' in done.stderr
    assert "ZeroDivisionError" in done.stderr
    shown = json.loads(run("exec", "--json", "-", stdin=b"def f():\n    1 / 0\nf()").stdout)
    assert '  File "<stdin>", line 2, in f\n' in shown["stderr"]


def test_a_limit_ends_it_with_3_and_says_which(script: Path) -> None:
    ignores = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    for code, grace_s, status in (("", 60, "interrupted"), (ignores, 0.2, "killed")):
        script.write_text(f"{code}while True: pass")
        done = run("exec", "--timeout", "0.3", "--limit", f"interrupt_grace_s={grace_s}", script)
        assert done.returncode == 3
        assert f"rlm-broker exec: {status}: " in done.stderr


MANY_THREADS = "import threading, time\nfor _ in range(99):\n    threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
EXCEPTIONS = {
    "held = []\nwhile True: held.append(bytes(1_000_000))": "memory_bytes = 200,000,000: MemoryError",
    MANY_THREADS: "max_processes = 8: RuntimeError: can't start new thread",
}


def test_a_limit_that_is_an_exception_ends_it_with_3_and_is_named() -> None:
    limits = ["--limit", "memory_bytes=200000000", "--limit", "max_processes=8"]
    for code, limit in EXCEPTIONS.items():
        done = run("exec", *limits, "-", stdin=code.encode())
        assert done.returncode == 3
        assert done.stderr.splitlines()[-1].startswith(f"rlm-broker exec: it ended at the limit {limit}")
        done = run("exec", "--json", *limits, "-", stdin=code.encode())
        assert (done.returncode, json.loads(done.stdout)["limit"]) == (3, limit.split()[0])


def test_json_has_what_happened_and_what_was_shown_and_enforced() -> None:
    code = b"class A:\n    def _repr_png_(self): return b'png'\ndisplay(A())\nprint('out')\n"
    shown = json.loads(run("exec", "--json", "-", stdin=code).stdout)
    assert shown.keys() >= {"status", "stdout", "stderr", "execution_time", "isolation"}
    assert (shown["status"], shown["stdout"][-5:], shown["code"]) == ("ok", "\nout\n", code.decode())
    assert shown["isolation"]["level"] in ("strict", "standard")
    assert [each["image/png"] for each in shown["displays"]] == ["cG5n"]
    done = run("exec", "-", stdin=code + b"import atexit; atexit.register(display, A())")
    assert (done.returncode, done.stderr) == (0, "rlm-broker exec: shown beside the output: 2 (see --json)\n")


def test_code_has_the_packages_of_a_venv(tmp_path: Path) -> None:
    packages = next(a_venv(tmp_path / "venv").glob("lib/*/site-packages"))
    (packages / "lenses.py").write_text("COUNT = 40\n")
    code = b"import lenses\nprint(lenses.COUNT)\nimport click"
    done = run("exec", "--python", tmp_path / "venv", "-", stdin=code)
    assert (done.returncode, done.stdout) == (1, "40\n")
    assert "No module named 'click'" in done.stderr


def test_a_file_that_may_not_be_read_is_named(script: Path) -> None:
    if os.getuid() == 0:
        pytest.skip(NEEDS_ORDINARY_USER)
    script.write_text("1")
    script.chmod(0)
    assert "is not readable" in sentence(run("exec", script))


def test_protection_may_be_none_with_a_warning_or_refuse_programs() -> None:
    done = run("exec", "--isolation", "process", "-", stdin=b"print(1)")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "warning: isolation level 'process' is not a security boundary" in done.stderr
    refused = run("exec", "--no-allow-exec", "-", stdin=b"import subprocess\nsubprocess.run(['true'])")
    assert "PermissionError" in refused.stderr


def test_what_stands_behind_the_file_is_the_programs(script: Path) -> None:
    script.write_text("import sys\nprint(sys.argv, __name__)\nsys.exit(len(sys.argv))")
    done = run("exec", "--timeout", "30s", script, "--json", "-x", "--", "--timeout", "ä")
    assert done.stdout == f"{[str(script), '--json', '-x', '--', '--timeout', 'ä']} __main__\n"
    assert done.returncode == 6
    code = b"import sys; print(sys.argv, '__file__' in globals())"
    assert run("exec", "-", "--help", stdin=code).stdout == "['-', '--help'] False\n"


def test_its_own_file_and_those_that_it_is_given_lie_where_it_runs(script: Path, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("NUMBER = 7")
    (tmp_path / "table.csv").write_bytes(b"\xff\x00")
    script.write_text(
        "from pathlib import Path\nimport helper\n"
        "print(helper.NUMBER, Path(__file__).name, Path(__file__).parent.samefile('.'), Path(__file__).read_text()[:4])\n"
        "print(Path('in/data.csv').read_bytes(), {'os', 'sys'} & {*globals()})"
    )
    done = run("exec", "--file", tmp_path / "helper.py", "--file", f"{tmp_path}/table.csv=in/data.csv", script)
    assert done.stdout == "7 script.py True from\nb'\\xff\\x00' set()\n"


def test_its_stdin_is_that_of_the_command(script: Path) -> None:
    script.write_text("import sys\nprint(input(), sys.stdin.readlines())")
    done = run("exec", script, stdin="ä\nb\nc".encode())
    assert (done.stdout, done.returncode) == ("ä ['b\\n', 'c']\n", 0)
    assert "EOFError" in run("exec", script).stderr


def test_stdin_that_cannot_be_given_is_one_sentence(script: Path) -> None:
    script.write_text("print('never')")
    for code, said in (
        (b"print(1)\xff", "rlm-broker exec: stdin is not UTF-8 text: byte at offset 8"),
        (b"#" * 5_000, "rlm-broker exec: stdin has more than max_frame_bytes = 4,096: raise it by --limit"),
    ):
        done = run("exec", "--limit", "max_frame_bytes=4k", "-", stdin=code)
        assert (done.returncode, done.stdout, sentence(done)) == (2, "", said)
    done = run("exec", "--limit", "max_frame_bytes=4k", "-", stdin=b'"' * 4_000)  # each is two bytes of a message
    assert done.returncode == 1
    assert "error: code and stdin are too long for a message" in sentence(done)


def test_a_pipe_without_an_end_is_read_as_the_program_asks(script: Path) -> None:
    script.write_text("print('began', flush=True)\nprint(input())\nprint(input())")
    with started("exec", script, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in ("began", "one", "two"):
            assert process.stdout.readline() == f"{line}\n"
            if line != "two":
                process.stdin.write("one\n" if line == "began" else "two\n")
                process.stdin.flush()
        assert process.wait(WAIT_S) == 0  # while the pipe is still open
    with started("exec", "-c", "print('reads nothing')", stdin=subprocess.PIPE) as process:
        assert process.wait(WAIT_S) == 0


def test_lines_are_typed_at_a_terminal() -> None:
    code = "print('hello', input('Your name? '))\nimport sys\nprint(sys.stdin.read() == '')"
    command = "exec", "-c", code
    seen = on_a_terminal(*command, keys=b"Ada\n\x04", after=b"Your name? ")
    assert lines_shown(seen) == ["Your name? Ada", "hello Ada", "True"]


def test_stdin_is_bytes_to_a_program_that_wants_them() -> None:
    reads = "import sys; print(sys.stdin.buffer.read())"
    assert run("exec", "-c", reads, stdin=b"\xff\0\r\n").stdout == "b'\\xff\\x00\\r\\n'\n"
    with open("/bin/sh", "rb") as file:  # of which epoll has no news
        done = subprocess.run(
            [sys.executable, "-m", "rlm_broker", "exec", "-c", "import sys; print(len(sys.stdin.buffer.read()))"],
            stdin=file,
            capture_output=True,
            text=True,
            check=True,
            timeout=WAIT_S,
        )
    assert int(done.stdout) == Path("/bin/sh").stat().st_size


def test_a_program_is_run_to_its_end_like_by_python(script: Path) -> None:
    script.write_bytes(
        b"\xef\xbb\xbfimport atexit, threading, time\n"
        b"atexit.register(print, 'bye')\n"
        b"threading.Thread(target=lambda: (time.sleep(0.3), print('result'))).start()\n"
        b"print('first')\n"
    )
    done = run("exec", script)
    assert (done.stdout, done.returncode) == ("first\nresult\nbye\n", 0)


def test_the_end_of_a_long_output_is_shown_while_it_runs(script: Path) -> None:
    script.write_text("for i in range(300_000): print(i)\nraise ValueError('the important message')")
    done = run("exec", script)
    assert done.stdout.endswith("\n299999\n")
    assert done.stderr.endswith("ValueError: the important message\n")
    assert done.returncode == 1


def test_code_of_the_command_line_runs_with_its_arguments_and_stdin() -> None:
    done = run("exec", "-c", "import sys; print(sys.argv, sys.stdin.read())", "a", "--b", stdin=b"in")
    assert (done.returncode, done.stdout) == (0, "['-c', 'a', '--b'] in\n")
    assert '  File "<string>", line 1, in <module>\n' in run("exec", "-c", "1/0").stderr  # as the interpreter says
    assert "name a program, or give one by -c CODE" in sentence(run("exec"))


def test_files_that_it_makes_and_pictures_that_it_shows_are_kept(script: Path, tmp_path: Path) -> None:
    script.write_text(
        "import os\nopen('made.csv', 'w').write('a,b')\nopen('.hidden', 'w')\nos.mkdir('folder')\n"
        "os.symlink('/etc/passwd', 'link')\nopen('odd\\x1b[31m', 'w')\n"
        "class Drawn:\n    def _repr_svg_(self):\n        return '<svg/>'\ndisplay(Drawn())"
    )
    out = tmp_path / "out" / "below"
    (tmp_path / "given").write_text("given")
    done = run("exec", "--file", str(tmp_path / "given"), "--out", out, script)
    assert done.returncode == 0, done.stderr
    assert {each.name: each.read_text() for each in out.iterdir()} == {"made.csv": "a,b", "picture-1.svg": "<svg/>"}
    assert f"rlm-broker exec: kept {out / 'made.csv'}" in done.stderr
    script.write_text("import os\nopen('made.csv', 'w')\nos.chmod('made.csv', 0)\nopen('z.csv', 'w').write('z')")
    partly = run("exec", "--out", tmp_path / "part", script)
    assert partly.stderr.splitlines() == [
        f"rlm-broker exec: kept {tmp_path / 'part' / 'z.csv'}",
        "rlm-broker exec: not kept: 'made.csv' cannot be opened: Permission denied",
    ]
    assert partly.returncode == 2
    script.write_text("import os\nopen('half.csv', 'w').write('a')\nos._exit(3)")
    killed = run("exec", "--out", tmp_path / "half", script)
    assert (tmp_path / "half" / "half.csv").read_text() == "a"
    assert killed.stderr.startswith(
        "rlm-broker exec: killed: its process ended by itself with exit code 3 (os._exit)\n"
    )
    script.write_text("print('began')")
    for folder, why in ((script, "cannot write into"), (out, f"{out} has files already: name a new folder, or an")):
        refused = run("exec", "--out", folder, script)
        assert why in sentence(refused)
        assert refused.stdout == ""  # it is refused before the program runs, whose files could not be kept
