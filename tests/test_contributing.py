"""The files for contributors agree with each other, and have the forms that tools take."""

import re
import sys
import tomllib
from pathlib import Path

import rlm_broker
import sandbox_worker
from scripts.lint import shapes
from tests.support.places import PROJECT

TEXT = (PROJECT / "CONTRIBUTING.md").read_text()
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())
TEMPLATES = PROJECT / ".github" / "ISSUE_TEMPLATE"


def test_hooks_run_what_the_tests_run_with_tools_that_are_installed() -> None:
    hooks = re.findall(
        r"^ +entry: \.venv/bin/(\w+)(?: ([a-z]+)\b)?", (PROJECT / ".pre-commit-config.yaml").read_text(), re.M
    )
    script = re.findall(r'^"\$venv/bin/(\w+)"(?: ([a-z]+)\b)?', (PROJECT / "scripts/test").read_text(), re.MULTILINE)
    assert sorted(hooks) == sorted(script)
    dev = " ".join(PYPROJECT["project"]["optional-dependencies"]["dev"])
    for tool, _ in hooks:
        assert f"{tool}>=" in dev or tool == "python"
        assert (Path(sys.executable).parent / tool).exists()


def test_security_problems_are_sent_elsewhere() -> None:
    assert "## Reporting" in (PROJECT / "SECURITY.md").read_text()
    assert "privately" in (TEMPLATES / "bug.yml").read_text()
    assert "blank_issues_enabled: false" in (TEMPLATES / "config.yml").read_text()


def test_bounds_of_the_lint_are_those_that_are_told() -> None:
    told = re.search(r"at most (\d+) lines, a function (\d+) lines and (\d+) parameters, a public class (\d+)", TEXT)
    assert told is not None
    bounds = (
        shapes.LONGEST_MODULE,
        shapes.LONGEST_FUNCTION,
        shapes.MOST_PARAMETERS,
        shapes.MOST_PARAMETERS_OF_CONSTRUCTORS,
    )
    assert tuple(map(int, told.groups())) == bounds


def test_release_is_one_number() -> None:
    assert PYPROJECT["project"]["version"] == rlm_broker.__version__ == sandbox_worker.RELEASE
