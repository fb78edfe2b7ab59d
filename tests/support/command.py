"""Runs the command line as a user does: a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.forked_command import forks
from tests.support.places import PROJECT

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.endswith("_API_KEY") and "RLM_BROKER" not in name},
    "XDG_CONFIG_HOME": "/nonexistent",
    "PYTHONPATH": str(PROJECT),
}
COMMAND = [sys.executable, "-m", "rlm_broker"]
WAIT_S = 90


def run(*arguments: str | Path, stdin: bytes = b"") -> "subprocess.CompletedProcess[str]":
    """Run one command to its end, in a process of its own."""
    given = [*map(str, arguments)]
    code, stdout, stderr = forks().run(given, stdin, ENVIRONMENT, WAIT_S)
    return subprocess.CompletedProcess([*COMMAND, *given], code, stdout.decode(), stderr.decode())


def sentence(done: "subprocess.CompletedProcess[str]") -> str:
    """The one line on stderr of a command that failed, and no other line."""
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]
