"""Runs the command line as a user does: a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.forked_python import WAIT_S as WAIT_S
from tests.support.forked_python import Python, python
from tests.support.places import PROJECT

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.endswith("_API_KEY") and "RLM_BROKER" not in name},
    "XDG_CONFIG_HOME": "/nonexistent",
    "XDG_STATE_HOME": "/proc/nonexistent",
    "PYTHONPATH": str(PROJECT),
}
COMMAND = [sys.executable, "-m", "rlm_broker"]


def run(*arguments: str | Path, stdin: bytes = b"") -> "subprocess.CompletedProcess[str]":
    """Run one command to its end, in a process of its own."""
    return python("-m", "rlm_broker", *arguments, stdin=stdin, env=ENVIRONMENT)


def started(*arguments: str | Path, **more: Any) -> Python:
    """Start a command in a process of its own, with the options of `Python`."""
    return Python(["-m", "rlm_broker", *arguments], **{"env": ENVIRONMENT, **more})


def sentence(done: "subprocess.CompletedProcess[str]") -> str:
    """The one line on stderr of a command that failed, and no other line."""
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]
