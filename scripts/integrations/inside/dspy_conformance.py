"""The conformance checks of dspy-interpreters, whose folder `src` is in the current one."""

import sys
from pathlib import Path
from typing import Any

from rlm_broker.integrations.dspy import Interpreter
from scripts.integrations.inside.recorder import record

SUITES = (
    "check_interpreter",
    "check_execution_instructions",
    "check_rlm",
    "check_rlm_execution_instructions",
    "check_flex_facade",
)


def main() -> None:
    """Run all of its suites."""
    sys.path.insert(0, str(Path("src").resolve()))
    checks: Any = __import__("dspy_interpreters.checks", fromlist=["checks"])
    for suite in SUITES:
        for result in getattr(checks, suite)(Interpreter).results:
            record(result.id, "passed" if result.passed else "failed", result.detail or "")


if __name__ == "__main__":
    main()
