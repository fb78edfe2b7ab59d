"""`scripts.cluster` as it is called: a short form of its faults, and of its simulation."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from rlm_broker.cluster.messages import BEAT_S, SILENCE_S
from scripts.cluster import stage
from scripts.cluster.__main__ import main
from scripts.cluster.faults import NOTICED_WITHIN_S
from scripts.cluster.simulation import simulated
from tests.support.places import PROJECT
from tests.support.waiting import until_now

WAIT_S = 200
COMMAND = [sys.executable, "-m", "scripts.cluster", "--quick"]


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces() -> None:
    if missing := stage.what_is_missing():
        pytest.skip(f"no network namespaces: {missing}")


def test_runs_of_a_cut_node_go_on_elsewhere() -> None:
    """A link that is cut loses no item and pays no call twice, and no process is left."""
    done = subprocess.run(
        [*COMMAND, "link cut and"], cwd=PROJECT, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 faults" in done.stdout
    assert "0 not as they must be" in done.stdout


def test_silence_that_is_a_loss_ends_within_the_bound_of_the_faults() -> None:
    """Seconds are measured by the whole script alone. What they consist of, beside the machine's own work, is here."""
    assert SILENCE_S + BEAT_S < NOTICED_WITHIN_S


def is_agent(process: psutil.Process) -> bool:
    try:
        return "node" in process.cmdline()
    except psutil.Error:  # it has ended by now
        return False


def test_interrupted_script_leaves_nothing() -> None:
    """Ctrl+C ends the script with all processes of its nodes."""
    process = subprocess.Popen([*COMMAND, "none", "--runs", "4000"], cwd=PROJECT, start_new_session=True)
    below: list[psutil.Process] = []

    def has_agents() -> bool:
        nonlocal below
        below = psutil.Process(process.pid).children(recursive=True)
        return sum(is_agent(each) for each in below) >= 2

    try:
        until_now(has_agents)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(WAIT_S)
        until_now(lambda: not any(each.is_running() for each in below))
    finally:
        process.kill()


def test_broker_carries_light_agents() -> None:
    """Light agents join one broker and get all of their runs answered."""
    found = asyncio.run(simulated(8, 32, is_tls=False, idle_s=0.0))
    assert found.lost == 0
    assert found.calls_s > 0


def test_unknown_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["earthquake"])
    assert "no fault is called earthquake" in capsys.readouterr().err
