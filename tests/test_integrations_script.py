"""`scripts.integrations`: its judgement, and what is declared of each peer. It runs beside real packages by hand."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.integrations.__main__ import MODULES, faults_of
from scripts.integrations.peer import HERE, Peer
from tests.support.places import PROJECT

PEERS = [path.stem for path in HERE.glob("[a-z]*.py") if path.stem not in MODULES]


def test_only_listed_tests_fail_and_all_of_them() -> None:
    outcomes = {"a": "passed", "b": "failed", "c": "passed", "d": "failed", "e": "skipped"}
    lines = [{"test": test, "outcome": outcome, "why": "it broke"} for test, outcome in outcomes.items()]
    assert sorted(faults_of(lines, {"c": "not ours", "d": "of theirs", "e": "needs more", "f": "gone"})) == [
        "b fails: it broke",
        "c passes, and is listed: not ours",
        "f is listed, and did not run",
    ]


def test_declared_parts_exist() -> None:
    for name in PEERS:
        peer: Peer = importlib.import_module(f"scripts.integrations.{name}").PEER
        assert peer.name == name
        assert (PROJECT / "rlm_broker" / "integrations" / f"{name}.py").exists()
        used = [*peer.programs, *peer.figures, *([peer.opened] if peer.opened else [])]
        for function in used:
            module, _, attribute = function.partition(":")
            spec = importlib.util.find_spec(module)  # without its import: it imports the peer
            assert spec is not None, function
            assert spec.origin is not None
            assert f"\ndef {attribute}(" in (PROJECT / spec.origin).read_text(), function
        suites = {suite.name: peer.expected(suite) for suite in peer.suites}
        assert all(reason for tests in suites.values() for reason in tests.values())


@pytest.mark.installer
def test_one_real_package_passes(tmp_path: Path) -> None:
    """The reference RLM: its own tests are in the archive of its sources, so pip brings all that is needed."""
    command = [sys.executable, "-m", "scripts.integrations", "rlms", "--cache", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=290, check=False)
    if "not tried: " in done.stdout and "its tests: " not in done.stdout:
        pytest.skip("needs packages from an index")
    assert done.returncode == 0, done.stdout + done.stderr
