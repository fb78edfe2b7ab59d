"""The short form of the table of faults, and of the soak; that either can fail."""

import subprocess

import pytest

from scripts.soak import Sample, grown
from tests.support.forked_python import python
from tests.support.places import PROJECT

WAIT_S = 280
SOME = ["SIGKILL of the REPL", "EMFILE", "client raises SystemExit", "trace truncated"]
"""Faults whose scenes are of different kinds: a killed process, a resource, the user's code, a file."""
BAD_CELL = """
import subprocess, sys
from pathlib import Path
from scripts.faults.cell import Cell, Report
from scripts.faults import leftovers
from scripts.faults.engine import play_all

leftovers.WAIT_S = 0.2

def scene(folder):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    (folder / "tmp" / "rlm-broker-x").mkdir()
    return Report("", False, ["answer", "variables"])

def dies(folder):
    raise KeyError("mine")

for result in play_all([Cell("bad", "-", scene, frozenset({"variables"})), Cell("dies", "-", dies)]):
    print(list(result.problems), result.report.told)
"""


def test_faults_lose_and_leave_nothing(request: pytest.FixtureRequest) -> None:
    """The script plays what it is asked for. All of the short form is played by `scripts/test all`: half a minute."""
    names = [] if request.config.getoption("tier") == "all" else SOME
    done = _run("-m", "scripts.faults", "--quick", *names)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "0 not as they must be" in done.stdout


def test_fault_checks_find_defects() -> None:
    """A fault that loses an answer, leaves a process or gives no sensible message is found."""
    done = _run("-c", BAD_CELL)
    bad, dies = done.stdout.splitlines()
    assert "'lost: answer'" in bad
    assert "process: sleep" in bad
    assert "folder: rlm-broker-x" in bad
    assert "told nothing sensible" in bad
    assert dies == "['told nothing sensible'] no report, exit code 1: KeyError: 'mine'"


def test_soak_ends_flat() -> None:
    done = _run("-m", "scripts.soak", "--minutes", "0.02", "--every", "0.7", "--workers", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT AS IT MUST BE" not in done.stdout


def test_soak_finds_growth() -> None:
    samples = [Sample(float(at), 50 << 20, 20 + 3 * at, 1, 6, 0, 0) for at in range(9)]
    assert grown(samples) == ["descriptors: from 26 to 44"]
    assert grown(samples[:3]) == []


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return python(*arguments, cwd=PROJECT, timeout=WAIT_S)
