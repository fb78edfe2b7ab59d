"""A plugin for pytest that appends the outcome of each test to a file, as `scripts.integrations` reads it."""

import json
import os
from pathlib import Path
from typing import Any

_outcomes: dict[str, tuple[str, str]] = {}


def record(test: str, outcome: str, why: str = "") -> None:
    """Append one outcome: "passed", "failed" or "skipped". For suites that are no pytest's, too."""
    with Path(os.environ["RESULTS"]).open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "why": why}) + "\n")


def pytest_runtest_logreport(report: Any) -> None:
    """Keep the worst outcome of a test's three phases."""
    outcome, why = _outcomes.get(report.nodeid, ("passed", ""))
    if report.outcome == "failed" or (report.outcome == "skipped" and outcome == "passed"):
        outcome, why = report.outcome, _last_line(report)
    _outcomes[report.nodeid] = (outcome, why)
    if report.when == "teardown":
        record(report.nodeid, *_outcomes.pop(report.nodeid))


def pytest_collectreport(report: Any) -> None:
    """Count a module that cannot be imported as a failed test."""
    if report.outcome == "failed":
        record(report.nodeid, "failed", _last_line(report))


def _last_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr or "")
    return (text.strip().splitlines() or [""])[0][:300]
