"""What untrusted code prints, on a real terminal."""

import os
import pty
import subprocess
import sys
from pathlib import Path

from rlm_broker.cli.terminal import printable

HOSTILE = "import sys\nsys.stdout.write('\\x1b]0;owned\\x07' + 'plain\\ttext\\n')\nsys.stderr.write('\\x1b[2J')"


def on_a_terminal(*command: str) -> bytes:
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "rlm_broker", *command], stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # how a terminal says that nobody is at its other end any more
                break
            if not piece:
                break
            seen += piece
        process.wait()
    os.close(ours)
    return seen


def test_escape_sequences_are_shown_and_not_sent(tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    seen = on_a_terminal("exec", str(tmp_path / "hostile.py"))
    assert b"\x1b" not in seen
    assert rb"\x1b]0;owned\x07plain" in seen
    assert b"\ttext\r\n" in seen


def test_a_pipe_gets_everything_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    done = subprocess.run(
        [sys.executable, "-m", "rlm_broker", "exec", str(tmp_path / "hostile.py")], capture_output=True, check=True
    )
    assert done.stdout == b"\x1b]0;owned\x07plain\ttext\n"
    assert done.stderr == b"\x1b[2J"


def test_what_is_printable_stays() -> None:
    assert printable("straße 日本 🙂\n", keep="\n") == "straße 日本 🙂\n"
    assert printable("a\nb\x9b\u202e") == "a\\nb\\x9b\\u202e"
